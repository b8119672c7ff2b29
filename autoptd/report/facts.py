"""The contents of a report page as plain data, all of it from the plan alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoptd.cost_models.memory import CONFIDENCE, MOST_MEASURED, alive
from autoptd.cost_models.steady import makespan_s
from autoptd.explain.costs import AS_STATED, CostQuestion, cost_lines
from autoptd.explain.plan import fullest_rank, headline, method, prediction, steps
from autoptd.explain.tables import GIB, part_name, seconds, words
from autoptd.explain.timeline import stage_times
from autoptd.plans.data import OtherPlan, PlanData
from autoptd.report.accuracy import MEMORY, STEP_TIME
from autoptd.report.in_words import in_words
from autoptd.schedule import period_of, step_lists
from autoptd.text import fold_table, ranges

_AXES = ("tp", "cp", "dp", "pp")  # fastest in a rank's number first
_NUMBERED = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_NODES = 24  # most nodes that are drawn one by one
_LEGEND = {
    "S": "a slice on each tp rank",
    "B": "whole on each tp rank",
    "Bp": "whole on each tp rank; its gradients are summed over tp",
}
_CHOICES = {
    "mesh": "Other meshes",
    "tp": "Another tp",
    "pp": "Another pp",
    "dp": "Another dp",
    "cp": "Another cp",
    "ep": "Another ep",
    "micro": "Other samples per microbatch",
    "zero": "Another ZeRO stage",
    "schedule": "Another schedule",
}


_SHORT = {"micro": "samples per microbatch", "zero": "ZeRO"}


@dataclass(frozen=True)
class Tile:
    """A number of the first screen: what it is, and what it is measured by."""

    label: str
    value: str
    note: str = ""


def facts(
    plan: PlanData,
    reasons: Mapping[str, str] | None = None,
    costs: CostQuestion = AS_STATED,
    constraints: Sequence[tuple[str, str, str, str]] = (),
) -> dict[str, Any]:
    """Return everything that a page shows of a plan, by section.

    `reasons`: what the other placements of each parameter would cost, in words. `costs`: the price, and the run.
    `constraints`: what is dropped, the step without it, what that costs, and the plan without it, in words."""
    costed = cost_lines(costs.of(plan))
    return {
        "title": headline(plan),
        "sentences": [steps(plan), prediction(plan), *costed, fullest_rank(plan), *method(plan).split("\n")],
        "tiles": _tiles(plan),
        "words": list(in_words(plan)),
        "axes": list(axes(plan)),
        "nodes": _nodes(plan),
        "stages": list(_stages(plan)),
        "layers": layers(plan),
        "time": _time(plan),
        "memory": _memory(plan),
        "parameters": list(_parameters(plan, reasons or {})),
        "has_reasons": bool(reasons),
        "others": list(_others(plan)),
        "why": list(why(plan)),
        "constraints": constraints,
        "several_devices": bool(plan.cluster.others),
        "limits": list(limits(plan)),
        "twice": twice(plan),
        "sure": list(_sure(plan)),
        "notes": list(plan.notes),
        "predicted_only": list(plan.not_runnable),
    }


def _tiles(plan: PlanData) -> list[Tile]:
    found = plan.predicted
    needed = [sum(row.values()) for row in found.memory]
    fullest = max(needed)
    device = plan.device_of(needed.index(fullest))
    return [
        Tile("step", seconds(found.step_time_s), f"{plan.batch:,} samples"),
        Tile("throughput", f"{found.tokens_per_s:,.0f}", f"{plan.unit}/s, all devices"),
        Tile("MFU", f"{found.mfu:.1%}", "of the peak rate of matrix products"),
        Tile(
            "memory",
            f"{fullest / GIB:.1f} GiB",
            f"of {device.memory_bytes / GIB:.1f}; with {CONFIDENCE:.0%} confidence below "
            f"{MOST_MEASURED * fullest / GIB:.1f}",
        ),
    ]


# ---- where things are ----


def axes(plan: PlanData) -> Iterator[dict[str, Any]]:
    """Yield the axes with several ranks: their size, how far apart neighbours are, and the links between them."""
    apart, distances = 1, dict[str, int]()
    for name in _AXES:
        distances[name] = apart
        apart *= getattr(plan.mesh, name)
    distances["ep"] = plan.mesh.etp or plan.mesh.tp  # among the ranks of a stage
    levels = plan.cluster.levels
    for name, apart in distances.items():
        size = getattr(plan.mesh, name)
        if size > 1:
            inside = (level.name for level in levels if level.ranks is not None and size * apart <= level.ranks)
            distance = "neighbours" if apart == 1 else f"{apart:,} ranks apart"
            yield {"axis": name, "size": size, "apart": distance, "link": next(inside, levels[-1].name)}


def ranks_of(plan: PlanData, stage: int) -> range:
    """Return the ranks that hold a stage, each a part of it on the other axes."""
    each = plan.world // plan.mesh.pp
    holder = plan.route.holder(stage)
    return range(holder * each, (holder + 1) * each)


def _nodes(plan: PlanData) -> dict[str, Any]:
    """Return the nodes to draw, each with the places of its ranks, and how many there are."""
    inner = plan.cluster.levels[0].ranks if len(plan.cluster.levels) > 1 else None
    size = min(plan.world, inner or plan.world)
    count = -(-plan.world // size)
    drawn = range(count)
    if count > _NODES:  # the first of each pipeline rank
        starts = {rank * (plan.world // plan.mesh.pp) // size for rank in range(plan.mesh.pp)}
        drawn = sorted(starts)[:_NODES]  # type: ignore[assignment]
    nodes = []
    for node in drawn:
        held = range(node * size, min(plan.world, (node + 1) * size))
        nodes.append({"node": node, "ranks": _span(held), "places": [_place(plan, rank) for rank in held]})
    return {"count": count, "size": size, "drawn": nodes, "left_out": count - len(nodes)}


def _place(plan: PlanData, rank: int) -> dict[str, int]:
    found = {"rank": rank}
    for name in _AXES:
        rank, found[name] = divmod(rank, getattr(plan.mesh, name))
    return found


def _span(ranks: range) -> str:
    return f"{ranks[0]:,}" if len(ranks) == 1 else f"{ranks[0]:,}–{ranks[-1]:,}"


def _stages(plan: PlanData) -> Iterator[dict[str, Any]]:
    for index, stage in enumerate(plan.stages):
        policies: dict[str, int] = {}
        for policy in plan.policies(stage).values():
            policies[policy] = policies.get(policy, 0) + 1
        yield {
            "stage": index,
            "ranks": _span(ranks_of(plan, index)),
            "device": stage.device or plan.cluster.device.name,
            "segments": stage.last - stage.first + 1,
            "modules": stage.modules,
            "recomputed": ", ".join(f"{count} {policy}" for policy, count in sorted(policies.items())) or "–",
        }


def layers(plan: PlanData) -> list[dict[str, str]]:
    """Return each layer, or module outside of layers, with its stages and the ranks that hold them."""
    held: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for segment in plan.segments[stage.first : stage.last + 1]:
            numbered = _NUMBERED.match(segment)
            at = held.setdefault(numbered[1] if numbered else segment, [])
            if index not in at:
                at.append(index)
    found = []
    for name, stages in held.items():
        spans = dict.fromkeys(_span(ranks_of(plan, stage)) for stage in stages)
        found.append({"layer": name, "stages": ranges(stages), "ranks": " and ".join(spans)})
    return found


# ---- what it costs ----


def _time(plan: PlanData) -> list[dict[str, Any]]:
    whole = plan.predicted.step_time_s
    parts = sorted(plan.predicted.time_s.items(), key=lambda item: (-item[1], item[0]))
    return [
        {"name": part_name(name, plan), "kind": name, "time": seconds(value), "share": value / whole}
        for name, value in parts
        if value > 0 and whole
    ]


def _memory(plan: PlanData) -> dict[str, Any]:
    rows = plan.predicted.memory
    largest = {name: max(row.get(name, 0) for row in rows) for row in rows for name in row}
    names = sorted((name for name, size in largest.items() if size), key=lambda name: -largest[name])
    devices = [plan.device_of(rank).memory_bytes for rank in range(len(rows))]
    scale = max(*devices, *(MOST_MEASURED * sum(row.values()) for row in rows))
    host = plan.predicted.host or (0,) * len(rows)
    found = []
    for rank, (row, device) in enumerate(zip(rows, devices, strict=True)):
        total = sum(row.values())
        found.append(
            {
                "rank": rank,
                "parts": [(name, row.get(name, 0) / GIB, row.get(name, 0) / scale) for name in names],
                "total": total / GIB,
                "of_device": total / device,
                "sure": MOST_MEASURED * total / GIB,
                "beyond": (MOST_MEASURED - 1) * total / scale,
                "limit": device / scale,
                "host": host[rank] / GIB,
            }
        )
    return {"names": [(name, words(name)) for name in names], "rows": found, "has_host": any(host)}


def limits(plan: PlanData) -> Iterator[str]:
    """Yield sentences on what keeps the step from being shorter, and the microbatch or batch from being larger."""
    parts = plan.predicted.time_s
    whole = plan.predicted.step_time_s
    idle = sorted(((value, name) for name, value in parts.items() if name != "compute" and value), reverse=True)
    for value, name in idle[:2]:
        if whole and value / whole >= 0.01:
            yield f"{part_name(name, plan)} takes {seconds(value)} of a step ({value / whole:.1%})"
    needed = [sum(row.values()) for row in plan.predicted.memory]
    at = max(range(len(needed)), key=lambda rank: needed[rank] / plan.device_of(rank).memory_bytes)
    row = plan.predicted.memory[at]
    kept = row.get("activations", 0)
    sure = MOST_MEASURED * needed[at] / plan.device_of(at).memory_bytes
    yield (
        f"memory: pipeline rank {at} is fullest, {needed[at] / GIB:.1f} GiB, {sure:.0%} of its device at "
        f"{CONFIDENCE:.0%} confidence; activations, which grow with the samples of a microbatch "
        f"({plan.micro}), are {kept / GIB:.1f} GiB of it"
    )
    kind, pp, count, virtual = plan.schedule.kind, plan.mesh.pp, plan.schedule.microbatches, plan.schedule.virtual
    held = [[alive(rank, pp, m, kind, virtual) for rank in range(pp)] for m in (count, 2 * count)]
    yield (
        f"the batch of {plan.batch:,} is {plan.schedule.microbatches:,} microbatches of {plan.micro} on each of "
        f"{plan.mesh.dp:,} data-parallel {'ranks' if plan.mesh.dp > 1 else 'rank'}: a larger batch makes more of them, "
        + ("and needs no more memory" if held[0] == held[1] else "and keeps more of them in memory")
    )
    if plan.mesh.pp > 1:
        bubble = parts.get("pipeline_bubble", 0.0) / whole if whole else 0.0
        yield (
            f"with fewer microbatches the pipeline of {plan.mesh.pp} ranks waits longer: it waits "
            f"{bubble:.1%} of a step now"
        )


def twice(plan: PlanData) -> str:
    """Return what the same plan with twice the data-parallel ranks takes for the same batch, by simulation."""
    count = plan.schedule.microbatches
    if not plan.predicted.times or count % 2:
        return (
            "With twice the devices and twice the batch this plan takes about as long, for twice the samples. Of the "
            "same batch the microbatches cannot be halved: plan again."
        )
    times, overlap = stage_times(plan)
    kind, virtual, pp = plan.schedule.kind, plan.schedule.virtual, plan.mesh.pp
    period = period_of(kind, pp)
    try:
        half, same = (
            makespan_s(lambda m: step_lists(kind, pp, m, virtual, overlap.early), m, times, overlap, period, plan.route)
            for m in (count // 2, count)
        )
    except ValueError:  # an interleaved schedule of so few microbatches
        return "With twice the devices this schedule has too few microbatches for the same batch: plan again."
    shorter = plan.predicted.step_time_s - (same - half)
    faster = plan.predicted.step_time_s / shorter
    return (
        f"With twice the devices ({2 * plan.world:,}) as data-parallel ranks and the same batch, this plan takes "
        f"{seconds(shorter)} a step, {faster:.2f} times as fast ({faster / 2:.0%} of twice), if reductions between "
        "data-parallel ranks take no longer than now. Planned anew it may be faster."
    )


# ---- why ----


def _parameters(plan: PlanData, reasons: Mapping[str, str]) -> Iterator[dict[str, str]]:
    texts = ((name, f"{text}\n{reasons.get(name, '')}") for name, text in plan.splits.parameters.items())
    for name, text in fold_table(texts):
        placement, _, reason = text.partition("\n")
        yield {"name": name, "placement": placement, "meaning": meaning(placement), "reason": reason}


def meaning(placement: str) -> str:
    """Return a placement on the tp axis in words."""
    if placement in _LEGEND:
        return _LEGEND[placement]
    if found := re.fullmatch(r"S(\d+)(?:/(\d+))?", placement):
        within = f", within each of its {found[2]} fused parts" if found[2] else ""
        return f"split along dim {found[1]}{within}: {_LEGEND['S']}"
    return placement


def why(plan: PlanData) -> Iterator[str]:
    """Yield for each choice what its other values take: `tp 2: +5.3% with 4; nothing tried fits with 1`."""
    best_s = plan.predicted.step_time_s
    for choice in list(_CHOICES)[1:]:
        others = [other for other in plan.others if other.choice == choice]
        timed = sorted((other.step_time_s, str(_chosen(other, choice))) for other in others if other.step_time_s)
        slower = ", ".join(f"{time_s / best_s - 1:+.1%} with {value}" for time_s, value in timed)
        unfit = ", ".join(str(_chosen(other, choice)) for other in others if other.step_time_s is None)
        parts = [slower, unfit and f"nothing tried fits with {unfit}"]
        if any(parts):
            yield f"{_SHORT.get(choice, choice)} {_chosen(plan, choice)}: {'; '.join(filter(None, parts))}"


def _chosen(plan: PlanData | OtherPlan, choice: str) -> object:
    """Return the value of a choice in a plan."""
    match choice:
        case "mesh":
            return plan.mesh
        case "micro" | "zero":
            return getattr(plan, choice)
        case "schedule":
            return plan.schedule.kind
    return getattr(plan.mesh, choice)


def _others(plan: PlanData) -> Iterator[dict[str, Any]]:
    for choice, title in _CHOICES.items():
        rows = [_other(plan, other) for other in plan.others if other.choice == choice]
        if rows:
            yield {"choice": choice, "title": title, "rows": rows}


def _other(plan: PlanData, other: OtherPlan) -> dict[str, str]:
    chunks = f", {other.schedule.virtual} chunks" if other.schedule.virtual > 1 else ""
    tried = f"{other.mesh}, {other.micro} a microbatch, ZeRO-{other.zero}, {other.schedule.kind}{chunks}"
    best_s = plan.predicted.step_time_s
    return {
        "value": str(_chosen(other, other.choice)),
        "tried": tried,
        "time": seconds(other.step_time_s) if other.step_time_s is not None else "does not fit",
        "more": f"{other.step_time_s / best_s - 1:+.1%}" if other.step_time_s is not None else "",
        "least": seconds(other.least_s) if other.least_s is not None else "no plan fits",
    }


def _sure(plan: PlanData) -> Iterator[dict[str, Any]]:
    """Yield, of the step time and of memory, a sentence, and the place of the prediction between its bounds."""
    step_s = plan.predicted.step_time_s
    rows = f"mixtures in {'fp8' if plan.method.fp8 else 'bf16'}" if plan.mesh.ep > 1 else "all rows"
    known = STEP_TIME[rows]
    models = "dense models" if plan.mesh.ep == 1 else f"mixtures of experts in {rows.split()[-1]}"
    low, high = (step_s * (1 + sign * known.most) for sign in (-1, 1))
    yield {
        "what": "step",
        "texts": [seconds(low), seconds(step_s), seconds(high)],
        "at": 0.5,
        "sentence": f"Step times of {known.runs} published runs of {models} were predicted with a median error of "
        f"{known.median:.1%}; 90% were within {known.most:.1%}: here between {seconds(low)} and {seconds(high)}.",
    }
    most = max(sum(row.values()) for row in plan.predicted.memory)
    low, high = most * (1 - MEMORY.most), most * MOST_MEASURED
    yield {
        "what": "memory",
        "texts": [f"{size / GIB:.1f} GiB" for size in (low, most, high)],
        "at": (most - low) / (high - low) if high > low else 0.5,
        "sentence": f"Memory of {MEMORY.runs} published runs of dense models was predicted with a median error of "
        f"{MEMORY.median:.1%}; "
        f"90% were within {MEMORY.most:.1%}, and {CONFIDENCE:.0%} needed less than {MOST_MEASURED:.2f} times the "
        f"prediction: here {high / GIB:.1f} GiB for the fullest rank's {most / GIB:.1f} GiB.",
    }
