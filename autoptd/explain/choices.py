"""What a plan chose, in words: a line for a table, names and texts for two plans side by side."""

from __future__ import annotations

from collections.abc import Mapping

from autoptd.plans.data import PlanData


def recompute_text(plan: PlanData) -> str:
    """`none`, `full`, or how many segments, and what of them if not all: `selective, 16 of 196 segments`."""
    again = _again(plan)
    if again == 0:
        return "none"
    part = f"{'/'.join(plan.partial)}, " if plan.partial else ""
    return "full" if again == len(plan.segments) and not part else f"{part}{again} of {len(plan.segments)} segments"


def short(plan: PlanData) -> str:
    """`dp4 tp2 pp8 micro1 recompute 16/196`: what is usual (1F1B, ZeRO-1, axes of one rank) is left out."""
    mesh = plan.mesh
    words = [f"{axis}{n}" for axis in ("dp", "tp", "pp", "cp") if (n := getattr(mesh, axis)) > 1] or ["dp1"]
    words += [f"micro{plan.micro}"]
    words += [f"zero{plan.zero}"] if mesh.dp > 1 and plan.zero != 1 else []
    if plan.schedule.kind != "1f1b":
        words.append(f"{plan.schedule.kind}{plan.schedule.virtual if plan.schedule.virtual > 1 else ''}")
    if again := _again(plan):
        policy = f"{'/'.join(plan.partial)} " if plan.partial else ""
        words.append(f"recompute {policy}{again}/{len(plan.segments)}")
    return " ".join(words)


def choices(plan: PlanData) -> dict[str, str]:
    """Every choice of a plan but the placements: name -> text."""
    asked = plan.method
    return {
        "mesh": str(plan.mesh),
        "samples per microbatch": str(plan.micro),
        "microbatches": str(plan.schedule.microbatches),
        "schedule": plan.schedule.kind,
        "chunks per rank": str(plan.schedule.virtual),
        "ZeRO": str(plan.zero),
        "shards": str(asked.shards or "all"),
        "recompute": recompute_text(plan),
        "segments per stage": ", ".join(str(stage.last - stage.first + 1) for stage in plan.stages),
        "kernels": asked.kernels,
        "attention": asked.attention,
        "loss": asked.loss,
        "tp gathers": asked.gathers,
        "gradients": asked.gradients,
        "beside compute": ", ".join(asked.overlap) or "nothing",
        "bucket bytes": str(asked.bucket_bytes),
        "sends": asked.sends,
        "context": asked.context,
    }


def changes(a: PlanData, b: PlanData) -> list[str]:
    """What differs from `a` to `b`, in a few words each: `tp 2 → 4`, `recompute none → full`. Empty for equal choices.

    What follows from others is left out: microbatches from the mesh, and cuts from a change of pp.
    """
    found = [
        f"{axis} {x} → {y}"
        for axis in ("dp", "tp", "pp", "cp")
        if (x := getattr(a.mesh, axis)) != (y := getattr(b.mesh, axis))
    ]
    found += [f"micro {a.micro} → {b.micro}"] if a.micro != b.micro else []
    left, right = choices(a), choices(b)
    found += _recomputed(a, b)
    told = {"mesh", "samples per microbatch", "microbatches", "segments per stage", "recompute"}
    found += [f"{name} {left[name]} → {right[name]}" for name in left if name not in told and left[name] != right[name]]
    if a.mesh.pp == b.mesh.pp and _cuts(a) != _cuts(b):
        found.append("stages cut elsewhere")
    if a.mesh.tp == b.mesh.tp and (a.splits != b.splits or a.strategies != b.strategies):
        found.append(_replaced(a.splits.parameters, b.splits.parameters))
    return found


def _again(plan: PlanData) -> int:
    """Segments that are recomputed."""
    return sum(len(set(stage.recompute)) for stage in plan.stages)


def _recomputed(a: PlanData, b: PlanData) -> list[str]:
    x, y = _again(a), _again(b)
    if a.partial != b.partial and x and y:
        return [f"recompute {recompute_text(a)} → {recompute_text(b)}"]
    return [f"recompute {x} → {y} of {len(b.segments)} segments"] if x != y else []


def _cuts(plan: PlanData) -> list[int]:
    return [stage.last for stage in plan.stages]


def _replaced(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    count = sum(a.get(name) != text for name, text in b.items())
    what = f"{count} parameters" if count > 1 else "1 parameter" if count else "ops"
    return f"{what} split otherwise"
