"""Expert regions of batched products: experts have a dim of their own, and every expert equally many rows.

    x [experts, rows, h] @ parameter [experts, h, f] ──► [experts, rows, f] ── any op on each row ──► @ [experts, f, h]

The two dims may be anywhere, and `rows`, which counts samples, may be one of several: GShard's capacity slots are
[experts, groups, slots, h]. They are followed through each op by the factors of its rule. A region has two products at
least, one on the results of the other: a projection to heads is no expert. Dropout on the way is computed outside, as
its mask is keyed by the positions of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from autoptd.passes.analysis.flops import PRODUCTS
from autoptd.passes.analysis.saved_tensors import DROPOUT
from autoptd.passes.fold import Segment
from autoptd.passes.graph import info, infos, is_getitem, operands
from autoptd.passes.rules.factor_notation import FactorPlace
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.expert_rows import (
    ExpertRegion,
    NoWeight,
    RowDims,
    has_sizes,
    other_readers,
    outermost,
    weight_chain,
)
from autoptd.passes.trace.traced import BATCH

aten = torch.ops.aten
Places = tuple[FactorPlace | None, ...]


@dataclass
class _Part:
    """A region while it is found. `chained`: one of its products works on the results of another."""

    product: fx.Node
    count: int
    ops: set[fx.Node] = field(default_factory=set)
    rows: dict[fx.Node, RowDims] = field(default_factory=dict)
    reads: dict[fx.Node, RowDims] = field(default_factory=dict)
    weights: dict[fx.Node, int] = field(default_factory=dict)
    chained: bool = False

    def put_after(self, other: _Part) -> None:
        self.product = other.product
        self.ops |= other.ops
        self.rows = other.rows | self.rows
        self.reads = other.reads | self.reads
        self.weights = other.weights | self.weights
        self.chained |= other.chained


def batched_regions(segment: Segment) -> list[ExpertRegion]:
    """Return the regions of a segment's batched products, in program order."""
    return _Finder(segment).run()


class _Finder:
    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.parts: dict[fx.Node, _Part] = {}  # of each tensor whose dims are known
        self.dims: dict[fx.Node, RowDims] = {}

    def run(self) -> list[ExpertRegion]:
        for node in self.segment.nodes:
            if is_getitem(node):
                owner = node.all_input_nodes[0]
                if owner in self.dims:
                    self._put(node, self.parts[owner], self.dims[owner])
                    self.parts[owner].ops.add(node)
            else:
                self._follow(node)
        parts = {id(part): part for part in self.parts.values() if part.chained}.values()
        return [
            ExpertRegion(p.product, p.count, None, frozenset(p.ops), p.rows, _without(p.reads, p.rows), p.weights)
            for p in parts
            if not other_readers(p.weights, p.ops)
        ]

    def _follow(self, node: fx.Node) -> None:
        """Add an op to the regions whose rows it reads, or begin one, if it works on each row of each expert."""
        known = [o for o in operands(node) if o in self.dims]
        product = node.target in PRODUCTS and any(map(_may_be_weight, operands(node)))
        if not (known or product) or has_sizes(node) or (loops := op_of(node).loops) is None:
            return
        every = list(loops.places.values())
        for experts, rows in _pairs(node, every):
            part = self._part(node, every, experts, rows, product)
            if part is not None:
                self._join(node, part, [self.parts[o] for o in known], experts, rows)
                return

    def _part(self, node: fx.Node, every: list[Places], experts: Places, rows: Places, product: bool) -> _Part | None:
        """Return the region of one op with these factors for experts and rows; None if it is none."""
        given = operands(node)
        part = _Part(node, int(infos(node)[0].shape[experts[len(given)].dim]))  # type: ignore[union-attr,arg-type]
        multiplied = chained = False
        for i, operand in enumerate(given):
            expert, row = experts[i], rows[i]
            if any(place is not None and place.outer != 1 for place in (expert, row)):
                return None
            if operand in self.dims:
                if expert is None or row is None or self.dims[operand] != RowDims(row.dim, expert.dim):
                    return None
                chained |= operand in self.parts and product
                if operand not in self.parts[operand].rows:  # dropped out outside the region
                    part.reads[operand] = self.dims[operand]
            elif row is not None:
                copied = expert is None or _is_copied(operand, expert.dim)
                part.reads[operand] = RowDims(row.dim, None if expert is None else expert.dim, copied)
            elif expert is not None:
                chain = weight_chain(self.segment, operand, expert.dim)
                if isinstance(chain, NoWeight):
                    return None
                part.weights |= chain
                multiplied |= product and _is_matrix(i, every, experts, len(given))
        part.chained = chained and multiplied
        begins = multiplied and bool(part.reads)
        return part if begins or any(o in self.dims for o in given) else None

    def _join(self, node: fx.Node, part: _Part, others: list[_Part], experts: Places, rows: Places) -> None:
        for other in others:
            if other is not part:
                part.put_after(other)
        for known, owner in self.parts.items():
            if any(owner is other for other in others):
                self.parts[known] = part
        count = len(operands(node))
        dims = RowDims(rows[count].dim, experts[count].dim)  # type: ignore[union-attr]
        if node.target in DROPOUT:
            self.parts[node], self.dims[node] = part, dims
        else:
            part.ops.add(node)
            self._put(node, part, dims)

    def _put(self, node: fx.Node, part: _Part, dims: RowDims) -> None:
        self.parts[node], self.dims[node], part.rows[node] = part, dims, dims


def _pairs(node: fx.Node, every: list[Places]) -> Iterator[tuple[Places, Places]]:
    """Yield the factors that may count experts and rows: in the same dim of every result, samples among the rows."""
    count = len(operands(node))
    shared = [
        places for places in every if all(outermost(p) and p == places[count] for p in places[count:]) and infos(node)
    ]
    sizes = [infos(node)[0].shape[places[count].dim] for places in shared]  # type: ignore[union-attr]
    for experts, n in zip(shared, sizes, strict=True):
        for rows, m in zip(shared, sizes, strict=True):
            if isinstance(n, int) and n > 1 and isinstance(m, sympy.Basic) and BATCH in m.free_symbols:
                yield experts, rows


def _may_be_weight(node: fx.Node) -> bool:
    shape = infos(node)[0].shape
    return len(shape) > 2 and all(isinstance(n, int) for n in shape)


def _is_matrix(position: int, every: list[Places], experts: Places, count: int) -> bool:
    """Return whether a product sums over one dim of this operand and takes another from it alone, besides experts."""
    own = [places for places in every if places[position] is not None and places is not experts]
    summed = any(all(place is None for place in places[count:]) for places in own)
    alone = any(
        any(place is not None for place in places[count:])
        and all(place is None for i, place in enumerate(places[:count]) if i != position)
        for places in own
    )
    return summed and alone


def _is_copied(node: fx.Node, dim: int) -> bool:
    """Return whether a tensor has the same values along a dim, because it was expanded."""
    if node.target is not aten.expand.default:
        return False
    source = info(operands(node)[0])
    at = dim - (info(node).ndim - source.ndim)
    return at < 0 or source.shape[at] == 1


def _without(reads: Mapping[fx.Node, RowDims], rows: Mapping[fx.Node, RowDims]) -> dict[fx.Node, RowDims]:
    return {node: dims for node, dims in reads.items() if node not in rows}
