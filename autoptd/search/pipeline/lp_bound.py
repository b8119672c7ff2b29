"""Lower bound on the step time of a candidate: a linear relaxation over all cuts and recomputations.

Blocks are divided among the pipeline's stages in fractions and out of order: y[k, g, w] blocks of group g (equal
blocks) are on stage k with recompute option w. A stage may begin and end inside a block, and then holds single segments
of it, z[k, g, i, w], with options of their own. Stage k takes t[k] per microbatch, f[k] of it forward:

    minimise C

    (1)  t[k] = sum (y, z)[k] (forward + backward + recompute)
    (2)  f[k] = sum (y, z)[k] forward
    (3)  sum z[k] <= 2 (segments of the longest block - 1)
    (4)  sum (y, z)[k] (state + alive[k] kept) <= budget[k]
    (5)  sum_{k,w} y[k, g, w] + sum_{k,w} z[k, g, i, w] = number of g, for each segment i
    (6)  C >= the paths of `search/pipeline/lower_bounds.py` through every stage, linear in t and f

Neighbouring stages of deep pipelines are grouped: the slowest stage of a group is no faster than their average.
Coefficients are seconds and bytes of a candidate, so each candidate has its own program, of a few milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoptd.schedule import row_of
from autoptd.search.pipeline.lower_bounds import (
    alternations,
    busiest_edge_s,
    interleaved_rounds,
    message_path_s,
    passed_over,
)
from autoptd.search.solver import IntegerProgram, minimise

_GROUPS = 16  # most groups of stages, with one device type


@dataclass(frozen=True)
class BlockOptions:
    """Seconds of a microbatch, bytes of state, and recompute `options`: (seconds, bytes saved for backward)."""

    forward_s: float
    backward_s: float
    state: float
    options: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Blocks:
    """A number of equal blocks. `segments`: the single segments of one, if a stage may hold part of a block."""

    count: int
    whole: BlockOptions
    segments: tuple[BlockOptions, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a candidate. For each rank, `alive`: in-flight microbatches (chunks, each 1 / `virtual` of its
    work); `pools`: device type; `budgets`: bytes. `sends_s`: least seconds of a message after each stage but the last.
    """

    schedule: str
    microbatches: int
    virtual: int
    alive: tuple[int, ...]
    pools: tuple[int, ...]
    budgets: tuple[float, ...]
    sends_s: tuple[float, ...] = ()


def relaxed_bound_s(by_pool: Sequence[Sequence[Blocks]], pipeline: Pipeline) -> float:
    """Return a lower bound on the seconds of all microbatches; infinite if not even fractions fit.

    `by_pool`: the blocks with their costs on each device type."""
    program = IntegerProgram()
    groups = list(_groups(pipeline.pools))
    blocks = by_pool[0]
    least = program.variable(upper=math.inf)
    times = [program.variable(upper=math.inf) for _ in groups]
    forwards = [program.variable(upper=math.inf) for _ in groups]
    shares: list[list[list[int]]] = [[[] for _ in b.segments or (b,)] for b in blocks]
    longest = max(len(b.segments) for b in blocks)
    for rank, group in enumerate(groups):
        alive, budget_bytes = min(pipeline.alive[k] for k in group), pipeline.budgets[group[0]]
        seconds, forward, held = {times[rank]: -1.0}, {forwards[rank]: -1.0}, dict[int, float]()
        partial: list[int] = []
        for same, own in zip(by_pool[pipeline.pools[group[0]]], shares, strict=True):
            for i, part in enumerate((same.whole, *same.segments)):
                for recompute_s, kept in part.options:
                    some = program.variable(upper=same.count)
                    for share in own if i == 0 else own[i - 1 : i]:
                        share.append(some)
                    if i:
                        partial.append(some)
                    seconds[some] = part.forward_s + part.backward_s + recompute_s
                    forward[some] = part.forward_s
                    held[some] = (part.state + alive / pipeline.virtual * kept) / max(1.0, budget_bytes)
        program.demand(1, seconds, 0, 0)
        program.demand(2, forward, 0, 0)
        if partial:
            program.demand(3, dict.fromkeys(partial, 1.0), high=2.0 * (longest - 1) * pipeline.virtual * len(group))
        if math.isfinite(budget_bytes):
            program.demand(4, held, high=len(group) * budget_bytes / max(1.0, budget_bytes))
    for same, own in zip(blocks, shares, strict=True):
        for share in own:
            program.demand(5, dict.fromkeys(share, 1.0), same.count, same.count)
    for rank, group in enumerate(groups):
        for path, constant in _paths(rank, group, times, forwards, pipeline):
            program.demand(6, {least: 1.0, **{v: -c for v, c in path.items()}}, constant)
    outcome = minimise(program, {least: 1.0})
    if outcome.status == "infeasible":
        return math.inf
    return outcome.bound if outcome.values else 0.0


def _groups(pools: Sequence[int]) -> Iterator[range]:
    """Yield groups of neighbouring stages on one device type, of about equal size."""
    size, start = -(-len(pools) // _GROUPS), 0
    for k in range(1, len(pools) + 1):
        if k == len(pools) or k - start == size or pools[k] != pools[start]:
            yield range(start, k)
            start = k


def _paths(
    at: int, group: range, times: Sequence[int], forwards: Sequence[int], pipeline: Pipeline
) -> list[tuple[dict[int, float], float]]:
    """Return the paths on which a stage of this group is the bottleneck: coefficients of variables, and a constant."""
    m, stages, share = pipeline.microbatches, len(pipeline.alive), 1 / len(group)
    edges: tuple[dict[int, float], float] = {}, busiest_edge_s(pipeline.sends_s, pipeline.schedule, stages, m)
    if row_of(pipeline.schedule).splits_backward:
        # chunks before a rank's first one may be arbitrarily small
        ahead = {} if pipeline.virtual > 1 else dict.fromkeys(forwards[:at], 1.0)
        return [({times[at]: m * share, **ahead}, 0.0), edges]
    if pipeline.virtual > 1:
        through = dict.fromkeys(times, interleaved_rounds(stages, m, pipeline.virtual))
        return [({times[at]: m * share}, 0.0), (through, 0.0), edges]
    busy = {times[at]: m * share, **dict.fromkeys(times[:at], 1.0)}
    through = dict.fromkeys(times, 1.0)
    through[times[at]] += (m - 1) * share
    waits = passed_over(pipeline.schedule, group[0], stages, m)
    sends = pipeline.sends_s or (0.0,) * (stages - 1)
    paths = [(busy, 0.0), ({**through, forwards[at]: -waits * share}, 2 * sum(sends))]
    once = dict.fromkeys(times, 1.0)
    paths.append((once, message_path_s(sends, pipeline.schedule, m)))
    if len(times) == stages and (often := alternations(pipeline.schedule, at, stages, m)):
        both = {times[at]: 1.0 + often, times[at + 1]: 1.0 + often}
        paths.append(({**once, **both}, 2 * sum(sends) + 2 * often * sends[at]))
    return paths
