"""Cache of tensor-level results for one folded graph, reused by later plans of the same graph.

The key of each entry holds everything that its value depends on, so that no entry is ever out of date:

    facts      the graph alone
    workbook   + kernels, attention, fp8
    context    the graph, cp, tp, ep, tokens of a sample, attention over cp ranks: whether they can be split
    legal      the graph, tp, sizes of a sample, whether tp may split the sequence
    tensors    + cluster, samples of a microbatch, cp, microbatches, pinned placements, bytes of state, policies
    sharded    + price of a byte saved for backward
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import sympy

from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError, PlanError
from autoptd.passes.analysis.flops import gradient_products
from autoptd.passes.fold import Folded
from autoptd.passes.opcall import Sizes
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.sharding.context_parallel import TokenSplits, split_tokens
from autoptd.passes.sharding.expert_parallel_graph import whole_experts
from autoptd.passes.trace.traced import BATCH
from autoptd.search.sharding.ilp import SplitPrograms
from autoptd.search.sharding.kind_cost import PARTIAL
from autoptd.search.sharding.op_table import GraphFacts, Workbook
from autoptd.search.sharding.strategies import ExpertsOnTp, legal_strategies
from autoptd.search.sharding.tensors import Sharded, Tensors

_ENTRIES = 128  # sharded models that are kept, some hundred kilobytes each

Values = tuple[tuple[sympy.Symbol, int], ...]  # in the graph's order
Legal = Mapping[str, dict[int, list[Strategy]]]


@dataclass(frozen=True)
class ShardingQuery:
    """A key of the cache: everything that the best sharding on a tp axis and its cost depend on."""

    cluster: Cluster
    tp: int
    micro: int
    values: Values  # of every symbol except b, on one rank
    microbatches: int
    static_bytes: float
    cp: int = 1
    kernels: str = "eager"
    attention: str = ""
    fp8: str = ""
    permutation: str = ""
    context: str = "ring"  # used if cp is more than 1
    fast_dropout: bool = False  # attention drops by its own kernel
    pins: tuple[tuple[str, str], ...] = ()
    whole: tuple[str, ...] = ()  # parameters that tp does not split
    experts: ExpertsOnTp = "any"
    sequence_parallel: bool = True
    policies: tuple[str, ...] = PARTIAL
    second_per_byte: float = 0.0  # price of a byte saved for backward, per microbatch
    world: int = 0  # given if it matters: tp groups that lie unevenly over nodes


_CHOICES = (  # fields that say what may be chosen, or weigh it; all others change the seconds of an op
    *("microbatches", "static_bytes", "pins", "whole", "experts", "sequence_parallel", "policies", "second_per_byte"),
)
_PRICED = tuple(field.name for field in fields(ShardingQuery) if field.name not in _CHOICES)


def _priced_alike(one: ShardingQuery, other: ShardingQuery) -> bool:
    """Return whether ops cost the same in both problems, whatever choices these leave."""
    return all(getattr(one, name) == getattr(other, name) for name in _PRICED)


class ShardingCache:
    """The cache of one folded graph. Not thread-safe."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self.facts = GraphFacts(folded)
        self._workbooks: dict[tuple[str | bool, ...], Workbook] = {}
        self._legal: dict[tuple[int, Values, bool, ExpertsOnTp], Legal] = {}
        self._contexts: dict[tuple[int, int, int, str], TokenSplits | PlanError] = {}
        self._context_errors: dict[tuple[int, int, int, int, str], PlanError | None] = {}
        self._sharded: OrderedDict[ShardingQuery, tuple[Tensors, Sharded | AutoptdError]] = OrderedDict()
        self._tensors: OrderedDict[ShardingQuery, Tensors] = OrderedDict()
        self._programs = SplitPrograms()
        self._flops: dict[tuple[Values, bool], tuple[Mapping[str, float], float]] = {}

    def read(self) -> ShardingCache:
        """Compute the facts about the graph now rather than during the first plan."""
        facts = self.facts
        assert facts.ops is not None and facts.offers is not None and facts.weights is not None
        return self

    def workbook(
        self, kernels: str, attention: str, fp8: str = "", permutation: str = "", fast_dropout: bool = False
    ) -> Workbook:
        key = kernels, attention, fp8, permutation, fast_dropout
        if key not in self._workbooks:
            self._workbooks[key] = Workbook(self.folded, kernels, attention, self.facts, fp8, permutation, fast_dropout)
        return self._workbooks[key]

    def legal(self, tp: int, values: Values, sequence_parallel: bool, experts: ExpertsOnTp = "any") -> Legal:
        """Return the legal strategies of every op."""
        key = tp, values, sequence_parallel, experts
        if key not in self._legal:
            sizes = Sizes({BATCH: 1, **dict(values)}, BATCH)
            self._legal[key] = legal_strategies(
                self.folded,
                tp,
                sizes,
                sequence_parallel=sequence_parallel,
                experts=experts,
                offers=self.facts.offers,
            )
        return self._legal[key]

    def context_error(self, cp: int, tp: int, ep: int, tokens: int, attention: str) -> PlanError | None:
        """Return why `cp` ranks cannot split the tokens of a sample, or experts over ep beside them; None if they can.

        `attention`: "ring" or "ulysses"."""
        if cp == 1:
            return None
        key = cp, tp, ep, tokens, attention
        if key not in self._context_errors:
            found = self._token_splits(cp, 1, tokens, attention)  # one tp rank leaves most dims to cp
            if isinstance(found, TokenSplits) and found.by_tp:
                found = self._token_splits(cp, tp, tokens, attention)
            if isinstance(found, TokenSplits):
                self._context_errors[key] = whole_experts(self.folded, found, ep)
            else:
                self._context_errors[key] = found
        return self._context_errors[key]

    def _token_splits(self, cp: int, tp: int, tokens: int, attention: str) -> TokenSplits | PlanError:
        if (key := (cp, tp, tokens, attention)) not in self._contexts:
            try:
                self._contexts[key] = split_tokens(self.folded, cp, tokens, attention, tp)
            except PlanError as error:
                self._contexts[key] = error
        return self._contexts[key]

    def tensors(self, query: ShardingQuery) -> Tensors:
        """Return the problem of a query, unsolved; it does not depend on `second_per_byte`."""
        q = replace(query, second_per_byte=0.0)
        if q in self._tensors:
            self._tensors.move_to_end(q)
            return self._tensors[q]
        self._tensors[q] = Tensors(
            self.folded,
            q.cluster,
            q.tp,
            {BATCH: q.micro, **dict(q.values)},
            workbook=self.workbook(q.kernels, q.attention, q.fp8, q.permutation, q.fast_dropout),
            cp=q.cp,
            microbatches=q.microbatches,
            static_bytes=q.static_bytes,
            pins=dict(q.pins),
            whole=q.whole,
            legal=self.legal(q.tp, q.values, q.sequence_parallel, q.experts),
            experts=q.experts,
            sequence_parallel=q.sequence_parallel,
            policies=q.policies,
            world=q.world,
            context=q.context,
            programs=self._programs,
            like=next((tensors for other, tensors in self._tensors.items() if _priced_alike(q, other)), None),
        )
        if len(self._tensors) > _ENTRIES:
            self._tensors.popitem(last=False)
        return self._tensors[q]

    def sharded(self, query: ShardingQuery) -> tuple[Tensors, Sharded | AutoptdError]:
        """Return the problem of a query, and its solution or the error."""
        if query in self._sharded:
            self._sharded.move_to_end(query)
            return self._sharded[query]
        self._sharded[query] = found = self._solve(query)
        if len(self._sharded) > _ENTRIES:
            self._sharded.popitem(last=False)
        return found

    def _solve(self, query: ShardingQuery) -> tuple[Tensors, Sharded | AutoptdError]:
        tensors = self.tensors(query)
        if query.experts == "widths":  # the best of all splits may split experts by their widths anyway
            _, best = self.sharded(replace(query, experts="any"))
            if isinstance(best, Sharded) and tensors.allows(best.sharding):
                return tensors, best
        try:
            return tensors, tensors.solve(query.second_per_byte)
        except AutoptdError as error:
            return tensors, error

    def flops(self, values: Values) -> float:
        """Return the floating-point operations of one sample: forward, and backward for operands with gradients."""
        products, others = self._flops_of(values)
        return sum(products.values()) + others

    def product_flops(self, values: Values, *, in_fp8: bool) -> Mapping[str, float]:
        """Return the part of `flops` in matrix products by their precision: no device runs it faster than its sustained
        rate. `in_fp8`: whether a recipe computes products with weights in fp8."""
        return self._flops_of(values, in_fp8)[0]

    def _flops_of(self, values: Values, in_fp8: bool = False) -> tuple[Mapping[str, float], float]:
        """Return floating-point operations of (matrix products by precision, all other ops)."""
        if (key := (values, in_fp8)) not in self._flops:
            sizes, products, others = Sizes({BATCH: 1, **dict(values)}, BATCH), defaultdict[str, float](float), 0.0
            ops, recipe = self.facts.ops, self.facts.fp8 if in_fp8 else ()
            for kind, segment in self.folded.representatives.items():
                for node in segment.nodes:
                    if node in ops and ops[node].work.flops != 0:
                        op = ops[node]
                        times = 1 + sum(gradient_products(op.call))
                        total = self.folded.multiplicity(kind) * times * float(sizes(op.work.flops))
                        if op.work.kind == "matmul":
                            products["fp8" if node in recipe else op.dtype] += total
                        else:
                            others += total
            self._flops[key] = products, others
        return self._flops[key]
