"""The graph of one ep rank: its own experts, and rows sent to the ranks of their experts and back.

    rows sorted by expert ─► dispatch ─┐                              ┌─ combine ─► rows in their first order
    ends of each expert's rows ─► route, own_ends ─► grouped products ┘

Only this graph contains ep. The placements on tp stay those of the plan; no dim of rows may be split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.errors import PlanError
from autoptd.layout.placements import B, O, Placement, Split
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import info, is_getitem, op_name, operands, source_line
from autoptd.passes.opcall import Sizes, TensorInfo
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.context_parallel import own_token_strategies
from autoptd.passes.sharding.context_parallel_graph import BEFORE, Before, before_cut
from autoptd.passes.sharding.expert_regions import ExpertRegion, check_experts, expert_regions, leaving
from autoptd.passes.sharding.own_prelude import rebuilt
from autoptd.passes.sharding.sharding import KindSharding, Sharding, Whole, ops_of
from autoptd.passes.trace.traced import BATCH, SEQUENCE


def route(ends: Tensor) -> Tensor:
    """`Experts.route` of `ops/expert_axis.py`; like the methods below, written into graphs and never run."""
    raise AssertionError


def own_ends(ends: Tensor, route: Tensor) -> Tensor:
    """`Experts.own_ends`."""
    raise AssertionError


def dispatch(x: Tensor, route: Tensor) -> Tensor:
    """`Experts.dispatch`."""
    raise AssertionError


def combine(y: Tensor, route: Tensor) -> Tensor:
    """`Experts.combine`."""
    raise AssertionError


EXPERT_OPS: Mapping[str, Callable[..., Tensor]] = {
    "route": route,
    "own_ends": own_ends,
    "dispatch": dispatch,
    "combine": combine,
}


def dispatched(segment: Segment, decided: KindSharding) -> list[tuple[TensorInfo, Placement]]:
    """Return the tensors of a segment that are dispatched to experts or combined, with their placements on tp."""
    placed: dict[fx.Node, Placement] = dict.fromkeys(segment.prelude, B)
    found: list[tuple[TensorInfo, Placement]] = []
    placed |= dict(zip(segment.receives, decided.receives, strict=True))
    for i, node in ops_of(segment):
        placed |= _given(node, decided.strategies[i])
    for region in expert_regions(segment):
        moved = (*sorted(region.reads, key=str), *leaving(region, segment))
        found += [(info(node), placed[node]) for node in moved]
    return found


def rows_stay_apart(folded: Folded, sizes: Sizes) -> bool:
    """Return whether tp ranks can compute the rows that experts take of their own tokens each (etp 1)."""
    some = Sizes({**sizes.values, SEQUENCE: 2}, BATCH)
    found = [(own_token_strategies(s, 2, some), expert_regions(s)) for s in folded.representatives.values()]
    return any(regions for _, regions in found) and all(
        node in own for own, regions in found for r in regions for node in r.ops if not is_getitem(node)
    )


def _given(node: fx.Node, strategy: Strategy) -> dict[fx.Node, Placement]:
    """Return the placements on tp of an op's results."""
    found = {} if isinstance(node.meta["info"], tuple) else {node: strategy.gives[0]}
    return found | {user: strategy.gives[user.args[1]] for user in node.users if is_getitem(user)}  # type: ignore[index,misc]


def split_experts(folded: Folded, ep: int, sharding: Sharding, etp: int = 0) -> tuple[Folded, Sharding]:
    """Return the graph of one of `ep` ranks, and the tp sharding carried over to it.

    `etp`: tp ranks that share each expert, 1 or 0 for all. Raises PlanError if the sharding's rows are others.
    """
    return _Splitter(folded, ep, sharding, own_rows=etp == 1 and sharding.ranks > 1).run()


@dataclass
class _Splitter:
    folded: Folded
    ep: int
    sharding: Sharding
    own_rows: bool  # whether tp ranks send rows of their own tokens each, to experts that no other tp rank shares
    graph: fx.Graph = field(default_factory=fx.Graph)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    strategies: dict[str, dict[int, Strategy]] = field(default_factory=dict)  # by kind

    def run(self) -> tuple[Folded, Sharding]:
        inside = {n for s in self.folded.segments for n in s.nodes}
        regions = [expert_regions(segment) for segment in self.folded.segments]
        check_experts(self.folded, self.ep)
        split = {n for found in regions for region in found for n in region.weights}
        for node in self.folded.traced.graph.graph.nodes:
            if node not in inside and node.op != "output":
                self.copy(node, self.new, local=node in split)
        segments = tuple(
            self._segment(segment, found) for segment, found in zip(self.folded.segments, regions, strict=True)
        )
        found = rebuilt(self.folded, self.graph, self.new, segments)
        found.ep = self.ep
        kinds = {k: replace(d, strategies=self.strategies[k]) for k, d in self.sharding.kinds.items()}
        whole = self.sharding.whole or Whole(self.folded.segments, self.sharding.kinds)
        return found, replace(self.sharding, kinds=kinds, whole=whole)

    def copy(self, node: fx.Node, known: dict[fx.Node, fx.Node], *, local: bool = False) -> fx.Node:
        """Copy a node; `local`: its first dim, the experts, has this rank's part."""
        made = self.graph.node_copy(node, lambda n: known.get(n) or self.new[n])
        assert made.name == node.name, (made.name, node.name)
        made.meta.pop("op", None)  # of the op before
        if local:
            made.meta["info"] = self.own(node)
            if node.op == "call_function" and (rule := op_of(node).rule) is not None:
                strategy = Strategy((Split(0),), (Split(0),), self.ep)
                for at, value in rule.local(op_of(node).call, strategy, self.ep).items():
                    made.update_kwarg(at, value) if isinstance(at, str) else made.update_arg(at, value)
        self.new[node] = made
        return made

    def own(self, node: fx.Node) -> TensorInfo:
        """Return the shape of a tensor with the rank's experts in its first dim."""
        whole = info(node)
        return replace(whole, shape=(whole.shape[0] // self.ep, *whole.shape[1:]))

    def _segment(self, segment: Segment, regions: Sequence[ExpertRegion]) -> Segment:
        writer = _RegionWriter(self, self.sharding.kinds[segment.kind], segment, regions)
        nodes = writer.write()
        self.strategies.setdefault(segment.kind, writer.strategies)
        return replace(
            segment,
            nodes=tuple(nodes),
            parameters=tuple(self.new[n] for n in segment.parameters),
            prelude=tuple(self.new[n] for n in segment.prelude),
            receives=tuple(self.new[n] for n in segment.receives),
            sends=tuple(self.new[n] for n in segment.sends),
        )


class _RegionWriter:
    """The nodes of one segment, with rows dispatched to and combined from its expert regions."""

    def __init__(
        self, splitter: _Splitter, decided: KindSharding, segment: Segment, regions: Sequence[ExpertRegion]
    ) -> None:
        self.splitter, self.decided, self.segment, self.regions = splitter, decided, segment, regions
        self.nodes: list[fx.Node] = []
        self.strategies: dict[int, Strategy] = {}
        self.tp: dict[fx.Node, Placement] = dict.fromkeys(segment.prelude, B)
        self.tp |= dict(zip(segment.receives, decided.receives, strict=True))
        self.tp |= dict(zip(segment.parameters, decided.parameters, strict=True))
        self.split = {n for region in regions for n in region.weights}
        self.routes: dict[ExpertRegion, tuple[fx.Node, fx.Node]] = {}  # its route and its own ends
        self.leaving = {n for region in regions for n in leaving(region, segment)}
        self.there: dict[ExpertRegion, dict[fx.Node, fx.Node]] = {region: {} for region in regions}  # dispatched

    def write(self) -> list[fx.Node]:
        positions = {n: i for i, n in ops_of(self.segment)}
        for node in self.segment.nodes:
            region = next((r for r in self.regions if node in r.ops), None)
            known: dict[fx.Node, fx.Node] = {}
            if region is not None:
                self._enter(region, node)
                known = self.there[region]
            made = self.splitter.copy(node, known, local=node in self.split)
            self._add(made, None if is_getitem(node) else self.decided.strategies[positions[node]])
            if not is_getitem(node):
                self._give(node, positions[node], made)
            if region is not None:
                self._leave(region, node, made)
        return self.nodes

    def _add(self, made: fx.Node, strategy: Strategy | None) -> None:
        if strategy is not None:
            self.strategies[len(self.nodes)] = strategy
        self.nodes.append(made)

    def _give(self, node: fx.Node, position: int, made: fx.Node) -> None:
        """Record an op's placements on tp, and its position, which keys its random numbers."""
        strategy = self.decided.strategies[position]
        self.tp |= _given(node, strategy)
        if before_cut(node) is None:
            made.meta[BEFORE] = Before(position, B)

    def _enter(self, region: ExpertRegion, node: fx.Node) -> None:
        """Dispatch the rows that an op of a region is the first to read."""
        if region not in self.routes:
            self.routes[region] = self._route(region)
        _, ends = self.routes[region]
        there = self.there[region]
        there[region.ends] = ends
        for operand in operands(node):
            if operand in region.reads and operand not in there:
                there[operand] = self._move(dispatch, operand, self.splitter.new[operand], region)

    def _leave(self, region: ExpertRegion, node: fx.Node, made: fx.Node) -> None:
        """Combine the rows of a region's tensor that others read."""
        if node not in region.rows or isinstance(node.meta["info"], tuple):
            return
        self.there[region][node] = made
        split_rows = isinstance(self.tp[node], Split) and self.tp[node].dim == 0  # type: ignore[union-attr]
        if split_rows or (self.tp[node] == O) != self.splitter.own_rows:
            etp, rows = (1, "own") if self.splitter.own_rows else (0, "all")
            raise PlanError(
                f"{op_name(node)} gives rows {self.tp[node]} on tp, but with etp {etp} each tp rank sends {rows} rows",
                where=source_line(node),
                fix="plan again, or leave ep or tp out",
            )
        if node in self.leaving:
            self.splitter.new[node] = self._move(combine, node, made, region)

    def _route(self, region: ExpertRegion) -> tuple[fx.Node, fx.Node]:
        experts = int(info(region.ends).shape[0])
        of_all, ep = self.splitter.new[region.ends], self.splitter.ep
        sent = self._made(route, region.ends, TensorInfo((2, ep, experts // ep), torch.int64, False), of_all)
        at = self.tp[region.ends]
        self._add(sent, Strategy((at,), (at,)))
        ends = self._made(own_ends, region.ends, self.splitter.own(region.ends), of_all, sent)
        self._add(ends, Strategy((at, at), (at,)))
        return sent, ends

    def _move(self, method: Any, node: fx.Node, x: fx.Node, region: ExpertRegion) -> fx.Node:
        moved = self._made(method, node, info(node), x, self.routes[region][0])
        self._add(moved, Strategy((self.tp[node], self.tp[region.ends]), (self.tp[node],)))
        return moved

    def _made(self, method: Any, node: fx.Node, found: TensorInfo, *args: fx.Node) -> fx.Node:
        made = self.splitter.graph.create_node("call_function", method, args, name=f"{method.__name__}_{node.name}")
        made.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        made.meta["info"] = found
        return made
