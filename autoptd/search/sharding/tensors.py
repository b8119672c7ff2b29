"""Solve the tensor-level problem: convert the solution of the splits ILP to a sharding and compute its cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.op_time import OpWork
from autoptd.layout.placements import B, Placement, conversion, parse_placement
from autoptd.ops import library as ops
from autoptd.passes.analysis.heads import heads_of
from autoptd.passes.analysis.liveness import Peak
from autoptd.passes.fold import Segment
from autoptd.passes.graph import info, infos, operands
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.sharding.sharding import (
    KindSharding,
    Sharding,
    ops_of,
    sends_of,
)
from autoptd.passes.sharding.tp_products import tp_products
from autoptd.search.sharding.attention_cost import moved_keys
from autoptd.search.sharding.build import SplitNumbers
from autoptd.search.sharding.cost import chunked_works
from autoptd.search.sharding.expert_work import spread
from autoptd.search.sharding.ilp import solve_splits
from autoptd.search.sharding.kind_cost import KindCost, KindWork, Repeated, RingWork, Works, price
from autoptd.search.sharding.moved_rows import moved_rows
from autoptd.search.sharding.problem import Scope, SplitSolution


@dataclass(frozen=True)
class Sharded:
    """A sharding and its cost."""

    sharding: Sharding
    costs: Mapping[str, KindCost]
    seconds: float  # one microbatch through the whole model, forward and backward
    compute_seconds: float  # without communication
    gap: float
    every_kind: tuple[tuple[int, KindCost], ...] = ()  # number of segments of each kind, and the cost of one
    # caches of `search/pipeline`: memory peaks of blocks, and the sizes of their tensors on a rank without ep
    peaks: dict[Any, Peak] = field(default_factory=dict, compare=False)
    sizes: dict[Any, tuple[int, ...]] = field(default_factory=dict, compare=False)
    memo: dict[str, Any] = field(default_factory=dict, compare=False)  # cache of `search/pipeline/chunk_parameters.py`
    context: str = "ring"  # attention over cp ranks

    def spread(self, ep: int, cluster: Cluster, world: int = 0, merged: bool = False, fullest: float = 1.0) -> Sharded:
        """Return the sharding with the model's experts spread over `ep` ranks; see `expert_work.spread`."""
        if ep == 1:
            return self
        name = f"spread over ep {ep}, {merged}, {fullest}"
        if name not in self.memo:
            works = {kind: spread(cost.work, ep, merged, fullest) for kind, cost in self.costs.items()}
            times = [count for count, _ in self.every_kind]
            found = _priced(self.sharding, works, times, cluster, world)
            shared = {key: getattr(self, key) for key in ("gap", "peaks", "sizes", "memo", "context")}
            self.memo[name] = replace(found, **shared)
        return self.memo[name]  # type: ignore[no-any-return]

    @property
    def kept_bytes(self) -> int:
        """Bytes that the whole model saves for the backward pass of one microbatch, without recomputation."""
        return sum(times * cost.activation_bytes for times, cost in self.every_kind)


class Tensors(SplitNumbers):
    """The tensor-level problem of one folded graph on one cluster for fixed tp, b and s."""

    def solve(
        self, second_per_byte: float = 0.0, time_limit_s: float = 20.0, fixed: Mapping[str, str] | None = None
    ) -> Sharded:
        """Return the cheapest sharding.

        `second_per_byte`: price of a byte saved for backward; `fixed`: labels by node of `problem`."""
        if self.ranks == 1 and not fixed and not self.pins:
            return self.priced(self._whole)
        labels = {**self.problem.fixed, **(fixed or {})}
        asked = replace(self.problem, second_per_byte=second_per_byte, fixed=labels)
        solution = solve_splits(asked, time_limit_s, self.programs)
        return self.priced(self._sharding(solution), solution)

    @property
    def _whole(self) -> Sharding:
        """The sharding that splits nothing."""
        kinds = {}
        for kind, segment in self.folded.representatives.items():
            strategies = {i: next(filter(_is_whole, options)) for i, options in self.legal[kind].items()}
            outside = (segment.parameters, segment.receives, segment.sends)
            kinds[kind] = KindSharding(strategies, *((B,) * len(tensors) for tensors in outside))
        return Sharding(self.ranks, kinds)

    def _sharding(self, solution: SplitSolution) -> Sharding:
        receives: dict[str, tuple[Placement, ...]] = {}
        partial: dict[str, tuple[dict[int, Strategy], tuple[Placement, ...]]] = {}
        for kind, segment in self.folded.representatives.items():
            scope = Scope(kind, segment)
            by_text = {i: {str(s): s for s in options} for i, options in self.legal[kind].items()}
            chosen = {i: by_text[i][solution.choices[f"{kind}/{n.name}"]] for i, n in ops_of(segment)}
            stored = tuple(
                parse_placement(solution.choices[scope.parameter(i)]) for i in range(len(segment.parameters))
            )
            partial[kind] = chosen, stored
            receives[kind] = tuple(
                parse_placement(solution.choices[scope.receive(i)]) for i in range(len(segment.receives))
            )
        sends = sends_of(self.folded, self.ranks, receives)
        kinds = {k: KindSharding(c, p, receives[k], sends[k]) for k, (c, p) in partial.items()}
        return Sharding(self.ranks, kinds)

    def priced(self, sharding: Sharding, solution: SplitSolution | None = None) -> Sharded:
        """Return a sharding with its costs."""
        kinds = self.folded.representatives.items()
        return self.sharded(sharding, {k: self._kind_work(k, s, sharding.kinds[k]) for k, s in kinds}, solution)

    def sharded(
        self, sharding: Sharding, works: Mapping[str, KindWork], solution: SplitSolution | None = None
    ) -> Sharded:
        """Return a sharding with its costs, given the work of one segment of each kind."""
        times = [self.folded.multiplicity(kind) for kind in works]
        found = _priced(sharding, works, times, self.cluster, self.world)
        return replace(found, gap=solution.gap if solution else 0.0, context=self.context)

    def _kind_work(self, kind: str, segment: Segment, decided: KindSharding) -> KindWork:
        ring = sums = exchanged = 0
        given, meta = self._given(segment, decided)
        wanted: dict[tuple[fx.Node, Placement], None] = {}
        works: tuple[list[OpWork], list[OpWork]] = ([], [])
        weights: list[OpWork] = []
        comm: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
        for i, node in ops_of(segment):
            strategy = decided.strategies[i]
            op = self.workbook.ops[node]
            forward, backward = self.kernels(node, strategy)
            works[0].extend(forward)
            works[1].extend(backward)
            weights += self._weight_works(node, backward)
            comm[0].extend((name, self.number(elements) * 4) for name, elements in strategy.collectives)
            if op.work.kind == "attention":
                sent = moved_keys(op.call, strategy, self.cp if self.context == "ulysses" else 1)
                pairs = zip(op.call.operands[1:3], strategy.needs[1:3], strict=True)
                moved = [(round(sent * self.nbytes(t, p)), t.dtype) for t, p in pairs]
                ring += sum(nbytes for nbytes, _ in moved)
                sums += sum(n * torch.promote_types(of, torch.float32).itemsize // of.itemsize for n, of in moved)
                exchanged += self.nbytes(op.call.operands[0], strategy.needs[0])
                exchanged += self.nbytes(op.call.outputs[0], strategy.gives[0])
            for operand, placement in zip(operands(node), strategy.needs, strict=True):
                wanted[operand, placement] = None
        for node, placement in zip(segment.sends, decided.sends, strict=True):
            wanted[node, placement] = None
        for node, placement in wanted:
            self._convert(node, meta[node], given[node], placement, works, comm)
        peak = self.workbook.walk([segment], {kind: decided}, "none").peak(self.number, self.ranks, self.cp)
        return KindWork(
            forward=tuple(works[0]),
            backward=tuple(works[1]),
            recomputed={
                (policy, ends): self._repeated(segment, decided, policy, ends, tuple(works[0]))
                for policy in ("full", *self.policies)
                for ends in (False, True)
            },
            forward_collectives=tuple(comm[0]),
            backward_collectives=tuple(comm[1]),
            activation_bytes=peak.kept,
            input_bytes=sum(
                self.nbytes(infos(n)[0], p) for n, p in zip(segment.receives, decided.receives, strict=True)
            ),
            temporary_bytes=peak.temporary,
            weights=tuple(weights),
            ring_bytes=ring,
            ring_sums_bytes=sums,
            exchanged_bytes=ring + exchanged,
            moved=moved_rows(self, segment, decided),
            rings=tuple(self._ring_works(segment, decided)),
            statistics=tuple(
                self.nbytes(infos(node)[0], decided.strategies[i].gives[0])
                for i, node in ops_of(segment)
                if node.target is ops.sum_over_batch
            ),
        )

    def _ring_works(self, segment: Segment, decided: KindSharding) -> Iterator[RingWork]:
        """Yield the collectives that products can take apart."""
        placed = {segment.nodes[i]: strategy for i, strategy in decided.strategies.items()}
        found = tp_products(segment, decided)
        for gather in found.gathers:
            made = sum(self.nbytes(info(node), placed[node].gives[0]) for node in gather.products)
            names = "all_gather", "reduce_scatter"
            yield RingWork(
                names, self.nbytes(info(gather.tensor)), self._passes(gather.products, placed), (self._copy(made), ())
            )
        for scatter in found.scatters:
            node = scatter.product
            made = self.nbytes(info(operands(node)[0]), placed[node].needs[0])
            names = "reduce_scatter", "all_gather"
            yield RingWork(names, self.nbytes(info(node)), self._passes((node,), placed), ((), self._copy(made)))

    def _passes(self, products: Sequence[fx.Node], placed: Mapping[fx.Node, Strategy]) -> tuple[Works, Works]:
        """Return the products of forward, and those of backward for gradients of inputs."""
        forward, backward = list[OpWork](), list[OpWork]()
        for node in products:
            both = self.kernels(node, placed[node])
            weights = self._weight_works(node, both[1])
            forward += both[0]
            backward += [work for work in both[1] if work.kind == "matmul" and work not in weights]
        return tuple(forward), tuple(backward)

    def _copy(self, nbytes: int) -> Works:
        """Return the kernels that put products of each rank's rows in place."""
        return (OpWork("memory", 0, 2 * nbytes, "bf16", launches=self.ranks),)

    def _weight_works(self, node: fx.Node, backward: Sequence[OpWork]) -> list[OpWork]:
        """Return the products of a backward pass that compute parameter gradients: one for each trained operand."""
        if self.workbook.ops[node].work.kind != "matmul":
            return []
        both = zip(operands(node)[:2], self.workbook.ops[node].call.operands[:2], strict=True)
        trained = [n for n, t in both if t.requires_grad]
        known = self.folded.traced.parameters
        return [w for n, w in zip(trained, backward, strict=False) if _untransposed(n).name in known]

    def _repeated(self, segment: Segment, decided: KindSharding, policy: str, ends: bool, forward: Works) -> Repeated:
        """Return what a recompute policy repeats of a segment. `ends`: see `GraphFacts.repeated`.

        By hand, all of a block runs again. A compiled graph saves tensors when it has ended, so that all kernels run
        again, and the collectives, which are no part of a graph, only up to the last that is needed.
        """
        kernels = self.workbook.kernels
        placed = {segment.nodes[i]: strategy for i, strategy in decided.strategies.items()}
        if policy == "logits":
            heads = heads_of(segment, decided)
            again = (w for head in heads for w in self.kernels(head.linear, placed[head.linear])[0])
            return Repeated((*again, *(w for head in heads for w in chunked_works(self, head, placed))))
        steps = self.workbook.facts.repeated(segment.kind, segment, decided, policy, ends and kernels != "fused")
        nodes = [step.node for step in steps if step.node is not None]
        collectives = [(s.collective, self.nbytes(s.outputs[0].info)) for s in steps if s.collective]
        collectives += [(name, self.number(k) * 4) for node in nodes for name, k in placed[node].collectives]
        if policy == "full" and not (ends and kernels == "eager"):
            return Repeated(forward, tuple(collectives))
        if ends and kernels != "eager":
            steps = self.workbook.facts.repeated(segment.kind, segment, decided, policy, False)
        computed = (step.node for step in steps if step.node is not None and not step.view)
        return Repeated(tuple(w for n in computed for w in self.kernels(n, placed[n])[0]), tuple(collectives))

    def _convert(
        self,
        node: fx.Node,
        tensor: TensorInfo,
        source: Placement,
        target: Placement,
        works: tuple[list[OpWork], ...],
        comm: tuple[list[tuple[str, int]], ...],
    ) -> None:
        """Append the kernels or collectives of one conversion to `works` or `comm`, each (forward, backward)."""
        row = conversion(source, target)
        if not row.function:
            return
        whole = self.nbytes(tensor)
        move = OpWork("memory", 0, whole // self.ranks, "bf16", origin=node.name)
        for i, name in enumerate((row.forward, row.backward)):
            if i == 0 or tensor.requires_grad:
                if name:
                    comm[i].append((name, whole))
                else:
                    works[i].append(move)

    @staticmethod
    def _given(segment: Segment, decided: KindSharding) -> tuple[dict[fx.Node, Placement], dict[fx.Node, TensorInfo]]:
        given: dict[fx.Node, Placement] = dict(zip(segment.parameters, decided.parameters, strict=True))
        given |= dict(zip(segment.receives, decided.receives, strict=True))
        given |= dict.fromkeys(segment.prelude, B)
        outputs = {n: decided.strategies[i].gives for i, n in ops_of(segment)}
        for node in segment.nodes:
            source, index = (node, 0) if node in outputs else (node.args[0], node.args[1])
            given[node] = outputs[source][index]  # type: ignore[index]
        return given, {n: infos(n)[0] for n in given}


def _priced(
    sharding: Sharding, works: Mapping[str, KindWork], times: Sequence[int], cluster: Cluster, world: int
) -> Sharded:
    """Return a sharding with its costs, given the work of one segment of each kind and how many there are."""
    costs = {kind: price(work, cluster, sharding.ranks, world) for kind, work in works.items()}
    every = tuple(zip(times, costs.values(), strict=True))
    total = sum(n * (c.forward_s + c.backward_s) for n, c in every)
    comm = sum(n * (c.forward_comm_s + c.backward_comm_s) for n, c in every)
    return Sharded(sharding, costs, total, total - comm, 0.0, every)


def _is_whole(strategy: Strategy) -> bool:
    return all(placement == B for placement in (*strategy.needs, *strategy.gives))


def _untransposed(node: fx.Node) -> fx.Node:
    """Return the node behind any `t`, through which products read weights stored as [in, out]."""
    while node.target is torch.ops.aten.t.default:
        (node,) = node.all_input_nodes
    return node
