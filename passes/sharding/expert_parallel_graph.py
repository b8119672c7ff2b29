"""The graph of one ep rank: its own experts, and rows sent to the ranks of their experts and back.

    rows sorted by expert ─► dispatch ─┐                              ┌─ combine ─► rows in their first order
    ends of each expert's rows ─► route, own_ends ─► grouped products ┘

    rows of all experts [e, r, …] ─► batch_route, dispatch ─► [e/ep, all ranks' r, …] ─► batched products ─► combine

Only this graph contains ep. The placements on tp stay those of the plan; no dim of rows may be split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.errors import PlanError
from autoptd.layout.placements import B, O, OwnRows, Placement, Split
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import info, infos, is_getitem, op_name, operands, source_line
from autoptd.passes.opcall import Sizes, TensorInfo
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.context_parallel import TokenSplits, own_token_strategies
from autoptd.passes.sharding.context_parallel_graph import BEFORE, Before, before_cut
from autoptd.passes.sharding.expert_regions import check_experts, expert_regions
from autoptd.passes.sharding.expert_rows import ExpertRegion, RowDims, leaving
from autoptd.passes.sharding.own_prelude import rebuilt
from autoptd.passes.sharding.sharding import KindSharding, Sharding, Whole, ops_of, output_names, tensor_name
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.text import fold_names


def route(ends: Tensor) -> Tensor:
    """`Experts.route` of `ops/expert_axis.py`; like the methods below, written into graphs and never run."""
    raise AssertionError


def own_ends(ends: Tensor, route: Tensor) -> Tensor:
    """`Experts.own_ends`."""
    raise AssertionError


def batch_route(x: Tensor, *, rows: int) -> Tensor:
    """`Experts.batch_route`."""
    raise AssertionError


def dispatch(x: Tensor, route: Tensor, **dims: int) -> Tensor:
    """`Experts.dispatch`."""
    raise AssertionError


def gather(x: Tensor, route: Tensor, **dims: int) -> Tensor:
    """`Experts.gather`."""
    raise AssertionError


def combine(y: Tensor, route: Tensor, **dims: int) -> Tensor:
    """`Experts.combine`."""
    raise AssertionError


EXPERT_OPS: Mapping[str, Callable[..., Tensor]] = {
    "route": route,
    "batch_route": batch_route,
    "own_ends": own_ends,
    "gather": gather,
    "dispatch": dispatch,
    "combine": combine,
}


def dispatched(segment: Segment, decided: KindSharding) -> list[tuple[TensorInfo, Placement, bool]]:
    """Return the tensors of a segment that are dispatched to experts or combined, with their placements on tp, and
    whether all ranks receive the whole tensor."""
    placed: dict[fx.Node, Placement] = dict.fromkeys(segment.prelude, B)
    found: list[tuple[TensorInfo, Placement, bool]] = []
    placed |= dict(zip(segment.receives, decided.receives, strict=True))
    for i, node in ops_of(segment):
        placed |= _given(node, decided.strategies[i])
    for region in expert_regions(segment):
        for node, dims in region.reads.items():
            found.append((_one_copy(info(node), dims), placed[node], dims.copied))
        found += [(info(node), placed[node], False) for node in leaving(region, segment)]
    return found


def rows_stay_apart(folded: Folded, sizes: Sizes) -> bool:
    """Return whether tp ranks can compute the rows that experts take of their own tokens each (etp 1)."""
    some = Sizes({**sizes.values, SEQUENCE: 2}, BATCH)
    found = [(own_token_strategies(s, 2, some), expert_regions(s)) for s in folded.representatives.values()]
    return any(regions for _, regions in found) and all(
        node in own for own, regions in found for r in regions for node in r.ops if not is_getitem(node)
    )


def rows_that_leave(folded: Folded, sizes: Sizes) -> fx.Node | None:
    """Return an op whose rows, of each tp rank's own tokens with etp 1, are read by another segment."""
    some = Sizes({**sizes.values, SEQUENCE: 2}, BATCH)
    for segment in folded.representatives.values():
        sent = {tensor_name(node) for node in segment.sends}
        for node, strategy in own_token_strategies(segment, 2, some).items() if expert_regions(segment) else ():
            if any(p == O and name in sent for name, p in zip(output_names(node), strategy.gives, strict=True)):
                return node
    return None


def whole_experts(folded: Folded, splits: TokenSplits, ep: int) -> PlanError | None:
    """Return the refusal of experts that read rows of all tokens where cp splits these: every rank has them whole."""
    if ep == 1:
        return None
    names, cp = folded.traced.parameters, splits.ranks
    found = ((s, r) for s in folded.segments for r in expert_regions(s))
    whole = [(s, r) for s, r in found if not isinstance(splits.strategies[r.product].gives[0], (OwnRows, Split))]
    if not whole:
        return None
    experts = fold_names(sorted({names[p.name] for s, r in whole for p in s.parameters if p in r.weights}))
    return PlanError(
        f"the experts {', '.join(experts)} are not split over ep {ep} where cp {cp} splits the tokens of a sample",
        where="fix['cp'], fix['ep']",
        fix="plan with fix={'cp': 1} or fix={'ep': 1}",
    )


def _one_copy(tensor: TensorInfo, dims: RowDims) -> TensorInfo:
    """Return the part of a tensor that differs between experts."""
    if not dims.copied or dims.experts is None:
        return tensor
    return replace(tensor, shape=tuple(1 if i == dims.experts else n for i, n in enumerate(tensor.shape)))


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
        split = {n: dim for found in regions for region in found for n, dim in region.weights.items()}
        for node in self.folded.traced.graph.graph.nodes:
            if node not in inside and node.op != "output":
                self.copy(node, self.new, split.get(node))
        segments = tuple(
            self._segment(segment, found) for segment, found in zip(self.folded.segments, regions, strict=True)
        )
        found = rebuilt(self.folded, self.graph, self.new, segments)
        found.ep = self.ep
        kinds = {k: replace(d, strategies=self.strategies[k]) for k, d in self.sharding.kinds.items()}
        whole = self.sharding.whole or Whole(self.folded.segments, self.sharding.kinds)
        return found, replace(self.sharding, kinds=kinds, whole=whole)

    def copy(self, node: fx.Node, known: dict[fx.Node, fx.Node], experts: int | None = None) -> fx.Node:
        """Copy a node; `experts`: the dim of its results that has this rank's part, if any."""
        made = self.graph.node_copy(node, lambda n: known.get(n) or self.new[n])
        assert made.name == node.name, (made.name, node.name)
        made.meta.pop("op", None)  # of the op before
        if experts is not None:
            own = tuple(self.own(tensor, experts) for tensor in infos(node))
            made.meta["info"] = own if isinstance(node.meta["info"], tuple) else own[0]
            if node.op == "call_function" and not is_getitem(node) and (rule := op_of(node).rule) is not None:
                strategy = Strategy((), (Split(experts),) * len(own), self.ep)
                for at, value in rule.local(op_of(node).call, strategy, self.ep).items():
                    made.update_kwarg(at, value) if isinstance(at, str) else made.update_arg(at, value)
        self.new[node] = made
        return made

    def own(self, whole: TensorInfo, experts: int | None) -> TensorInfo:
        """Return the shape of a tensor with the rank's experts in a dim."""
        shape = [n // self.ep if dim == experts else n for dim, n in enumerate(whole.shape)]
        return replace(whole, shape=tuple(shape))

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
        self.split = {n: dim for region in regions for n, dim in region.weights.items()}
        self.split |= {n: d.experts for region in regions for n, d in region.rows.items() if d.experts is not None}
        self.routes: dict[ExpertRegion, fx.Node] = {}
        self.leaving = {n for region in regions for n in leaving(region, segment)}
        self.there: dict[ExpertRegion, dict[fx.Node, fx.Node]] = {region: {} for region in regions}  # dispatched

    def write(self) -> list[fx.Node]:
        for each in self.regions:
            for weight in each.weights:
                self._check_tp(weight, each)
        positions = {n: i for i, n in ops_of(self.segment)}
        for node in self.segment.nodes:
            region = next((r for r in self.regions if node in r.ops), None)
            known: dict[fx.Node, fx.Node] = {}
            if region is not None:
                self._enter(region, node)
                known = self.there[region]
            made = self.splitter.copy(node, known, self.split.get(node))
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
            made.meta[BEFORE] = Before(position, None)

    def _check_tp(self, node: fx.Node, region: ExpertRegion) -> None:
        """Raise PlanError if tp cannot split the experts of each ep rank as the plan says."""
        placement, ep, tp = self.tp.get(node), self.splitter.ep, self.splitter.sharding.ranks
        if not isinstance(placement, Split) or placement.dim != region.weights[node]:
            return
        if region.count % (ep * tp * placement.groups):
            raise PlanError(
                f"ep {ep} leaves {region.count // ep} experts on a rank, which tp {tp} cannot split",
                where=source_line(region.product),
                fix="leave ep or tp out, or let tp split the widths of experts",
            )

    def _enter(self, region: ExpertRegion, node: fx.Node) -> None:
        """Dispatch the rows that an op of a region is the first to read."""
        there = self.there[region]
        for operand in operands(node):
            if operand in region.reads and operand not in there:
                if region not in self.routes:
                    self._route(region, operand)
                dims = region.reads[operand]
                method = gather if dims.copied else dispatch
                there[operand] = self._move(method, operand, self.splitter.new[operand], region, dims)

    def _leave(self, region: ExpertRegion, node: fx.Node, made: fx.Node) -> None:
        """Combine the rows of a region's tensor that others read."""
        if node not in region.rows or isinstance(node.meta["info"], tuple):
            return
        self.there[region][node] = made
        if node in self.leaving:
            self.splitter.new[node] = self._move(combine, node, made, region, region.rows[node])

    def _route(self, region: ExpertRegion, first: fx.Node) -> None:
        """Write the exchange of numbers of rows. `first`: the first tensor that is dispatched."""
        ep, ends = self.splitter.ep, region.ends
        if ends is None:
            x, options = self.splitter.new[first], {"rows": region.reads[first].rows}
            counts = TensorInfo((2, ep, 1), torch.int64, False)
            self.routes[region] = self._made(
                batch_route, first, counts, Strategy((self.tp[first],), (B,)), x, **options
            )
            return
        at = self.tp[ends]
        of_all, counts = self.splitter.new[ends], TensorInfo((2, ep, region.count // ep), torch.int64, False)
        sent = self.routes[region] = self._made(route, ends, counts, Strategy((at,), (B,)), of_all)
        own = self.splitter.own(info(ends), 0)
        self.there[region][ends] = self._made(own_ends, ends, own, Strategy((at, B), (at,)), of_all, sent)

    def _move(self, method: Any, node: fx.Node, x: fx.Node, region: ExpertRegion, dims: RowDims) -> fx.Node:
        inside = outside = self.tp[node]
        own = self.splitter.own_rows
        if (isinstance(inside, Split) and inside.dim == dims.rows) or (inside == O) != own:
            etp, rows = (1, "own") if own else (0, "all")
            raise PlanError(
                f"{op_name(node)} gives rows {inside} on tp, but with etp {etp} each tp rank sends {rows} rows",
                where=source_line(node),
                fix="plan again, or leave ep or tp out",
            )
        if isinstance(inside, Split) and inside.dim == dims.experts and not dims.copied:
            # tp splits the experts of each ep rank, so the experts of all ranks are split in ep groups
            outside = Split(inside.dim, self.splitter.ep * inside.groups)
        needs, gives = (inside, outside) if method is combine else (outside, inside)
        options = {} if region.ends else {"rows": dims.rows}
        options |= {} if dims.experts is None else {"experts": dims.experts}
        found = info(node) if method is combine else self.splitter.own(info(node), dims.experts)
        return self._made(method, node, found, Strategy((needs, B), (gives,)), x, self.routes[region], **options)

    def _made(
        self, method: Any, node: fx.Node, found: TensorInfo, strategy: Strategy, *args: fx.Node, **options: int
    ) -> fx.Node:
        name = f"{method.__name__}_{node.name}"
        made = self.splitter.graph.create_node("call_function", method, args, {**options}, name=name)
        made.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        made.meta["info"] = found
        self._add(made, strategy)
        return made
