"""Split the tensors of the candidates of one task, once for each (tp, microbatch, cp)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy
from torch import fx

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES
from autoptd.cost_models.paths import is_even
from autoptd.errors import AutoptdError, PlanError
from autoptd.passes.analysis.flops import work
from autoptd.passes.graph import info, op_call, source_line
from autoptd.passes.sharding.sharding import Sharding, ops_of
from autoptd.passes.trace.traced import SEQUENCE
from autoptd.search.constraints.named import NamedConstraints
from autoptd.search.constraints.options import CONTEXTS, SearchOptions
from autoptd.search.infeasible import InfeasibleSplit
from autoptd.search.meshes import Candidate, divisors
from autoptd.search.sharding.cache import Legal, ShardingCache, ShardingQuery
from autoptd.search.sharding.kind_cost import PARTIAL, context_seconds
from autoptd.search.sharding.strategies import ExpertsOnTp, experts_on_tp
from autoptd.search.sharding.tensors import Sharded, Tensors
from autoptd.search.task import Task

CLOSE = 1e-3  # relative: how far splits for a microbatch between two others may be from the best
_UNLIMITED_BYTES = 2**62
# tp, samples of a microbatch, cp, attention over cp ranks that may be, memory-saving, experts
Key = tuple[int, int, int, tuple[str, ...], bool, ExpertsOnTp]


class Splitter:
    """The split tensors of a task's candidates, found on demand.

    `sharded`: the solutions, by the `key_of` a candidate; `tensors`: the problems that they solve.
    """

    def __init__(self, task: Task, known: ShardingCache, pins: NamedConstraints, method: SearchOptions) -> None:
        self.task, self.known, self._pins, self._method = task, known, pins, method
        self._unlimited = _unlimited(task.cluster)
        self.tensors: dict[Key, Tensors] = {}
        self.sharded: dict[Key, Sharded | AutoptdError] = {}
        self.is_derived = False  # whether some splits were taken over from microbatches of other sizes

    def whole_attention(self, tp: int) -> fx.Node | None:
        """Return attention whose heads `tp` ranks cannot split, but that may be split; None if there is none."""
        for kind, options in self._legal_for(tp).items() if tp > 1 else ():
            for i, node in ops_of(self.task.folded.representatives[kind]):
                is_whole = work(op_call(node)).kind == "attention" and all(s.ranks == 1 for s in options[i])
                if is_whole and not self._pins.keeps(node) and info(node).ndim > 3:  # else it has no dim of heads
                    return node
        return None

    def heads_error(self, tp: int, node: fx.Node) -> PlanError:
        """Return the error for attention whose heads a tp cannot split."""
        heads, fixed = info(node).shape[1], self.task.constraints.mesh
        sizes = ", ".join(str(d) for d in divisors(int(heads)) if self.task.world % d == 0)
        others = ", ".join(sorted(fixed))
        return PlanError(
            f"{heads} attention heads do not divide by tp {tp}",
            where=f"{source_line(node)}\nfix['tp']" if "tp" in fixed else source_line(node),
            fix=f"use tp {sizes}" if "tp" in fixed else f"fix fewer of {others}, so that tp may be one of {sizes}",
        )

    def _sizes(self, cp: int) -> Mapping[sympy.Symbol, int]:
        """Return the sizes on one rank, which has its share of a sample's tokens."""
        sizes = dict(self.task.sizes)
        if cp > 1:
            if SEQUENCE not in sizes and (where := self.task.folded.traced.length_fixed):
                raise PlanError(
                    f"cp {cp} cuts a sequence, but the model runs at the length of the example only: it is a number",
                    where=where,
                    fix="leave cp out, or let nothing there need a number: take the length from the tensors, as "
                    "x.shape[1], without a branch on it; add up over tokens, too, what is added up over samples; a "
                    "recurrence over single tokens is written for a number of them",
                )
            if SEQUENCE not in sizes:
                raise PlanError(
                    f"cp {cp} cuts a sequence, but no input of the model has one",
                    where="fix['cp']",
                    fix="leave cp out: a sequence is a dim of an input, next to that of the samples, that may vary",
                )
            if sizes[SEQUENCE] % cp:
                raise PlanError(
                    f"cp {cp} does not divide the sequence of {sizes[SEQUENCE]} tokens",
                    where="fix['cp']",
                    fix="use a divisor of the sequence length",
                )
            sizes[SEQUENCE] //= cp
        return sizes

    def _legal_for(self, tp: int) -> Legal:
        values = tuple(self._sizes(self._method.cp).items())
        return self.known.legal(tp, values, self.task.constraints.sequence_parallel)

    def key_of(self, c: Candidate) -> Key:
        """Return everything about a candidate that its splits depend on."""
        return c.tp, c.micro, c.cp, self._contexts(c), c.memory_saving, self._experts(c)

    def alike(self, c: Candidate) -> Hashable:
        """Return everything that a candidate's splits depend on, the size of the microbatch aside."""
        return c.tp, c.cp, self._contexts(c), c.memory_saving, self._experts(c)

    def _experts(self, c: Candidate) -> ExpertsOnTp:
        return experts_on_tp(c.tp, c.ep, c.etp, self.known.facts.expert_counts if c.ep > 1 else ())

    def context_error(self, c: Candidate, context: str, ep: int) -> PlanError | None:
        """Return why the runtime does not split tokens so, or experts over ep beside them."""
        return self.known.context_error(c.cp, c.tp, ep, self.task.sizes.get(SEQUENCE, 1), context)

    @property
    def contexts(self) -> tuple[str, ...]:
        """Kinds of attention over cp ranks that may be."""
        return (self._method.context,) if "context" in self.task.constraints.fixed else CONTEXTS

    def _contexts(self, c: Candidate) -> tuple[str, ...]:
        """Return what attention over its cp ranks may be; what a plan that is only predicted has, if nothing runs."""
        if c.cp == 1:
            return self.contexts[:1]
        runs = tuple(context for context in self.contexts if self.context_error(c, context, c.ep) is None)
        return runs or self.contexts[:1]

    def question(self, c: Candidate, context: str | None = None) -> ShardingQuery:
        """Return the problem of a candidate's splits. `context`: attention over cp ranks, by default the chosen one."""
        task = self.task
        if context is None:
            solved = self.sharded.get(self.key_of(c))
            context = solved.context if isinstance(solved, Sharded) else self._contexts(c)[0]
        method = replace(self._method, context=context)  # type: ignore[arg-type]
        wanted = task.constraints.mesh.get("recompute")
        return ShardingQuery(
            cluster=self._unlimited,
            tp=c.tp,
            micro=c.micro,
            values=tuple(self._sizes(c.cp).items()),
            microbatches=max(1, task.batch * c.tp * c.cp // (task.world * c.micro)),
            static_bytes=COMPUTE_BYTES[task.precision] + 4 * MAIN_BYTES[task.precision],
            cp=c.cp,
            kernels=self._method.kernels,
            attention=self._method.attention,
            fp8=self._method.fp8,
            permutation=self._method.permutation,
            context=context if c.cp > 1 else "ring",
            fast_dropout=method.drops_fast(c.cp),
            pins=tuple(task.constraints.splits.items()),
            experts=self._experts(c),
            whole=self._pins.whole,
            sequence_parallel=task.constraints.sequence_parallel,
            second_per_byte=self._byte_s(c),
            policies=tuple(p for p in PARTIAL if p in self._policies(wanted)),
            world=0 if is_even(self._unlimited, c.tp, 1) else task.world,
        )

    def _policies(self, wanted: object) -> Collection[str]:
        """Return the recompute policies that blocks may have if `wanted` is fixed."""
        chosen = self._method.policies if wanted in (None, "auto") else (str(wanted),)
        return (*chosen, "logits") if self._method.loss == "chunked" else chosen

    def solve_between(self, grid: Sequence[Candidate]) -> None:
        """Split tensors for microbatches of several sizes.

        The seconds of one sharding are affine in the samples of a microbatch, except for tiles, protocols and kernels
        that small microbatches leave bound by memory. If they were affine, the minimum over shardings would be concave,
        and a sharding within `CLOSE` of it for both the smallest and the largest microbatch would be so for all
        between. It is taken for these.
        """
        first, last, between = self.solve(grid[0]), self.solve(grid[-1]), grid[1:-1]
        if not between:
            return
        common = self._common(grid, first, last)
        if common is None:
            middle = len(grid) // 2
            self.solve_between(grid[: middle + 1])
            self.solve_between(grid[middle:])
            return
        for c in between:
            ways = (self.known.tensors(self.question(c, context)) for context in self._contexts(c))
            each = [(tensors, tensors.priced(common)) for tensors in ways]
            quickest = min(each, key=lambda way: self._pass_s(c, way[1]))
            self.tensors[self.key_of(c)], self.sharded[self.key_of(c)] = quickest
            self.is_derived = True

    def _common(
        self, grid: Sequence[Candidate], first: Sharded | AutoptdError, last: Sharded | AutoptdError
    ) -> Sharding | None:
        """Return a sharding that is as good as the best at either end."""
        if not isinstance(first, Sharded) or not isinstance(last, Sharded):
            return None
        for one, other, at in ((first, last, grid[-1]), (last, first, grid[0])):
            if one.sharding == other.sharding:
                return one.sharding
            byte_s, moved = self.question(at).second_per_byte, self.tensors[self.key_of(at)].priced(one.sharding)
            tried, best = (x.seconds + byte_s * x.kept_bytes for x in (moved, other))
            if tried <= best * (1 + CLOSE):
                return one.sharding
        return None

    def _byte_s(self, c: Candidate) -> float:
        """Return the price of a byte saved for backward: seconds of full recomputation per byte that it frees."""
        fast = self.solve(c._replace(memory_saving=False)) if c.memory_saving else None
        if not isinstance(fast, Sharded):
            return 0.0
        forward_s = sum(times * k.forward_s for times, k in fast.every_kind)
        saved = sum(times * (k.activation_bytes - k.input_bytes) for times, k in fast.every_kind)
        return forward_s / saved if saved > 0 else 0.0

    def solve(self, c: Candidate) -> Sharded | AutoptdError:
        key = self.key_of(c)
        if key not in self.sharded:
            first, *others = self._contexts(c)
            tensors, solved = self.known.sharded(self.question(c, first))
            if isinstance(solved, AutoptdError):
                if not isinstance(solved, (InfeasibleSplit, PlanError)):
                    raise solved
                constraints = self.task.constraints
                if constraints.mesh.get("tp") == c.tp and (c.etp == 0 or "etp" in constraints.fixed):
                    raise solved
            else:
                tensors, solved = self._in_quickest(c, tensors, solved, others)
            self.tensors[key], self.sharded[key] = tensors, solved
        return self.sharded[key]

    def _in_quickest(
        self, c: Candidate, tensors: Tensors, solved: Sharded, contexts: Sequence[str]
    ) -> tuple[Tensors, Sharded]:
        """Return the problem and solution of the quickest of these contexts, or those given if they are quicker.

        Tensors are split anew in a context only where those splits are quicker in it."""
        for context in contexts:
            query = self.question(c, context)
            if self._pass_s(c, self.known.tensors(query).priced(solved.sharding)) < self._pass_s(c, solved):
                anew, found = self.known.sharded(query)
                if isinstance(found, Sharded):
                    tensors, solved = anew, found
        return tensors, solved

    def _pass_s(self, c: Candidate, sharded: Sharded) -> float:
        """Return the seconds of a microbatch through the whole model, with communication over cp ranks."""
        seconds, method = sharded.seconds, replace(self._method, context=sharded.context)  # type: ignore[arg-type]
        for n, cost in sharded.every_kind if c.cp > 1 else ():
            seconds += n * sum(context_seconds(cost, method, self._unlimited, c.cp, c.tp, c.world))
        return seconds

    def in_every_context(self, c: Candidate) -> list[Sharded]:
        """Return the split tensors of a candidate in each context that may be, as far as they can be split."""
        found = (self.known.sharded(self.question(c, context))[1] for context in self._contexts(c))
        return [sharded for sharded in found if isinstance(sharded, Sharded)]

    def refusal(self) -> AutoptdError:
        """Return why no tp can split the tensors as asked, for the largest tp: it has the most choices."""
        errors = [(key, solved) for key, solved in self.sharded.items() if isinstance(solved, AutoptdError)]
        if not errors:
            return PlanError("no mesh can be split as was asked for", fix="fix fewer dimensions")
        return max(errors, key=lambda e: e[0])[1]


@lru_cache(maxsize=64)
def _unlimited(cluster: Cluster) -> Cluster:
    """Return the cluster with unlimited memory, which splits do not depend on: plans under other limits share them."""

    def unlimited(part: Any) -> Any:
        host = part.device.host.model_copy(update={"memory_bytes": None})
        changes = {"memory_bytes": _UNLIMITED_BYTES, "host": host}
        return part.model_copy(update={"device": part.device.model_copy(update=changes)})

    return cluster.model_copy(
        update={"device": unlimited(cluster).device, "others": tuple(map(unlimited, cluster.others))}
    )
