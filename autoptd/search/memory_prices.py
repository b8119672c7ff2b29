"""Prices of time and memory that prove a bound of one candidate from the program that was solved for another.

Programs (1), (3) to (5) of `search/pipeline/lp_bound.py`, without a schedule, have a dual. For any prices u_k >= 0 of
the seconds of group k of stages, of which Σ u_k = 1, λ_k >= 0 of its memory and ρ_k >= 0 of its single segments, no cut
takes less than

    Σ_g number of g · min( min_{k,w} cost of block g on k, Σ_i min_{k,w} (cost of its segment i on k + ρ_k) )
        - Σ_k (λ_k + ρ_k · single segments that k may hold)

    cost = u_k microbatches (forward + backward + recompute) / stages of k + λ_k (state + alive_k kept) / memory of k

and the best prices reach the program's optimum. Where it has no solution, prices with u = 0 make this positive instead,
which proves so. Programs of a search are much alike: the prices of the last ones exclude most candidates, in a tenth of
the time that solving another program takes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import accumulate

import numpy as np

from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.lp_bound import Blocks, LeastBound, Pipeline, Prices, groups_of, relaxed_bound
from autoptd.search.pipeline.windows import Floats

_KEPT = 6  # prices for each number of groups
Kinds = Collection[tuple[str, int]]  # schedules and their numbers of chunks
_PROOF = 1e-6  # of the prices of memory: a smaller value may be a rounding error


class MemoryPrices:
    """The prices of the programs that a search solved last."""

    def __init__(self) -> None:
        self._known: dict[int, deque[Prices]] = {}

    def bound(self, by_pool: Sequence[Sequence[Blocks]], pipeline: Pipeline, limit_s: float) -> LeastBound:
        """Return `relaxed_bound` of a pipeline without a schedule, or a lower bound of it that reaches `limit_s`."""
        groups = list(groups_of(pipeline.pools))
        known = self._known.setdefault(len(groups), deque(maxlen=_KEPT))
        if known and math.isfinite(sum(pipeline.budgets)):
            found_s = _most_s(known, by_pool, pipeline, groups)
            if found_s >= limit_s:
                return LeastBound(found_s, True)
        found = relaxed_bound(by_pool, pipeline)
        if found.prices is not None:
            known.append(found.prices)
        return found


class FamilyBounds:
    """Bounds of the passes of families of candidates, from the program of the one that takes least memory."""

    def __init__(self, solve: Callable[[Candidate, Kinds, float], float]) -> None:
        """`solve`: returns a bound of the passes of a candidate under any of these schedules, or one that reaches a
        limit."""
        self._solve = solve
        self._members: dict[Hashable, list[Candidate]] = {}
        self._found: dict[tuple[Hashable, float], tuple[float, float]] = {}  # bounds, and what they had to reach

    def add(self, c: Candidate) -> None:
        """Add a candidate to its family."""
        self._members.setdefault(c.family, []).append(c)

    def known_s(self, c: Candidate, offload: float) -> float:
        """Return what is known already to bound a candidate's family with this offload."""
        return self._found.get((c.family, offload), (0.0, 0.0))[0]

    def passes_s(self, c: Candidate, needed_s: float) -> float:
        """Return a bound of a candidate's family with its offload; one of `needed_s` is enough."""
        found_s, reached_s = self._found.get((c.family, c.offload), (0.0, 0.0))
        if reached_s <= found_s < needed_s:  # else it is the least
            members = self._members[c.plain_memory.family]
            lightest = c if c.zero > 1 else c._replace(zero=max(m.zero for m in members), shards=0)
            found_s = self._solve(lightest, {(m.schedule, m.virtual) for m in members}, needed_s)
            self._found[c.family, c.offload] = found_s, needed_s
        return found_s


def _most_s(
    known: Sequence[Prices], by_pool: Sequence[Sequence[Blocks]], pipeline: Pipeline, groups: Sequence[range]
) -> float:
    """Return the largest bound that any of these prices proves."""
    count = np.array([len(group) for group in groups], dtype=float)
    firsts = [group[0] for group in groups]
    alive = np.array([min(pipeline.alive[k][0][0] for k in group) for group in groups])
    budgets = np.array([pipeline.budgets[k] for k in firsts])
    unit = np.maximum(1.0, budgets)  # of bytes, as in the program
    pieces = pipeline.most_pieces(by_pool[0]) * count
    seconds_of, memory_of, pieces_of = (np.array(prices) for prices in zip(*known, strict=True))  # [prices, group]
    per_second = (pipeline.microbatches * seconds_of / count)[:, :, None]
    per_byte = (memory_of / unit)[:, :, None]
    parts = sum(1 + len(same.segments) for same in by_pool[0])
    least = np.empty((len(known), len(groups), parts))  # [prices, group, part]
    for pool in {pipeline.pools[k] for k in firsts}:  # each type of device has options of its own
        blocks, on = by_pool[pool], [j for j, k in enumerate(firsts) if pipeline.pools[k] == pool]
        seconds, state, kept = _columns(blocks)
        costs = per_second[:, on] * seconds + per_byte[:, on] * (state + alive[on, None] * kept)
        costs[:, ~np.array([_may_hold(blocks, pipeline, groups[j]) for j in on])] = np.inf  # [prices, group, option]
        least[:, on] = np.minimum.reduceat(costs, _starts(blocks), axis=2)
    whole = least.min(axis=1)
    single = (least + pieces_of[:, :, None]).min(axis=1)
    found, at = -memory_of @ (count * budgets / unit) - pieces_of @ pieces, 0
    for same in by_pool[0]:
        after = at + 1 + len(same.segments)
        in_pieces = single[:, at + 1 : after].sum(axis=1) if same.segments else math.inf
        found += same.count * np.minimum(whole[:, at], in_pieces)
        at = after
    proofs = ~seconds_of.any(axis=1)
    is_proved = (found > _PROOF * (memory_of @ count))[proofs].any()  # that nothing fits
    return math.inf if is_proved else float(found[~proofs].max(initial=0.0))


def _columns(blocks: Sequence[Blocks]) -> tuple[Floats, Floats, Floats]:
    """Return seconds of a microbatch, bytes of state and bytes kept of each option of each block and segment."""
    rows = [
        (part.forward_s + part.backward_s + there_s + again_s, part.state, kept)
        for same in blocks
        for part in (same.whole, *same.segments)
        for there_s, again_s, kept in part.options
    ]
    seconds, state, kept = np.array(rows).T
    return seconds, state, kept


def _starts(blocks: Sequence[Blocks]) -> list[int]:
    """Return the place of the first option of each block and segment among all."""
    counts = (len(part.options) for same in blocks for part in (same.whole, *same.segments))
    return [0, *accumulate(counts)][:-1]


def _may_hold(blocks: Sequence[Blocks], pipeline: Pipeline, group: range) -> list[bool]:
    """Return for each option of each block and segment whether a group may hold it."""
    sizes = ((same, len(part.options)) for same in blocks for part in (same.whole, *same.segments))
    return [pipeline.may_hold(group, same) for same, n in sizes for _ in range(n)]
