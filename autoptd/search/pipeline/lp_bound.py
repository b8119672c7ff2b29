"""Lower bound on the step time of a candidate: a linear relaxation over all cuts and recomputations.

Blocks are divided among the pipeline's stages in fractions and out of order: y[k, g, w] blocks of group g (equal
blocks) are on stage k with recompute option w. A stage may begin and end inside a block, and then holds single segments
of it, z[k, g, i, w], with options of their own. Stage k is all that rank k holds, or one of its chunks where these have
different numbers of microbatches in flight.

    minimise C

    (1)  C >= sum (y, z)[k] (microbatches (forward + backward + recompute) + reduction), over the stages k of a rank
    (2)  C >= the average of chains of `search/critical_paths.py`, linear in the same seconds and in those of messages,
         plus the reductions of the first rank, whose backward pass of the first stage ends all chains
    (3)  sum z[k] <= 2 (segments of the longest block - 1)
    (4)  sum (y, z)[k] (state + alive[k] kept) <= budget of the rank, at each candidate memory peak
    (5)  sum_{k,w} y[k, g, w] + sum_{k,w} z[k, g, i, w] = number of g, for each segment i
    (6)  C >= m T of the last stage + (m + 1 - p) T of the other stages of its rank + T of all other stages + messages:
         bound (7) of `search/pipeline/lower_bounds.py` for the last chunk, if backward passes are not split

The first segment of the model is only on the first stage and the last one, often the head, only on the last, unless
other segments are equal to them.

Neighbouring stages of deep pipelines are grouped: the slowest stage of a group is no faster than their average.
Coefficients are seconds and bytes of a candidate, so each candidate has its own program, of a few milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoptd.cost_models.memory import alive
from autoptd.schedule import Alive, route_of, row_of
from autoptd.search.critical_paths import PassShares, PathWeights, average_path
from autoptd.search.pipeline.lower_bounds import busiest_edge_s
from autoptd.search.solver import IntegerProgram, Outcome, minimise

_GROUPS = 16  # most groups of stages, with one device type
_FULL = 1e-6  # distance from a limit at which it counts as reached


@dataclass(frozen=True)
class BlockOptions:
    """Seconds of a microbatch, bytes of state, and recompute `options`: (seconds added to forward, to backward, bytes
    saved for backward).

    `weight_s`: the part of `backward_s` that a schedule may split off; `reduce_s`: of gradients after the last
    microbatch."""

    forward_s: float
    backward_s: float
    weight_s: float
    reduce_s: float
    state: float
    options: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Blocks:
    """A number of equal blocks. `segments`: the single segments of one, if a stage may hold part of a block; `only`: 0
    or -1 if none but the first or the last stage may hold them."""

    count: int
    whole: BlockOptions
    segments: tuple[BlockOptions, ...] = ()
    only: int | None = None


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a candidate. For each rank, `alive`: at each candidate memory peak, the in-flight microbatches of
    each chunk, or one number for all chunks; `pools`: device type; `budgets`: bytes. `sends_s`: least seconds of a
    message after each stage but the last; `ending`: the ranks that may hold the last stage.
    """

    schedule: str | None  # None: any
    microbatches: int
    virtual: int
    alive: tuple[tuple[tuple[float, ...], ...], ...]
    pools: tuple[int, ...]
    budgets: tuple[float, ...]
    sends_s: tuple[float, ...] = ()
    ending: tuple[int, ...] = ()

    def may_hold(self, group: range, blocks: Blocks) -> bool:
        """Return whether a group of ranks may hold these blocks."""
        return blocks.only is None or any(rank in group for rank in ((0,) if blocks.only == 0 else self.ending))

    def most_pieces(self, blocks: Sequence[Blocks]) -> float:
        """Return how many single segments a rank may hold, by (3)."""
        return 2.0 * max(0, max(len(same.segments) for same in blocks) - 1) * self.virtual


def of_any(
    kinds: Collection[tuple[str, int]], microbatches: int, pools: tuple[int, ...], budgets: tuple[float, ...]
) -> Pipeline:
    """Return the pipeline that stands for any of these schedules and numbers of chunks."""
    p = len(pools)
    held = (min(alive(rank, p, microbatches, kind, v).least / v for kind, v in kinds) for rank in range(p))
    ending = {route_of(kind, p, v).holder(p * v - 1) for kind, v in kinds}
    most = max(v for _, v in kinds)
    return Pipeline(None, microbatches, most, tuple(((n,),) for n in held), pools, budgets, (), tuple(ending))


def in_flight(held: Alive) -> tuple[tuple[float, ...], ...]:
    """Return the `alive` of a rank for a `Pipeline`."""
    rows = tuple(tuple(n / held.parts for n in row) for row in held.rows)
    return tuple(row[:1] for row in rows) if all(len(set(row)) == 1 for row in rows) else rows


def least_in_flight(group: Sequence[tuple[tuple[float, ...], ...]]) -> list[tuple[float, ...]]:
    """Return an `alive` that no rank of a group is below.

    Ranks may have different numbers of peaks: all of a rank hold, so its last one stands for those that it lacks. One
    number for all chunks stands for each of them."""
    chunks, count = max(len(row) for rank in group for row in rank), max(map(len, group))
    wide = [[row * (chunks // len(row)) for row in rank] for rank in group]
    return [tuple(map(min, zip(*(rank[min(i, len(rank) - 1)] for rank in wide), strict=True))) for i in range(count)]


Prices = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]  # of (1), (4) and (3) for each group of stages


class LeastBound(NamedTuple):
    """A lower bound of all cuts, infinite if none fits, and whether memory raises it, or that of its stages.

    `work_s`: seconds of a microbatch on each stage, without recomputation, in the fractions that attain the bound;
    `prices`: those that prove it (`search/memory_prices.py`), without a schedule."""

    seconds: float
    is_full: bool
    work_s: tuple[float, ...] = ()
    prices: Prices | None = None


def relaxed_bound(by_pool: Sequence[Sequence[Blocks]], pipeline: Pipeline, close: bool = False) -> LeastBound:
    """Return a lower bound on the seconds of all microbatches and, for a given schedule, of the reduction that ends
    last; infinite if not even fractions fit.

    `by_pool`: the blocks with their costs on each device type; `close`: as in `average_path`."""
    program, blocks, sends = IntegerProgram(), by_pool[0], pipeline.sends_s
    edges_s, route, path, last = 0.0, None, None, list[int]()
    count, rounds = len(pipeline.pools) * pipeline.virtual, list[int]()
    if pipeline.schedule is not None:
        kind = pipeline.schedule, len(pipeline.pools)
        edges_s = busiest_edge_s(sends, *kind, pipeline.microbatches)
        route = route_of(*kind, pipeline.virtual)
        path = path_of(blocks, *kind, pipeline.microbatches, pipeline.virtual, sends, close)
        if not row_of(pipeline.schedule).splits_backward:
            last = list(route.stages_of(0))
            rounds = _rounds(kind[1], pipeline.microbatches, pipeline.virtual)
    least = program.variable(upper=math.inf)
    shares: list[list[list[int]]] = [[[] for _ in b.segments or (b,)] for b in blocks]
    chain, to_last = dict[int, float](), dict[int, float]()
    memory: list[tuple[dict[int, float], float]] = []
    recomputed: list[int] = []
    work: list[tuple[list[int], dict[int, float]]] = []  # stages, and the seconds that variables add to them
    for group in groups_of(pipeline.pools):
        budget_bytes = pipeline.budgets[group[0]]
        peaks = least_in_flight([pipeline.alive[k] for k in group])
        busy, partial = dict[int, float](), list[int]()
        held: list[dict[int, float]] = [{} for _ in peaks]
        for chunk in range(len(peaks[0])):
            stages = [s for k in group for s in route.stages_of(k)[chunk :: len(peaks[0])]] if route else []
            for same, own in zip(by_pool[pipeline.pools[group[0]]], shares, strict=True):
                at = stages if same.only is None else [s for s in stages if s == same.only % count]
                if not (at if route else pipeline.may_hold(group, same)):
                    continue
                work.append((at, own_s := {}))
                for i, part in enumerate((same.whole, *same.segments)):
                    for there_s, again_s, kept in part.options:
                        some = program.variable(upper=math.inf)  # (5) limits it
                        for share in own if i == 0 else own[i - 1 : i]:
                            share.append(some)
                        if i:
                            partial.append(some)
                        if there_s or again_s:
                            recomputed.append(some)
                        passes = part.forward_s + there_s, part.backward_s + again_s, part.weight_s
                        own_s[some] = part.forward_s + part.backward_s
                        reduce_s = part.reduce_s if path is not None else 0.0
                        busy[some] = (pipeline.microbatches * (passes[0] + passes[1]) + reduce_s) / len(group)
                        if path is not None:
                            seconds = path.seconds(*passes)
                            seconds[last] += reduce_s
                            chain[some] = float(seconds[at].min())
                        if rounds:
                            to_last[some] = min(rounds[s] for s in at) * (passes[0] + passes[1])
                        for row, peak in zip(held, peaks, strict=True):
                            row[some] = (part.state + peak[chunk] * kept) / max(1.0, budget_bytes)
        program.demand(1, {least: 1.0, **{some: -seconds for some, seconds in busy.items()}}, 0.0)
        if partial:
            program.demand(3, dict.fromkeys(partial, 1.0), high=pipeline.most_pieces(blocks) * len(group))
        for row in held if math.isfinite(budget_bytes) else ():
            memory.append((row, len(group) * budget_bytes / max(1.0, budget_bytes)))
            program.demand(4, row, high=memory[-1][1])
    for same, own in zip(blocks, shares, strict=True):
        for share in own:
            program.demand(5, dict.fromkeys(share, 1.0), same.count, same.count)
    if path is not None:
        program.demand(2, {least: 1.0, **{some: -seconds for some, seconds in chain.items()}}, path.sends_s(sends))
    if to_last:
        program.demand(6, {least: 1.0, **{some: -seconds for some, seconds in to_last.items()}}, 2 * sum(sends))
    outcome = minimise(program, {least: 1.0})
    prices = _prices(program, outcome) if path is None else None
    if outcome.status == "infeasible":
        return LeastBound(math.inf, True, prices=prices)
    if not outcome.values:
        return LeastBound(edges_s, True)
    values = outcome.values
    full = any(sum(n * values[v] for v, n in held.items()) > limit - _FULL for held, limit in memory)
    work_s = [0.0] * (count if route else 0)
    for stages, own_s in work:
        for stage in stages:
            work_s[stage] += sum(n * values[v] for v, n in own_s.items()) / len(stages)
    is_full = full or any(values[v] > _FULL for v in recomputed)
    return LeastBound(max(outcome.bound, edges_s), is_full, tuple(work_s), prices)


def _rounds(ranks: int, microbatches: int, virtual: int) -> list[int]:
    """Return the times that (6) counts the seconds of each stage."""
    on_last_rank = 1 + microbatches - ranks
    return ([1] * (ranks - 1) + [on_last_rank]) * (virtual - 1) + [1] * (ranks - 1) + [microbatches]


def _prices(program: IntegerProgram, outcome: Outcome) -> Prices | None:
    """Return the prices of the groups, without those of seconds if nothing fits; None if the solver gave none, or
    memory has no limit."""
    found: dict[int, list[float]] = {1: [], 3: [], 4: []}
    of_time = float(outcome.status != "infeasible")
    for row, price in zip(program.rows, outcome.prices, strict=True) if outcome.prices else ():
        if row.number in found:
            found[row.number].append(max(0.0, price * of_time if row.number == 1 else -price))
    seconds, memory, pieces = found[1], found[4], found[3] or [0.0] * len(found[1])
    return (tuple(seconds), tuple(memory), tuple(pieces)) if memory and len(memory) == len(seconds) else None


def path_of(
    blocks: Sequence[Blocks],
    schedule: str,
    ranks: int,
    microbatches: int,
    virtual: int,
    sends_s: Sequence[float],
    close: bool = False,
) -> PathWeights:
    """Return the average of chains that is best for stages without recomputation, the last of which holds the last
    segment. `sends_s`: as in `Pipeline`; `close`: as in `average_path`."""
    send_s = sum(sends_s) / max(1, len(sends_s)) * ranks * virtual
    forward_s, backward_s, weight_s = (
        sum(same.count * getattr(same.whole, name) for same in blocks)
        for name in ("forward_s", "backward_s", "weight_s")
    )
    last_s = sum(same.count * (same.whole.forward_s + same.whole.backward_s) for same in blocks if same.only == -1)
    shares = PassShares.of(forward_s, backward_s, weight_s, send_s, last_s, ranks * virtual)
    return average_path(schedule, ranks, microbatches, virtual, shares, close)


def groups_of(pools: Sequence[int]) -> Iterator[range]:
    """Yield groups of neighbouring stages on one device type, of about equal size."""
    size, start = -(-len(pools) // _GROUPS), 0
    for k in range(1, len(pools) + 1):
        if k == len(pools) or k - start == size or pools[k] != pools[start]:
            yield range(start, k)
            start = k
