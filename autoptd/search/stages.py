"""From a sharded model to stages: the numbers of the cuts search, and time and memory of what it chose.

forward of a stage   sum of its segments            backward   the same, + a forward for each recomputed segment
memory of a rank     parameters + gradients + optimizer + in flight × activations + workspace + context
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s, p2p_s
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES, Memory, in_flight, model_state, optimizer_step_bytes
from autoptd.cost_models.op_time import memory_s
from autoptd.cost_models.simulate import StageTimes, Timeline, simulate
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos
from autoptd.passes.placements import BP, Placement
from autoptd.schedule import step_lists
from autoptd.search.cuts import InfeasibleStages, SegmentCost, StageProblem, StageSolution, Unit, solve_stages
from autoptd.search.meshes import Candidate
from autoptd.search.recompute import Block, choose, peak_bytes
from autoptd.search.tensors import KindCost, Sharded, Tensors


@dataclass(frozen=True)
class StageCost:
    """One stage on one rank: seconds per microbatch, and bytes."""

    forward_s: float
    backward_s: float
    recompute_s: float
    comm_s: float  # of tp, part of the others
    memory: Memory


@dataclass(frozen=True)
class Staged:
    """A candidate with its stages: everything that a plan says, in numbers."""

    candidate: Candidate
    sharded: Sharded
    solution: StageSolution
    stages: tuple[StageCost, ...]
    times: tuple[StageTimes, ...]
    seconds: float  # of a step: by the bound at first, by simulation for the best few
    timeline: Timeline | None = None


class Stages:
    """The stage-level problem of one candidate, given a sharding."""

    def __init__(
        self, tensors: Tensors, sharded: Sharded, candidate: Candidate, precision: str, optimizer: str
    ) -> None:
        self.tensors, self.sharded, self.candidate = tensors, sharded, candidate
        self.precision, self.optimizer = precision, optimizer
        self.folded: Folded = tensors.folded
        self.cluster: Cluster = tensors.cluster

    def solve(self) -> Staged:
        """The best cut. Raises DoesNotFit."""
        c = self.candidate
        budget = self.cluster.device.usable_bytes
        problem = StageProblem(
            units=tuple(self._units()),
            stages=c.pp,
            microbatches=c.microbatches,
            budget_bytes=(float(budget),) * c.pp,
            in_flight=tuple(in_flight(i, c.pp, c.microbatches) for i in range(c.pp)),
            recompute=c.recompute,  # type: ignore[arg-type]
        )
        solution = self._recompute_whole_blocks(problem, solve_stages(problem))
        stages = tuple(self._stage(i, solution) for i in range(c.pp))
        times = tuple(self._times(i, solution, cost) for i, cost in enumerate(stages))
        end = max(t.reduce_s + t.step_s + t.gather_s for t in times)
        return Staged(c, self.sharded, solution, stages, times, solution.bound_s + end)

    def _recompute_whole_blocks(self, problem: StageProblem, solution: StageSolution) -> StageSolution:
        """The cut stays; what is recomputed becomes whole blocks, as the emitted code calls them."""
        recompute: list[tuple[int, ...]] = []
        times = list(solution.times_s)
        for i, (first, last) in enumerate(solution.boundaries):
            blocks = self._blocks(first, last)
            static, workspace = self._fixed_bytes(first, last)
            match problem.recompute:
                case "none":
                    chosen: set[int] | None = set()
                case "full":
                    chosen = set(range(len(blocks)))
                case "auto":
                    chosen = choose(blocks, static, workspace, problem.in_flight[i], problem.budget_bytes[i])
            if chosen is None or (
                peak_bytes(blocks, chosen, static, workspace, problem.in_flight[i]) > problem.budget_bytes[i]
            ):
                everything = set(range(len(blocks)))
                least = peak_bytes(blocks, everything, static, workspace, problem.in_flight[i])
                raise InfeasibleStages(
                    ((first, last),), (least - problem.budget_bytes[i],), least, False, self._names()
                )
            before = sum(self._cost(j).forward_s for j in solution.recompute[i])
            times[i] += sum(blocks[j].forward_s for j in chosen) - before
            recompute.append(tuple(sorted(s for j in chosen for s in blocks[j].segments)))
        bound = problem.bound_s(times)
        return replace(
            solution, recompute=tuple(recompute), times_s=tuple(times), bottleneck_s=max(times), bound_s=bound
        )

    def _blocks(self, first: int, last: int) -> list[Block]:
        """The blocks of a stage: repetitions of units, or the parts of them that lie inside."""
        found = []
        for unit in self.folded.units:
            for start in range(unit.first, unit.last + 1, unit.length):
                inside = tuple(i for i in range(start, start + unit.length) if first <= i <= last)
                if inside:
                    costs = [self._cost(i) for i in inside]
                    found.append(
                        Block(
                            inside,
                            sum(c.forward_s for c in costs),
                            sum(c.activation_bytes for c in costs),
                            costs[0].input_bytes,
                        )
                    )
        return found

    def _cost(self, segment: int) -> KindCost:
        return self.sharded.costs[self.folded.segments[segment].kind]

    def _fixed_bytes(self, first: int, last: int) -> tuple[int, int]:
        """(parameters, gradients and optimizer; the largest workspace of an op)."""
        segments = list(self.folded.segments[first : last + 1])
        return self._state(segments).total, max(self._cost(s.index).temporary_bytes for s in segments)

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
        cost: KindCost = self.sharded.costs[segment.kind]
        return SegmentCost(
            name=segment.kind if self.folded.multiplicity(segment.kind) > 1 else segment.name,
            forward_s=cost.forward_s,
            backward_s=cost.backward_s,
            activation_bytes=cost.activation_bytes,
            recompute_activation_bytes=cost.input_bytes,
            recompute_s=cost.forward_s,
            parameter_bytes=self._state([segment]).total,
            temporary_bytes=cost.temporary_bytes,
            send_bytes_s=2 * self._send_s(segment.index + 1),
        )

    def _send_s(self, place: int) -> float:
        """Seconds to send what crosses a place, one way."""
        nbytes = self._crossing_bytes[place] if place < len(self._crossing_bytes) else 0
        stride = self.candidate.tp * self.candidate.dp
        return p2p_s(nbytes, self.cluster, stride) if nbytes and self.candidate.pp > 1 else 0.0

    @cached_property
    def _crossing_bytes(self) -> list[int]:
        """Local bytes alive at each place between segments."""
        placed: dict[fx.Node, tuple[int, Placement]] = {}
        last: dict[fx.Node, int] = {}
        for segment in self.folded.segments:
            decided = self.sharded.sharding.kinds[segment.kind]
            for node in segment.receives:
                last[node] = segment.index
            for node, placement in zip(segment.sends, decided.sends, strict=True):
                placed[node] = segment.index, placement
        found = [0] * len(self.folded.segments)
        for node, until in last.items():
            made, placement = placed[node]
            for place in range(made + 1, until + 1):
                found[place] += self.tensors.nbytes(infos(node)[0], placement)
        return found

    # ---- what was chosen ----

    def _state(self, segments: list[Segment]) -> Memory:
        """Parameters, gradients and optimizer state of segments, each parameter once."""
        frozen, trained = self._numel(segments)
        state = model_state(
            [trained],
            precision=self.precision,
            optimizer=self.optimizer if self.optimizer in ("adamw", "sgd") else "adamw",
            zero=self.candidate.zero,
            dp=self.candidate.dp,
        )
        return state + Memory(parameters=frozen * COMPUTE_BYTES[self.precision])

    def _numel(self, segments: list[Segment], placement: Placement | None = None) -> tuple[int, int]:
        """Local elements (frozen, trained), of one placement or of all; tied parameters of these segments once."""
        traced = self.folded.traced
        found: dict[str, int] = {}
        for segment in segments:
            decided = self.sharded.sharding.kinds[segment.kind]
            for node, stored in zip(segment.parameters, decided.parameters, strict=True):
                name = traced.parameters[node.name]
                first = self._first_reader[name] == segment.index
                if (placement is None or stored == placement) and (first or self.candidate.pp > 1 or len(segments) > 1):
                    tensor = infos(node)[0]
                    found[name] = self.tensors.nbytes(tensor, stored) // tensor.dtype.itemsize
        frozen = sum(n for name, n in found.items() if name in traced.frozen)
        return frozen, sum(found.values()) - frozen

    @cached_property
    def _first_reader(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for segment in self.folded.segments:
            for node in segment.parameters:
                found.setdefault(self.folded.traced.parameters[node.name], segment.index)
        return found

    def _stage(self, index: int, solution: StageSolution) -> StageCost:
        first, last = solution.boundaries[index]
        recomputed = set(solution.recompute[index])
        segments = list(self.folded.segments[first : last + 1])
        costs = {s.index: self.sharded.costs[s.kind] for s in segments}
        recompute_s = sum(costs[i].forward_s for i in recomputed)
        blocks = self._blocks(first, last)
        chosen = {i for i, b in enumerate(blocks) if set(b.segments) <= recomputed}
        alive = in_flight(index, self.candidate.pp, self.candidate.microbatches)
        _, workspace = self._fixed_bytes(first, last)
        memory = self._state(segments) + Memory(
            activations=peak_bytes(blocks, chosen, 0, 0, alive),
            temporary=workspace,
            overhead=self.cluster.device.context_bytes,
        )
        comm = sum(c.forward_comm_s + c.backward_comm_s for c in costs.values())
        comm += sum(costs[i].forward_comm_s for i in recomputed)
        return StageCost(
            forward_s=sum(c.forward_s for c in costs.values()),
            backward_s=sum(c.backward_s for c in costs.values()) + recompute_s,
            recompute_s=recompute_s,
            comm_s=comm,
            memory=memory,
        )

    def _times(self, index: int, solution: StageSolution, cost: StageCost) -> StageTimes:
        c, cluster = self.candidate, self.cluster
        first, last = solution.boundaries[index]
        segments = list(self.folded.segments[first : last + 1])
        _, trained = self._numel(segments)
        main, compute = MAIN_BYTES[self.precision], COMPUTE_BYTES[self.precision]
        reduce_s = collective_s("reduce_scatter" if c.zero else "all_reduce", trained * main, cluster, c.dp, c.tp)
        _, partial = self._numel(segments, BP)
        reduce_s += collective_s("all_reduce", partial * main, cluster, c.tp, 1)
        reduce_s += self._tied_s(segments, main)
        gather_s = collective_s("all_gather", trained * compute, cluster, c.dp, c.tp) if c.zero else 0.0
        shard = trained // (c.dp if c.zero else 1)
        optimizer = self.optimizer if self.optimizer in ("adamw", "sgd") else "adamw"
        step = memory_s(cluster.device, optimizer_step_bytes(shard, precision=self.precision, optimizer=optimizer))
        return StageTimes(
            forward_s=cost.forward_s,
            backward_s=cost.backward_s,
            send_forward_s=self._send_s(last + 1) if index < c.pp - 1 else 0.0,
            send_backward_s=self._send_s(first) if index > 0 else 0.0,
            reduce_s=reduce_s,
            step_s=step,
            gather_s=gather_s,
        )

    def _tied_s(self, segments: list[Segment], main: int) -> float:
        """The sum over stages of gradients of parameters that other stages hold too."""
        if self.candidate.pp == 1:
            return 0.0
        traced = self.folded.traced
        mine = {traced.parameters[p.name]: (s, p) for s in segments for p in s.parameters}
        inside = {s.index for s in segments}
        elsewhere = {
            traced.parameters[p.name] for s in self.folded.segments if s.index not in inside for p in s.parameters
        }
        numel = sum(self._numel([s])[1] for name, (s, _) in mine.items() if name in elsewhere)
        stride = self.candidate.tp * self.candidate.dp * (self.candidate.pp - 1)
        shard = numel * main / (self.candidate.dp if self.candidate.zero else 1)
        return collective_s("all_reduce", shard, self.cluster, 2, stride) if numel else 0.0


def _same(a: tuple[SegmentCost, ...], b: tuple[SegmentCost, ...]) -> bool:
    return all(x == y for x, y in zip(a, b, strict=True))


def simulated(staged: Staged) -> Staged:
    """The same with its step time by the very action lists that the runtime executes."""
    c = staged.candidate
    timeline = simulate(step_lists("1f1b", c.pp, c.microbatches), staged.times)
    return replace(staged, seconds=timeline.makespan_s, timeline=timeline)
