"""The choices of a plan in words: a line for a table; names and texts to compare two plans."""

from __future__ import annotations

from collections.abc import Mapping

from autoptd.layout.execution import ExecutionOptions
from autoptd.plans.data import PlanData

NO_EFFECT = "–"


def recompute_text(plan: PlanData) -> str:
    """Return `none`, `full`, or the policy and number of recomputed segments: `selective, 16 of 196 segments`."""
    count = _recomputed_segments(plan)
    if count == 0:
        return "none"
    part = f"{'/'.join(plan.partial)}, " if plan.partial else ""
    return "full" if count == len(plan.segments) and not part else f"{part}{count} of {len(plan.segments)} segments"


def offloaded(options: ExecutionOptions) -> str:
    """Return the shares of the optimizer state in host memory: `none`, `12.5%`, or one for each pipeline rank."""
    shares = [f"{100 * share:g}%" for share in options.offload if any(options.offload)] or ["none"]
    return shares[0] if len(set(shares)) == 1 else ", ".join(shares)


def short(plan: PlanData) -> str:
    """Return `dp4 tp2 pp8 micro1 recompute 16/196`; defaults (1F1B, ZeRO-1, axes of one rank) are omitted."""
    mesh = plan.mesh
    words = [f"{axis}{n}" for axis in ("dp", "tp", "pp", "cp") if (n := getattr(mesh, axis)) > 1] or ["dp1"]
    words += [f"micro{plan.micro}"]
    words += [f"zero{plan.zero}"] if mesh.dp > 1 and plan.zero != 1 else []
    if plan.schedule.kind != "1f1b":
        words.append(f"{plan.schedule.kind}{plan.schedule.virtual if plan.schedule.virtual > 1 else ''}")
    words += [f"offload {offloaded(plan.method)}"] if any(plan.method.offload) else []
    if count := _recomputed_segments(plan):
        policy = f"{'/'.join(plan.partial)} " if plan.partial else ""
        words.append(f"recompute {policy}{count}/{len(plan.segments)}")
    return " ".join(words)


def choices(plan: PlanData) -> dict[str, str]:
    """Return every choice of a plan except the placements: name -> text, `–` for one without effect on its mesh."""
    options, mesh = plan.method, plan.mesh
    return {
        "mesh": str(plan.mesh),
        "samples per microbatch": str(plan.micro),
        "microbatches": str(plan.schedule.microbatches),
        "schedule": plan.schedule.kind,
        "chunks per rank": str(plan.schedule.virtual),
        "ZeRO": str(plan.zero),
        "shards": str(options.shards or "all"),
        "recompute": recompute_text(plan),
        "segments per stage": ", ".join(str(stage.last - stage.first + 1) for stage in plan.stages),
        "kernels": options.kernels,
        "attention": options.attention,
        "loss": options.loss,
        "tp gathers": options.gathers if mesh.tp > 1 else NO_EFFECT,
        "gradients": options.gradients,
        "overlapped with compute": ", ".join(options.overlap) or "nothing",
        "bucket bytes": str(options.bucket_bytes),
        "optimizer state in host memory": offloaded(options),
        "sends": options.sends if mesh.tp > 1 and mesh.pp > 1 else NO_EFFECT,
        "context": options.context if mesh.cp > 1 else NO_EFFECT,
        "attention dropout": options.dropout,
        "dispatch": options.dispatch if mesh.ep > 1 else NO_EFFECT,
        "fp8": options.fp8 or "none",
        "permutation": options.permutation or "by kernels",
        "routing": options.routing if mesh.ep > 1 else NO_EFFECT,
    }


def changes(a: PlanData, b: PlanData) -> list[str]:
    """Return the changes from `a` to `b`: `tp 2 → 4`, `recompute none → full`. Empty for equal choices.

    Changes implied by others are omitted: microbatches by the mesh, cuts by pp.
    """
    found = [
        f"{axis} {x} → {y}"
        for axis in ("dp", "tp", "pp", "cp")
        if (x := getattr(a.mesh, axis)) != (y := getattr(b.mesh, axis))
    ]
    found += [f"micro {a.micro} → {b.micro}"] if a.micro != b.micro else []
    left, right = choices(a), choices(b)
    found += _recomputed(a, b)
    skip = {"mesh", "samples per microbatch", "microbatches", "segments per stage", "recompute"}
    found += [
        f"{name} {left[name]} → {right[name]}"
        for name in left
        if name not in skip and left[name] != right[name] and NO_EFFECT not in (left[name], right[name])
    ]
    if a.mesh.pp == b.mesh.pp and _cuts(a) != _cuts(b):
        found.append("different stage cuts")
    if a.mesh.tp == b.mesh.tp and (a.splits != b.splits or a.strategies != b.strategies):
        found.append(_split_changes(a.splits.parameters, b.splits.parameters))
    return found


def _recomputed_segments(plan: PlanData) -> int:
    """Return the number of segments that are recomputed."""
    return sum(len(set(stage.recompute)) for stage in plan.stages)


def _recomputed(a: PlanData, b: PlanData) -> list[str]:
    x, y = _recomputed_segments(a), _recomputed_segments(b)
    if a.partial != b.partial and x and y:
        return [f"recompute {recompute_text(a)} → {recompute_text(b)}"]
    return [f"recompute {x} → {y} of {len(b.segments)} segments"] if x != y else []


def _cuts(plan: PlanData) -> list[int]:
    return [stage.last for stage in plan.stages]


def _split_changes(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    count = sum(a.get(name) != text for name, text in b.items())
    what = f"{count} parameters" if count > 1 else "1 parameter" if count else "ops"
    return f"{what} split differently"
