"""The search: for each tp and microbatch size the splits ILP, for each mesh the cuts, best simulated wins.

tp, micro ──► splits ILP ──► Sharded ─┐
dp, pp, zero, recompute ──────────────┴─► bound ─► cuts ─► step time ─► the best few simulated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import sympy

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES
from autoptd.errors import AutoptdError, DoesNotFit, PlanError
from autoptd.passes.fold import Folded
from autoptd.passes.graph import info, op_call, source_line
from autoptd.passes.sharding import ops_of
from autoptd.passes.trace import SEQUENCE
from autoptd.passes.work import work
from autoptd.progress import Progress
from autoptd.schedule import prove
from autoptd.search.kinds import PARTIAL
from autoptd.search.known import Known, Legal, Question
from autoptd.search.meshes import Candidate, Limits, Searched, candidates, divisors, search
from autoptd.search.room import Room
from autoptd.search.splits import InfeasibleSplit
from autoptd.search.stages import Staged, Stages, action_lists, simulated
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
    question: Question  # that `tensors` answers
    known: Known


class Planner:
    """Answers one task; sharded models are kept per (tp, micro), and in `known` for further tasks of this graph."""

    def __init__(self, task: Task, progress: Progress, known: Known | None = None) -> None:
        assert known is None or known.folded is task.folded, "what is known is of another graph"
        self.task, self.progress = task, progress
        self.known = known or Known(task.folded)
        self._tensors: dict[tuple[int, int], Tensors] = {}
        self._sharded: dict[tuple[int, int], Sharded | AutoptdError] = {}
        self._method = task.wishes.method
        self._room = Room(task.folded, task.cluster, task.precision, task.optimizer)

    def answer(self) -> Answer:
        """Search. Raises PlanError for wishes that cannot be, DoesNotFit where nothing fits."""
        possible = self.candidates()
        self._check_heads()
        ignored = self._method.memory == "ignore"
        options = list(possible) if ignored else self._room.promising(possible)
        with self.progress.stage(f"split tensors for {len({(c.tp, c.micro) for c in options})} (tp, microbatch) pairs"):
            for tp, micro in sorted({(c.tp, c.micro) for c in options}):
                self._shard(tp, micro)
        with self.progress.stage(f"cut stages for up to {len(options)} meshes"):
            found = search(options, self._lower_bound, self._evaluate, keep=_SIMULATED, slack=0.02)
        if not found.best:
            raise self._nothing_fits(found, len(possible))
        with self.progress.stage(f"simulate the best {len(found.best)}"):
            best = min((simulated(f.result) for f in found.best), key=lambda s: s.seconds)
            c, method = best.candidate, self._method
            _prove(method.schedule, c.pp, c.microbatches, method.virtual)
        tensors, question = self._tensors[c.tp, c.micro], self._question(c.tp, c.micro)
        return Answer(best, tensors, len(possible), found.visited, found.gap, question, self.known)

    def predict(self, candidate: Candidate) -> Staged:
        """Time and memory of one candidate, simulated; nothing is searched but its splits and cuts, nothing proved.

        For sweeps over many. Raises PlanError, InfeasibleSplit, DoesNotFit.
        """
        if (candidate.tp, candidate.micro) not in self._sharded:
            self._shard(candidate.tp, candidate.micro)
        solved = self._sharded[candidate.tp, candidate.micro]
        if isinstance(solved, AutoptdError):
            raise solved
        return simulated(self._evaluate(candidate)[1])

    # ---- candidates ----

    def candidates(self) -> Sequence[Candidate]:
        task = self.task
        wish = dict(task.wishes.mesh)
        cp = self._method.cp
        if task.world % cp:
            raise PlanError(f"world {task.world} is not divisible by cp {cp}", where="fix['cp']", fix="use a divisor")
        world = task.world // cp
        node = task.cluster.gpus_per_node or world
        tp_sizes = {d for d in divisors(world) if d <= node}
        if isinstance(wish.get("tp"), int):
            tp_sizes.add(int(wish["tp"]))
        length = task.sizes.get(SEQUENCE, 1)
        limits = Limits(
            world=world,
            batch=task.batch,
            segments=len(task.folded.segments),
            tp_sizes=tuple(sorted(tp_sizes)),
            zeros=(1, 0, 2, 3) if "zero" in wish else (1,),
            recomputes=("auto", "none", "full", "selective", "ops") if "recompute" in wish else ("auto",),
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

    @cached_property
    def _sizes(self) -> Mapping[sympy.Symbol, int]:
        """Of one rank: its share of a sample's tokens."""
        sizes, cp = dict(self.task.sizes), self._method.cp
        if cp > 1:
            if sizes.get(SEQUENCE, 1) % cp:
                raise PlanError(
                    f"cp {cp} does not divide the sequence of {sizes.get(SEQUENCE, 1)} tokens",
                    where="fix['cp']",
                    fix="use a divisor of the sequence length",
                )
            sizes[SEQUENCE] //= cp
        return sizes

    # ---- tensor level ----

    def _legal_for(self, tp: int) -> Legal:
        return self.known.legal(tp, tuple(self._sizes.items()), self.task.wishes.sequence_parallel)

    def _question(self, tp: int, micro: int) -> Question:
        task, wanted = self.task, self.task.wishes.mesh.get("recompute")
        return Question(
            cluster=task.cluster,
            tp=tp,
            micro=micro,
            values=tuple(self._sizes.items()),
            microbatches=max(1, task.batch * tp // (task.world * micro)),
            static_bytes=COMPUTE_BYTES[task.precision] + 4 * MAIN_BYTES[task.precision],
            cp=self._method.cp,
            kernels=self._method.kernels,
            attention=self._method.attention,
            pins=tuple(task.wishes.splits.items()),
            sequence_parallel=task.wishes.sequence_parallel,
            policies=tuple(policy for policy in PARTIAL if policy == wanted),
        )

    def _shard(self, tp: int, micro: int) -> None:
        tensors, solved = self.known.sharded(self._question(tp, micro))
        if isinstance(solved, AutoptdError):
            if not isinstance(solved, (InfeasibleSplit, PlanError)):
                raise solved
            if "tp" in self.task.wishes.mesh or not self._sharded:
                raise solved
        self._tensors[tp, micro], self._sharded[tp, micro] = tensors, solved

    # ---- stage level ----

    def _lower_bound(self, c: Candidate) -> float:
        """Perfectly even stages of total time T: m T / p, and a ramp of p - 1 chunks."""
        sharded = self._sharded[c.tp, c.micro]
        if isinstance(sharded, AutoptdError):
            return float("inf")
        seconds = sharded.compute_seconds if "tp" in self._method.overlap else sharded.seconds
        return (c.microbatches + (c.pp - 1) / self._method.virtual) * seconds / c.pp

    def _evaluate(self, c: Candidate) -> tuple[float, Staged]:
        sharded = self._sharded[c.tp, c.micro]
        assert isinstance(sharded, Sharded)
        tensors = self._tensors[c.tp, c.micro]
        staged = Stages(tensors, sharded, c, self._method, self.task.precision, self.task.optimizer).solve()
        return staged.seconds, staged

    def _nothing_fits(self, found: Searched[Staged], considered: int) -> DoesNotFit:
        """The candidate that lacks least, with its own answer."""
        if not found.rejected:
            raise PlanError("no mesh can be split as was asked for", fix="fix fewer dimensions")
        candidate, error = min(found.rejected, key=lambda r: max(getattr(r[1], "missing_bytes", (0.0,))))
        return self._room.refusal(self.task.world, considered, candidate, error, self.task.wishes.mesh)


@lru_cache(maxsize=256)
def _prove(kind: str, stages: int, microbatches: int, virtual: int) -> None:
    """That the schedule cannot block. Raises StuckSchedule."""
    prove(action_lists(kind, stages, microbatches, virtual))


def alternatives(answer: Answer, name: str) -> list[tuple[str, float | None]]:
    """(placement, seconds per microbatch) of a parameter if it were stored otherwise; None where nothing allows it."""
    found: list[tuple[str, float | None]] = []
    for label in answer.tensors.parameter_labels(name):
        pins = tuple({**dict(answer.question.pins), name: label}.items())
        _, solved = answer.known.sharded(replace(answer.question, pins=pins, policies=()))
        if isinstance(solved, AutoptdError) and not isinstance(solved, (InfeasibleSplit, PlanError)):
            raise solved
        found.append((label, None if isinstance(solved, AutoptdError) else solved.seconds))
    return found
