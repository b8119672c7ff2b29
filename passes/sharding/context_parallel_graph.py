"""The graph of one cp rank: ops at the local number of tokens, and conversions on the cp axis as separate ops.

    prelude   unchanged, at full length: positions, masks and rotary tables count all tokens; a prelude tensor that main
              reads is sliced first, once per stage
    main      `s_local` tokens where `split_tokens` splits them; attention by its own implementation; each all-gather,
              slice or sum over cp is a `convert` before the op that needs it
    results   the loss, and sums for buffers, are partial values on every cp rank

Only this graph contains cp. The placements on tp stay those of the plan, within a rank's tokens, and programs are
emitted from it as from any other graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autoptd.errors import PlanError
from autoptd.layout.placements import B, Broadcast, O, P, Placement, Split, conversion
from autoptd.ops import library as ops
from autoptd.passes.analysis.saved_tensors import ATTENTION, DROPOUT
from autoptd.passes.batch.batch_dims import SamplePlace, sample_place
from autoptd.passes.fold import Cut, Folded, Segment
from autoptd.passes.graph import info, infos, is_getitem, operands, source_line
from autoptd.passes.opcall import Size, TensorInfo
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.context_parallel import TokenSplits, plain
from autoptd.passes.sharding.own_prelude import ORIGIN, OwnPrelude, rebuilt
from autoptd.passes.sharding.sharding import KindSharding, Sharding, Whole, ops_of
from autoptd.passes.trace.traced import LOCAL, SEQUENCE

aten = torch.ops.aten


def convert(x: Tensor, method: str, *dims: int | tuple[int, int]) -> Tensor:
    """A conversion of the cp axis: `cp.method(x, dim=dim)` in an emitted program.

    An exchange has two dims: `cp.all_to_all(x, source=(dim, 1), target=(dim, 1))`.
    """
    raise AssertionError("written into graphs, never run")


def ring(*args: Any, **kwargs: Any) -> Tensor:
    """Ring attention over the cp axis, which passes keys and values round; arguments as in torch's attention."""
    raise AssertionError("written into graphs, never run")


def ulysses(*args: Any, **kwargs: Any) -> Tensor:
    """Ulysses attention, with all-to-alls between heads and tokens over cp; arguments as in torch's attention."""
    raise AssertionError("written into graphs, never run")


_ATTENTION: Mapping[str, Callable[..., Tensor]] = {"ring": ring, "ulysses": ulysses}
TOKEN_OPS = frozenset({convert, ring, ulysses})


def cut_tokens(folded: Folded, splits: TokenSplits, sharding: Sharding) -> tuple[Folded, Sharding]:
    """Return the graph of one cp rank, and the tp sharding carried over to it.

    Raises PlanError if segments of one kind would be split differently.
    """
    return _Cutter(folded, splits, sharding).run()


@dataclass
class _DecidedKind:
    """The decisions for the first segment of a kind, which must be those for the others."""

    strategies: dict[int, Strategy]
    decisions: list[str]


@dataclass
class _Cutter:
    folded: Folded
    splits: TokenSplits
    sharding: Sharding
    graph: fx.Graph = field(default_factory=fx.Graph)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    cuts: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)  # (prelude node, dim) -> its slice
    extra: list[fx.Node] = field(default_factory=list)  # other nodes added to the prelude
    kinds: dict[str, _DecidedKind] = field(default_factory=dict)
    results: dict[fx.Node, fx.Node] = field(default_factory=dict)  # loss or sum -> its partial value on this rank

    def __post_init__(self) -> None:
        self.own = OwnPrelude(
            self.graph,
            self.new,
            lambda size: size.subs(SEQUENCE, LOCAL),
            lambda node: self.cut(node, info(node).shape.index(SEQUENCE)),
        )

    def run(self) -> tuple[Folded, Sharding]:
        folded, traced = self.folded, self.folded.traced
        inside = {n for s in folded.segments for n in s.nodes}
        for node in traced.graph.graph.nodes:
            if node not in inside and node.op != "output":
                self._copy(node)
        segments = tuple(map(self._segment, folded.segments))
        extra = (*self.cuts.values(), *self.extra, *self.own.made.values())
        cut = rebuilt(folded, self.graph, self.new, segments, extra, self.results)
        cut.cut = Cut(self.splits.ranks, self.splits.zigzag, LOCAL)
        kinds = {k: replace(d, strategies=self.kinds[k].strategies) for k, d in self.sharding.kinds.items()}
        return cut, Sharding(self.sharding.ranks, kinds, Whole(folded.segments, self.sharding.kinds))

    def _copy(self, node: fx.Node) -> fx.Node:
        made = self.graph.node_copy(node, self.new.__getitem__)
        assert made.name == node.name, (made.name, node.name)
        self.new[node] = made
        return made

    def _segment(self, segment: Segment) -> Segment:
        decided = self.sharding.kinds[segment.kind]
        writer = _SegmentWriter(self, segment, decided)
        nodes = writer.write()
        known = self.kinds.setdefault(segment.kind, _DecidedKind(writer.strategies, writer.decisions))
        if known.decisions != writer.decisions:
            raise PlanError(
                f"cp {self.splits.ranks}: {segment.name} would be split differently from other segments of its kind",
                where=segment.name,
                fix="leave cp out",
            )
        inside = set(nodes)
        reads = dict.fromkeys(o for n in nodes for o in operands(n) if o not in inside)
        main = {self.new[n] for n in (*segment.parameters, *segment.receives)}
        return replace(
            segment,
            nodes=tuple(nodes),
            parameters=tuple(self.new[n] for n in segment.parameters),
            prelude=tuple(n for n in reads if n not in main),
            receives=tuple(self.new[n] for n in segment.receives),
            sends=tuple(self.results.get(n, self.new[n]) for n in segment.sends),
        )

    def cut(self, node: fx.Node, dim: int) -> fx.Node:
        """Return the slice of a prelude tensor that has this rank's tokens."""
        if (node, dim) not in self.cuts:
            made = self.graph.call_function(convert, (self.new[node], "slice", dim))
            made.meta = {k: v for k, v in node.meta.items() if k in ORIGIN}
            made.meta["info"] = local(info(node), Split(dim), self.splits.ranks)
            self.cuts[node, dim] = made
        return self.cuts[node, dim]


_DRAWS = ATTENTION | DROPOUT | ops.DRAWS
BEFORE = "before the cut"  # key of a node's meta


@dataclass(frozen=True)
class Before:
    """An op's position before tokens were split, and the place of its first result's tokens, which key its random
    numbers."""

    position: int  # in its segment
    tokens: SamplePlace | None  # None if tokens are not split


def before_cut(node: fx.Node) -> Before | None:
    """Return an op's `Before`, or None if tokens are not split."""
    found: Before | None = node.meta.get(BEFORE)
    return found


class _SegmentWriter:
    """The nodes of one segment at local sizes."""

    def __init__(self, cutter: _Cutter, segment: Segment, decided: KindSharding) -> None:
        self.cutter, self.segment, self.decided = cutter, segment, decided
        self.nodes: list[fx.Node] = []
        self.strategies: dict[int, Strategy] = {}  # on the tp axis
        self.decisions: list[str] = []
        self.converted: dict[tuple[fx.Node, Placement, Placement | None], fx.Node] = {}
        self.tp: dict[fx.Node, Placement] = dict(zip(segment.receives, decided.receives, strict=True))
        self.tp |= dict(zip(segment.parameters, decided.parameters, strict=True))

    def write(self) -> list[fx.Node]:
        positions = {n: i for i, n in ops_of(self.segment)}
        shifts = self.cutter.splits.shifted
        for node in self.segment.nodes:
            if node in shifts.values():
                self.cutter.new[node] = self.cutter.new[operands(node)[0]]
                self.decisions.append("shifted")
            elif is_getitem(node):
                made = self.cutter._copy(node)
                made.meta["info"] = local(info(node), self.cutter.splits.given[node], self.cutter.splits.ranks)
                self.nodes.append(made)
            else:
                self._op(node, positions[node], self.decided.strategies[positions[node]])
        for node, placement in zip(self.segment.sends, self.decided.sends, strict=True):
            self._check_nesting(node, self.cutter.splits.given[node], placement)
        results = self.cutter.folded.results
        for node in (n for n in self.segment.sends if n in results):
            self._partial(node)
        return self.nodes

    def _op(self, node: fx.Node, position: int, tp: Strategy) -> None:
        splits = self.cutter.splits
        strategy = splits.strategies[node]
        self.decisions.append(str(strategy))
        reads = list(zip(operands(node), strategy.needs, tp.needs, strict=True))
        if node in splits.shifted:
            taken = [self._operand(*reads[0]), self._padded_labels(node)]
        else:
            taken = [self._operand(*read) for read in reads]
        self._give(node, tp)
        source = iter(taken)
        args = _with_nodes(node.args, source)
        kwargs = {k: _with_nodes(v, source) for k, v in node.kwargs.items()}
        args, kwargs = _local_sizes(node, strategy, splits.ranks, args, kwargs)
        target = _ATTENTION.get(strategy.implementation, node.target)
        made = self.cutter.graph.create_node("call_function", target, args, kwargs, name=node.name)  # type: ignore[arg-type]
        assert made.name == node.name, (made.name, node.name)
        if node.target in _DRAWS:
            sample_place(node)  # computed from the unsplit ops before it, and cached in its meta
        given = strategy.gives[0]
        place = SamplePlace(given.dim) if isinstance(given, Split) else splits.places.get(node)
        made.meta = {**node.meta, BEFORE: Before(position, place)}
        made.meta.pop("op", None)  # of the op before
        found = tuple(local(t, p, splits.ranks) for t, p in zip(infos(node), strategy.gives, strict=True))
        made.meta["info"] = found if isinstance(node.meta["info"], tuple) else found[0]
        self.cutter.new[node] = made
        self._add(made, tp)

    def _add(self, made: fx.Node, tp: Strategy) -> None:
        self.strategies[len(self.nodes)] = tp
        self.nodes.append(made)

    def _give(self, node: fx.Node, tp: Strategy) -> None:
        if not isinstance(node.meta["info"], tuple):
            self.tp[node] = tp.gives[0]
        for user in node.users:
            if is_getitem(user):
                self.tp[user] = tp.gives[user.args[1]]  # type: ignore[index]

    def _operand(self, node: fx.Node, need: Placement, on_tp: Placement) -> fx.Node:
        """Return a tensor in the placement that the op needs on the cp axis."""
        have, need = self.cutter.splits.given[node], plain(need, infos(node)[0])
        self._check_nesting(node, have, on_tp)
        if have == need or (need != O and not conversion(have, need).function):
            return self.cutter.new[node]
        if node in self.segment.prelude and need == O:
            return self.cutter.own.of(node)
        if node in self.segment.prelude and isinstance(need, Split) and not _same_dim(need, on_tp, node):
            return self.cutter.cut(node, need.dim)
        key = node, need, on_tp if _same_dim(need, on_tp, node) else None
        if key not in self.converted:
            self.converted[key] = self._convert(node, have, need, on_tp)
        return self.converted[key]

    def _convert(self, node: fx.Node, have: Placement, need: Placement, on_tp: Placement) -> fx.Node:
        splits = [p for p in (have, need) if isinstance(p, Split)]
        tokens = [p.dim for p in splits if info(node).shape[p.dim] == SEQUENCE]
        if isinstance(on_tp, Split) and on_tp.dim in tokens:  # tp splits within a cp rank's tokens, so it comes after
            on_tp = given if isinstance(given := self.tp.get(node, B), Broadcast) else B
        dims = [p.dim for p in splits] if len(splits) < 2 else [(p.dim, 1) for p in splits]
        made = self.cutter.graph.call_function(convert, (self.cutter.new[node], conversion(have, need).function, *dims))
        made.meta = {k: v for k, v in node.meta.items() if k in ORIGIN}
        made.meta["info"] = local(info(node), need, self.cutter.splits.ranks)
        self.decisions.append(f"{have} -> {need}")
        self._add(made, Strategy((on_tp,), (on_tp,)))
        return made

    def _check_nesting(self, node: fx.Node, have: Placement, on_tp: Placement) -> None:
        """Raise PlanError if tp would split or gather a dim that cp splits for all tokens: of such dims, tp splits
        first, so that each rank's part of every tensor is the same."""
        given = self.tp.get(node, B)
        if given != on_tp and any(_same_dim(have, p, node) for p in (given, on_tp)):
            raise PlanError(
                f"cp {self.cutter.splits.ranks}: tp would convert a dim of {node.name} that cp splits for all tokens",
                where=source_line(node),
                fix="leave cp or tp out",
            )

    def _partial(self, node: fx.Node) -> None:
        """Convert a result of the graph to a partial value."""
        have = self.cutter.splits.given[node]
        if have != O and conversion(have, P).function:  # a sum over a rank's own rows is partial
            on_tp = P if self.tp.get(node) == P and node is not self.cutter.folded.loss else B
            self.cutter.results[node] = self._convert(node, have, P, on_tp)

    def _padded_labels(self, node: fx.Node) -> fx.Node:
        """Return labels for all tokens, padded with `ignore_index` for the last ones."""
        labels, call = operands(node)[1], op_of(node).call
        graph, ignore = self.cutter.graph, call.arg(2, "ignore_index", -100)
        missing = sympy.expand(SEQUENCE - info(labels).shape[1])
        padded = graph.call_function(aten.pad.default, (self.cutter.new[labels], [0, int(missing)], "constant", ignore))
        whole = TensorInfo((info(labels).shape[0], SEQUENCE), info(labels).dtype, False)
        padded.meta = {**{k: v for k, v in labels.meta.items() if k in ORIGIN}, "info": whole}
        made = graph.call_function(convert, (padded, "slice", 1))
        made.meta = {**padded.meta, "info": local(whole, Split(1), self.cutter.splits.ranks)}
        self.cutter.extra += [padded, made]
        return made


def _same_dim(on_cp: Placement, on_tp: Placement, node: fx.Node) -> bool:
    """Return whether cp splits a dim other than the tokens that tp splits too."""
    both = isinstance(on_cp, Split) and isinstance(on_tp, Split) and on_cp.dim == on_tp.dim
    return both and info(node).shape[on_cp.dim] != SEQUENCE  # type: ignore[union-attr]


def local(tensor: TensorInfo, placement: Placement, ranks: int) -> TensorInfo:
    """Return the shape and dtype of one cp rank's part of a tensor."""
    if placement == O:
        return replace(tensor, shape=_at_local(tensor.shape))
    if not isinstance(placement, Split):
        return tensor
    size = tensor.shape[placement.dim]
    assert size == SEQUENCE or (isinstance(size, int) and size % ranks == 0), (tensor.shape, str(placement))
    part: Size = LOCAL if size == SEQUENCE else size // ranks
    shape: Sequence[Size] = [part if dim == placement.dim else n for dim, n in enumerate(tensor.shape)]
    return replace(tensor, shape=tuple(shape))


def _local_sizes(
    node: fx.Node, strategy: Strategy, ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with local values for sizes, as the op's rule defines them."""
    if O in strategy.needs or O in strategy.gives:
        return _at_local(args), _at_local(dict(kwargs))
    op = op_of(node)
    sizes = {} if op.rule is None or strategy.implementation else op.rule.local(op.call, strategy, ranks)
    at = {key: _named(value, SEQUENCE / ranks) for key, value in sizes.items()}
    return tuple(at.get(i, a) for i, a in enumerate(args)), {k: at.get(k, v) for k, v in kwargs.items()}


def _named(value: Any, tokens: sympy.Expr) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_named(v, tokens) for v in value)
    return LOCAL if isinstance(value, sympy.Basic) and value == tokens else value


def _at_local(value: Any) -> Any:
    """Return arguments or a shape with the number of a rank's tokens in the place of all tokens."""
    if isinstance(value, sympy.Basic):
        return value.subs(SEQUENCE, LOCAL)
    if isinstance(value, dict):
        return {k: _at_local(v) for k, v in value.items()}
    return type(value)(map(_at_local, value)) if isinstance(value, (tuple, list)) else value


def _with_nodes(value: Any, nodes: Any) -> Any:
    if isinstance(value, fx.Node):
        return next(nodes)
    if isinstance(value, (tuple, list)):
        return type(value)(_with_nodes(v, nodes) for v in value)
    return value
