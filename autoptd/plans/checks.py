"""Consistency checks across the fields of a plan."""

from __future__ import annotations

import json
from collections.abc import Iterator

from autoptd.cost_models.complaints import brief
from autoptd.layout.placements import parse_placement
from autoptd.plans.data import PlanData

Fault = tuple[str, str]  # field path, what is wrong


class Inconsistent(ValueError):
    """Fields of a plan that contradict each other."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(f"{path}: {what}" for path, what in faults))
        self.faults = faults


def faults(plan: PlanData) -> Iterator[Fault]:
    """Yield every contradiction between fields, as (field path, what is wrong)."""
    if plan.mesh.ranks != plan.world:
        yield "mesh", f"{plan.mesh} is {plan.mesh.ranks} ranks, but world is {plan.world}"
    over, ranks = "dp × cp × tp" if plan.mesh.etp else "dp × cp", plan.mesh.dp * plan.mesh.cp
    if (ranks * (plan.mesh.tp if plan.mesh.etp else 1)) % plan.mesh.ep:
        yield "mesh.ep", f"is {plan.mesh.ep}; it must divide {over}, {ranks * (plan.mesh.tp if plan.mesh.etp else 1)}"
    yield from _batch_faults(plan)
    yield from _stage_faults(plan)
    yield from _placement_faults(plan)
    if len(shares := plan.method.offload) not in (0, plan.mesh.pp):
        yield "method.offload", f"has {len(shares)} entries; one per pipeline rank is {plan.mesh.pp}"
    if any(shares) and plan.zero == 3:
        yield "method.offload", "is not empty, but parameters that ZeRO 3 shards stay on the device"
    if any(shares) and plan.whole:
        yield "method.offload", "is not empty, but the optimizer updates whole parameters, on the device"
    if len(plan.predicted.memory) != plan.mesh.pp:
        yield "predicted.memory", f"has {len(plan.predicted.memory)} entries; one per stage is {plan.mesh.pp}"
    if len(plan.predicted.host) not in (0, plan.mesh.pp):
        yield "predicted.host", f"has {len(plan.predicted.host)} entries; one per stage is {plan.mesh.pp}"
    if plan.predicted.times and len(plan.predicted.times) != len(plan.stages):
        yield "predicted.times", f"has {len(plan.predicted.times)} entries; one per stage is {len(plan.stages)}"


def _batch_faults(plan: PlanData) -> Iterator[Fault]:
    if "b" not in plan.sizes:
        yield "sizes", "lacks b, the samples of a microbatch"
        return
    per_microbatch = plan.mesh.dp * plan.micro
    needed, least = -(-plan.batch // per_microbatch), plan.batch // plan.mesh.dp
    if least <= (needed - 1) * plan.micro:
        yield "batch", f"is {plan.batch}: some of dp {plan.mesh.dp} ranks have {least} samples, and fewer microbatches"
    if plan.schedule.microbatches != needed:
        yield (
            "schedule.microbatches",
            f"is {plan.schedule.microbatches}, but a batch of {plan.batch} in microbatches of "
            f"dp {plan.mesh.dp} × {plan.micro} is {needed}",
        )


def _stage_faults(plan: PlanData) -> Iterator[Fault]:
    virtual = plan.schedule.virtual
    if len(plan.stages) != plan.mesh.pp * virtual:
        chunks = f" with {virtual} chunks each" if virtual > 1 else ""
        yield "stages", f"has {len(plan.stages)} entries, but mesh.pp is {plan.mesh.pp}{chunks}"
    start = 0
    for i, stage in enumerate(plan.stages):
        if stage.first != start:
            why = "the first segment" if i == 0 else f"one after stages[{i - 1}].last"
            yield f"stages[{i}].first", f"is {stage.first}; it must be {start}, {why}"
        if stage.last < stage.first:
            yield f"stages[{i}].last", f"is {stage.last}, before first {stage.first}"
        for j, segment in enumerate(stage.recompute):
            if not stage.first <= segment <= stage.last:
                yield f"stages[{i}].recompute[{j}]", f"is {segment}, outside {stage.first} to {stage.last}"
        if len(stage.policies) not in (0, len(stage.recompute)):
            yield f"stages[{i}].policies", f"has {len(stage.policies)} entries for {len(stage.recompute)} segments"
        start = stage.last + 1
    if start != len(plan.segments):
        yield f"stages[{len(plan.stages) - 1}].last", f"is {start - 1}; the last segment is {len(plan.segments) - 1}"


def _placement_faults(plan: PlanData) -> Iterator[Fault]:
    tables = {
        "splits.parameters": plan.splits.parameters.items(),
        "splits.activations": plan.splits.activations.items(),
        "boundaries": ((kind, text) for kind, texts in plan.boundaries.items() for text in texts),
    }
    for table, items in tables.items():
        for name, text in items:
            try:
                parse_placement(text)
            except ValueError as error:
                yield f"{table}[{brief(json.dumps(name))}]", str(error)
