"""The search: the space of candidates, visited by optimistic bound until no other can be better.

    candidate ──► floor: products at the device's rate
              ──► split: its tensors by the splits ILP (once per tp, cp and microbatch) ──► bound of all cuts
              ──► cut: stages and recomputation ──► bound of these stages
              ──► simulated by the action lists that will run
              ──► refined: all other cuts whose bound is below the best, where they are few

Each candidate waits in one queue under the least that it may take as far as it is known, and goes on from there when
it is its turn. When the first of the queue takes no less than the best simulated, nothing else is left to find. The
least bound of a candidate that was not looked at in full is what the gap is reckoned from.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES, optimizer_step_bytes
from autoptd.cost_models.op_time import memory_s
from autoptd.errors import AutoptdError, PlanError
from autoptd.passes.fold import Folded
from autoptd.passes.graph import info, op_call, source_line
from autoptd.passes.sharding import Sharding, ops_of
from autoptd.passes.trace import SEQUENCE
from autoptd.passes.work import work
from autoptd.progress import Progress
from autoptd.schedule import prove
from autoptd.search.bounds import cut_bound_s, even_bound_s
from autoptd.search.kinds import PARTIAL, floor_s
from autoptd.search.known import Known, Legal, Question
from autoptd.search.meshes import Candidate, Limits, candidates, divisors
from autoptd.search.pins import allowed, read_pins
from autoptd.search.refine import Effort, refine
from autoptd.search.room import Room
from autoptd.search.splits import InfeasibleSplit
from autoptd.search.staged import Staged, action_lists, simulated
from autoptd.search.stages import NoRoom, Stages
from autoptd.search.tensors import Sharded, Tensors
from autoptd.search.wishes import Method, Wishes, schedules_and_chunks

_TOKENS = 65536  # of the largest microbatch that is considered
EFFORT = 200  # cuts beyond the first of each candidate that are simulated, unless more is asked for
CLOSE = (
    1e-3  # by how much splits may miss the best, relative, where microbatches of two sizes are solved for those between
)
_CUT = 3  # the step of a candidate from which on it is gone through with at once, until there is something to beat
_DIVES = 8  # candidates that are tried at first
_EXPLAINED = 4  # candidates that are looked at closely to say what is missing
_RANKS_OF_CONTEXT = 64  # most ranks that share a sample's tokens


@dataclass(frozen=True)
class Task:
    """What is to be planned.

    `effort`: cuts beyond the first of each candidate that may be simulated; None is as many as it takes to be exact.
    `time_limit_s`: of the search, once it has found a plan.
    """

    folded: Folded
    cluster: Cluster
    world: int
    batch: int
    sizes: Mapping[sympy.Symbol, int]  # of every symbol but b
    precision: str
    optimizer: str
    wishes: Wishes
    effort: int | None = EFFORT
    time_limit_s: float = float("inf")


@dataclass(frozen=True)
class Answer:
    """The best plan found, and how the search went."""

    staged: Staged
    tensors: Tensors
    considered: int
    visited: int
    gap: float  # no candidate takes less than (1 - gap) times the best
    question: Question  # that `tensors` answers
    known: Known


@dataclass
class _Waiting:
    """A candidate in the queue: the least it may take by any cut, and how far it has come."""

    candidate: Candidate
    bound_s: float
    staged: Staged | None = None
    stages: Stages | None = None
    step: int = 0  # into `Planner._steps`


_ENDLESS = 2**62
_TAKE_ROOM = {"cuts", "headroom", "max_tp", "splits", "whole"}  # what may be fixed at memory's expense, beside meshes
Key = tuple[int, int, int, bool]  # tp, samples of a microbatch, cp, lean


class Planner:
    """Answers one task; sharded models are kept per (tp, micro, cp), and in `known` for further tasks of this graph."""

    def __init__(self, task: Task, progress: Progress, known: Known | None = None) -> None:
        assert known is None or known.folded is task.folded, "what is known is of another graph"
        self.task, self.progress = task, progress
        self.known = known or Known(task.folded)
        self._tensors: dict[Key, Tensors] = {}
        self._sharded: dict[Key, Sharded | AutoptdError] = {}
        self._pins = read_pins(task.folded, task.wishes)
        self._method = self._pins.on(task.wishes.method)
        self._roomy = _roomy(task.cluster)
        self._room = Room(task.folded, task.cluster, task.precision, task.optimizer, self._method.headroom)
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
        self._visited = self._solutions = 0

    def answer(self) -> Answer:
        """Search. Raises PlanError for wishes that cannot be, DoesNotFit where nothing fits."""
        possible = self.space()
        self._check_heads()
        ignored = self._method.memory == "ignore"
        options = list(possible) if ignored else self._room.promising(possible)
        with self.progress.stage(f"search {len(options)} ways to run on {self.task.world} devices"):
            bound_s = self._visit(options)
        best = self._best
        if best is None:
            raise self._nothing_fits(len(possible))
        c = best.candidate
        gap = max(0.0, 1 - bound_s * (1 - CLOSE * self._is_derived) / best.seconds)
        with self.progress.stage("prove the schedule"):
            _prove(best.method.schedule, c.pp, c.microbatches, best.method.virtual)
        tensors = self._tensors[_key(c)]
        return Answer(best, tensors, len(possible), self._visited, gap, self._question(c), self.known)

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
        except NoRoom:
            raise stages.refusal() from None

    # ---- the queue ----

    def _visit(self, options: Sequence[Candidate]) -> float:
        """Find the best; returns what no candidate takes less than."""
        started, least = time.monotonic(), float("inf")
        self._waiting = waiting = [_Waiting(c, self._floor_s(c)) for c in options]
        self._dive([w for w in waiting if w.candidate.tp == 1])
        lean = {replace(w.candidate, lean=False): i for i, w in enumerate(waiting) if w.candidate.lean}
        queue = [(w.bound_s, 0, i) for i, w in enumerate(waiting) if not w.candidate.lean]
        heapq.heapify(queue)
        while queue:
            bound_s, _, i = heapq.heappop(queue)
            late = self._best is not None and time.monotonic() - started > self.task.time_limit_s
            if late or bound_s >= self._best_s:
                least = min(least, bound_s)
                break
            w = waiting[i]
            now_s = self._go_on(w)
            if w.step == _CUT - 1 and w.candidate in lean:  # no quicker than these splits, before memory counts
                heapq.heappush(queue, (now_s, 0, lean.pop(w.candidate)))
            while self._best is None and _CUT <= w.step <= _CUT + 2 and now_s < float("inf"):
                now_s = self._go_on(w)  # to have something to beat
            if w.step < len(self._steps):
                heapq.heappush(queue, (now_s, -w.step, i))
            elif now_s < self._best_s:  # not looked at in full
                least = min(least, now_s)
        return min(least, self._best_s, *(entry[0] for entry in queue))

    def _dive(self, whole: Sequence[_Waiting]) -> None:
        """Something to beat before tensors are split: the most hopeful with whole ones that fits."""
        for w in whole:
            while w.step < _CUT - 1:
                self._go_on(w)
        for w in sorted(whole, key=lambda w: w.bound_s)[:_DIVES]:
            while w.step <= _CUT + 2 and w.bound_s < float("inf"):
                self._go_on(w)
            if self._best is not None:
                return

    def _go_on(self, w: _Waiting) -> float:
        """Take the next step with a candidate; the least that it may take as far as it is known now."""
        w.step += 1
        now_s = self._steps[w.step - 1](w)
        return now_s if w.step == len(self._steps) else max(now_s, w.bound_s)

    @property
    def _is_derived(self) -> bool:
        """Whether some splits were taken over from microbatches of other sizes."""
        return len(self._sharded) > self._solutions

    @property
    def _best_s(self) -> float:
        return float("inf") if self._best is None else self._best.seconds

    def _weigh(self, w: _Waiting) -> float:
        """A bound by the model's work on one rank, shared out: before its tensors are split, which takes longest."""
        c = w.candidate
        if c.tp > 1 and not c.pools and len(self._waiting) > 1:
            whole = self._solved(replace(c, tp=1, lean=False))
            if isinstance(whole, Sharded):
                device = self.task.cluster.device
                seconds = sum(times * floor_s(k.work, device, c.tp) for times, k in whole.every_kind)
                passes = even_bound_s(seconds, c.schedule, c.pp, c.microbatches, c.virtual, 0.5)
                w.bound_s = max(w.bound_s, passes, passes - seconds * (c.pp > 1) + self._end_s(c))
        return w.bound_s

    def _split(self, w: _Waiting) -> float:
        """Split its tensors; a bound of all its cuts."""
        solved = self._solved(w.candidate)
        if isinstance(solved, AutoptdError) or (w.candidate.lean and self._is_quick(w.candidate, solved)):
            w.bound_s = float("inf")
            return w.bound_s
        w.bound_s = max(w.bound_s, self._bound_s(w.candidate, solved))
        return w.bound_s

    def _is_quick(self, c: Candidate, lean: Sharded) -> bool:
        """Whether the lean splits are the quickest ones."""
        quick = self._solved(replace(c, lean=False))
        return isinstance(quick, Sharded) and quick.sharding == lean.sharding

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
            w.bound_s = max(w.bound_s, self._with_end_s(w.candidate, passes_s()))
            if w.bound_s == float("inf"):
                self._hopeless.append(w)
        return w.bound_s

    def _cut(self, w: _Waiting) -> float:
        """Cut it into stages; a bound of these stages."""
        self._visited += 1
        assert w.stages is not None
        try:
            w.staged = w.stages.solve()
        except NoRoom:
            self._hopeless.append(w)
            w.bound_s = float("inf")
            return float("inf")
        c, costs = w.candidate, w.staged.stages
        passes = [s.forward_s for s in costs], [s.backward_s for s in costs]
        return cut_bound_s(*passes, w.staged.method.schedule, c.pp, c.microbatches)

    def _simulate(self, w: _Waiting) -> float:
        """Its cut as it will run. What is left are other cuts."""
        assert w.staged is not None
        w.staged = simulated(w.staged)
        if w.staged.seconds < self._best_s:
            self._best = w.staged
        return w.bound_s

    def _refine(self, w: _Waiting) -> float:
        """Its other cuts; the least that those not looked at may take."""
        assert w.stages is not None
        if w.stages.fixed or w.candidate.pp == 1:
            return float("inf")
        found, complete = refine(w.stages, self._best_s, self._effort) if self._effort else (None, False)
        if found is not None:
            self._best = found
        return float("inf") if complete else w.bound_s

    # ---- candidates ----

    def space(self) -> Sequence[Candidate]:
        """All that is searched: every candidate, and where memory counts, with splits that keep less as well."""
        found = self.candidates()
        if self._method.memory == "ignore":
            return found
        return [*found, *(replace(c, lean=True) for c in found if c.tp > 1)]

    def candidates(self) -> Sequence[Candidate]:
        """As far as the wishes leave the space open, with the quickest splits."""
        task, fixed, method = self.task, self.task.wishes.fixed, self._method
        wish, include = dict(task.wishes.mesh), task.wishes.include
        cps: tuple[int, ...] = (method.cp,)
        if "cp" in include and "cp" not in fixed:
            length = task.sizes.get(SEQUENCE, 1)
            cps = tuple(d for d in divisors(task.world) if d <= _RANKS_OF_CONTEXT and length % (2 * d) == 0) or (1,)
        if task.world % cps[0]:
            raise PlanError(
                f"world {task.world} is not divisible by cp {cps[0]}", where="fix['cp']", fix="use a divisor"
            )
        node = task.cluster.gpus_per_node or task.world
        widest = max(node, -(-task.world // task.batch))  # across nodes only where there are fewer samples than nodes
        tp_sizes = {d for d in divisors(task.world) if d <= (task.wishes.max_tp or widest)}
        if isinstance(wish.get("tp"), int):
            tp_sizes.add(int(wish["tp"]))
        schedules, virtuals = schedules_and_chunks(task.wishes)
        zeros = (1, 0, 2, 3) if "zero" in wish or "zero" in include else (1, 0)
        groups = [d for d in divisors(node) if d > 1] if "shards" in include and "shards" not in fixed else []
        limits = Limits(
            world=task.world,
            batch=task.batch,
            segments=len(task.folded.segments),
            tp_sizes=tuple(sorted(tp_sizes)),
            zeros=zeros,
            recomputes=("auto", "none", "full", "selective", "ops") if "recompute" in wish else ("auto",),
            max_micro=max(8, _TOKENS // max(1, task.sizes.get(SEQUENCE, 1))),
            cps=cps,
            schedules=tuple(schedules),
            virtuals=tuple(virtuals),
            shards=(method.shards, *groups),
            pool_ranks=task.cluster.pool_ranks(task.world) if task.cluster.others else (),
        )
        return allowed(task.folded, method, candidates(limits, wish))

    def _check_heads(self) -> None:
        """A tp that was asked for must split the attention: anything else is a mistake, not a plan."""
        tp = self.task.wishes.mesh.get("tp", 1)
        if tp == 1:
            return
        for kind, options in self._legal_for(int(tp)).items():
            for i, node in ops_of(self.task.folded.representatives[kind]):
                if self._pins.keeps(node):
                    continue
                if work(op_call(node)).kind == "attention" and all(s.ranks == 1 for s in options[i]):
                    heads = info(node).shape[1]
                    sizes = [d for d in divisors(int(heads)) if self.task.world % d == 0]
                    raise PlanError(
                        f"{heads} attention heads do not divide by tp {tp}",
                        where=f"{source_line(node)}\nfix['tp']",
                        fix=f"use tp {', '.join(map(str, sizes))}",
                    )

    def _sizes(self, cp: int) -> Mapping[sympy.Symbol, int]:
        """Of one rank: its share of a sample's tokens."""
        sizes = dict(self.task.sizes)
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
        values = tuple(self._sizes(self._method.cp).items())
        return self.known.legal(tp, values, self.task.wishes.sequence_parallel)

    def _question(self, c: Candidate) -> Question:
        task = self.task
        wanted = task.wishes.mesh.get("recompute")
        return Question(
            cluster=self._roomy,
            tp=c.tp,
            micro=c.micro,
            values=tuple(self._sizes(c.cp).items()),
            microbatches=max(1, task.batch * c.tp * c.cp // (task.world * c.micro)),
            static_bytes=COMPUTE_BYTES[task.precision] + 4 * MAIN_BYTES[task.precision],
            cp=c.cp,
            kernels=self._method.kernels,
            attention=self._method.attention,
            pins=tuple(task.wishes.splits.items()),
            whole=self._pins.whole,
            sequence_parallel=task.wishes.sequence_parallel,
            second_per_byte=self._byte_s(c),
            policies=tuple(
                p for p in PARTIAL if p == wanted or (wanted in (None, "auto") and p in self._method.policies)
            ),
        )

    def _solved(self, c: Candidate) -> Sharded | AutoptdError:
        """Its tensors split. Raises what stands in the way of every candidate."""
        if _key(c) not in self._sharded:
            self._solve_between((c,) if self.task.effort is None else self._hopeful(c))
        return self._sharded[_key(c)]

    def _hopeful(self, c: Candidate) -> Sequence[Candidate]:
        """One candidate for each size of microbatch that may still be worth splitting tensors for alike, in order."""
        found = {c.micro: c}
        for w in self._waiting:
            other = w.candidate
            if (other.tp, other.cp, other.lean) == (c.tp, c.cp, c.lean) and self._weigh(w) < self._best_s:
                found.setdefault(other.micro, other)
        return [found[micro] for micro in sorted(found)]

    def _solve_between(self, grid: Sequence[Candidate]) -> None:
        """Split tensors for microbatches of several sizes.

        Seconds of any one sharding are affine in the samples of a microbatch, but for tiles and protocols; so the least
        of all shardings is concave, and one that is within `CLOSE` of the best for both the smallest and the largest is
        so for all between.
        """
        first, last, between = self._solve(grid[0]), self._solve(grid[-1]), grid[1:-1]
        if not between:
            return
        common = self._common(grid, first, last)
        if common is None:
            middle = len(grid) // 2
            self._solve_between(grid[: middle + 1])
            self._solve_between(grid[middle:])
            return
        for c in between:
            tensors = self.known.tensors(self._question(c))
            self._tensors[_key(c)], self._sharded[_key(c)] = tensors, tensors.priced(common)

    def _common(
        self, grid: Sequence[Candidate], first: Sharded | AutoptdError, last: Sharded | AutoptdError
    ) -> Sharding | None:
        """A sharding that is as good as the best at either end."""
        if not isinstance(first, Sharded) or not isinstance(last, Sharded):
            return None
        for one, other, at in ((first, last, grid[-1]), (last, first, grid[0])):
            if one.sharding == other.sharding:
                return one.sharding
            byte_s, moved = self._question(at).second_per_byte, self._tensors[_key(at)].priced(one.sharding)
            tried, best = (x.seconds + byte_s * x.kept_bytes for x in (moved, other))
            if tried <= best * (1 + CLOSE):
                return one.sharding
        return None

    def _byte_s(self, c: Candidate) -> float:
        """What a byte kept per microbatch is worth: the seconds of recomputing everything, by what that saves."""
        quick = self._solved(replace(c, lean=False)) if c.lean else None
        if not isinstance(quick, Sharded):
            return 0.0
        forward_s = sum(times * k.forward_s for times, k in quick.every_kind)
        saved = sum(times * (k.activation_bytes - k.input_bytes) for times, k in quick.every_kind)
        return forward_s / saved if saved > 0 else 0.0

    def _solve(self, c: Candidate) -> Sharded | AutoptdError:
        key = _key(c)
        if key not in self._sharded:
            tensors, solved = self.known.sharded(self._question(c))
            if isinstance(solved, AutoptdError):
                if not isinstance(solved, (InfeasibleSplit, PlanError)):
                    raise solved
                if self.task.wishes.mesh.get("tp") == c.tp:
                    raise solved
            self._tensors[key], self._sharded[key] = tensors, solved
            self._solutions += 1
        return self._sharded[key]

    # ---- bounds ----

    def _floor_s(self, c: Candidate) -> float:
        """Its matrix products at the device's sustained rate, however they are split."""
        task, devices = self.task, [pool.device for pool in self.task.cluster.pools]
        flops = self.known.product_flops(tuple(task.sizes.items())) * c.micro / (c.tp * c.cp)
        rate = max(d.matmul_flops_per_s.of(task.precision) * d.matmul_sustained.fraction for d in devices)
        seconds = flops / rate
        return even_bound_s(seconds, c.schedule, c.pp, c.microbatches, c.virtual, 0.5)

    def _bound_s(self, c: Candidate, sharded: Sharded) -> float:
        """Of all its cuts, without recomputation, and with the end of the step of an average pipeline rank."""
        overlapped = "tp" in self._method.overlap
        if c.pools:  # the relaxation knows which stage is where
            return 0.0
        seconds = sharded.compute_seconds if overlapped else sharded.seconds
        costs = [k for k in sharded.costs.values() if k.forward_s]
        share = 0.5  # of the forward pass in any stage, at the most
        if not overlapped and c.zero < 2:
            ring = 1 / 3 if c.cp > 1 else 0.0  # passed once in the forward pass, twice in the backward pass
            share = min(share, max([ring, *(k.forward_s / (k.forward_s + k.backward_s) for k in costs)]))
        passes = even_bound_s(seconds, c.schedule, c.pp, c.microbatches, c.virtual, share)
        return self._with_end_s(c, passes)

    def _with_end_s(self, c: Candidate, passes_s: float) -> float:
        """The same with the end of the step, which a rank may begin while the first ones do their last microbatch."""
        solved = self._sharded[_key(c)]
        assert isinstance(solved, Sharded)
        if c.pools:
            return passes_s
        return max(passes_s, passes_s - (solved.seconds if c.pp > 1 else 0.0) + self._end_s(c))

    def _end_s(self, c: Candidate) -> float:
        """Reduction, optimizer step and gathering of one pipeline rank's even share of the parameters."""
        task, cluster, dp = self.task, self.task.cluster, c.dp * c.cp
        numel = self._room.numel[0] / (c.tp * c.pp)
        shards = {0: 1, 1: dp}.get(c.zero, c.shards or dp)
        optimizer = task.optimizer if task.optimizer in ("adamw", "sgd") else "adamw"
        touched = optimizer_step_bytes(int(numel / shards), precision=task.precision, optimizer=optimizer)
        seconds = memory_s(cluster.device, touched)
        if c.zero > 1 or dp == 1 or "dp" in self._method.overlap:
            return seconds
        width = COMPUTE_BYTES if self._method.gradients == "compute" else MAIN_BYTES
        kind = "reduce_scatter" if c.zero else "all_reduce"
        seconds += collective_s(kind, numel * width[task.precision], cluster, dp, c.tp)
        return seconds + (
            collective_s("all_gather", numel * COMPUTE_BYTES[task.precision], cluster, dp, c.tp) if c.zero else 0.0
        )

    # ---- stage level ----

    def _method_of(self, c: Candidate) -> Method:
        return replace(self._method, cp=c.cp, schedule=c.schedule, virtual=c.virtual, shards=c.shards)

    def _stages(self, c: Candidate) -> Stages:
        sharded = self._sharded[_key(c)]
        assert isinstance(sharded, Sharded)
        task = self.task
        return Stages(
            self._tensors[_key(c)], sharded, c, self._method_of(c), task.precision, task.optimizer, task.cluster
        )

    def _nothing_fits(self, considered: int) -> AutoptdError:
        """The candidate that lacks least, with its own answer."""
        near = sorted(self._hopeless, key=lambda w: self._room.least_bytes(w.candidate))[:_EXPLAINED]
        if not near:
            raise self._unsplit()
        explained = [(w.candidate, self._stages(w.candidate).refusal()) for w in near]
        candidate, error = min(explained, key=lambda e: max(getattr(e[1], "missing_bytes", (0.0,))))
        pins = {*self.task.wishes.mesh, *(self.task.wishes.fixed & _TAKE_ROOM)}
        return self._room.refusal(self.task.world, considered, candidate, error, pins)

    def _unsplit(self) -> AutoptdError:
        """Why no tp can split the tensors as was asked for: of the largest, which has most to choose from."""
        errors = [(key, solved) for key, solved in self._sharded.items() if isinstance(solved, AutoptdError)]
        if not errors:
            return PlanError("no mesh can be split as was asked for", fix="fix fewer dimensions")
        return max(errors, key=lambda e: e[0])[1]


def _key(c: Candidate) -> Key:
    return c.tp, c.micro, c.cp, c.lean


@lru_cache(maxsize=64)
def _roomy(cluster: Cluster) -> Cluster:
    """With endless memory, which has no part in how tensors are split: plans under other limits share what is known."""

    def endless(part: Any) -> Any:
        return part.model_copy(update={"device": part.device.model_copy(update={"memory_bytes": _ENDLESS})})

    return cluster.model_copy(update={"device": endless(cluster).device, "others": tuple(map(endless, cluster.others))})


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
