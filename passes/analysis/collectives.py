"""Counts of tp collectives in a sharded program, per microbatch and segment, by kind of segment.

A conversion counts once per (tensor, placement), however many ops share it, as in emitted code; in backward only if the
tensor has a gradient. Megatron's sequence-parallel transformer layer has 4 in forward: an all-gather and a
reduce-scatter around attention, and the same around the MLP (Korthikanti et al. 2022, figure 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autoptd.layout.placements import B, Placement, conversion
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import info, is_getitem, operands
from autoptd.passes.sharding.sharding import KindSharding, Sharding, ops_of


@dataclass(frozen=True)
class CollectiveCounts:
    """Name of a collective -> number of times that one segment issues it."""

    forward: Mapping[str, int]
    backward: Mapping[str, int]


def count_collectives(folded: Folded, sharding: Sharding) -> dict[str, CollectiveCounts]:
    """Return each kind's collectives for one microbatch, without recomputation; empty for a single rank."""
    if sharding.ranks == 1:
        return {}
    return {kind: _traffic(segment, sharding.kinds[kind]) for kind, segment in folded.representatives.items()}


def _traffic(segment: Segment, decided: KindSharding) -> CollectiveCounts:
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    given = given_placements(segment, decided)
    for node, wanted in dict.fromkeys(_wanted(segment, decided)):
        row = conversion(given[node], wanted)
        forward.update([row.forward] if row.forward else [])
        backward.update([row.backward] if row.backward and info(node).requires_grad else [])
    for strategy in decided.strategies.values():
        forward.update(name for name, _ in strategy.collectives)
    return CollectiveCounts(dict(sorted(forward.items())), dict(sorted(backward.items())))


def _wanted(segment: Segment, decided: KindSharding) -> Iterator[tuple[fx.Node, Placement]]:
    for i, node in ops_of(segment):
        yield from zip(operands(node), decided.strategies[i].needs, strict=True)
    yield from zip(segment.sends, decided.sends, strict=True)


def given_placements(segment: Segment, decided: KindSharding) -> dict[fx.Node, Placement]:
    """Return the placement in which each tensor that a segment reads is available."""
    found: dict[fx.Node, Placement] = dict.fromkeys(segment.prelude, B)
    found |= dict(zip(segment.parameters, decided.parameters, strict=True))
    found |= dict(zip(segment.receives, decided.receives, strict=True))
    for i, node in ops_of(segment):
        gives = decided.strategies[i].gives
        found[node] = gives[0]
        found |= {user: gives[user.args[1]] for user in node.users if is_getitem(user)}  # type: ignore[index]
    return found
