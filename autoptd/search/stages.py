"""From a sharded model to stages: the numbers of the cuts search, and time and memory of what it chose.

memory of a rank     parameters + gradients + optimizer + in flight × activations + workspace + context
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import Memory, allocator_bytes, communicator_bytes, in_flight
from autoptd.cost_models.simulate import simulate
from autoptd.cost_models.step_times import ChunkTimes, Overlap, StageTimes
from autoptd.cost_models.timeline import Timeline
from autoptd.passes.fold import Segment
from autoptd.passes.liveness import Peak
from autoptd.schedule import Schedule, step_lists
from autoptd.search.chunks import ChunkCost, Chunks
from autoptd.search.cuts import InfeasibleStages, SegmentCost, StageProblem, StageSolution, Unit, solve_stages
from autoptd.search.even import even_cuts
from autoptd.search.footprints import activation_bytes, block_peak
from autoptd.search.kinds import PARTIAL
from autoptd.search.meshes import Candidate
from autoptd.search.recompute import Block, choose, peak_bytes
from autoptd.search.tensors import Sharded, Tensors
from autoptd.search.wishes import Method


@dataclass(frozen=True)
class RankEnd:
    """Seconds of the end of a step on one pipeline rank."""

    reduce_s: float
    step_s: float
    gather_s: float


@dataclass(frozen=True)
class Staged:
    """A candidate with its stages: everything that a plan says, in numbers. Stage k is chunk k // pp of rank k % pp."""

    candidate: Candidate
    method: Method
    chunks: Chunks
    solution: StageSolution
    policy: str  # of recomputation
    stages: tuple[ChunkCost, ...]
    sends_s: tuple[float, ...]  # of what crosses behind each stage, one way
    memory: tuple[Memory, ...]  # of each pipeline rank
    ends: tuple[RankEnd, ...]
    seconds: float  # of a step: by the bound at first, by simulation for the best few
    timeline: Timeline | None = None

    @property
    def sharded(self) -> Sharded:
        return self.chunks.sharded


class Stages:
    """The stage-level problem of one candidate, given a sharding."""

    def __init__(
        self, tensors: Tensors, sharded: Sharded, candidate: Candidate, method: Method, precision: str, optimizer: str
    ) -> None:
        self.tensors, self.sharded, self.candidate, self.method = tensors, sharded, candidate, method
        self.folded = tensors.folded
        self.chunks = Chunks(tensors, sharded, candidate, method, precision, optimizer)
        usable = tensors.cluster.device.usable_bytes - self._communication_bytes
        self.budget = math.inf if method.memory == "ignore" else float(usable)
        self._known_segments: dict[tuple[str, Hashable], SegmentCost] = {}
        self._known_blocks: dict[tuple[str, ...], Block] = {}
        self.policy = candidate.recompute if candidate.recompute in ("selective", "ops") else "full"

    def solve(self) -> Staged:
        """The best cut. Raises DoesNotFit."""
        c, chunks = self.candidate, self.chunks
        count = c.pp * self.method.virtual
        problem = StageProblem(
            units=tuple(self._units()) if self.method.stages == "balanced" else (),
            stages=count,
            microbatches=c.microbatches,
            budget_bytes=(self.budget,) * count,
            in_flight=tuple(in_flight(i % c.pp, c.pp, c.microbatches) for i in range(count)),
            recompute=c.recompute if c.recompute in ("none", "auto") else "full",  # type: ignore[arg-type]
        )
        if self.method.stages == "even":
            solution = self._even(problem)
        elif self.method.virtual == 1:
            solution = solve_stages(problem)
        else:  # memory is a matter of all chunks of a rank together
            solution = solve_stages(replace(problem, budget_bytes=(math.inf,) * count))
        solution = self._recompute_whole_blocks(problem, solution)
        memory = tuple(self._memory(rank, solution) for rank in range(c.pp))
        self._check_memory(memory, solution)
        return timed(chunks, solution, self.policy, memory)

    def _even(self, problem: StageProblem) -> StageSolution:
        """The same number of blocks on every stage."""
        cuts = even_cuts(self.folded, problem.stages)
        empty = ((),) * problem.stages
        nothing = (0.0,) * problem.stages
        return StageSolution(cuts, empty, nothing, nothing, 0.0, 0.0)

    def _check_memory(self, memory: tuple[Memory, ...], solution: StageSolution) -> None:
        """Cuts that were not searched under a budget."""
        usable = self.tensors.cluster.device.memory_bytes
        if self.method.memory == "check" and any(m.needed > usable for m in memory):
            missing = tuple(float(m.needed - usable) for m in memory)
            raise InfeasibleStages(
                solution.boundaries[: len(memory)], missing, max(m.needed for m in memory), False, self._names()
            )

    def _recompute_whole_blocks(self, problem: StageProblem, solution: StageSolution) -> StageSolution:
        """The cut stays; what is recomputed becomes whole blocks, as the emitted code calls them."""
        recompute: list[tuple[int, ...]] = []
        times = []
        for i, (first, last) in enumerate(solution.boundaries):
            blocks = self._blocks(first, last)
            static, workspace = self._fixed_bytes(first, last)
            chosen: set[int] | None
            match problem.recompute:
                case "none":
                    chosen = set()
                case "full":
                    chosen = {j for j, b in enumerate(blocks) if self._repeats(b)}
                case "auto":
                    chosen = choose(blocks, static, workspace, problem.in_flight[i], problem.budget_bytes[i])
            if chosen is None or (
                self.method.virtual == 1
                and peak_bytes(blocks, chosen, static, workspace, problem.in_flight[i]) > problem.budget_bytes[i]
            ):
                everything = set(range(len(blocks)))
                least = peak_bytes(blocks, everything, static, workspace, problem.in_flight[i])
                raise InfeasibleStages(
                    ((first, last),), (least - problem.budget_bytes[i],), least, False, self._names()
                )
            again = tuple(sorted(s for j in chosen for s in blocks[j].segments))
            cost = self.chunks.chunk(first, last, frozenset(again), self.policy)
            times.append(cost.forward_s + cost.backward_s)
            recompute.append(again)
        bound = problem.bound_s(times)
        return replace(
            solution, recompute=tuple(recompute), times_s=tuple(times), bottleneck_s=max(times), bound_s=bound
        )

    def _blocks(self, first: int, last: int) -> list[Block]:
        """The blocks of a stage: repetitions of units, or the parts of them that lie inside."""
        return [self._block(run) for run in self._runs(first, last)]

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, ...]]:
        """The segments of each block."""
        for unit in self.folded.units:
            for start in range(unit.first, unit.last + 1, unit.length):
                if inside := tuple(i for i in range(start, start + unit.length) if first <= i <= last):
                    yield inside

    def _block(self, run: tuple[int, ...]) -> Block:
        kinds = tuple(self.folded.segments[i].kind for i in run)
        if kinds not in self._known_blocks:
            costs = [self.chunks.cost(i) for i in run]
            if self.policy in PARTIAL:
                seconds, least = sum(c.again_s[self.policy] for c in costs), self._peak(run, self.policy).kept
            else:
                seconds, least = sum(c.forward_s for c in costs), costs[0].input_bytes
            kept = sum(c.activation_bytes for c in costs)
            self._known_blocks[kinds] = Block(run, seconds, kept, min(least, kept))
        return replace(self._known_blocks[kinds], segments=run)

    def _peak(self, run: tuple[int, ...], policy: str) -> Peak:
        segments = [self.folded.segments[i] for i in run]
        return block_peak(self.tensors, self.sharded, segments, policy, self.method)

    def _repeats(self, block: Block) -> bool:
        """Whether a block is one of many: what a full recompute means, where a model has any that repeat."""
        units = [u for u in self.folded.units if u.count > 1] or list(self.folded.units)
        return any(u.first <= block.segments[0] <= u.last for u in units)

    def _fixed_bytes(self, first: int, last: int) -> tuple[int, int]:
        """(parameters, gradients and optimizer; the largest workspace of an op)."""
        return self.chunks.state([(first, last)]).total, max(
            self.chunks.cost(i).temporary_bytes for i in range(first, last + 1)
        )

    def _names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.folded.segments)

    # ---- numbers of the cuts search ----

    def _units(self) -> Iterator[Unit]:
        for unit in self.folded.units:
            costs = [self._segment(s) for s in self.folded.segments[unit.first : unit.last + 1]]
            instances = [tuple(costs[i : i + unit.length]) for i in range(0, len(costs), unit.length)]
            at = 0
            while at < len(instances):  # instances are alike unless a skip connection runs along some of them
                end = at
                while end < len(instances) and _same(instances[end], instances[at]):
                    end += 1
                yield Unit(instances[at][0].name, instances[at], end - at)
                at = end

    def _segment(self, segment: Segment) -> SegmentCost:
        """Segments alike in kind, parameters and what crosses behind them are worked out once."""
        key = segment.kind, self.chunks.alike(segment.index)
        if key not in self._known_segments:
            self._known_segments[key] = self._costed(segment)
        return self._known_segments[key]

    def _costed(self, segment: Segment) -> SegmentCost:
        cost, i = self.chunks.cost(segment.index), segment.index
        timed = self.chunks.chunk(i, i, frozenset(), "none")
        again = self.chunks.chunk(i, i, frozenset({i}), self.policy)
        return SegmentCost(
            name=segment.kind if self.folded.multiplicity(segment.kind) > 1 else segment.name,
            forward_s=timed.forward_s,
            backward_s=timed.backward_s,
            activation_bytes=cost.activation_bytes,
            recompute_activation_bytes=cost.input_bytes,
            recompute_s=again.backward_s - timed.backward_s,
            parameter_bytes=self.chunks.state([(i, i)]).total,
            temporary_bytes=cost.temporary_bytes,
            send_bytes_s=2 * self.chunks.send_s(i + 1),
        )

    # ---- what was chosen ----

    def _memory(self, rank: int, solution: StageSolution) -> Memory:
        """Of one pipeline rank: all of its chunks."""
        c, device = self.candidate, self.tensors.cluster.device
        mine = range(rank, len(solution.boundaries), c.pp)
        peaks = []
        for stage in mine:
            again = set(solution.recompute[stage])
            runs = self._runs(*solution.boundaries[stage])
            peaks.append([self._peak(run, self.policy if set(run) <= again else "none") for run in runs])
        kept, extra = activation_bytes(peaks, rank, c, self.method)
        chunks = [solution.boundaries[stage] for stage in mine]
        state = self.chunks.state(chunks, self._largest_block(), solution.boundaries)
        work, upcast = kept + extra, self.chunks.upcast_bytes(chunks)
        found = state + Memory(
            activations=kept,
            temporary=max(extra, upcast - kept),
            communication=self._communication_bytes,
            context=device.context_bytes,
        )
        # blocks of a pass are no use to the step, which wants few large ones: the allocator keeps both
        unused = allocator_bytes(work) + min(work, upcast)
        return found + Memory(overhead=min(unused, max(0, device.memory_bytes - found.total)))

    @property
    def _communication_bytes(self) -> int:
        """Buffers of the library, by communicator, and of gradients on their way."""
        c, dp = self.candidate, self.chunks.dp
        groups = (c.tp * dp * c.pp, c.tp, dp, c.pp, min(c.pp, 2))
        return communicator_bytes(groups) + 3 * self.method.bucket_bytes  # two to reduce by turns, one to gather

    def _largest_block(self) -> int:
        """Local elements of the block that has most, of those that repeat."""
        found = (self.chunks.numel(u.first, u.first + u.length - 1)[1] for u in self.folded.units if u.count > 1)
        return max(found, default=0)


def _same(a: tuple[SegmentCost, ...], b: tuple[SegmentCost, ...]) -> bool:
    return all(x == y for x, y in zip(a, b, strict=True))


def timed(chunks: Chunks, solution: StageSolution, policy: str, memory: tuple[Memory, ...]) -> Staged:
    """The stages of a cut with their times; of the step, the bound."""
    c, method = chunks.candidate, chunks.method
    stages = tuple(
        chunks.chunk(*run, frozenset(again), policy)
        for run, again in zip(solution.boundaries, solution.recompute, strict=True)
    )
    runs = [list(solution.boundaries[rank :: c.pp]) for rank in range(c.pp)]
    ends = tuple(RankEnd(chunks.reduce_s(r), chunks.step_s(r), chunks.gather_s(r)) for r in runs)
    sends = tuple(chunks.send_s(last + 1) for _, last in solution.boundaries[:-1])
    seconds = _bound_s(stages, c, method) + max(e.reduce_s + e.step_s + e.gather_s for e in ends)
    return Staged(c, method, chunks, solution, policy, stages, sends, memory, ends, seconds)


def _bound_s(stages: tuple[ChunkCost, ...], c: Candidate, method: Method) -> float:
    """The slowest rank in its steady state, and a chunk on every other before or behind (Narayanan et al. 2021)."""
    chunks = [s.forward_s + s.backward_s for s in stages]
    ranks = [sum(chunks[rank :: c.pp]) for rank in range(c.pp)]
    ramp = sum(ranks) / method.virtual + max(ranks) * (1 - 1 / method.virtual)
    return (c.microbatches - 1) * max(ranks) + ramp


def under(staged: Staged, cluster: Cluster) -> Staged:
    """The same plan on another cluster, simulated; memory stays as it was."""
    return simulated(bounded(staged, cluster))


def bounded(staged: Staged, cluster: Cluster) -> Staged:
    """The same, with the step by its bound: for fits, which ask thousands of times."""
    return timed(staged.chunks.under(cluster), staged.solution, staged.policy, staged.memory)


def rank_times(staged: Staged) -> tuple[StageTimes, ...]:
    """Seconds of every pipeline rank's chunks and step end; tp holds what compute does not hide."""
    sends = (*staged.sends_s, 0.0)
    chunks = [
        ChunkTimes(
            forward_s=cost.forward_s - cost.forward_tp_s,
            backward_s=cost.backward_s - cost.backward_tp_s,
            forward_tp_s=cost.forward_tp_s,
            backward_tp_s=cost.backward_tp_s,
            send_forward_s=sends[i],
            send_backward_s=sends[i - 1] if i else 0.0,
        )
        for i, cost in enumerate(staged.stages)
    ]
    pp = staged.candidate.pp
    return tuple(
        StageTimes(tuple(chunks[rank::pp]), end.reduce_s, end.step_s, end.gather_s)
        for rank, end in enumerate(staged.ends)
    )


@lru_cache(maxsize=16)  # of 64 ranks and 512 microbatches it takes longer to make than to simulate
def action_lists(kind: str, ranks: int, microbatches: int, virtual: int) -> Schedule:
    """`schedule.step_lists`, kept."""
    return step_lists(kind, ranks, microbatches, virtual)


def simulated(staged: Staged) -> Staged:
    """The same with its step time by the very action lists that the runtime executes."""
    c, method = staged.candidate, staged.method
    lists = action_lists(method.schedule, c.pp, c.microbatches, method.virtual)
    timeline = simulate(lists, rank_times(staged), Overlap.of(set(method.overlap) - {"tp"}))
    return replace(staged, seconds=timeline.makespan_s, timeline=timeline)
