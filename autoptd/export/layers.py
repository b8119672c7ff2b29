"""A plan in units of whole layers (`passes/layer_stack.py`): other systems can cut stages only between layers.

A stage that begins inside a unit is moved to the nearer end of it, and the move is reported. If both ends are equally
near, it is moved to the beginning: the later stage, which has fewer in-flight microbatches, gets the whole layer.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from glob import escape
from itertools import pairwise

from autoptd.errors import PlanError
from autoptd.passes.layer_stack import layer_stack
from autoptd.plans.model import Plan


@dataclass(frozen=True)
class Layers:
    """The stack of layers that a plan's segments belong to.

    stack    path of the parent of the numbered modules, "transformer.h"; "" if that is the model itself
    count    number of layers
    owners   unit of each segment: 0 before the stack, 1 + i for layer i, count + 1 after it
    bounds   first unit of each stage, then count + 2; stage k has units bounds[k] to bounds[k + 1] - 1
    moved    a sentence for each stage whose first layer was moved
    """

    stack: str
    count: int
    owners: tuple[int, ...]
    bounds: tuple[int, ...]
    moved: tuple[str, ...]

    def layers_of(self, stage: int) -> range:
        """Return the layers of a stage, counted from 0."""
        first, end = self.bounds[stage : stage + 2]
        return range(max(0, first - 1), min(self.count, end - 1))

    def path(self, layer: int) -> str:
        """Return the path of a layer: `transformer.h.3`."""
        return f"{self.stack}.{layer}" if self.stack else str(layer)

    @property
    def pattern(self) -> str:
        """The pattern that matches every layer: `transformer.h.*`."""
        return f"{escape(self.stack)}.*" if self.stack else "*"

    def stage_of(self, unit: int) -> int:
        """Return the stage that holds a unit."""
        return next(k for k, (first, end) in enumerate(pairwise(self.bounds)) if first <= unit < end)


def read_layers(plan: Plan) -> Layers:
    """Find the layers of a plan. Raises PlanError if there are none or several stacks, or a stage would be empty."""
    if plan.route.shape != "loop":
        raise PlanError(
            f"the schedule {plan.schedule.kind} places stages on ranks in a V: exported programs place them in a loop",
            where="schedule.kind",
            fix="plan with the schedule 'interleaved' or 'zero-bubble', or run the program that autoptd emits",
        )
    if plan.statistics:
        raise PlanError(
            f"samples are normalised by {plan.statistics} sums over the batch, which no exported program computes",
            where="statistics",
            fix="run the program that autoptd emits",
        )
    if plan.updates:
        raise PlanError(
            f"forward updates {plan.updates[0]}{' and other buffers' * (len(plan.updates) > 1)} from sums over the "
            "whole batch, which no exported program computes",
            where="updates",
            fix="run the program that autoptd emits",
        )
    stack = layer_stack(plan.segments, plan.model, "segments", "export to json, which needs no layers, and takes any")
    bounds, moved = _bounds(plan, stack.owners, stack.count)
    return Layers(stack.path, stack.count, stack.owners, bounds, tuple(moved))


def _bounds(plan: Plan, owners: tuple[int, ...], count: int) -> tuple[tuple[int, ...], list[str]]:
    bounds, moved = [0], []
    for k, stage in enumerate(plan.stages[1:], 1):
        unit = owners[stage.first]
        if owners[stage.first - 1] == unit:
            before = stage.first - owners.index(unit)
            later = unit == 0 or (unit <= count and 2 * before > owners.count(unit))
            unit += later
            moved.append(_move(plan, k, unit, count))
        bounds.append(unit)
    bounds.append(count + 2)
    for k, (first, end) in enumerate(pairwise(bounds)):
        if first >= end:
            raise PlanError(
                f"stage {k} of {len(plan.stages)} holds no whole layer ({plan.stages[k].modules})",
                where=f"stages[{k}]",
                fix="plan with fewer stages, or with fix={'stages': 'even'}",
            )
    return tuple(bounds), moved


def _move(plan: Plan, stage: int, unit: int, count: int) -> str:
    planned = plan.segments[plan.stages[stage].first]
    start = "what follows the layers" if unit == count + 1 else f"layer {unit - 1}"
    return f"stage {stage} begins with {start}, not inside it with {planned}"


def recomputed(plan: Plan) -> dict[int, str]:
    """Return the policy ("full", "selective", "ops" or "offload") of each segment that has one; heads have none."""
    found = (item for stage in plan.stages for item in sorted(plan.policies(stage).items()))
    return {i: policy for i, policy in found if policy != "logits"}


def whole_layers(plan: Plan, layers: Layers) -> dict[int, str]:
    """Return the policy of each layer whose segments are all recomputed under the same policy."""
    found: dict[int, list[str]] = {}
    for i, policy in recomputed(plan).items():
        found.setdefault(layers.owners[i], []).append(policy)
    return {
        unit - 1: policies[0]
        for unit, policies in sorted(found.items())
        if 1 <= unit <= layers.count and len(policies) == layers.owners.count(unit) and len(set(policies)) == 1
    }


def is_sequence_parallel(plan: Plan, layers: Layers) -> bool:
    """Return whether the hidden states between layers, [b, s, width], are split along the sequence, dim 1."""
    if plan.mesh.tp == 1:
        return False
    inside = {
        re.sub(r"\d+", "*", plan.segments[i]) for i, unit in enumerate(layers.owners) if 1 <= unit <= layers.count
    }
    given = [texts[0] for kind, texts in plan.boundaries.items() if texts and _name_of(kind) in inside]
    return bool(given) and sum(text == "S1" for text in given) * 2 > len(given)


def _name_of(kind: str) -> str:
    """Return the name of a kind's segments, without the number that distinguishes kinds of the same name."""
    return re.sub(r"#\d+$", "", kind)


def _is_of_layers(kind: str, plan: Plan, layers: Layers) -> bool:
    """Return whether a kind is part of the layers. Its name is that of its segments, with stars for numbers."""
    inside = range(1, layers.count + 1)
    named = {re.sub(r"\d+", "*", plan.segments[i]) for i, unit in enumerate(layers.owners) if unit in inside}
    return _name_of(kind) in named


def planned_collectives(plan: Plan, layers: Layers) -> dict[str, float]:
    """Return the tp collectives of a layer's forward pass, averaged over the layers; {} if the plan records none."""
    counts: Counter[str] = Counter()
    for kind, found in plan.collectives.items():
        if _is_of_layers(kind, plan, layers):
            counts.update({name: number * found.count for name, number in found.forward.items()})
    return {name: counts[name] / layers.count for name in sorted(counts)}


def collectives_differ(plan: Plan, layers: Layers, theirs: dict[str, float], whose: str) -> list[str]:
    """Return a sentence if a layer's collectives in the plan differ from `theirs`."""
    planned = planned_collectives(plan, layers)
    if not planned or planned == theirs:
        return []
    mine, other = (
        ", ".join(f"{name.replace('_', '-')} {number:.3g}" for name, number in row.items()) or "nothing"
        for row in (planned, theirs)
    )
    return [f"a layer's forward pass has {mine}: {whose} has {other}"]


def modules_of(segment: str) -> list[str]:
    """Return the modules of a segment: `h.0.{ln_1,attn}` -> ["h.0.ln_1", "h.0.attn"]."""
    head, brace, inside = segment.partition("{")
    return [head + name for name in inside.removesuffix("}").split(",")] if brace else [segment]
