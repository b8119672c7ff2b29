"""The search: for each tp and microbatch size the splits ILP, for each mesh the cuts, best simulated wins.

tp, micro ──► splits ILP ──► Sharded ─┐
dp, pp, zero, recompute ──────────────┴─► bound ─► cuts ─► step time ─► the best few simulated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES
from autoptd.errors import AutoptdError, DoesNotFit, PlanError
from autoptd.passes.fold import Folded
from autoptd.passes.graph import info, op_call, source_line
from autoptd.passes.opcall import Sizes
from autoptd.passes.sharding import ops_of
from autoptd.passes.trace import BATCH, SEQUENCE
from autoptd.passes.work import work
from autoptd.progress import Progress
from autoptd.schedule import training_step
from autoptd.search.legal import legal_strategies
from autoptd.search.meshes import Candidate, Limits, Searched, candidates, divisors, search
from autoptd.search.room import Room
from autoptd.search.splits import InfeasibleSplit
from autoptd.search.stages import Staged, Stages, simulated
from autoptd.search.tensors import Sharded, Tensors
from autoptd.search.wishes import Wishes

_TOKENS = 65536  # of the largest microbatch that is considered
_SIMULATED = 4  # candidates that the bound finds best


@dataclass(frozen=True)
class Task:
    """What is to be planned."""

    folded: Folded
    cluster: Cluster
    world: int
    batch: int
    sizes: Mapping[sympy.Symbol, int]  # of every symbol but b
    precision: str
    optimizer: str
    wishes: Wishes


@dataclass(frozen=True)
class Answer:
    """The best plan found, and how the search went."""

    staged: Staged
    tensors: Tensors
    considered: int
    visited: int
    gap: float


class Planner:
    """Answers one task; sharded models are kept per (tp, micro)."""

    def __init__(self, task: Task, progress: Progress) -> None:
        self.task, self.progress = task, progress
        self._tensors: dict[tuple[int, int], Tensors] = {}
        self._sharded: dict[tuple[int, int], Sharded | AutoptdError] = {}
        self._legal: dict[int, Mapping[str, dict]] = {}
        self._room = Room(task.folded, task.cluster, task.precision, task.optimizer)

    def answer(self) -> Answer:
        """Search. Raises PlanError for wishes that cannot be, DoesNotFit where nothing fits."""
        possible = self._candidates()
        self._check_heads()
        options = self._room.promising(possible)
        with self.progress.stage(f"split tensors for {len({(c.tp, c.micro) for c in options})} (tp, microbatch) pairs"):
            for tp, micro in sorted({(c.tp, c.micro) for c in options}):
                self._shard(tp, micro)
        with self.progress.stage(f"cut stages for up to {len(options)} meshes"):
            found = search(options, self._lower_bound, self._evaluate, keep=_SIMULATED, slack=0.02)
        if not found.best:
            raise self._nothing_fits(found, len(possible))
        with self.progress.stage(f"simulate the best {len(found.best)}"):
            best = min((simulated(f.result) for f in found.best), key=lambda s: s.seconds)
            training_step("1f1b", best.candidate.pp, best.candidate.microbatches)  # proves that it cannot block
        key = best.candidate.tp, best.candidate.micro
        return Answer(best, self._tensors[key], len(possible), found.visited, found.gap)

    # ---- candidates ----

    def _candidates(self) -> Sequence[Candidate]:
        task = self.task
        wish = dict(task.wishes.mesh)
        node = task.cluster.gpus_per_node or task.world
        tp_sizes = {d for d in divisors(task.world) if d <= node}
        if isinstance(wish.get("tp"), int):
            tp_sizes.add(int(wish["tp"]))
        length = task.sizes.get(SEQUENCE, 1)
        limits = Limits(
            world=task.world,
            batch=task.batch,
            segments=len(task.folded.segments),
            tp_sizes=tuple(sorted(tp_sizes)),
            zeros=(1, 0) if "zero" in wish else (1,),
            recomputes=("auto", "none", "full") if "recompute" in wish else ("auto",),
            max_micro=max(8, _TOKENS // max(1, length)),
        )
        found = candidates(limits, wish)
        if "micro" in wish:
            return found
        return [c for c in found if c.micro & (c.micro - 1) == 0]

    def _check_heads(self) -> None:
        """A tp that was asked for must split the attention: anything else is a mistake, not a plan."""
        tp = self.task.wishes.mesh.get("tp", 1)
        if tp == 1:
            return
        for kind, options in self._legal_for(int(tp)).items():
            for i, node in ops_of(self.task.folded.representatives[kind]):
                if work(op_call(node)).kind == "attention" and all(s.ranks == 1 for s in options[i]):
                    heads = info(node).shape[1]
                    sizes = [d for d in divisors(int(heads)) if self.task.world % d == 0]
                    raise PlanError(
                        f"{heads} attention heads do not divide by tp {tp}",
                        where=f"{source_line(node)}\nfix['tp']",
                        fix=f"use tp {', '.join(map(str, sizes))}",
                    )

    # ---- tensor level ----

    def _legal_for(self, tp: int) -> Mapping[str, dict]:
        if tp not in self._legal:
            sizes = Sizes({BATCH: 1, **self.task.sizes}, BATCH)
            self._legal[tp] = legal_strategies(
                self.task.folded, tp, sizes, sequence_parallel=self.task.wishes.sequence_parallel
            )
        return self._legal[tp]

    def _shard(self, tp: int, micro: int) -> None:
        task = self.task
        microbatches = max(1, task.batch * tp // (task.world * micro))
        tensors = Tensors(
            task.folded,
            task.cluster,
            tp,
            {BATCH: micro, **task.sizes},
            microbatches=microbatches,
            static_bytes=COMPUTE_BYTES[task.precision] + 4 * MAIN_BYTES[task.precision],
            pins=task.wishes.splits,
            legal=self._legal_for(tp),
            sequence_parallel=task.wishes.sequence_parallel,
        )
        self._tensors[tp, micro] = tensors
        try:
            self._sharded[tp, micro] = tensors.solve()
        except (InfeasibleSplit, PlanError) as error:
            if "tp" in task.wishes.mesh or len({c for c, _ in self._sharded}) == 0:
                raise
            self._sharded[tp, micro] = error

    # ---- stage level ----

    def _lower_bound(self, c: Candidate) -> float:
        """Perfectly even stages: (m - 1) · total / p + total."""
        sharded = self._sharded[c.tp, c.micro]
        if isinstance(sharded, AutoptdError):
            return float("inf")
        return (c.microbatches - 1) * sharded.seconds / c.pp + sharded.seconds

    def _evaluate(self, c: Candidate) -> tuple[float, Staged]:
        sharded = self._sharded[c.tp, c.micro]
        assert isinstance(sharded, Sharded)
        tensors = self._tensors[c.tp, c.micro]
        staged = Stages(tensors, sharded, c, self.task.precision, self.task.optimizer).solve()
        return staged.seconds, staged

    def _nothing_fits(self, found: Searched[Staged], considered: int) -> DoesNotFit:
        """The candidate that lacks least, with its own answer."""
        if not found.rejected:
            raise PlanError("no mesh can be split as was asked for", fix="fix fewer dimensions")
        candidate, error = min(found.rejected, key=lambda r: max(getattr(r[1], "missing_bytes", (0.0,))))
        return self._room.refusal(self.task.world, considered, candidate, error, self.task.wishes.mesh)


def alternatives(answer: Answer, name: str) -> list[tuple[str, float | None]]:
    """(placement, seconds per microbatch) of a parameter if it were stored otherwise; None where nothing allows it."""
    tensors = answer.tensors
    found: list[tuple[str, float | None]] = []
    for label in tensors.parameter_labels(name):
        pinned = Tensors(
            tensors.folded,
            tensors.cluster,
            tensors.ranks,
            tensors.values,
            microbatches=tensors.microbatches,
            static_bytes=tensors.static_bytes,
            pins={**tensors.pins, name: label},
            legal=tensors.legal,
            sequence_parallel=tensors.sequence_parallel,
        )
        try:
            found.append((label, pinned.solve().seconds))
        except (InfeasibleSplit, PlanError):
            found.append((label, None))
    return found
