"""Which blocks of a stage recompute their activations: the cheapest set that fits.

A block is one repetition of a unit, or the part of it that a stage holds; recomputed, it keeps its input alone and has
its activations back, all at once, while its own backward runs:

    memory(R) = static + in flight × (Σ_{not R} activations + Σ_R input)
                + workspace + max_R(activations - input)
    extra time per microbatch = Σ_R forward
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_EXACT = 20_000  # combinations of counts that are tried one by one


@dataclass(frozen=True)
class Block:
    """Consecutive segments of one stage that are recomputed together or not at all; seconds and bytes."""

    segments: tuple[int, ...]
    forward_s: float
    activation_bytes: int
    input_bytes: int

    @property
    def freed_bytes(self) -> int:
        return self.activation_bytes - self.input_bytes


def peak_bytes(blocks: Sequence[Block], recomputed: set[int], static: int, workspace: int, in_flight: int) -> int:
    """Memory at the fullest moment; `recomputed` are positions in `blocks`."""
    kept = sum(b.input_bytes if i in recomputed else b.activation_bytes for i, b in enumerate(blocks))
    restored = max((blocks[i].freed_bytes for i in recomputed), default=0)
    return static + in_flight * kept + workspace + max(0, restored)


def choose(blocks: Sequence[Block], static: int, workspace: int, in_flight: int, budget: float) -> set[int] | None:
    """Positions of the blocks to recompute, at the least extra time; None if nothing fits."""
    kinds: dict[tuple[float, int, int], list[int]] = {}
    for i, block in enumerate(blocks):
        kinds.setdefault((block.forward_s, block.activation_bytes, block.input_bytes), []).append(i)
    members = list(kinds.values())
    counts: Iterable[tuple[int, ...]]
    if math.prod(len(m) + 1 for m in members) <= _EXACT:
        counts = itertools.product(*(range(len(m) + 1) for m in members))
    else:
        counts = _by_price(blocks, members)
    best: set[int] | None = None
    least = math.inf
    for combination in counts:
        chosen = {i for m, n in zip(members, combination, strict=True) for i in m[:n]}
        seconds = sum(blocks[i].forward_s for i in chosen)
        if seconds < least and peak_bytes(blocks, chosen, static, workspace, in_flight) <= budget:
            best, least = chosen, seconds
    return best


def _by_price(blocks: Sequence[Block], members: list[list[int]]) -> list[tuple[int, ...]]:
    """Counts per kind, growing one block at a time, the most bytes per second first."""
    order = sorted(
        range(len(members)),
        key=lambda k: -blocks[members[k][0]].freed_bytes / (blocks[members[k][0]].forward_s or 1e-12),
    )
    counts = [0] * len(members)
    found = [tuple(counts)]
    for kind in order:
        for _ in members[kind]:
            counts[kind] += 1
            found.append(tuple(counts))
    return found
