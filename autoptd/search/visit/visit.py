"""A visit of candidates, each by its lower bound until no other can be better.

    candidate ──► floor: its matrix products at the device's rate
              ──► work: all work of the model on one rank, divided by the ranks
              ──► split: its tensors by the splits ILP (once per tp, cp and microbatch) ──► bound of all cuts
              ──► family: all cuts in fractions, with the least memory of any schedule, sharding and offload
              ──► contiguous: all cuts by the least seconds of each run of segments, for one chunk per rank
              ──► relaxed: all in fractions with its own memory, then with the critical paths of its schedule
              ──► measured: all cuts by the seconds of each run with the recomputation that fits, or by whole segments
              ──► cut into stages, and simulated by the action lists that will run unless a bound excludes it
              ──► refined: all other cuts whose bound is below the best, where they are few

Candidates wait in one queue (`candidate_queue.py`). The first one takes its next step and goes back into the queue,
unless its bound is not below the best simulated time. Once its turn ended early it takes the first `_CUT` steps only.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Sequence

from autoptd.errors import AutoptdError
from autoptd.progress import Progress
from autoptd.search.memory_prices import FamilyBounds, MemoryPrices
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.evaluate import Staged, simulated
from autoptd.search.pipeline.exact import Effort, refine, sums_by_chunk
from autoptd.search.pipeline.stages import Stages, StagesDoNotFit
from autoptd.search.sharding.tensors import Sharded
from autoptd.search.visit.candidate_costs import CandidateCosts
from autoptd.search.visit.candidate_queue import NEVER, CandidateQueue, QueueEntry
from autoptd.search.visit.left_behind import LeftBehind

_CUT = 3  # steps before the bounds that read memory, which take longer
_SIMULATED = _CUT + 3  # steps before the simulation
_REFUSALS = 64  # candidates that may fit, but of which no cut that is tried does, before a search without a plan ends
_STEPS = (
    "_bound_by_work",
    "_split",
    "_bound_family",
    "_bound_contiguous",
    "_bound_relaxed",
    "_bound_measured",
    "_simulate",
    "_refine",
)


class Visit:
    """A visit of candidates of one task, and the best plan that it has found so far."""

    def __init__(self, costs: CandidateCosts, progress: Progress) -> None:
        self.costs, self.progress, self.task = costs, progress, costs.task
        self._bounds, self._variants, self._method = costs.bounds, costs.variants, costs.method
        self.best: Staged | None = None
        self.queue = CandidateQueue()
        self.visited = 0  # candidates whose cuts into stages were measured
        self.too_large: list[Candidate] = []  # those that do not fit
        self._sharded_state: dict[Candidate, QueueEntry] = {}  # the entries with ZeRO 1 over all ranks
        self._alike: dict[Hashable, dict[int, list[QueueEntry]]] = {}  # those with equal splits, by their microbatch
        self._prices = MemoryPrices()
        self._families = FamilyBounds(self._family_passes_s)
        self._effort = Effort(self.task.effort)

    def run(self, candidates: Iterable[Candidate]) -> float:
        """Visit candidates until none is left, or no time; return a lower bound of all that were ever visited."""
        start_s, self.queue.refused, late = time.monotonic(), 0, False
        for c in candidates:
            self.queue.add(entry := QueueEntry(c, self._bounds.floor_s(c)))
            if c.zero == 1 and not c.shards:
                self._sharded_state[c] = entry
            self._families.add(c)
            self._alike.setdefault(self.costs.splitter.alike(c), {}).setdefault(c.micro, []).append(entry)
        while (e := self.queue.pop()) is not None:
            late = self.best is not None and time.monotonic() - start_s > self.task.time_limit_s
            hopeless = self.best is None and self.task.effort is not None and self.queue.refused >= _REFUSALS
            if late or hopeless:
                break
            ended = e.step >= _CUT and self.task.effort is not None and self.queue.has_ended(e)
            if e.bound_s >= self.best_s or ended:
                continue
            priority_s = self._advance(e)
            while self.best is None and _CUT <= e.step <= _SIMULATED and priority_s < NEVER:
                priority_s = self._advance(e)  # a first plan, to compare the others with
            self._enqueue_variants(e)
            if e.step < len(_STEPS):
                self.queue.put(e, priority_s)
            else:
                e.closed = priority_s == NEVER
        if not late:
            self._refine_best()
        return self._least_s()

    def _refine_best(self) -> None:
        """Give the best candidate all of the effort, if others took some: its choices, fixed, then find no more."""
        best = self.best.candidate if self.best is not None else None
        e = next((e for e in self.queue.entries if e.candidate == best), None)
        if e is not None and self.task.effort is not None and e.effort < self.task.effort:
            self._effort = Effort(self.task.effort)
            e.closed = self._refine(e) == NEVER

    def _least_s(self) -> float:
        """Return a lower bound of all candidates."""
        for e in self.queue.entries:
            if (lighter := self._lighter(e.candidate)) and self._is_dominated(e):
                e.bound_s, e.closed = max(e.bound_s, lighter.bound_s), e.closed or lighter.closed
        if self.best is not None and not self.queue.pop():  # in time
            LeftBehind(self.best_s, self._bounds, self.costs.stages).raise_bounds(self.queue.entries)
        return min([self.best_s, *(e.bound_s for e in self.queue.entries if not e.closed)])

    def _enqueue_variants(self, e: QueueEntry) -> None:
        """Enqueue the variants of a candidate once memory limits it. Others are no faster than the candidate itself."""
        every = self.task.effort is None and e.step >= _CUT - 1
        on_host = every or (e.stages is not None and e.stages.copies_quickly)
        known, e.limits = e.limits, (every or e.is_full or e.is_short, e.is_full, on_host)
        for c in self._variants.of(e.candidate, on_host) if e.limits[0] and e.limits != known else ():
            if c not in self.queue and (c.offload or every or e.is_full):
                passes_s = 0.0 if self.best is None else self._families.known_s(c, self._variants.most_offload(c))
                split_s = e.split_s if c.offload == e.candidate.offload else 0.0
                floor_s = max(self._bounds.floor_s(c), self._bounds.with_end_s(c, passes_s), split_s)
                self.queue.add(QueueEntry(c, floor_s, is_variant=e.is_varied or e.bound_s < NEVER, turn=e.turn))

    def _advance(self, e: QueueEntry) -> float:
        """Take a candidate's next step; return its new place in the queue."""
        e.step += 1
        now_s = getattr(self, _STEPS[e.step - 1])(e)
        return now_s if e.step == len(_STEPS) else max(now_s, e.bound_s)

    @property
    def best_s(self) -> float:
        return NEVER if self.best is None else self.best.seconds

    def _passes_to_beat_s(self, c: Candidate) -> float:
        """Return the seconds from which the passes of a candidate make it no better than the best."""
        return self.best_s - self._bounds.with_end_s(c, 0.0)

    # ---- steps: each returns a lower bound of the cuts that are left ----

    def _bound_by_work(self, e: QueueEntry) -> float:
        """Bound by the model's work on one rank, divided by the ranks: cheap, before tensors are split."""
        c = e.candidate
        if c.tp > 1 and not c.pools and len(self.queue.entries) > 1 and not e.is_weighed:
            e.is_weighed = True
            if whole := self.costs.on_one_rank(c, self._microbatches_like):
                e.bound_s = max(e.bound_s, self._bounds.shared_out_s(c, whole))
        return e.bound_s

    def _split(self, e: QueueEntry) -> float:
        """Split its tensors, and bound all cuts by what the splits cost."""
        c, solved = e.candidate, self.costs.solved(e.candidate, self._microbatches_like)
        fast = self.costs.solved(c._replace(memory_saving=False), self._microbatches_like) if c.memory_saving else None
        if isinstance(solved, AutoptdError) or (isinstance(fast, Sharded) and fast.sharding == solved.sharding):
            e.bound_s = NEVER  # or equal to the fast splits
            return NEVER
        e.split_s = e.bound_s = max(e.bound_s, self._bounds.bound_s(c, solved))
        return e.bound_s

    def _lighter(self, c: Candidate) -> QueueEntry | None:
        """Return the same candidate with its state sharded over all ranks, whose passes take no longer, in less
        memory; None if that is itself, or none of the candidates."""
        is_heavier = c.zero == 0 or (c.zero == 1 and c.shards)
        return self._sharded_state.get(c._replace(zero=1, shards=0)) if is_heavier else None

    def _is_dominated(self, e: QueueEntry) -> bool:
        """Return whether the lighter candidate is known to end its steps no later either, by even shares."""
        c = e.candidate  # passes may hide a part of the end, and devices may differ
        unknown = self.task.effort is None or c.pools or "dp" in self._method.overlap
        if unknown or (lighter := self._lighter(c)) is None:
            return False
        return self._bounds.end_s(lighter.candidate) <= self._bounds.end_s(c)

    def _bound_family(self, e: QueueEntry) -> float:
        """Bound by the relaxation with the least memory that any schedule and sharding of its mesh takes."""
        c = e.candidate
        if c.pp == 1 or self._method.stages == "even" or self._method.starts:
            return e.bound_s
        if self._is_dominated(e):
            e.step = len(_STEPS)
            return e.bound_s
        needed_s = self._passes_to_beat_s(c)
        for offload in dict.fromkeys((self._variants.most_offload(c), c.offload)):  # the first excludes all at once
            if e.passes_s < needed_s:
                e.passes_s = max(e.passes_s, self._families.passes_s(c._replace(offload=offload), needed_s))
        e.is_short = self._bounds.with_end_s(c, e.passes_s) > e.bound_s
        return self._raise_bound(e, self._bounds.with_end_s(c, e.passes_s))

    def _family_passes_s(self, lightest: Candidate, kinds: Collection[tuple[str, int]], needed_s: float) -> float:
        return self.costs.stages(lightest).memory_bound(kinds, self._prices, needed_s).seconds

    def _bound_contiguous(self, e: QueueEntry) -> float:
        """Bound all cuts that respect segments, by the least seconds of each run of them."""
        e.stages = self.costs.stages(e.candidate)
        return self._bound_cuts(e, e.stages, measured=False)

    def _bound_relaxed(self, e: QueueEntry) -> float:
        """Bound all cuts by the linear relaxation, first without critical paths, which take longer."""
        c, stages = e.candidate, e.stages
        assert stages is not None
        if stages.fixed or self._bound_by_lighter(e):
            return e.bound_s
        found = stages.memory_bound({(c.schedule, c.virtual)}, self._prices, self._passes_to_beat_s(c))
        e.passes_s = max(e.passes_s, found.seconds)
        if self._raise_bound(e, self._bounds.with_end_s(c, e.passes_s)) >= self.best_s:
            e.is_full = True  # memory may be what raises it
            return e.bound_s
        e.reduced_s, is_full, *_ = stages.relaxed_bound
        e.is_full = e.is_full or is_full
        return self._raise_bound(e, self._bounds.with_end_s(c, e.reduced_s))

    def _bound_measured(self, e: QueueEntry) -> float:
        """Bound all cuts by the seconds of each run with the recomputation that fits; chunks that share a rank's
        memory, by what ranks can hold."""
        self.visited += 1
        if (stages := e.stages) is None or e.candidate.virtual == 1 or stages.fixed or self.best is None:
            return self._bound_cuts(e, stages or self.costs.stages(e.candidate), measured=True)
        is_excluded = stages.excludes(self._passes_to_beat_s(e.candidate))
        return self._raise_bound(e, self.best_s if is_excluded else 0.0)

    def _bound_cuts(self, e: QueueEntry, stages: Stages, *, measured: bool) -> float:
        c = e.candidate
        if stages.fixed or c.pp == 1:
            is_only = stages.fixed or stages.count == 1
            return self._bound_only_cut(e, stages) if measured and is_only else e.bound_s
        if self._bound_by_lighter(e):
            return e.bound_s
        passes_s, is_full, *_ = stages.least(measured=measured)
        e.passes_s, e.is_full = max(e.passes_s, passes_s), e.is_full or is_full
        return self._raise_bound(e, self._bounds.with_end_s(c, e.passes_s))

    def _bound_only_cut(self, e: QueueEntry, stages: Stages) -> float:
        """Bound by the only possible cut, with the recomputation that fits."""
        try:
            (staged,) = stages.solutions()
        except StagesDoNotFit:
            return self._raise_bound(e, NEVER)
        e.is_full = e.is_full or any(staged.solution.policies)
        is_rough = any(stage_cost.rough for stage_cost in stages.stage_costs)
        return e.bound_s if is_rough else self._raise_bound(e, staged.least_s)

    def _bound_by_lighter(self, e: QueueEntry) -> bool:
        """Return whether its lighter candidate raised its bound: it takes this step when its turn comes again."""
        c, lighter = e.candidate, self._lighter(e.candidate)
        if lighter is None:
            return False
        before_s, e.is_full = e.bound_s, e.is_full or lighter.is_full
        known_s = max(lighter.passes_s, lighter.reduced_s * self._bounds.reduces_no_faster(c, lighter.candidate))
        if self._raise_bound(e, self._bounds.with_end_s(c, known_s)) == before_s:
            return False
        e.step -= 1
        return True

    def _raise_bound(self, e: QueueEntry, seconds: float) -> float:
        e.bound_s = max(e.bound_s, seconds)
        if e.bound_s == NEVER:
            e.is_full = True
            self.too_large.append(e.candidate)
        return e.bound_s

    def _simulate(self, e: QueueEntry) -> float:
        """Cut it into stages, and simulate them as they will run. Only other cuts are left then."""
        try:
            assert e.stages is not None
            # unless memory is known to limit it, recomputation of any of its cuts tells whether variants follow
            solutions = e.stages.solutions(self._passes_to_beat_s(e.candidate) if e.is_full else NEVER)
        except StagesDoNotFit as refusal:
            e.is_full = True
            if refusal.every_cut:
                return self._raise_bound(e, NEVER)
            self.too_large.append(e.candidate)  # but other cuts may fit
            self.queue.refused += 1
            return e.bound_s
        self.queue.count(e)  # those that do not fit say nothing about others
        for staged in solutions:
            e.is_full = e.is_full or any(staged.solution.policies)
            if staged.least_s < self.best_s:
                found = simulated(staged)
                e.found_s = min(e.found_s, found.seconds)
                if found.seconds < self.best_s:
                    self.best = found
                    self.queue.prefer(found.candidate)
                    self.progress.say(f"best so far {found.seconds:.3g} s a step")
        return e.bound_s

    def _refine(self, e: QueueEntry) -> float:
        """Simulate its other cuts that may be better; infinite where none is left."""
        assert e.stages is not None
        complete, e.effort = e.stages.fixed or e.candidate.pp == 1, self._effort.left or 0
        if not complete and self._effort:
            found, complete = refine(e.stages, self.best_s, self._effort)
            if found is not None:
                self.best, e.found_s = found, found.seconds
        rough = any(stage_cost.rough for stage_cost in e.stages.stage_costs)
        rough = rough or (sums_by_chunk(e.stages) and e.is_full)
        return NEVER if complete and not rough else e.bound_s

    # ---- candidates that are split together ----

    def _microbatches_like(self, c: Candidate) -> Sequence[Candidate]:
        """Return one candidate per microbatch size, in order, whose tensors may still be worth splitting."""
        found = {c.micro: c}
        alike = self._alike.get(self.costs.splitter.alike(c), {}) if self.task.effort is not None else {}
        for micro, entries in alike.items():
            if any(self._bound_by_work(e) < self.best_s for e in entries):
                found.setdefault(micro, entries[0].candidate)
        return [found[micro] for micro in sorted(found)]
