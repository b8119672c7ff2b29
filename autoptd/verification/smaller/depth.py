"""Segments of a deep model that can be dropped while every kind of stage and cut remains.

A window has as many segments as one repetition of a unit. If two neighbouring windows of a stage are equal in kinds and
in recomputation, one of them is dropped. Each stage thus keeps its first segment, its last one, and every recompute
policy. A stage that is then equal to an earlier one runs no more than each kind between equal ends, as the earlier one
runs the rest. With * for a recomputed segment:

    stage 1   m* a* m* a* m* a* m a     ->   m* a* m a      (begins and ends within a layer, as before)
    stage 2   m* a* m* a* m a m a       ->   m a

At least `LEAST` repetitions of each unit are kept: with fewer, a block would not become a class of its own, and an
encoder's result would have one reader instead of many.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from torch import nn

from autoptd.errors import PlanError
from autoptd.passes.fold import Folded, RepeatedUnit
from autoptd.plans.model import Plan

LEAST = 3
Label: TypeAlias = tuple[str, str | None]  # kind of a segment, and its recompute policy
Drops: TypeAlias = Callable[[Sequence[int], Sequence[int], Sequence[int]], bool]  # segments before, window, after it


@dataclass(frozen=True)
class KeptSegments:
    """Indices of the kept segments, and the number of dropped repetitions by the unit's first segment."""

    segments: tuple[int, ...]
    dropped: dict[int, int]


def keep_segments(folded: Folded, plan: Plan) -> KeptSegments:
    """Return the fewest segments that keep every decision of the plan."""
    unit_of = {i: unit for unit in folded.units if unit.count > 1 for i in range(unit.first, unit.last + 1)}
    dropped: Counter[int] = Counter()
    seen: set[tuple[Label, ...]] = set()
    kept: list[int] = []
    for stage in plan.stages:
        policies = plan.policies(stage)
        labels = {i: (folded.segments[i].kind, policies.get(i)) for i in range(stage.first, stage.last + 1)}
        mine = _shorten(list(labels), unit_of, dropped, partial(_repeats, labels))
        if (alike := tuple(labels[i] for i in mine)) in seen:
            mine = _shorten(mine, unit_of, dropped, partial(_is_spare, labels))
        seen.add(alike)
        kept += mine
    return KeptSegments(tuple(kept), dict(dropped))


def _shorten(
    segments: Sequence[int], unit_of: Mapping[int, RepeatedUnit], dropped: Counter[int], drops: Drops
) -> list[int]:
    """Return a stage's segments without the windows that can be dropped; count them by the unit's first segment."""
    left, at = list(segments), 0
    while at < len(left):
        unit = unit_of.get(left[at])
        if unit is not None and unit.count - dropped[unit.first] > LEAST:
            window, rest = left[at : at + unit.length], [i for i in left[at + unit.length :] if i <= unit.last]
            if drops(left[:at], window, rest):
                del left[at : at + unit.length]
                dropped[unit.first] += 1
                at = -1  # what is now side by side may fit before
        at += 1
    return left


def _repeats(labels: Mapping[int, Label], _: Sequence[int], window: Sequence[int], rest: Sequence[int]) -> bool:
    """Return whether a window equals the next one."""
    return [labels[i] for i in window] == [labels[i] for i in rest[: len(window)]]


def _is_spare(labels: Mapping[int, Label], before: Sequence[int], window: Sequence[int], rest: Sequence[int]) -> bool:
    """Return whether a stage without a window has its kinds, and next to each other only what the plan has so.

    A block has one policy, so a recomputed half of a layer cannot stand before one that is not.
    """
    kinds = {labels[i][0] for i in (*before, *rest)}
    if not rest or labels[rest[0]][0] != labels[window[0]][0] or not {labels[i][0] for i in window} <= kinds:
        return False
    return not before or (labels[before[-1]], labels[rest[0]]) in pairwise(labels.values())


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
