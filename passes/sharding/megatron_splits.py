"""Placements of parameters under the tensor parallelism of Megatron-LM, read off the graph.

    column   y = x Wᵀ, where x is whole: W is split by the width of y, which the ops after it keep apart up to …
    row      z = y Wᵀ, which sums over that width: W is split by it, and z is a partial value
    head     a column whose width the loss sums over
    table    the first table that is looked up: split by rows
    whole    all other parameters: norms, biases of rows, positions, and products whose result no row takes in slices:
             routers, and the compressed projections of latent attention

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2. Compressed projections: "duplicated" in
megatron/core/transformer/multi_latent_attention.py; routers: megatron/core/transformer/moe/router.py.)

No names of modules are read. A width is followed by the factors of each op's rule, so joined projections (`S0/3`),
weights [in, out], grouped query heads and the parameters of experts need no cases of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch
from torch import fx

from autoptd.errors import PlanError
from autoptd.layout.placements import Split
from autoptd.passes.analysis.flops import GROUPED, PRODUCTS
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import ancestors, info, infos, is_getitem, op_name, operands, source_line
from autoptd.passes.rules.factor_notation import MAX_GROUPS, FactorPlace
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.sharding import output_names, tensor_name

aten = torch.ops.aten
MEGATRON = "megatron"  # in place of a placement in fix['splits']
_UNREAD = (aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default)
_FIX = "leave splits out, or name placements: fix={'splits': {'*.q_proj.weight': 'S0'}}"

Places = tuple[FactorPlace | None, ...]  # of a factor, in the operands and results of an op


@dataclass(frozen=True)
class ParameterSplit:
    """The placement of a parameter.

    split    None if it is whole on every rank
    parts    number of equal parts that it has, such as heads: tp must divide it; 0: any tp does
    padded   whether Megatron-LM pads it to a multiple of tp, as it does a vocabulary
    """

    split: Split | None = None
    parts: int = 0
    padded: bool = False

    def __str__(self) -> str:
        return "B" if self.split is None else str(self.split)

    def divides(self, tp: int) -> bool:
        """Return whether tp ranks can have equal parts."""
        return self.parts % tp == 0


@dataclass(frozen=True)
class MegatronSplits:
    """The placement of each parameter that an op reads, by name, and of each activation whose width is split, by tensor
    of the first of equal segments. Other activations are whole, or split by tokens (sequence parallelism).

    `compressed`: whether columns read what whole products give, as in latent attention.
    """

    parameters: Mapping[str, ParameterSplit]
    widths: Mapping[str, Split]
    compressed: bool


@dataclass
class _Width:
    """A product's width: its number of equal parts, the parameters that are split with it, and where it is summed."""

    parts: int = 0
    weights: dict[fx.Node, Split] = field(default_factory=dict)
    rows: set[fx.Node] = field(default_factory=set)
    in_loss: bool = False


def megatron_splits(folded: Folded) -> MegatronSplits:
    """Return the placements of a model; of equal segments the first one is read.

    Raises PlanError for a model without a column and a row, and for a product of a layer that can be neither.
    """
    graph, names = _Graph(folded), folded.traced.parameters
    found = _split_parameters(folded, graph)
    slots = {
        (segment.kind, i): found.get(node, ParameterSplit())
        for segment in folded.representatives.values()
        for i, node in enumerate(segment.parameters)
    }
    placed: dict[str, ParameterSplit] = {}
    for segment in folded.segments:
        for i, node in enumerate(segment.parameters):
            name, mine = names[node.name], slots[segment.kind, i]
            if name not in placed or placed[name].split is None:  # tied to the head, say
                placed[name] = mine
    return MegatronSplits(placed, graph.carried, graph.compressed)


def _split_parameters(folded: Folded, graph: _Graph) -> dict[fx.Node, ParameterSplit]:
    found: dict[fx.Node, ParameterSplit] = {}
    rows = set[fx.Node]()
    for segment in folded.representatives.values():
        products = [node for node in segment.nodes if not is_getitem(node) and graph.is_product(node)]
        for node in products:
            if node in rows or any(tensor_name(o) in graph.carried for o in operands(node)):
                continue
            width = graph.column(node)
            graph.note(node, segment, isinstance(width, _Width))
            if isinstance(width, _Width):
                rows |= width.rows
                found |= {p: ParameterSplit(s, width.parts, width.in_loss) for p, s in width.weights.items()}
            elif infos(operands(node)[1])[0].ndim > 2:  # of experts, which with etp 1 are not split at all
                found |= {p: ParameterSplit(parts=1) for p in graph.parameters_of(node)}
            else:
                _check_whole(folded, segment, node, width, alone=len(products) == 1)
    if not rows:
        raise PlanError(
            "no layer has a matrix product to split by columns and one after it to split by rows, as Megatron-LM does",
            where="fix['splits']",
            fix=_FIX,
        )
    if (table := graph.table()) is not None:
        found[table] = ParameterSplit(Split(0), int(info(table).shape[0]), padded=True)
    return found


def _check_whole(folded: Folded, segment: Segment, product: fx.Node, stop: fx.Node, alone: bool) -> None:
    """Raise PlanError for a wide product of a layer whose result is needed whole: Megatron-LM splits it."""
    in_layer = any(u.count > 1 and u.first <= segment.index <= u.last for u in folded.units)
    wide = infos(product)[0].shape[-1] >= operands(product)[0].meta["info"].shape[-1]
    if wide and (in_layer or not alone):
        raise PlanError(
            f"the result of {product.name} cannot stay split up to a product that sums over it, as in Megatron-LM's "
            f"layers: {op_name(stop)} needs it whole",
            where=source_line(product),
            fix=_FIX,
        )


class _Graph:
    """The graph of a model, and the tensors whose width is split so far."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self.order = {node: i for i, node in enumerate(folded.traced.graph.graph.nodes)}
        self.carried: dict[str, Split] = {}
        self.compressed = False
        self._whole: set[fx.Node] = set()

    def note(self, product: fx.Node, segment: Segment, is_column: bool) -> None:
        """Record a product that is a column, or whole, and whether a column reads whole ones."""
        if is_column:
            inside = {n for n in segment.nodes if n is product or _is_wide(n)}
            before = ancestors([product], inside.__contains__)
            self.compressed = self.compressed or not self._whole.isdisjoint(before)
        else:
            self._whole.add(product)

    def table(self) -> fx.Node | None:
        """Return the first table that is looked up: the vocabulary's."""
        lookups = (n for s in self.folded.segments for n in s.nodes if n.target is aten.embedding.default)
        tables = (operands(node)[0] for node in lookups)
        return next((table for table in tables if self._is_parameter(table)), None)

    def is_product(self, node: fx.Node) -> bool:
        """Return whether an op sums over a factor of a weight and of an activation."""
        return next(self._widths(node), None) is not None

    def column(self, node: fx.Node) -> _Width | fx.Node:
        """Return the width of a product that may be split by columns, or the op that needs its result whole."""
        stop, loops = node, op_of(node).loops
        assert loops is not None
        for name, places in self._widths(node):
            size = loops.sizes[name]
            for count in range(1, MAX_GROUPS + 1):
                if isinstance(size, int) and size % count == 0:
                    reached = self._follow(node, places, size, count)
                    if isinstance(reached, _Width):
                        return reached
                    stop = reached if stop is node else stop
        return stop

    def _widths(self, node: fx.Node) -> Iterator[tuple[str, Places]]:
        """Yield the factors that a product's result has of its weight alone."""
        loops, given = op_of(node).loops, operands(node)
        weighs = [self._weight(o) for o in given]
        if loops is None or not any(weighs) or all(weighs) or node.target not in PRODUCTS | GROUPED:
            return
        every = [(name, places, _those(places, weighs)) for name, places in loops.places.items()]
        if not any(places[-1] is None and set(of) == {True, False} for _, places, of in every):
            return
        yield from ((name, places) for name, places, of in every if places[-1] is not None and set(of) == {True})

    def _weight(self, node: fx.Node) -> bool:
        """Return whether a tensor is a parameter or computed from one alone."""
        while not self._is_parameter(node):
            if node.op != "call_function" or len(operands(node)) != 1:
                return False
            (node,) = operands(node)
        return True

    def _is_parameter(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node.name in self.folded.traced.parameters

    def _follow(self, product: fx.Node, places: Places, size: int, count: int) -> _Width | fx.Node:
        """Follow the width of a product, split in `count` groups; return where it is needed whole if it is."""
        width, carried, queue = _Width(), dict[str, Split](), list[tuple[int, fx.Node]]()
        found: fx.Node | None = self._take(product, places, size, count, width, carried, queue)
        while queue and found is None:
            _, node = heappop(queue)
            if node.target in _UNREAD or (queue and queue[0][1] is node):
                continue
            if is_getitem(node):
                self._push(queue, node)
                continue
            factor = None if node.op == "output" else _factor(node, carried)
            found = node if factor is None else self._take(node, *factor, width, carried, queue)
        if found is not None or not (width.rows or width.in_loss):
            return product if found is None else found
        self.carried |= carried
        return width

    def _push(self, queue: list[tuple[int, fx.Node]], node: fx.Node) -> None:
        for user in node.users:
            heappush(queue, (self.order[user], user))

    def _take(
        self,
        node: fx.Node,
        places: Places,
        size: int,
        count: int,
        width: _Width,
        carried: dict[str, Split],
        queue: list[tuple[int, fx.Node]],
    ) -> fx.Node | None:
        """Split a factor of an op; return the op if it needs the factor whole."""
        given = operands(node)
        if not all(isinstance(place.outer, int) for place in places if place is not None):  # merged with samples
            return node
        here, there = places[: len(given)], places[len(given) :]
        width.parts = math.gcd(width.parts, size // count)
        for operand, place in zip(given, here, strict=True):
            if place is not None and tensor_name(operand) not in carried:
                width.weights |= dict(self._sources(operand, _split(place, count)))
        if all(place is not None for place in there):
            for name, place in zip(output_names(node), there, strict=True):
                assert place is not None
                carried[name] = _split(place, count)
            self._push(queue, node)
            return None
        if any(place is not None for place in there):
            return node
        if self.is_product(node):
            width.rows.add(node)
        elif _sums_in_parts(node, places):
            width.in_loss = True
        else:
            return node
        return None

    def parameters_of(self, product: fx.Node) -> Iterator[fx.Node]:
        """Yield the parameters that the weights of a product are computed from."""
        for node in filter(self._weight, operands(product)):
            while not self._is_parameter(node):
                (node,) = operands(node)
            yield node

    def _sources(self, node: fx.Node, split: Split) -> Iterator[tuple[fx.Node, Split]]:
        """Yield the parameter that a tensor is computed from, and how it is split if the tensor is."""
        if self._is_parameter(node):
            yield node, split
        elif node.op == "call_function" and not is_getitem(node) and (loops := op_of(node).loops) is not None:
            given = operands(node) if node.target is not aten.embedding.default else []  # a table of positions
            for places in loops.places.values():
                if len(places) == len(given) + 1 and (count := _groups(places[-1], split)):
                    for operand, place in zip(given, places, strict=False):
                        if place is not None:
                            yield from self._sources(operand, _split(place, count))


def _is_wide(node: fx.Node) -> bool:
    """Return whether a tensor has a width: it is no index, and no single score of each row, as a router gives."""
    tensor = infos(node)[0]
    return tensor.dtype.is_floating_point and tensor.shape[-1:] != (1,)


def _those(places: Places, weighs: Sequence[bool]) -> list[bool]:
    """Return, of each operand that has a factor, whether it is a weight."""
    return [weight for place, weight in zip(places, weighs, strict=False) if place is not None]


def _split(place: FactorPlace, count: int) -> Split:
    assert isinstance(place.outer, int)
    return Split(place.dim, place.outer * count)


def _groups(place: FactorPlace | None, split: Split) -> int:
    """Return in how many groups a factor is split if its tensor is split so; 0 if that does not split the factor."""
    if place is None or place.dim != split.dim or not isinstance(place.outer, int) or split.groups % place.outer:
        return 0
    return split.groups // place.outer


def _factor(node: fx.Node, carried: dict[str, Split]) -> tuple[Places, int, int] | None:
    """Return (places, size, groups) of the factor of an op along which its carried operands are split; None if it needs
    them whole."""
    loops, given = op_of(node).loops, [carried.get(tensor_name(o)) for o in operands(node)]
    for name, places in () if loops is None else loops.places.items():
        assert loops is not None
        counts = {_groups(place, split) for place, split in zip(places, given, strict=False) if split is not None}
        size = loops.sizes[name]
        if len(counts) == 1 and (count := counts.pop()) and isinstance(size, int) and size % count == 0 < size - count:
            return places, size, count
    return None


def _sums_in_parts(node: fx.Node, places: Places) -> bool:
    """Return whether an op, such as a loss, has an implementation of its own that sums over a split factor."""
    op = op_of(node)
    assert op.loops is not None and op.rule is not None
    names = {name for name, others in op.loops.places.items() if others is places}
    return any(own.factor in names and own.applies(op.call) for own in op.rule.implementations)
