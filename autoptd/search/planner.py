"""The search: every candidate, visited by its lower bound until no other can be better (`visit/visit.py`).

The gap is measured from the least bound of the candidates that were not examined in full (`visit/left_behind.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autoptd.errors import AutoptdError
from autoptd.progress import Progress
from autoptd.search.infeasible import nothing_fits
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.evaluate import Staged, prove_schedule, simulated
from autoptd.search.pipeline.stages import StagesDoNotFit
from autoptd.search.runners_up import Answer, RunnerUp, runners_up
from autoptd.search.sharding.cache import ShardingCache
from autoptd.search.sharding.solve import CLOSE
from autoptd.search.task import EFFORT as EFFORT
from autoptd.search.task import Task as Task
from autoptd.search.variants import SHARES
from autoptd.search.visit.candidate_costs import CandidateCosts
from autoptd.search.visit.visit import Visit

_EXPLAINED = 4  # candidates whose missing memory is worked out where nothing fits
_COST_MEMORY = {"cuts", "headroom", "max_tp", "offload", "splits", "whole"}  # constraints that may, beside meshes


class Planner:
    """The search for one task. `known`: what was worked out about this graph, which serves further tasks of it."""

    def __init__(self, task: Task, progress: Progress, known: ShardingCache | None = None) -> None:
        assert known is None or known.folded is task.folded, "`known` is of another graph"
        self.task, self.progress = task, progress
        self.costs = CandidateCosts(task, known or ShardingCache(task.folded))
        self.visit = Visit(self.costs, progress)

    def answer(self) -> Answer:
        """Search. Raises PlanError for impossible constraints, DoesNotFit where nothing fits."""
        possible = self.candidates()
        options = self.costs.variants.promising(possible)
        with self.progress.stage(f"search {len(options)} ways to run on {self.task.world} devices"):
            bound_s = self.visit.run(options)
            if self.visit.best is None and (others := self.costs.variants.on_host(self.visit.too_large)):
                bound_s = self.visit.run(others)
        if self.visit.best is None:
            raise self._nothing_fits(len(possible))
        planned = self._runners_up() if self.task.others else ()
        best, c = self.visit.best, self.visit.best.candidate
        if c.offload and not self.costs.method.offload:  # no more of it than each rank needs
            trimmed = simulated(self.costs.stages(c).trimmed(best, (0.0, *SHARES)))
            best = min(trimmed, best, key=lambda staged: staged.seconds)  # of a quick host more may be quicker
        gap = max(0.0, 1 - bound_s * (1 - CLOSE * self.costs.splitter.is_derived) / best.seconds)
        with self.progress.stage("prove the schedule"):
            prove_schedule(best.method.schedule, c.pp, c.microbatches, best.method.virtual)
        tensors, question, visited = self.costs.tensors(c), self.costs.splitter.question(c), self.visit.visited
        return Answer(best, tensors, len(possible), visited, gap, question, self.costs.known, planned)

    def _runners_up(self) -> tuple[RunnerUp, ...]:
        """Plan the runners-up; one that is better becomes the best."""
        assert self.visit.best is not None
        with self.progress.stage("plan the runners-up"):
            best = self.visit.best.candidate
            found = runners_up(self.visit.queue.entries, best, self._tried_s)
            return found if self.visit.best.candidate == best else self._runners_up()

    def _tried_s(self, c: Candidate) -> float:
        found = self.predict(c)
        self.visit.best = min(self.visit.best or found, found, key=lambda staged: staged.seconds)
        return found.seconds

    def predict(self, candidate: Candidate) -> Staged:
        """Split, cut and simulate one candidate; its schedule is not proved.

        Used for sweeps over many candidates. Raises PlanError, InfeasibleSplit, DoesNotFit.
        """
        solved = self.costs.solved(candidate)
        if isinstance(solved, AutoptdError):
            raise solved
        stages = self.costs.stages(candidate)
        try:
            return min(map(simulated, stages.solutions()), key=lambda staged: staged.seconds)
        except StagesDoNotFit:
            raise stages.shortfall().error() from None

    def space(self) -> Sequence[Candidate]:
        """Return all candidates that may be searched, with their variants."""
        return self.costs.variants.every(self.candidates())

    def candidates(self) -> Sequence[Candidate]:
        """Return every candidate that the constraints leave open, with the fastest splits."""
        return self.costs.candidates()

    def _nothing_fits(self, considered: int) -> AutoptdError:
        """Return the refusal, explained by the candidate that lacks least."""
        order = sorted(self.visit.too_large, key=lambda c: (self.costs.memory.least_bytes(c), -c.offload))
        if not order:
            return self.costs.refusal()
        missing = (self.costs.stages(c).shortfall() for c in order[:_EXPLAINED])
        closest = min(missing, key=lambda s: s.worst_bytes)
        fixed = {*self.task.constraints.mesh, *(self.task.constraints.fixed & _COST_MEMORY)}
        all_tried = not self.visit.queue.pop()
        return nothing_fits(self.costs.memory, self.task.world, considered, closest, fixed, all_tried=all_tried)
