"""Segments of a deep model that can be dropped while every kind of stage and cut remains.

A window has as many segments as one repetition of a unit. If two neighbouring windows of a stage are equal in kinds and
in recomputation, one of them is dropped. Each stage thus keeps its first segment, its last one, and every recompute
policy. At least `LEAST` repetitions of each unit are kept: with fewer, a block would not become a class of its own, and
an encoder's result would have one reader instead of many.

    stage 1   m a m a m a m a      ->   m a          (begins and ends within a layer, as before)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from autoptd.errors import PlanError
from autoptd.passes.fold import Folded, RepeatedUnit
from autoptd.plans.model import Plan

LEAST = 3


@dataclass(frozen=True)
class KeptSegments:
    """Indices of the kept segments, and the number of dropped repetitions by the unit's first segment."""

    segments: tuple[int, ...]
    dropped: dict[int, int]


def keep_segments(folded: Folded, plan: Plan) -> KeptSegments:
    """Return the fewest segments that keep every decision of the plan."""
    unit_of = {i: unit for unit in folded.units if unit.count > 1 for i in range(unit.first, unit.last + 1)}
    dropped: Counter[int] = Counter()
    kept: list[int] = []
    for stage in plan.stages:
        policies = plan.policies(stage)
        mine = list(range(stage.first, stage.last + 1))
        at = 0
        while at < len(mine):
            unit = unit_of.get(mine[at])
            if unit is not None and _repeats(folded, policies, unit, mine[at : at + 2 * unit.length], dropped):
                del mine[at : at + unit.length]
                dropped[unit.first] += 1
            else:
                at += 1
        kept += mine
    return KeptSegments(tuple(kept), dict(dropped))


def _repeats(
    folded: Folded, policies: dict[int, str], unit: RepeatedUnit, window: Sequence[int], dropped: Counter[int]
) -> bool:
    """Return whether both halves of a double window are equal, so that the first can be dropped."""
    length = unit.length
    if len(window) < 2 * length or window[-1] > unit.last or unit.count - dropped[unit.first] <= LEAST:
        return False
    labels = [(folded.segments[i].kind, policies.get(i)) for i in window]
    return labels[:length] == labels[length:]


def drop_layers(model: nn.Module, folded: Folded, kept: KeptSegments) -> None:
    """Remove the dropped layers from the model, in place. Raises PlanError if a unit's layers are not in one list."""
    for unit in folded.units:
        count = kept.dropped.get(unit.first, 0)
        if not count:
            continue
        path, numbers = _list_of(folded, unit)
        each = len(numbers) // unit.count
        if not each:
            raise PlanError(
                f"the {unit.count} repetitions from {folded.segments[unit.first].name} on are not layers of one list",
                where=path or "model",
                fix="verify it at its full depth: --full",
            )
        gone = set(numbers[each : each * (count + 1)])
        layers = model.get_submodule(path)
        assert isinstance(layers, (nn.ModuleList, nn.Sequential))
        left = [layer for i, layer in enumerate(layers) if i not in gone]
        owner, _, name = path.rpartition(".")
        made = nn.ModuleList(left) if isinstance(layers, nn.ModuleList) else nn.Sequential(*left)
        made.training = layers.training  # not `train()`, which would also set the layers inside
        setattr(model.get_submodule(owner), name, made)


def _list_of(folded: Folded, unit: RepeatedUnit) -> tuple[str, list[int]]:
    """Return the list that holds the repetitions, and their indices: `model.layers`, [0, 1, …, 79]."""
    parameters = folded.traced.parameters
    names = [parameters[p.name] for s in folded.segments[unit.first : unit.last + 1] for p in s.parameters]
    found: dict[str, set[int]] = {}
    for name in names:
        for match in re.finditer(r"(?:^|\.)(\d+)\.", name):
            found.setdefault(name[: match.start()], set()).add(int(match[1]))
    path = next((p for p, numbers in found.items() if len(numbers) >= unit.count), "")
    return path, sorted(found.get(path, ()))
