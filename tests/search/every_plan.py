"""Exhaustive search over a small task: every candidate, every cut, every recomputation of each block, simulated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from autoptd.cost_models.memory import Memory
from autoptd.errors import AutoptdError
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.evaluate import StageSolution, simulated, timed
from autoptd.search.pipeline.recompute_options import RecomputeOption, bytes_of
from autoptd.search.pipeline.stage_cost import StageCost
from autoptd.search.pipeline.stages import Stages
from autoptd.search.planner import Planner

Cuts = tuple[tuple[int, int], ...]


def least_seconds(
    planner: Planner,
    thorough: bool = False,
    candidates: Iterable[Candidate] | None = None,
    keep: Callable[[Cuts], bool] = lambda cuts: True,
) -> tuple[float, int]:
    """Return the least step time of all plans that fit, and the number of plans tried, independently of the search.

    Dominated recomputations of a rank are skipped unless `thorough`: a longer action never ends a step sooner. Only
    these `candidates` are tried, and those of their cuts that `keep` accepts.
    """
    best, count = math.inf, 0
    for candidate in planner.space() if candidates is None else candidates:
        if isinstance(planner.costs.solved(candidate), AutoptdError):
            continue
        for seconds in _all_seconds(planner, candidate, thorough, keep):
            best, count = min(best, seconds), count + 1
    return best, count


def _all_seconds(
    planner: Planner, candidate: Candidate, thorough: bool, keep: Callable[[Cuts], bool]
) -> Iterator[float]:
    stages = planner.costs.stages(candidate)
    ranks_known: dict[tuple[object, ...], list[RankChoice]] = {}
    chunks_known: dict[tuple[int, int, int], ChunkWays] = {}
    for cuts in filter(keep, all_cuts(len(stages.folded.segments), stages.count)):
        ranks: list[list[RankChoice]] = []
        for rank in range(candidate.pp):
            mine = candidate.route.of(cuts, rank)
            key = rank, mine, repr(stages.chunks._sharers(cuts))
            if key not in ranks_known:
                stage_cost = stages.stage_cost(rank)
                for run in mine:
                    known = id(stage_cost), *run
                    if known not in chunks_known:
                        chunks_known[known] = ChunkWays(stage_cost, run)
                ways = [chunks_known[(id(stage_cost), *run)] for run in mine]
                ranks_known[key] = list(_rank_choices(stages, rank, cuts, ways, thorough))
            ranks.append(ranks_known[key])
            if not ranks[-1]:
                break
        if not ranks[-1]:
            continue
        for chosen in itertools.product(*ranks):
            policies: list[dict[int, str]] = [{} for _ in cuts]
            for rank, (ways, _) in enumerate(chosen):
                for stage, own in zip(candidate.route.stages_of(rank), ways, strict=True):
                    policies[stage] = own
            staged = timed(stages.chunks, StageSolution(cuts, tuple(policies)), tuple(m for _, m in chosen))
            yield simulated(staged).seconds


def all_cuts(segments: int, stages: int) -> Iterator[Cuts]:
    for places in itertools.combinations(range(1, segments), stages - 1):
        edges = (0, *places, segments)
        yield tuple((a, b - 1) for a, b in itertools.pairwise(edges))


RankChoice = tuple[list[dict[int, str]], Memory]  # policies of each chunk of a rank, and its bytes
Seconds = tuple[float, ...]


class ChunkWays:
    """Seconds, bytes saved, peak, bytes on the host and bytes held until W of all recomputations of the blocks of a run
    of segments.

    The first of those that are equal in all five.
    """

    def __init__(self, stage_cost: StageCost, run: tuple[int, int]) -> None:
        self.blocks = list(stage_cost.blocks.within(*run))
        self.menus = [stage_cost.blocks.all_options(block, received=block[0] == run[0] > 0) for block in self.blocks]
        if run[0] == 0:  # its backward passes are whole
            self.menus = [[w._replace(peak=w.peak._replace(waiting=0)) for w in menu] for menu in self.menus]
        self.recompute_s, self.kept, self.peak, self.host, self.waiting = (np.zeros(1) for _ in range(5))
        for menu in self.menus:
            kept, full, again = (np.array(x, dtype=float) for x in zip(*map(_of, menu), strict=True))
            self.peak = np.maximum(self.peak[:, None], self.kept[:, None] + full).ravel()
            self.kept, self.recompute_s = (
                np.add.outer(*x).ravel() for x in ((self.kept, kept), (self.recompute_s, again))
            )
            self.host = np.add.outer(self.host, [float(way.host) for way in menu]).ravel()
            self.waiting = np.add.outer(self.waiting, [float(way.peak.waiting) for way in menu]).ravel()
        self.peak = np.maximum(self.peak, self.kept)
        all_five = self.recompute_s, self.kept, self.peak, self.host, self.waiting
        _, self.index = np.unique(np.stack(all_five), axis=1, return_index=True)
        self.recompute_s, self.kept, self.peak, self.host, self.waiting = (x[self.index] for x in all_five)

    def ways(self, index: int) -> tuple[RecomputeOption, ...]:
        places = np.unravel_index(self.index[index], [len(menu) for menu in self.menus])
        return tuple(menu[i] for menu, i in zip(self.menus, places, strict=True))

    def policies(self, index: int) -> dict[int, str]:
        pairs = zip(self.blocks, self.ways(index), strict=True)
        return {i: way.policy for block, way in pairs if way.policy != "none" for i in block}


def _of(way: RecomputeOption) -> tuple[int, int, float]:
    return way.peak.kept, max(way.peak.forward, way.peak.backward), way.recompute_s


def _rank_choices(
    stages: Stages, rank: int, cuts: Cuts, chunks: Sequence[ChunkWays], thorough: bool
) -> Iterator[RankChoice]:
    """Yield all choices that fit, quickest first; one of those with equal seconds, and no dominated ones unless
    `thorough`."""
    stage_cost, alive = stages.stage_cost(rank), stages.held(rank)
    mine = list(stages.candidate.route.of(cuts, rank))
    state, upcast = stages.chunks.state(mine, cuts), stages.chunks.update_bytes(mine)
    index = np.indices([len(c.recompute_s) for c in chunks]).reshape(len(chunks), -1)
    each = [c.kept[i] for c, i in zip(chunks, index, strict=True)]
    later = [c.waiting[i] for c, i in zip(chunks, index, strict=True)]
    waiting = alive.waiting or [(0,) * len(row) for row in alive.rows]
    rows = [
        sum(n * k + w * g for n, k, w, g in zip(row, each, put_off, later, strict=True))
        for row, put_off in zip(alive.rows, waiting, strict=True)
    ]
    kept = np.rint(np.maximum.reduce(rows) / alive.parts)
    above = np.stack([(c.peak - c.kept)[i] for c, i in zip(chunks, index, strict=True)]).max(axis=0)
    pairs, which = np.unique(kept + 1j * above, return_inverse=True)
    memory = [stage_cost.memory(state, upcast, int(pair.real), int(pair.imag)) for pair in pairs]
    fits = np.array([m.needed <= stage_cost.limit for m in memory])[which]
    most, whole = alive.parts * stages.candidate.microbatches, alive.parts > 1
    late = [  # one microbatch more, of whichever chunk, has buffers on the host
        tuple(min(n + (whole or i == chunk), most) for i, n in enumerate(row))
        for row in alive.rows
        for chunk in range(len(row))
    ]
    moved = [sum(n * c.host[i] for n, c, i in zip(row, chunks, index, strict=True)) / alive.parts for row in late]
    fits &= state.host + np.maximum.reduce(moved) <= stage_cost.host_limit
    again = np.stack([np.round(c.recompute_s[i], 15) for c, i in zip(chunks, index, strict=True)])
    fitting = np.flatnonzero(fits)
    _, alike = np.unique(again[:, fitting], axis=1, return_index=True)
    found: list[Seconds] = []
    for at in fitting[alike][np.argsort(again[:, fitting[alike]].sum(axis=0), kind="stable")]:
        seconds = tuple(again[:, at])
        if not thorough and any(_no_worse(other, seconds) for other in found):
            continue
        found.append(seconds)
        ways = [c.ways(i) for c, i in zip(chunks, index[:, at], strict=True)]
        assert bytes_of(ways, alive) == (kept[at], above[at])
        yield [c.policies(i) for c, i in zip(chunks, index[:, at], strict=True)], memory[which[at]]


def _no_worse(a: Seconds, b: Seconds) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))
