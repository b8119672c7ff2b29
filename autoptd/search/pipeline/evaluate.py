"""A candidate with its stages, and its step time: by a bound, or by simulating the action lists of the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import Memory, alive
from autoptd.cost_models.steady import makespan_s
from autoptd.cost_models.step_times import PRICED, ChunkTimes, Overlap, StageTimes
from autoptd.passes.losses.loss_form import LossForm
from autoptd.schedule import (
    Schedule,
    StageMap,
    forward_only,
    period_of,
    prove,
    prove_memory,
    route_of,
    row_of,
    step_lists,
    with_communication,
)
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.critical_paths import longest_path_s
from autoptd.search.loss_end import loss_end_s
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.chunk_cost import ChunkCost, ChunkCosts
from autoptd.search.pipeline.lower_bounds import cut_bound_s
from autoptd.search.pipeline.messages import BothWays
from autoptd.search.pipeline.partition import Cuts
from autoptd.search.sharding.tensors import Sharded

Sums = Literal["none", "held", "ahead"]


_PROVED_ROUNDS = 4  # microbatches per rank for which a schedule is proved


@dataclass(frozen=True)
class RankEnd:
    """Seconds of the end of a step on one pipeline rank. `buckets`: those of a chunk, on average."""

    reduce_s: float
    step_s: float
    gather_s: float
    buckets: int


@dataclass(frozen=True)
class StageSolution:
    """First and last segment of each stage, and the recompute policies of its segments."""

    boundaries: Cuts
    policies: tuple[Mapping[int, str], ...]


@dataclass(frozen=True)
class Staged:
    """A candidate with its stages, times and memory: the numbers of a plan."""

    candidate: Candidate
    method: SearchOptions
    chunks: ChunkCosts
    solution: StageSolution
    stages: tuple[ChunkCost, ...]
    sends_s: tuple[BothWays, ...]  # of the messages after each stage but the last
    memory: tuple[Memory, ...]  # of each pipeline rank
    ends: tuple[RankEnd, ...]
    seconds: float  # of a step: a bound at first; simulated for the best candidates
    ahead_s: float = 0.0  # of `seconds`, what a loss of the whole batch adds to the step, once simulated

    @property
    def route(self) -> StageMap:
        """Map of stages to pipeline ranks."""
        return self.candidate.route

    @property
    def offload(self) -> tuple[float, ...]:
        """Share of the optimizer state in host memory, by pipeline rank; () for none."""
        shares = tuple(self.chunks.on(rank).offload for rank in range(self.candidate.pp))
        return shares if any(shares) else ()

    @property
    def sharded(self) -> Sharded:
        return self.chunks.sharded

    @property
    def least_s(self) -> float:
        """A lower bound on the seconds of its step: of its passes, and of what follows unless passes may hide it."""
        c, passes_s = self.candidate, least_passes_s(self.candidate, self.stages, self.sends_s)
        if "dp" in self.method.overlap:
            return passes_s + max(end.step_s for end in self.ends)
        all_wait_s = max(end.step_s + end.gather_s for end in self.ends)
        # the first rank's backward pass ends last
        last = self.ends if row_of(c.schedule).splits_backward else self.ends[:1]
        return passes_s + min(end.reduce_s for end in last) + all_wait_s


def least_passes_s(c: Candidate, stages: Sequence[ChunkCost], messages_s: Sequence[BothWays]) -> float:
    """Return a lower bound on the seconds of the passes of a cut. `messages_s`: of those after each stage."""
    sends_s = [min(both) for both in messages_s]
    forward_s, backward_s, weight_s = zip(*((s.forward_s, s.backward_s, s.weight_s) for s in stages), strict=True)
    return max(
        cut_bound_s(forward_s, backward_s, c.schedule, c.pp, c.microbatches, sends_s),
        longest_path_s(c.schedule, c.pp, c.microbatches, c.virtual, (forward_s, backward_s, weight_s), sends_s),
    )


def timed(chunks: ChunkCosts, solution: StageSolution, memory: tuple[Memory, ...]) -> Staged:
    """Return a cut with the times of its stages and a bound of the step."""
    c, method, route = chunks.candidate, chunks.method, chunks.candidate.route
    cuts = enumerate(zip(solution.boundaries, solution.policies, strict=True))
    stages = tuple(chunks.on(route.holder(k)).chunk(*run, again) for k, (run, again) in cuts)
    ends = tuple(_end(chunks.on(rank), solution.boundaries, rank) for rank in range(c.pp))
    sends = chunks.messages.sends_s(solution.boundaries)
    seconds = _bound_s(stages, c, method) + max(e.reduce_s + e.step_s + e.gather_s for e in ends)
    return Staged(c, method, chunks, solution, stages, sends, memory, ends, seconds)


def _end(chunks: ChunkCosts, cut: Cuts, rank: int) -> RankEnd:
    runs = list(chunks.candidate.route.of(cut, rank))
    buckets = chunks.buckets(sum(chunks.numel(*run) for run in runs) // len(runs))
    return RankEnd(chunks.reduce_s(runs, cut), chunks.step_s(runs), chunks.gather_s(runs), buckets)


def _bound_s(stages: tuple[ChunkCost, ...], c: Candidate, method: SearchOptions) -> float:
    """Return seconds of the slowest rank in steady state plus pipeline fill and drain (Narayanan et al. 2021)."""
    chunks = [s.forward_s + s.backward_s for s in stages]
    ranks = [sum(c.route.of(chunks, rank)) for rank in range(c.pp)]
    fill = sum(ranks) / method.virtual + max(ranks) * (1 - 1 / method.virtual)
    return (c.microbatches - 1) * max(ranks) + fill


def under(staged: Staged, cluster: Cluster) -> Staged:
    """Return the plan with its step simulated on another cluster; memory is not changed."""
    return simulated(bounded(staged, cluster))


def bounded(staged: Staged, cluster: Cluster) -> Staged:
    """Return the plan with a bound of its step on another cluster: for fits, which evaluate it thousands of times."""
    return timed(staged.chunks.under(cluster), staged.solution, staged.memory)


def rank_times(staged: Staged) -> tuple[StageTimes, ...]:
    """Return the seconds of every pipeline rank's chunks and step end, with exposed tp communication apart."""
    sends = (*staged.sends_s, (0.0, 0.0))
    chunks = [
        ChunkTimes(
            forward_s=cost.forward_s - cost.forward_tp_s,
            backward_s=cost.backward_s - cost.backward_tp_s,
            weight_s=cost.weight_s,
            forward_tp_s=cost.forward_tp_s,
            backward_tp_s=cost.backward_tp_s,
            send_forward_s=sends[i][0],
            send_backward_s=sends[i - 1][1] if i else 0.0,
            recompute_s=min(cost.recompute_s, cost.backward_s - cost.backward_tp_s),
        )
        for i, cost in enumerate(staged.stages)
    ]
    return tuple(
        StageTimes(staged.route.of(chunks, rank), end.reduce_s, end.step_s, end.gather_s, end.buckets)
        for rank, end in enumerate(staged.ends)
    )


def sums_of(form: LossForm, c: Candidate) -> Sums:
    """Return how the batch sums that a loss depends on are known before the first backward pass.

    none    the loss is a plain sum and needs none
    held    the last stage has then finished all forward passes: it holds the sums, and the ranks add them up
    ahead   forward passes of the whole batch run ahead of the step, which repeats them
    """
    if form.outer is None:
        return "none"
    return "held" if c.schedule == "gpipe" or c.microbatches == 1 else "ahead"


@lru_cache(maxsize=32)
def _forward_lists(ranks: int, microbatches: int, virtual: int, route: StageMap) -> Schedule:
    return with_communication(forward_only(ranks, microbatches, virtual), route)


def _ahead_s(staged: Staged) -> float:
    """Return seconds of a loss of the whole batch, and of the forward passes ahead of the step, if there are any."""
    c, method, form = staged.candidate, staged.method, staged.chunks.folded.loss_form
    end_s = loss_end_s(staged.chunks.loss_end, c, staged.chunks.cluster)
    if sums_of(form, c) != "ahead":
        return end_s
    return end_s + makespan_s(
        lambda microbatches: _forward_lists(c.pp, microbatches, method.virtual, staged.route),
        c.microbatches,
        rank_times(staged),
        _overlap_of(staged),
        c.pp,
        staged.route,
    )


@lru_cache(maxsize=32)  # building them takes longer than simulating them
def action_lists(kind: str, ranks: int, microbatches: int, virtual: int, early: tuple[str, ...]) -> Schedule:
    """Return `schedule.step_lists`, cached."""
    return step_lists(kind, ranks, microbatches, virtual, early)


def exposed_end_s(staged: Staged, rank: int) -> float:
    """Return seconds of a simulated step for sums and gathers at its end, on a rank or, if passes run beside them, as
    far as the step is shorter without any."""
    if "dp" not in staged.method.overlap:
        return staged.ends[rank].reduce_s + staged.ends[rank].gather_s
    free = tuple(replace(end, reduce_s=0.0, gather_s=0.0) for end in staged.ends)
    return max(0.0, staged.seconds - simulated(replace(staged, ends=free)).seconds)


def _overlap_of(staged: Staged) -> Overlap:
    """Return what overlaps in a simulation of the plan."""
    device = staged.chunks.cluster.device
    return Overlap.of(set(staged.method.overlap) - PRICED, device.collective_share)


def simulated(staged: Staged) -> Staged:
    """Return the plan with its step time by simulation of the action lists that the runtime executes."""
    c, method = staged.candidate, staged.method
    overlap = _overlap_of(staged)
    seconds = makespan_s(
        lambda microbatches: action_lists(method.schedule, c.pp, microbatches, method.virtual, overlap.early),
        c.microbatches,
        rank_times(staged),
        overlap,
        period_of(method.schedule, c.pp),
        staged.route,
    )
    ahead_s = _ahead_s(staged)
    return replace(staged, seconds=seconds + ahead_s, ahead_s=ahead_s)


@lru_cache(maxsize=256)
def prove_schedule(kind: str, stages: int, microbatches: int, virtual: int) -> None:
    """Prove that a schedule cannot deadlock and holds no more activations than the predicted memory includes.

    The proof runs on enough microbatches to take the schedule through all of its states: with four per rank, each rank
    is in every position of a round at least twice, and further microbatches repeat that. `parallelize` proves the lists
    that run. Raises StuckSchedule, UncountedActivations.
    """
    period = period_of(kind, stages)
    enough = -(-_PROVED_ROUNDS * stages // period) * period + microbatches % period
    count = min(microbatches, enough)
    lists = action_lists(kind, stages, count, virtual, ())
    prove(lists, route_of(kind, stages, virtual))
    prove_memory(lists, [alive(rank, stages, count, kind, virtual) for rank in range(stages)])
