"""The search: the space of candidates, visited by optimistic bound until no other can be better.

    candidate ──► floor: products at the device's rate; weighed: all its work on one rank, shared out
              ──► split: its tensors by the splits ILP (once per tp, cp and microbatch) ──► bound of all cuts
              ──► lined up, relaxed: bounds of all cuts that mind their pieces, and memory
              ──► cut: stages and recomputation
              ──► simulated by the action lists that will run, if the bound of these stages allows
              ──► refined: all other cuts whose bound is below the best, where they are few

Each candidate waits in one queue under the least that it may take as far as it is known, and goes on from there when
it is its turn. When the first of the queue takes no less than the best simulated, nothing else is left to find. The
least bound of a candidate that was not looked at in full is what the gap is reckoned from.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoptd.errors import AutoptdError, PlanError
from autoptd.passes.sharding.sharding import parameter_splits
from autoptd.progress import Progress
from autoptd.schedule import row_of
from autoptd.search.constraints.named import read_named
from autoptd.search.constraints.options import Method
from autoptd.search.infeasible import InfeasibleSplit, nothing_fits
from autoptd.search.memory_filter import MemoryFilter
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.evaluate import Staged, prove_schedule, simulated
from autoptd.search.pipeline.exact import Effort, refine
from autoptd.search.pipeline.lower_bounds import CandidateBounds, cut_bound_s
from autoptd.search.pipeline.stages import Stages, StagesDoNotFit
from autoptd.search.sharding.cache import ShardingCache, ShardingQuery
from autoptd.search.sharding.solve import CLOSE, Splitter, key_of
from autoptd.search.sharding.tensors import Sharded, Tensors
from autoptd.search.space import candidate_space
from autoptd.search.task import EFFORT as EFFORT
from autoptd.search.task import Task as Task

_CUT = 3  # the step of a candidate from which on it is gone through with at once, until there is something to beat
_TIGHT = 1.005  # times the bound without memory: where it begins to count
_NEIGHBOURS = 30  # of the best that are tried in one round
_DIVES = 8  # candidates that are tried at first
_EXPLAINED = 4  # candidates that are looked at closely to say what is missing


@dataclass(frozen=True)
class Answer:
    """The best plan found, and how the search went."""

    staged: Staged
    tensors: Tensors
    considered: int
    visited: int
    gap: float  # no candidate takes less than (1 - gap) times the best
    question: ShardingQuery  # that `tensors` answers
    known: ShardingCache


@dataclass
class _Waiting:
    """A candidate in the queue: the least it may take by any cut, and how far it has come."""

    candidate: Candidate
    bound_s: float
    staged: Staged | None = None
    stages: Stages | None = None
    step: int = 0  # into `Planner._steps`
    split_s: float = float("inf")  # the bound by its split tensors, before memory counts
    closed: bool = False  # whether all its cuts were looked at


_COST_MEMORY = {"cuts", "headroom", "max_tp", "splits", "whole"}  # what may be fixed at memory's expense, beside meshes


class Planner:
    """Answers one task; sharded models are kept per (tp, micro, cp), and in `known` for further tasks of this graph."""

    def __init__(self, task: Task, progress: Progress, known: ShardingCache | None = None) -> None:
        assert known is None or known.folded is task.folded, "what is known is of another graph"
        self.task, self.progress = task, progress
        self.known = known or ShardingCache(task.folded)
        self._pins = read_named(task.folded, task.constraints)
        self._method = self._pins.on(task.constraints.method)
        self._memory = MemoryFilter(task.folded, task.cluster, task.precision, task.optimizer, self._method.headroom)
        self._splitter = Splitter(task, self.known, self._pins, self._method)
        self._bounds = CandidateBounds(task, self.known, self._method, self._memory)
        self._steps: tuple[Callable[[_Waiting], float], ...] = (
            self._weigh,
            self._split,
            self._line_up,
            self._relax,
            self._cut,
            self._simulate,
            self._refine,
        )
        self._waiting: Sequence[_Waiting] = ()
        self._best: Staged | None = None
        self._hopeless: list[_Waiting] = []  # those that do not fit
        self._effort = Effort(task.effort)
        self._visited = 0

    def answer(self) -> Answer:
        """Search. Raises PlanError for constraints that cannot be, DoesNotFit where nothing fits."""
        possible = self.space()
        self._splitter.check_heads()
        ignored = self._method.memory == "ignore"
        options = list(possible) if ignored else self._memory.promising(possible)
        with self.progress.stage(f"search {len(options)} ways to run on {self.task.world} devices"):
            bound_s = self._visit(options)
        best = self._best
        if best is None:
            raise self._nothing_fits(len(possible))
        c = best.candidate
        gap = max(0.0, 1 - bound_s * (1 - CLOSE * self._splitter.is_derived) / best.seconds)
        with self.progress.stage("prove the schedule"):
            prove_schedule(best.method.schedule, c.pp, c.microbatches, best.method.virtual)
        tensors = self._splitter.tensors[key_of(c)]
        return Answer(best, tensors, len(possible), self._visited, gap, self._splitter.question(c), self.known)

    def predict(self, candidate: Candidate) -> Staged:
        """Time and memory of one candidate, simulated; nothing is searched but its splits and cuts, nothing proved.

        For sweeps over many. Raises PlanError, InfeasibleSplit, DoesNotFit.
        """
        solved = self._solved(candidate)
        if isinstance(solved, AutoptdError):
            raise solved
        stages = self._stages(candidate)
        try:
            return simulated(stages.solve())
        except StagesDoNotFit:
            raise stages.shortfall().error() from None

    # ---- the queue ----

    def _visit(self, options: Sequence[Candidate]) -> float:
        """Find the best; returns what no candidate takes less than."""
        started = time.monotonic()
        self._waiting = waiting = [_Waiting(c, self._bounds.floor_s(c)) for c in options]
        self._dive(waiting)
        if self.task.constraints.include and self.task.effort is not None:
            self._climb(started)
        memory_saving = {
            replace(w.candidate, memory_saving=False): i for i, w in enumerate(waiting) if w.candidate.memory_saving
        }
        queue = [(self._hope_s(w), 0, i) for i, w in enumerate(waiting) if not w.candidate.memory_saving]
        for w in waiting:
            self._wake(w, memory_saving, queue)
        heapq.heapify(queue)
        while queue:
            hope_s, _, i = heapq.heappop(queue)
            late = self._best is not None and time.monotonic() - started > self.task.time_limit_s
            if late or hope_s >= self._best_s:
                break
            w = waiting[i]
            now_s = self._go_on(w)
            self._wake(w, memory_saving, queue)
            while self._best is None and _CUT <= w.step <= _CUT + 2 and now_s < float("inf"):
                now_s = self._go_on(w)  # to have something to beat
            if w.step < len(self._steps):
                heapq.heappush(queue, (now_s, -w.step, i))
            else:
                w.closed = now_s == float("inf")
        asleep = set(memory_saving.values())  # no quicker than their siblings, which are counted
        left = (w.bound_s for i, w in enumerate(waiting) if not w.closed and i not in asleep)
        return min([self._best_s, *left])

    def _wake(self, w: _Waiting, memory_saving: dict[Candidate, int], queue: list[tuple[float, int, int]]) -> None:
        """Where memory counts with the quickest splits, those that keep less follow: before, they are no quicker."""
        if w.candidate in memory_saving and (w.step >= _CUT - 1 if self.task.effort is None else self._is_tight(w)):
            other = memory_saving.pop(w.candidate)
            self._waiting[other].bound_s = max(w.split_s, self._waiting[other].bound_s)
            heapq.heappush(queue, (self._hope_s(self._waiting[other]), 0, other))

    @staticmethod
    def _is_tight(w: _Waiting) -> bool:
        """Whether memory makes a candidate slower, by the relaxation or its cut."""
        if w.staged is not None:
            return any(w.staged.solution.policies)
        return w.step > _CUT and w.bound_s > w.split_s * _TIGHT

    def _hope_s(self, w: _Waiting) -> float:
        """Where it stands in the queue: by its bound, and with the ramp of even chunks where no bound has one."""
        c = w.candidate
        if not row_of(c.schedule).groups or self.task.effort is None:
            return w.bound_s
        return w.bound_s * (1 + (c.pp - 1) / (c.virtual * c.microbatches))

    def _dive(self, waiting: Sequence[_Waiting]) -> None:
        """Something to beat early: of each tp the most hopeful plain candidate that fits.

        First where the fewest stages may fit, then whole tensors: deep pipelines take long to look at.
        """
        by_tp: dict[int, list[_Waiting]] = {}
        for w in waiting:
            if w.candidate == _plain(w.candidate):
                by_tp.setdefault(w.candidate.tp, []).append(w)
        for _, mine in sorted(by_tp.items(), key=lambda of: (min(w.candidate.pp for w in of[1]), of[0])):
            for w in mine:
                while w.step < _CUT and (w.step == 0 or w.bound_s < self._best_s):
                    self._go_on(w)
            for w in sorted(mine, key=lambda w: w.bound_s)[:_DIVES]:
                while _CUT <= w.step <= _CUT + 2 and w.bound_s < self._best_s:
                    self._go_on(w)
                if w.step == _CUT + 3:
                    break

    def _climb(self, started: float) -> None:
        """From the best so far to what differs in one dimension, as long as that is better: in wide spaces no bound is
        of much use before something good is known."""
        tried: set[int] = set()
        while self._best is not None:
            best = self._best
            near = [w for w in self._waiting if id(w) not in tried and _differ(w.candidate, best.candidate) == 1]
            for w in sorted(near, key=self._hope_s)[:_NEIGHBOURS]:
                tried.add(id(w))
                while w.step <= _CUT + 2 and self._hope_s(w) < self._best_s:
                    self._go_on(w)
                if time.monotonic() - started > self.task.time_limit_s:
                    return
            if self._best is best:
                return

    def _go_on(self, w: _Waiting) -> float:
        """Take the next step with a candidate; the least that it may take as far as it is known now."""
        w.step += 1
        now_s = self._steps[w.step - 1](w)
        return now_s if w.step == len(self._steps) else max(now_s, self._hope_s(w))

    @property
    def _best_s(self) -> float:
        return float("inf") if self._best is None else self._best.seconds

    def _weigh(self, w: _Waiting) -> float:
        """A bound by the model's work on one rank, shared out: before its tensors are split, which takes longest."""
        c = w.candidate
        if c.tp > 1 and not c.pools and len(self._waiting) > 1:
            whole = self._solved(replace(c, tp=1, memory_saving=False))
            if isinstance(whole, Sharded):
                w.bound_s = max(w.bound_s, self._bounds.shared_out_s(c, whole))
        return w.bound_s

    def _split(self, w: _Waiting) -> float:
        """Split its tensors; a bound of all its cuts."""
        solved = self._solved(w.candidate)
        if isinstance(solved, AutoptdError) or (w.candidate.memory_saving and self._is_quick(w.candidate, solved)):
            w.bound_s = float("inf")
            return w.bound_s
        w.split_s = w.bound_s = max(w.bound_s, self._bounds.bound_s(w.candidate, solved))
        return w.bound_s

    def _is_quick(self, c: Candidate, memory_saving: Sharded) -> bool:
        """Whether the lean splits are the quickest ones."""
        quick = self._solved(replace(c, memory_saving=False))
        return isinstance(quick, Sharded) and quick.sharding == memory_saving.sharding

    def _line_up(self, w: _Waiting) -> float:
        """A bound of all its cuts by the slowest stage of each."""
        w.stages = self._stages(w.candidate)
        return self._raised(w, w.stages.contiguous_bound_s)

    def _relax(self, w: _Waiting) -> float:
        """A bound of all its cuts by the linear relaxation."""
        assert w.stages is not None
        return self._raised(w, w.stages.relaxed_bound_s)

    def _raised(self, w: _Waiting, passes_s: Callable[[], float]) -> float:
        assert w.stages is not None
        if w.candidate.pp > 1 and not w.stages.fixed:
            microbatch_s = w.stages.sharded.seconds + 2 * sum(w.stages.least_sends_s)
            w.bound_s = max(w.bound_s, self._bounds.with_end_s(w.candidate, passes_s(), microbatch_s))
            if w.bound_s == float("inf"):
                self._hopeless.append(w)
        return w.bound_s

    def _cut(self, w: _Waiting) -> float:
        """Cut it into stages."""
        self._visited += 1
        assert w.stages is not None
        try:
            w.staged = w.stages.solve()
        except StagesDoNotFit:
            self._hopeless.append(w)
            w.bound_s = float("inf")
            return float("inf")
        return w.bound_s

    def _simulate(self, w: _Waiting) -> float:
        """Its cut as it will run, unless it cannot be the best. What is left are other cuts."""
        assert w.staged is not None
        c, costs = w.candidate, w.staged.stages
        passes = [s.forward_s for s in costs], [s.backward_s for s in costs]
        if cut_bound_s(*passes, w.staged.method.schedule, c.pp, c.microbatches, w.staged.sends_s) < self._best_s:
            played = simulated(w.staged)
            if played.seconds < self._best_s:
                self._best = played
        return w.bound_s

    def _refine(self, w: _Waiting) -> float:
        """Its other cuts; the least that those not looked at may take."""
        assert w.stages is not None
        complete = w.stages.fixed or w.candidate.pp == 1
        if not complete and self._effort:
            found, complete = refine(w.stages, self._best_s, self._effort)
            if found is not None:
                self._best = found
        rough = any(stage_cost.rough for stage_cost in w.stages.stage_costs)
        return float("inf") if complete and not rough else w.bound_s

    # ---- candidates ----

    def space(self) -> Sequence[Candidate]:
        """All that is searched: every candidate, and where memory counts, with splits that keep less as well."""
        found = self.candidates()
        if self._method.memory == "ignore":
            return found
        return [*found, *(replace(c, memory_saving=True) for c in found if c.tp > 1)]

    def candidates(self) -> Sequence[Candidate]:
        """Return every candidate that the constraints leave open, with the quickest splits."""
        return candidate_space(self.task, self._method, self.known.facts.has_attention)

    # ---- splits and stages ----

    def _solved(self, c: Candidate) -> Sharded | AutoptdError:
        """Its tensors split. Raises what stands in the way of every candidate."""
        if key_of(c) not in self._splitter.sharded:
            self._splitter.solve_between((c,) if self.task.effort is None else self._hopeful(c))
        return self._splitter.sharded[key_of(c)]

    def _hopeful(self, c: Candidate) -> Sequence[Candidate]:
        """One candidate for each size of microbatch that may still be worth splitting tensors for alike, in order."""
        found = {c.micro: c}
        for w in self._waiting:
            other = w.candidate
            if (other.tp, other.cp, other.memory_saving) == (c.tp, c.cp, c.memory_saving) and self._weigh(
                w
            ) < self._best_s:
                found.setdefault(other.micro, other)
        return [found[micro] for micro in sorted(found)]

    def _method_of(self, c: Candidate) -> Method:
        return replace(self._method, cp=c.cp, schedule=c.schedule, virtual=c.virtual, shards=c.shards)

    def _stages(self, c: Candidate) -> Stages:
        sharded = self._splitter.sharded[key_of(c)]
        assert isinstance(sharded, Sharded)
        task = self.task
        return Stages(
            self._splitter.tensors[key_of(c)],
            sharded,
            c,
            self._method_of(c),
            task.precision,
            task.optimizer,
            task.cluster,
        )

    def _nothing_fits(self, considered: int) -> AutoptdError:
        """The candidate that lacks least, with its own answer."""
        near = sorted(self._hopeless, key=lambda w: self._memory.least_bytes(w.candidate))[:_EXPLAINED]
        if not near:
            raise self._splitter.refusal()
        closest = min((self._stages(w.candidate).shortfall() for w in near), key=lambda s: max(s.missing_bytes))
        fixed = {*self.task.constraints.mesh, *(self.task.constraints.fixed & _COST_MEMORY)}
        return nothing_fits(self._memory, self.task.world, considered, closest, fixed)


def _differ(a: Candidate, b: Candidate) -> int:
    """In how many dimensions, data parallelism and microbatches following from the others."""
    pairs = [(a.tp, b.tp), (a.pp, b.pp), (a.cp, b.cp), (a.micro, b.micro), (a.zero, b.zero), (a.shards, b.shards)]
    chunks = (a.schedule, a.virtual), (b.schedule, b.virtual)
    return sum(x != y for x, y in (*pairs, chunks, (a.memory_saving, b.memory_saving), (a.pools, b.pools)))


def _plain(c: Candidate) -> Candidate:
    """The same mesh with nothing out of the ordinary."""
    return Candidate(c.dp, c.tp, c.pp, c.micro, c.microbatches, c.zero and 1, c.recompute, pools=c.pools)


def alternatives(answer: Answer, name: str) -> list[tuple[str, float | None]]:
    """(placement, seconds per microbatch) of a parameter if it were stored otherwise; None where nothing allows it."""
    tensors, sharded = answer.tensors, answer.staged.sharded
    node, placed = tensors.parameter_node(name), parameter_splits(tensors.folded, sharded.sharding)[name]

    def seconds(slot: str, label: str) -> float | None:
        if label == placed:
            return sharded.seconds
        try:
            return tensors.solve(answer.question.second_per_byte, fixed={slot: label}).seconds
        except (InfeasibleSplit, PlanError):
            return None

    return [] if node is None else [(choice.label, seconds(node.name, choice.label)) for choice in node.choices]
