"""The search: every candidate, visited by its lower bound until no other can be better.

    candidate ──► floor: its matrix products at the device's rate
              ──► work: all work of the model on one rank, divided by the ranks
              ──► split: its tensors by the splits ILP (once per tp, cp and microbatch) ──► bound of all cuts
              ──► family: all cuts in fractions, with the least memory of any schedule and sharding
              ──► contiguous: all cuts by the least seconds of each run of segments, for one chunk per rank
              ──► relaxed: all in fractions with its own memory, then with the critical paths of its schedule
              ──► measured: all cuts by the seconds of each run with the recomputation that fits
              ──► cut into stages, and simulated by the action lists that will run unless a bound excludes it
              ──► refined: all other cuts whose bound is below the best, where they are few

Candidates wait in one queue, ordered by the best lower bound known of each, and plain meshes before all others. The
first one takes its next step and goes back into the queue. When the first bound is not below the best simulated time,
the search is over; unless it is exact, also once `_VARIED` of the others were simulated. The gap is measured from the
least bound of the candidates that were not examined in full.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from autoptd.errors import AutoptdError
from autoptd.progress import Progress
from autoptd.search.constraints.named import read_named
from autoptd.search.infeasible import nothing_fits
from autoptd.search.memory_filter import MemoryFilter
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.block_cost import BlockCosts
from autoptd.search.pipeline.evaluate import Staged, prove_schedule, simulated
from autoptd.search.pipeline.exact import Effort, refine
from autoptd.search.pipeline.lower_bounds import CandidateBounds
from autoptd.search.pipeline.stages import Stages, StagesDoNotFit
from autoptd.search.sharding.cache import ShardingCache, ShardingQuery
from autoptd.search.sharding.solve import CLOSE, Splitter
from autoptd.search.sharding.tensors import Sharded, Tensors
from autoptd.search.task import EFFORT as EFFORT
from autoptd.search.task import Task as Task
from autoptd.search.task import candidate_space
from autoptd.search.variants import SHARES, Variants

_CUT = 3  # steps before the bounds that read memory, which take longer
_SIMULATED = _CUT + 3  # steps before the simulation
_VARIED = 64  # candidates beyond plain meshes that are cut and simulated, unless the search is exact
_EXPLAINED = 4  # candidates whose missing memory is worked out where nothing fits
_COST_MEMORY = {"cuts", "headroom", "max_tp", "splits", "whole"}  # constraints, beside meshes, that may cost memory
_NEVER = float("inf")
_Place = tuple[bool, float, int, int]  # in the queue: whether it is not plain, its bound, -step, and index


@dataclass(frozen=True)
class Answer:
    """The best plan found, and how the search went."""

    staged: Staged
    tensors: Tensors
    considered: int  # candidates
    visited: int  # candidates whose cuts into stages were measured
    gap: float  # no candidate takes less than (1 - gap) times the best
    question: ShardingQuery  # answered by `tensors`
    known: ShardingCache


@dataclass
class _Entry:
    """A candidate in the queue: a lower bound of all its cuts, and the steps taken so far."""

    candidate: Candidate
    bound_s: float
    passes_s: float = 0.0  # lower bound on the seconds of all cuts without the step's end
    is_full: bool = False  # whether memory raises its bound, or its stages recompute
    stages: Stages | None = None
    step: int = 0  # into `Planner._steps`
    split_s: float = _NEVER  # the bound by its split tensors, before memory counts
    is_weighed: bool = False  # whether the model's work on one rank bounds it already
    closed: bool = False  # whether all its cuts were examined
    is_short: bool = False  # whether all candidates of its family lack memory
    is_variant: bool = False  # of a candidate that memory limits: with memory-saving splits, or with offload

    @property
    def is_varied(self) -> bool:
        return self.is_variant or not self.candidate.is_plain


class Planner:
    """The search for one task.

    `known` holds what was worked out about this graph and serves further tasks of it.
    """

    def __init__(self, task: Task, progress: Progress, known: ShardingCache | None = None) -> None:
        assert known is None or known.folded is task.folded, "`known` is of another graph"
        self.task, self.progress = task, progress
        self.known = known or ShardingCache(task.folded)
        named = read_named(task.folded, task.constraints)
        self._method = named.on(task.constraints.method)
        self._memory = MemoryFilter(task.folded, task.cluster, task.precision, task.optimizer, self._method.headroom)
        self._splitter = Splitter(task, self.known, named, self._method)
        self._bounds = CandidateBounds(task, self.known, self._method, self._memory)
        self._steps: tuple[Callable[[_Entry], float], ...] = (
            self._bound_by_work,
            self._split,
            self._bound_family,
            self._bound_contiguous,
            self._bound_relaxed,
            self._bound_measured,
            self._simulate,
            self._refine,
        )
        self._entries: list[_Entry] = []
        self._sharded_state: dict[Candidate, _Entry] = {}  # the entries with ZeRO 1 over all ranks
        self._families: dict[Hashable, list[Candidate]] = {}
        self._alike: dict[Hashable, dict[int, list[_Entry]]] = {}  # those with equal splits, by their microbatch
        self._family_s: dict[Hashable, float] = {}  # lower bounds on the passes of a family's candidates
        self._whole: dict[Hashable, Sharded | AutoptdError] = {}  # the model's work on one rank
        self._best: Staged | None = None
        self._variants = Variants(task, self._memory)
        self._varied: set[Candidate] = set()  # variants that are entries
        self._blocks: dict[Hashable, dict[int, BlockCosts]] = {}
        self._too_large: list[_Entry] = []  # those that do not fit
        self._effort = Effort(task.effort)
        self._visited = self._simulated = 0

    def answer(self) -> Answer:
        """Search. Raises PlanError for impossible constraints, DoesNotFit where nothing fits."""
        possible = self.candidates()
        self._splitter.check_heads()
        options, left_out = self._variants.promising(possible, exact=self.task.effort is None)
        with self.progress.stage(f"search {len(options)} ways to run on {self.task.world} devices"):
            bound_s = min([self._visit(options), *map(self._bounds.floor_s, left_out)])
        if self._best is None:
            raise self._nothing_fits(len(possible))
        best, c = self._best, self._best.candidate
        if c.offload and not self._method.offload:  # no more of it than each rank needs
            best = simulated(self._stages(c).trimmed(best, (0.0, *SHARES)))
        gap = max(0.0, 1 - bound_s * (1 - CLOSE * self._splitter.is_derived) / best.seconds)
        with self.progress.stage("prove the schedule"):
            prove_schedule(best.method.schedule, c.pp, c.microbatches, best.method.virtual)
        tensors = self._splitter.tensors[self._splitter.key_of(c)]
        return Answer(best, tensors, len(possible), self._visited, gap, self._splitter.question(c), self.known)

    def predict(self, candidate: Candidate) -> Staged:
        """Split, cut and simulate one candidate; its schedule is not proved.

        Used for sweeps over many candidates. Raises PlanError, InfeasibleSplit, DoesNotFit.
        """
        solved = self._solved(candidate)
        if isinstance(solved, AutoptdError):
            raise solved
        stages = self._stages(candidate)
        try:
            return min(map(simulated, stages.solutions()), key=lambda staged: staged.seconds)
        except StagesDoNotFit:
            raise stages.shortfall().error() from None

    def _visit(self, options: Sequence[Candidate]) -> float:
        """Find the best plan; return a lower bound of all candidates."""
        started = time.monotonic()
        self._entries = entries = [_Entry(c, self._bounds.floor_s(c)) for c in options]
        self._sharded_state = {e.candidate: e for e in entries if e.candidate.zero == 1 and not e.candidate.shards}
        for e in entries:
            self._families.setdefault(e.candidate.family, []).append(e.candidate)
            self._alike.setdefault(self._splitter.alike(e.candidate), {}).setdefault(e.candidate.micro, []).append(e)
        queue = [self._place(i, e.bound_s) for i, e in enumerate(entries)]
        heapq.heapify(queue)
        while queue:
            varied, priority_s, _, i = heapq.heappop(queue)
            late = time.monotonic() - started > self.task.time_limit_s
            tired = self.task.effort is not None and self._simulated >= _VARIED
            if self._best is not None and (late or (varied and tired)):
                break
            if priority_s >= self._best_s:
                if varied:
                    break
                continue  # the others have a turn of their own
            e = entries[i]
            priority_s = self._advance(e)
            while self._best is None and _CUT <= e.step <= _SIMULATED and priority_s < _NEVER:
                priority_s = self._advance(e)  # a first plan, to compare the others with
            self._enqueue_variants(e, queue)
            if e.step < len(self._steps):
                heapq.heappush(queue, self._place(i, priority_s))
            else:
                e.closed = priority_s == _NEVER
        for e in entries:
            if (lighter := self._lighter(e.candidate)) and self._is_dominated(e):  # no faster than that one
                e.bound_s, e.closed = max(e.bound_s, lighter.bound_s), e.closed or lighter.closed
        return min([self._best_s, *(e.bound_s for e in entries if not e.closed)])

    def _place(self, i: int, priority_s: float) -> _Place:
        """Return the place of a candidate in the queue: plain ones first, which soon find a plan that few others beat,
        so that most microbatches are excluded before their tensors are split."""
        e = self._entries[i]
        return e.is_varied, priority_s, -e.step, i

    def _enqueue_variants(self, e: _Entry, queue: list[_Place]) -> None:
        """Enqueue the variants of a candidate once memory limits it. Others are no faster than the candidate itself."""
        every = self.task.effort is None and e.step >= _CUT - 1
        for c in self._variants.of(e.candidate) if every or e.is_full or e.is_short else ():
            if c not in self._varied and (c.offload or every or e.is_full):
                self._varied.add(c)
                floor_s = max(self._bounds.floor_s(c), e.split_s if c.memory_saving else 0.0)
                self._entries.append(_Entry(c, floor_s, is_variant=True))
                heapq.heappush(queue, self._place(len(self._entries) - 1, floor_s))

    def _advance(self, e: _Entry) -> float:
        """Take a candidate's next step; return its new place in the queue."""
        e.step += 1
        now_s = self._steps[e.step - 1](e)
        return now_s if e.step == len(self._steps) else max(now_s, e.bound_s)

    @property
    def _best_s(self) -> float:
        return _NEVER if self._best is None else self._best.seconds

    # ---- steps: each returns a lower bound of the cuts that are left ----

    def _bound_by_work(self, e: _Entry) -> float:
        """Bound by the model's work on one rank, divided by the ranks: cheap, before tensors are split."""
        c = e.candidate
        if c.tp > 1 and not c.pools and len(self._entries) > 1 and not e.is_weighed:
            e.is_weighed = True
            if (key := (c.micro, c.cp, c.ep, c.etp)) not in self._whole:
                self._whole[key] = self._solved(c._replace(tp=1, memory_saving=False))
            whole = self._whole[key]
            if isinstance(whole, Sharded):
                e.bound_s = max(e.bound_s, self._bounds.shared_out_s(c, whole))
        return e.bound_s

    def _split(self, e: _Entry) -> float:
        """Split its tensors, and bound all cuts by what the splits cost."""
        solved = self._solved(e.candidate)
        if isinstance(solved, AutoptdError) or (e.candidate.memory_saving and self._is_fast(e.candidate, solved)):
            e.bound_s = _NEVER
            return _NEVER
        e.split_s = e.bound_s = max(e.bound_s, self._bounds.bound_s(e.candidate, solved))
        return e.bound_s

    def _is_fast(self, c: Candidate, memory_saving: Sharded) -> bool:
        """Return whether the memory-saving splits are the fast ones too."""
        fast = self._solved(c._replace(memory_saving=False))
        return isinstance(fast, Sharded) and fast.sharding == memory_saving.sharding

    def _lighter(self, c: Candidate) -> _Entry | None:
        """Return the same candidate with its state sharded over all ranks, whose passes take no longer, in less
        memory; None if that is itself, or none of the candidates."""
        if c.zero > 1 or not (c.zero == 0 or c.shards):
            return None
        return self._sharded_state.get(c._replace(zero=1, shards=0))

    def _is_dominated(self, e: _Entry) -> bool:
        """Return whether the lighter candidate is known to end its steps no later either, by even shares."""
        c = e.candidate  # passes may hide a part of the end, and devices may differ
        unknown = self.task.effort is None or c.pools or "dp" in self._method.overlap
        if unknown or (lighter := self._lighter(c)) is None:
            return False
        return self._bounds.end_s(lighter.candidate) <= self._bounds.end_s(c)

    def _bound_family(self, e: _Entry) -> float:
        """Bound by the relaxation with the least memory that any schedule and sharding of its mesh takes."""
        c = e.candidate
        if c.pp == 1 or self._method.stages == "even" or self._method.starts:
            return e.bound_s
        if self._is_dominated(e):
            e.step = len(self._steps)
            return e.bound_s
        if (key := (c.family, c.offload)) not in self._family_s:
            members = self._families[c._replace(memory_saving=False).family]
            most = max(m.zero for m in members if m.zero < 3 or not c.offload)
            lightest = self._stages(c._replace(zero=most, shards=0))
            self._family_s[key] = lightest.memory_bound_s({(m.schedule, m.virtual) for m in members})
        e.passes_s = max(e.passes_s, self._family_s[key])
        e.is_short = self._bounds.with_end_s(c, e.passes_s) > e.bound_s
        return self._raise_bound(e, self._bounds.with_end_s(c, e.passes_s))

    def _bound_contiguous(self, e: _Entry) -> float:
        """Bound all cuts that respect segments, by the least seconds of each run of them."""
        e.stages = self._stages(e.candidate)
        return self._bound_cuts(e, e.stages, measured=False)

    def _bound_relaxed(self, e: _Entry) -> float:
        """Bound all cuts by the linear relaxation, first without critical paths, which take longer."""
        c, stages = e.candidate, e.stages
        assert stages is not None
        if stages.fixed or c.pp == 1 or self._bound_by_lighter(e):
            return e.bound_s
        e.passes_s = max(e.passes_s, stages.memory_bound_s({(c.schedule, c.virtual)}))
        if self._raise_bound(e, self._bounds.with_end_s(c, e.passes_s)) >= self._best_s:
            e.is_full = True  # memory may be what raises it
            return e.bound_s
        passes_s, is_full, _ = stages.relaxed_bound
        e.passes_s, e.is_full = max(e.passes_s, passes_s), e.is_full or is_full
        microbatch_s = self._bounds.microbatch_s(c, stages.sharded) + 2 * sum(stages.least_sends_s)
        return self._raise_bound(e, self._bounds.with_end_s(c, passes_s, microbatch_s))

    def _bound_measured(self, e: _Entry) -> float:
        """Bound all cuts by the seconds of each run with the recomputation that fits."""
        self._visited += 1
        assert e.stages is not None
        return self._bound_cuts(e, e.stages, measured=True)

    def _bound_cuts(self, e: _Entry, stages: Stages, *, measured: bool) -> float:
        c = e.candidate
        if stages.fixed or c.pp == 1 or self._bound_by_lighter(e):
            return e.bound_s
        passes_s, is_full, _ = stages.least(measured=measured)
        e.passes_s, e.is_full = max(e.passes_s, passes_s), e.is_full or is_full
        return self._raise_bound(e, self._bounds.with_end_s(c, e.passes_s))

    def _bound_by_lighter(self, e: _Entry) -> bool:
        """Return whether its lighter candidate raised its bound: it takes this step when its turn comes again."""
        c, lighter = e.candidate, self._lighter(e.candidate)
        if lighter is None:
            return False
        before_s, e.is_full = e.bound_s, e.is_full or lighter.is_full
        if self._raise_bound(e, self._bounds.with_end_s(c, lighter.passes_s)) == before_s:
            return False
        e.step -= 1
        return True

    def _raise_bound(self, e: _Entry, seconds: float) -> float:
        e.bound_s = max(e.bound_s, seconds)
        if e.bound_s == _NEVER:
            e.is_full = True
            self._too_large.append(e)
        return e.bound_s

    def _simulate(self, e: _Entry) -> float:
        """Cut it into stages, and simulate them as they will run. Only other cuts are left then."""
        assert e.stages is not None
        self._simulated += e.is_varied
        try:
            solutions = e.stages.solutions()
        except StagesDoNotFit:
            e.is_full = True
            return self._raise_bound(e, _NEVER)
        for staged in solutions:
            e.is_full = e.is_full or any(staged.solution.policies)
            if staged.least_s < self._best_s:
                found = simulated(staged)
                if found.seconds < self._best_s:
                    self._best = found
        return e.bound_s

    def _refine(self, e: _Entry) -> float:
        """Simulate its other cuts that may be better; infinite where none is left."""
        assert e.stages is not None
        complete = e.stages.fixed or e.candidate.pp == 1
        if not complete and self._effort:
            found, complete = refine(e.stages, self._best_s, self._effort)
            if found is not None:
                self._best = found
        rough = any(stage_cost.rough for stage_cost in e.stages.stage_costs)
        return _NEVER if complete and not rough else e.bound_s

    # ---- candidates, their splits and stages ----

    def space(self) -> Sequence[Candidate]:
        """Return all candidates that may be searched, with their variants."""
        return self._variants.every(self.candidates())

    def candidates(self) -> Sequence[Candidate]:
        """Return every candidate that the constraints leave open, with the fastest splits."""
        return candidate_space(self.task, self._method, self.known.facts.has_attention)

    def _solved(self, c: Candidate) -> Sharded | AutoptdError:
        """Return its split tensors, or why they cannot be split. Raises errors that concern every candidate."""
        if self._splitter.key_of(c) not in self._splitter.sharded:
            self._splitter.solve_between((c,) if self.task.effort is None else self._microbatches_like(c))
        return self._splitter.sharded[self._splitter.key_of(c)]

    def _microbatches_like(self, c: Candidate) -> Sequence[Candidate]:
        """Return one candidate per microbatch size, in order, whose tensors may still be worth splitting."""
        found = {c.micro: c}
        for micro, entries in self._alike.get(self._splitter.alike(c), {}).items():
            if any(self._bound_by_work(e) < self._best_s for e in entries):
                found.setdefault(micro, entries[0].candidate)
        return [found[micro] for micro in sorted(found)]

    def _stages(self, c: Candidate) -> Stages:
        task, sharded = self.task, self._splitter.sharded[self._splitter.key_of(c)]
        assert isinstance(sharded, Sharded)
        chosen = {name: getattr(c, name) for name in ("cp", "ep", "etp", "schedule", "virtual", "shards")}
        tensors = self._splitter.tensors[self._splitter.key_of(c)]
        blocks = self._blocks.setdefault((self._splitter.key_of(c), c.ep, c.etp, c.recompute), {})
        method = replace(self._method, **chosen)
        return Stages(tensors, sharded, c, method, task.precision, task.optimizer, task.cluster, blocks)

    def _nothing_fits(self, considered: int) -> AutoptdError:
        """Return the refusal, explained by the candidate that lacks least."""
        order = sorted(self._too_large, key=lambda e: (self._memory.least_bytes(e.candidate), -e.candidate.offload))
        if not order:
            return self._splitter.refusal()
        missing = (self._stages(e.candidate).shortfall() for e in order[:_EXPLAINED])
        closest = min(missing, key=lambda s: max(s.missing_bytes))
        fixed = {*self.task.constraints.mesh, *(self.task.constraints.fixed & _COST_MEMORY)}
        return nothing_fits(self._memory, self.task.world, considered, closest, fixed)
