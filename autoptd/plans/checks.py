"""Consistency checks across the fields of a plan."""

from __future__ import annotations

import json
from collections.abc import Iterator

from autoptd.cost_models.complaints import brief
from autoptd.cost_models.step_times import times_from_data
from autoptd.errors import PlanError
from autoptd.layout.placements import parse_placement
from autoptd.plans.data import PlanData
from autoptd.schedule import SCHEDULES

Fault = tuple[str, str]  # field path, what is wrong
_ROUNDED = 1e-6  # of numbers that follow from each other
_ROUNDED_BYTES = 64  # of a sum of whole bytes by category


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
    if shards := plan.method.shards:
        if not plan.zero:
            yield "method.shards", f"is {shards}, but zero is 0, which shards nothing"
        elif ranks % shards:
            yield "method.shards", f"is {shards}; it must divide dp × cp, {ranks}"
    yield from _prediction_faults(plan)


def _prediction_faults(plan: PlanData) -> Iterator[Fault]:
    found, pp = plan.predicted, plan.mesh.pp
    if len(found.memory) != pp:
        yield "predicted.memory", f"has {len(found.memory)} entries; one per stage is {pp}"
    else:
        most = max(sum(row.values()) for row in found.memory)
        if abs(most - found.memory_bytes) > _ROUNDED_BYTES:
            yield "predicted.memory_bytes", f"is {found.memory_bytes}, but predicted.memory of the fullest is {most}"
    if len(found.host) not in (0, pp):
        yield "predicted.host", f"has {len(found.host)} entries; one per stage is {pp}"
    units = plan.units_per_step
    if abs(found.tokens_per_s * found.step_time_s - units) > _ROUNDED * units:
        yield (
            "predicted.tokens_per_s",
            f"is {found.tokens_per_s:g}, but {units} {plan.unit} in a step of {found.step_time_s:g} s are another rate",
        )
    parts = sum(found.time_s.values())
    if found.time_s and found.step_time_s > parts * (1 + _ROUNDED):
        yield "predicted.time_s", f"is {parts:g} s in all, less than step_time_s, {found.step_time_s:g}"
    if found.times and len(found.times) != len(plan.stages):
        yield "predicted.times", f"has {len(found.times)} entries; one per stage is {len(plan.stages)}"
    elif found.times:
        try:
            times_from_data(found.times, pp)
        except PlanError as error:
            yield f"predicted.{error.where}", error.what


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
    virtual, kind = plan.schedule.virtual, plan.schedule.kind
    if (chunks_of := SCHEDULES[kind].chunks) not in (None, virtual):
        yield "schedule.virtual", f"is {virtual}, but {kind} has {chunks_of} chunk{'s' * (chunks_of != 1)} per rank"
    devices = {"", *(pool.device.name for pool in plan.cluster.pools)}
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
        if stage.device not in devices:
            yield f"stages[{i}].device", f"is {brief(stage.device)}, which the cluster does not have"
        for j, segment in enumerate(stage.recompute):
            if not stage.first <= segment <= stage.last:
                yield f"stages[{i}].recompute[{j}]", f"is {segment}, outside {stage.first} to {stage.last}"
            if segment in stage.recompute[:j]:
                yield f"stages[{i}].recompute[{j}]", f"is {segment}, which has a policy already"
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
