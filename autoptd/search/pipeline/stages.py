"""The stage-level problem of one candidate: bounds over all cuts, the best cut, and the memory that is missing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, islice, pairwise

import numpy as np

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import FRAGMENTATION_LEAST, Memory, alive
from autoptd.errors import DoesNotFit, PlanError
from autoptd.layout.host_memory import host_share
from autoptd.schedule import Alive, row_of
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.infeasible import Shortfall
from autoptd.search.memory_prices import MemoryPrices
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.block_cost import BlockCosts
from autoptd.search.pipeline.chunk_cost import ChunkCosts
from autoptd.search.pipeline.cut_ilp import StageOption
from autoptd.search.pipeline.evaluate import Staged, StageSolution, least_passes_s, timed
from autoptd.search.pipeline.lower_bounds import busiest_edge_s, message_path_s, passed_over
from autoptd.search.pipeline.lp_bound import LeastBound, Pipeline, in_flight, of_any, path_of, relaxed_bound
from autoptd.search.pipeline.partition import (
    CutObjective,
    balanced,
    even_cuts,
    least_value,
    rounded,
    smallest_cut,
    solve_cuts,
)
from autoptd.search.pipeline.stage_cost import StageCost
from autoptd.search.pipeline.windows import Cuts, Floats, Partition, PartitionProblem
from autoptd.search.sharding.tensors import Sharded, Tensors
from autoptd.search.whole_segments import Chains, RankCosts, WholeSegments, contents, most_of

_LONGEST = 3  # times an even share of the segments: first stages for which the reduction is counted


class StagesDoNotFit(DoesNotFit):
    """No cut of a candidate fits, or only not this one (`every_cut`). `Stages.shortfall` computes the missing memory,
    which takes longer."""

    def __init__(self, what: str, *, every_cut: bool) -> None:
        super().__init__(what)
        self.every_cut = every_cut


class Stages:
    """The stage-level problem of one candidate, given a sharding."""

    def __init__(
        self,
        tensors: Tensors,
        sharded: Sharded,
        candidate: Candidate,
        method: SearchOptions,
        precision: str,
        optimizer: str,
        cluster: Cluster | None = None,
        blocks: dict[int, BlockCosts] | None = None,
    ) -> None:
        """`cluster`: given if its devices differ in memory from the one that tensors were split for; `blocks`: costs of
        blocks by type of device, shared by candidates that they are equal for."""
        self.tensors, self.sharded, self.candidate, self.method = tensors, sharded, candidate, method
        self.cluster = cluster or tensors.cluster
        self.folded = tensors.folded
        self.chunks = ChunkCosts(tensors, sharded, candidate, method, precision, optimizer)
        self._blocks = {} if blocks is None else blocks
        self.stage_costs = self._stage_costs()

    def _stage_costs(self, unlimited: bool = False) -> list[StageCost]:
        """Return one `StageCost` per kind of pipeline rank; `unlimited`: they ignore memory."""
        found = []
        for pool, share in dict.fromkeys(self._kinds):
            chunks = self.chunks.on(self._kinds.index((pool, share)))
            blocks = self._blocks.setdefault(pool, BlockCosts(chunks))
            kind = self.cluster.pools[pool]
            found.append(StageCost(chunks, blocks, kind.device, unlimited, host_share(kind, self.candidate.world)))
        return found

    def stage_cost(self, stage: int) -> StageCost:
        """Return the costs on the kind of rank that a stage runs on."""
        return self.stage_costs[self._of_stages[stage][0]]

    @cached_property
    def _of_stages(self) -> list[tuple[int, Alive]]:
        """The index of each stage in `stage_costs`, and the in-flight microbatches of its rank if chunks are alike."""
        ranks = [(pool, self.held(rank).alike) for rank, pool in enumerate(self._pools)]
        return [ranks[rank] for rank in map(self.candidate.route.holder, range(self.count))]

    @cached_property
    def _kinds(self) -> list[tuple[int, float]]:
        """The type of device of each pipeline rank, and its share of the optimizer state on the host."""
        c, shares = self.candidate, self.method.offload
        shares = shares if len(shares) > 1 else (c.offload,) * c.pp
        return list(zip(c.pools or (0,) * c.pp, shares, strict=True))

    @cached_property
    def _pools(self) -> tuple[int, ...]:
        """The index of each pipeline rank in `stage_costs`."""
        found = list(dict.fromkeys(self._kinds))
        return tuple(found.index(kind) for kind in self._kinds)

    def solutions(self, limit_s: float = math.inf) -> list[Staged]:
        """Return the cuts of which one is the best; which one, a simulation tells. Of several, those whose passes take
        `limit_s` at least are left out; if all do, the first that fits is returned. Raises DoesNotFit."""
        if self.fixed or self.count == 1:
            return [self.finish(self._fixed_cuts())]
        if self.method.virtual == 1:
            return [self.finish(self._cut())]
        most, ranks = self._cut_without_limits(), list(map(self.candidate.route.holder, range(self.count)))
        least_s, uncut, bound = self.problem.least_s, self.method.uncut, self.relaxed_bound
        near = rounded(bound.work_s, least_s, uncut) if bound.is_full else None  # its chunks share a rank's memory
        even = self._even()  # such stages may wait less than the bound says
        shared = (balanced(cut, ranks, least_s, uncut) for cut in (most, even) if cut)
        cuts = list(filter(None, dict.fromkeys((most, even, *shared, near))))
        quick = [cut for cut in cuts if self._least_passes_s(cut) < limit_s]
        fitting = filter(None, map(self._if_it_fits, quick or cuts))
        if found := list(fitting if quick else islice(fitting, 1)):
            return found
        return [self.finish(self._cut())]  # assumes that all chunks of a rank need the same memory

    def _least_passes_s(self, cuts: Cuts) -> float:
        """Return a lower bound on the passes of a cut: their seconds without recomputation."""
        stages = [self.stage_cost(k).least_cost(*run) for k, run in enumerate(cuts)]
        return least_passes_s(self.candidate, stages, self.chunks.messages.sends_s(cuts))

    def _cut_without_limits(self) -> Cuts:
        """Return the best cut if memory had no limit, since that of a run depends on all chunks of its rank."""
        known, self.stage_costs = self.stage_costs, self._stage_costs(unlimited=True)
        self.__dict__.pop("problem", None)  # bounds may have made it with limits
        try:
            return self._cut()
        finally:
            self.stage_costs = known
            self.__dict__.pop("problem", None)

    def _even(self) -> Cuts | None:
        try:
            cuts = even_cuts(self.folded, self.count)
        except PlanError:
            return None
        return None if any(first in self.method.uncut for first, _ in cuts) else cuts

    def _if_it_fits(self, cuts: Cuts) -> Staged | None:
        try:
            return self.finish(cuts)
        except StagesDoNotFit:
            return None

    @property
    def fixed(self) -> bool:
        """True if the constraints leave one possible cut."""
        return self.method.stages == "even" or bool(self.method.starts)

    def _fixed_cuts(self) -> Cuts:
        """Return the only possible cut."""
        if not self.method.starts:
            return even_cuts(self.folded, self.count)
        edges = (0, *self.method.starts, len(self.folded.segments))
        return tuple((first, after - 1) for first, after in pairwise(edges))

    @property
    def copies_quickly(self) -> bool:
        """True if some block's copies of activations to the host and back take less time than its recomputation."""
        return any(stage_cost.blocks.copies_quickly for stage_cost in self.stage_costs)

    @property
    def count(self) -> int:
        """Number of stages: chunks of all pipeline ranks."""
        return self.candidate.pp * self.method.virtual

    def alive(self, stage: int) -> Alive:
        """Return the in-flight microbatches of the pipeline rank of a stage, summed over chunks, which are alike."""
        return self._of_stages[stage][1]

    def held(self, rank: int) -> Alive:
        """Return the in-flight microbatches of each chunk of a pipeline rank at each candidate memory peak."""
        c = self.candidate
        return alive(rank, c.pp, c.microbatches, c.schedule, c.virtual)

    def finish(self, cuts: Cuts) -> Staged:
        """Return these stages with the fastest recomputation that fits and a bound of the step. Raises DoesNotFit."""
        route, policies = self.candidate.route, list[Mapping[int, str]]([{}] * len(cuts))
        memory: list[Memory] = []
        for rank in range(route.ranks):
            mine, stage_cost = route.stages_of(rank), self.stage_cost(rank)
            runs = [cuts[stage] for stage in mine]
            spans = [stage_cost.span(*run) for run in runs]
            state, upcast = self.chunks.on(rank).state(runs, cuts), self.chunks.update_bytes(runs)
            choice = stage_cost.choose(spans, state, upcast, self.held(rank))
            if choice is None:
                raise StagesDoNotFit("these stages do not fit", every_cut=self.fixed or self.count == 1)
            on_host = stage_cost.host_bytes(choice, self.held(rank))
            for stage, span, options in zip(mine, spans, choice.chosen, strict=True):
                policies[stage] = stage_cost.policies(cuts[stage][0], span, options)
            memory.append(stage_cost.memory(state, upcast, choice.kept, choice.extra, on_host))
        return timed(self.chunks, StageSolution(cuts, tuple(policies)), tuple(memory))

    def trimmed(self, staged: Staged, shares: Sequence[float]) -> Staged:
        """Return the stages with the least of these shares of the optimizer state on the host of each pipeline rank
        with which the same recomputation fits."""
        chosen, memory = list[float](), list[Memory]()
        for rank, most in enumerate(staged.memory):
            runs = list(self.candidate.route.of(staged.solution.boundaries, rank))
            activations = most.host - self.chunks.on(rank).state(runs, staged.solution.boundaries).host
            for share in sorted({*shares, self.candidate.offload}):
                state = self.chunks.sharing([share]).on(rank).state(runs, staged.solution.boundaries)
                needs = replace(most, optimizer=state.optimizer, host=activations + state.host)
                if share == self.candidate.offload or needs.needed <= self.stage_costs[self._pools[rank]].limit:
                    break
            chosen.append(share)
            memory.append(needs)
        return timed(self.chunks.sharing(chosen), staged.solution, tuple(memory))

    # ---- the search for cuts ----

    def _cut(self) -> Cuts:
        rounds = (self.candidate.microbatches - 1) * self.method.virtual**2
        options = self.options if self.method.cut_solver == "ilp" else None
        found = solve_cuts(self.problem, CutObjective(rounds), self.passes_that_fit, options)
        if found is None:
            raise StagesDoNotFit("no cut fits", every_cut=self.method.virtual == 1)
        return found

    @cached_property
    def problem(self) -> PartitionProblem:
        """The input of the search for cuts."""
        first, (kept, least_kept) = self.stage_costs[0], self.stage_costs[0].blocks.kept
        return PartitionProblem(
            names=self.chunks.names,
            base_s=tuple(cost.base_s for cost in self.stage_costs),
            send_s=self.chunks.messages.send_table_s(),
            alive=tuple(self.alive(k).chunks for k in range(self.count)),
            alike=tuple(map(self._of_stages.index, self._of_stages)),
            pools=tuple(pool for pool, _ in self._of_stages),
            state=np.minimum.reduce([cost.state for cost in self.stage_costs]) * self.method.virtual,
            kept=kept,
            least_kept=least_kept,
            recompute_s=tuple(cost.blocks.recompute_s for cost in self.stage_costs),
            budget_bytes=tuple(cost.bound_bytes for cost in self.stage_costs),
            temporary=first.blocks.temporary,
            whole_from=first.blocks.starts,
            waste=FRAGMENTATION_LEAST,
            forward_share=max(cost.forward_share for cost in self.stage_costs),
            uncut=self.method.uncut,
        )

    def passes_that_fit(self, stage: int, first: int, last: int) -> tuple[float, float] | None:
        """Return seconds (forward, backward) of a stage with the fastest recomputation that fits; None if none does."""
        cost = self.stage_cost(stage).cost(first, last, self.alive(stage))
        return None if cost is None else (cost.forward_s, cost.backward_s)

    def options(self, stage: int, first: int, last: int) -> Sequence[StageOption]:
        """Return the recompute options of a stage of these segments."""
        return self.stage_cost(stage).options(first, last, self.alive(stage))

    def passes(self, stage: int, first: int, last: int) -> tuple[float, float] | None:
        """Return a lower bound on seconds (forward, backward) of a stage; None if the stage is impossible.

        With several chunks per rank recomputation is left out, since memory depends on all of them."""
        if not self.method.uncut.isdisjoint((first, last + 1)):
            return None
        if self.method.virtual == 1:
            return self.passes_that_fit(stage, first, last)
        cost = self.stage_cost(stage).least_cost(first, last)
        return cost.forward_s, cost.backward_s

    # ---- bounds of all cuts ----

    def least(self, *, measured: bool) -> LeastBound:
        """Return the least lower bound of any cut.

        From the recomputation of each run that fits where `measured`, else from the least that its memory takes. It is
        path (2), or (1) without its second term for split backward passes. Path (2) ends on the first rank; where
        `measured`, with its reduction of gradients. With several chunks per rank, the memory of a run depends on the
        other chunks: only the busiest message counts.
        """
        c, schedule = self.candidate, self.method.schedule
        sent_s = busiest_edge_s(self.least_sends_s, schedule, c.pp, c.microbatches)
        if self.method.virtual > 1:
            return LeastBound(sent_s, False)
        problem, path = self.problem, CutObjective(c.microbatches, messages=False, fill=False)
        if not row_of(schedule).splits_backward:
            waits = tuple(passed_over(schedule, k, c.pp, c.microbatches) for k in range(c.pp))
            path = CutObjective(c.microbatches - 1, waits, messages=False)
            sent_s = float(problem.least_s.sum()) + message_path_s(self.least_sends_s, schedule, c.microbatches)
        if measured:
            problem = replace(problem, send_s=problem.send_s + self._first_reduction_s)
            found = least_value(problem, path, self.passes)
            is_full = found is None or self._is_full(found)
        else:
            free = replace(problem, budget_bytes=(math.inf,) * len(problem.budget_bytes))
            found = least_value(free, path)
            is_full = found is not None and self._is_full(found)
            found = least_value(problem, path) if is_full else found
        return LeastBound(math.inf if found is None else max(found.value, sent_s), is_full)

    def _is_full(self, found: Partition) -> bool:
        return any(self.problem.is_full(k, *run) for k, run in enumerate(found.cuts))

    @property
    def _first_reduction_s(self) -> Floats:
        """Seconds of reducing the first rank's gradients, if it holds the segments up to e, [stage, e]; 0 if hidden."""
        found = np.zeros_like(self.problem.send_s)
        chunks, longest = self.chunks.on(0), -(-_LONGEST * found.shape[1] // self.count)
        for last in range(min(longest, found.shape[1])) if "dp" not in self.method.overlap else ():
            found[0, last] = chunks.reduce_s([(0, last)])
        return found

    @cached_property
    def least_sends_s(self) -> tuple[float, ...]:
        """Least seconds of a message after each stage but the last, over all places where the stage may end."""
        return self.chunks.messages.least_sends_s()

    @cached_property
    def relaxed_bound(self) -> LeastBound:
        """Return the lower bound of `search/pipeline/lp_bound.py` over all cuts; infinite if none fits."""
        return self.bound_by_chains(close=False)

    def bound_by_chains(self, close: bool) -> LeastBound:
        """Return the `relaxed_bound`; `close`: as in `average_path`."""
        c, v = self.candidate, self.method.virtual
        held = tuple(in_flight(self.held(rank)) for rank in range(c.pp))
        budgets = tuple(self.stage_costs[pool].bound_bytes for pool in self._pools)
        ending = (c.route.holder(self.count - 1),)
        pipeline = Pipeline(c.schedule, c.microbatches, v, held, self._pools, budgets, self.least_sends_s, ending)
        return relaxed_bound([stage_cost.relaxed for stage_cost in self.stage_costs], pipeline, close)

    def excludes(self, limit_s: float, close: bool = False) -> bool:
        """Return whether no cut into whole segments takes less than `limit_s` for its passes and last reduction
        (`search/whole_segments.py`). `close`: as in `average_path`."""
        c, names = self.candidate, self.stage_costs[0].segment_names
        kinds = tuple(names.index(name) for name in self.chunks.names)
        base_s = np.minimum.reduce([stage_cost.base_s for stage_cost in self.stage_costs])
        most = most_of(kinds, base_s[[kinds.index(i) for i in range(len(names))]], limit_s / c.microbatches)
        ending, splits = c.route.holder(self.count - 1), row_of(self.method.schedule).splits_backward
        if (held := contents(kinds, most, self.method.uncut, self.method.virtual, ending == 0)) is None:
            return False
        ranks = list[RankCosts]()
        for rank, sent_s in enumerate(accumulate(self.least_sends_s[: c.pp - 1], initial=0.0)):
            parts, budget_bytes = self.stage_cost(rank).single, self.stage_cost(rank).bound_bytes
            forward_s = sent_s + rank * min(part.forward_s for part in parts)
            both_s = 2 * sent_s + rank * min(part.forward_s + part.backward_s for part in parts)
            alive = max(min(row) for row in in_flight(self.held(rank)))
            ranks.append(RankCosts(parts, alive, budget_bytes, (forward_s, 0.0 if splits else both_s)))
        found = WholeSegments(held, ranks, np.bincount(kinds).tolist(), c.microbatches, limit_s, ending)
        return found.are_too_few() or found.are_too_few(self._chains(close))

    def _chains(self, close: bool) -> Chains:
        c, v, sends_s, end = self.candidate, self.method.virtual, self.least_sends_s, self.stage_cost(self.count - 1)
        path = path_of(self.stage_costs[0].relaxed, c.schedule, c.pp, c.microbatches, v, sends_s, close)
        last = end.single[end.segment_names.index(self.chunks.names[-1])]
        return Chains.of(path, c.route, last, sends_s, reduces=not row_of(c.schedule).splits_backward)

    def memory_bound(self, kinds: Collection[tuple[str, int]], prices: MemoryPrices, limit_s: float) -> LeastBound:
        """Return a lower bound on the passes over all cuts under any of these schedules and numbers of chunks: their
        work with the recomputation that fits, without the fill of the pipeline; one of `limit_s` is enough."""
        budgets = tuple(self.stage_costs[pool].bound_bytes for pool in self._pools)
        pipeline = of_any(kinds, self.candidate.microbatches, self._pools, budgets)
        return prices.bound([stage_cost.relaxed for stage_cost in self.stage_costs], pipeline, limit_s)

    # ---- missing memory if nothing fits ----

    def over_bytes(self, stage: int, first: int, last: int) -> float:
        """Return by how many bytes a stage of these segments exceeds its memory under the most saving recomputation."""
        return self.stage_cost(stage).over_bytes(first, last, self.alive(stage))

    def shortfall(self) -> Shortfall:
        """Return the missing memory of the cut whose worst stage exceeds its memory least."""
        cuts = self._fixed_cuts() if self.fixed else smallest_cut(self.problem).cuts
        over = [self.over_bytes(k, *run) for k, run in enumerate(cuts)]
        on_host = [self.stage_cost(k).over_host_bytes(*run, self.alive(k)) for k, run in enumerate(cuts)]
        names = [segment.name for segment in self.folded.segments]
        return Shortfall(
            self.candidate,
            stages=tuple((names[first], names[last]) for first, last in cuts),
            missing_bytes=tuple(max(0.0, value) / (1 - self.method.headroom) for value in over),
            budget_bytes=max(self.stage_cost(k).budget_bytes for k in range(len(cuts))) + max(over),
            recompute_fits=self.candidate.recompute != "auto" and self._auto_fits(cuts),
            missing_host_bytes=tuple(max(0.0, value) / (1 - self.method.headroom) for value in on_host),
        )

    def _auto_fits(self, cuts: Cuts) -> bool:
        other = Stages(
            self.tensors,
            self.sharded,
            self.candidate._replace(recompute="auto"),
            self.method,
            self.chunks.precision,
            self.chunks.optimizer,
            self.cluster,
        )
        return all(other.over_bytes(k, *run) <= 0 for k, run in enumerate(cuts))
