"""Ops that read or write rows by index: proof that every index points to a row of the same sample.

    read    x[i], x[:, i, j], index_select, gather, a lookup      rows of x at i, in the order of i
    write   index_put, index_add, index_copy, scatter …           rows in the order of i, at i

A row that is read or written through an index of its own sample still belongs to that sample. Rows written through the
indices of an order are in the order that these indices point into; writing 0, 1, 2 … gives the inverse permutation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autoptd.passes.batch.batch_dims import SamplePlace, counts_samples
from autoptd.passes.batch.row_numbers import is_range
from autoptd.passes.batch.rows import FILLED, Across, Points, Rows, State, placed
from autoptd.passes.graph import op_call, op_name, operands
from autoptd.passes.opcall import OpCall, target_name
from autoptd.passes.rules.views import same

FIX = (
    "select by the index of the sample (x[torch.arange(b), i]) or along another dim (x.gather(1, i)); restore the "
    "order of sorted rows with the indices that sorted them (index_add, or the inverse permutation as index)"
)
_UNPROVED = "works across samples: its indices are not proved to stay within each sample"
_READS = ("index", "index_select", "gather", "embedding", "take_along_dim")
_WRITES = (
    "index_put",
    "index_add",
    "index_copy",
    "index_fill",
    "index_reduce",
    "scatter",
    "scatter_add",
    "scatter_reduce",
)


@dataclass(frozen=True)
class Move:
    """A read or write by index: its call, the states of its operands, and the operand that indexes each dim."""

    call: OpCall
    states: Sequence[State]
    indices: Mapping[int, int]  # dim -> operand
    source: int | None = None  # operand whose rows are written

    def index(self, dim: int) -> Rows | None:
        found = self.states[self.indices[dim]]
        return found if isinstance(found, Rows) else None

    @property
    def wide(self) -> int:
        """Number of dims of the indices after broadcasting."""
        return max(self.call.operands[i].ndim for i in self.indices.values())

    def beside(self, first: int, second: int) -> bool:
        """Return whether broadcasting aligns the rows of two operands; an operand without rows fits any other."""
        one, other = self.states[first], self.states[second]
        if not (isinstance(one, Rows) and isinstance(other, Rows)):
            return True
        return one.aligned(self.call.operands[first].ndim, other, self.call.operands[second].ndim)


def follow_move(node: fx.Node, states: Sequence[State]) -> State:
    """Return the state of a read or write by index; NotImplemented for other ops, and if it moves no rows."""
    base = op_name(node)
    if base not in _READS and base not in _WRITES:
        return NotImplemented
    call = op_call(node)
    if base in _READS:
        return _read(node, Move(call, states, dict(_indices(call))))
    return _write(node, Move(call, states, dict(_indices(call)), _source(call)))


def _indices(call: OpCall) -> Iterator[tuple[int, int]]:
    """Yield (dim, operand) of every index."""
    base = target_name(call.target)
    if base == "embedding":
        yield 0, 1
    elif base in ("index", "index_put"):
        dim, operand = 0, 1
        for slot in call.args[1]:
            if slot is not None:
                yield dim, operand
                operand += 1
            masks = slot is not None and slot.dtype in (torch.bool, torch.uint8)
            dim += slot.ndim if masks else 1
    else:
        yield call.arg(1, "dim") % max(call.operands[0].ndim, 1), 1


def _source(call: OpCall) -> int | None:
    last = len(call.operands) - 1
    return last if last > len(dict(_indices(call))) else None


def _read(node: fx.Node, move: Move) -> State:
    """Return the rows read from the first operand, in the order of the index; NotImplemented if no rows are moved."""
    table, unproved = move.states[0], Across(node, _UNPROVED, FIX)
    if isinstance(table, Rows):
        if table.place.dim not in move.indices:
            return NotImplemented
        own = move.index(table.place.dim)
        if own is None or own.points is None or not own.points.at(table.place, table.order):
            return unproved
        first = move.indices[table.place.dim]
        others = [i for i in move.indices.values() if i != first and isinstance(move.states[i], Rows)]
        if any(_points(move.states[i]) or not move.beside(first, i) for i in others):
            return unproved
        found = placed(move.call, {first: own})
        return unproved if found is None else replace(found, points=_through(table.points, own.points))
    if table is FILLED:
        return FILLED if counts_samples(move.call.outputs[0]) else None
    return NotImplemented


def _through(inner: Points | None, outer: Points) -> Points | None:
    """Return the state of row indices that are themselves read by row indices."""
    return None if inner is None else replace(inner, each=inner.each and outer.each)


def _points(state: State) -> bool:
    return isinstance(state, Rows) and state.points is not None


def _write(node: fx.Node, move: Move) -> State:
    """Return the rows of the result, if each is made from rows of the same sample."""
    pointed = [dim for dim in move.indices if (rows := move.index(dim)) is not None and rows.points is not None]
    moving = [dim for dim in move.indices if move.index(dim) is not None]
    base, unproved = move.states[0], Across(node, _UNPROVED, FIX)
    if not moving:
        return _beside_rows(move)
    if any(move.call.operands[move.indices[dim]].dtype in (torch.bool, torch.uint8) for dim in moving):
        return _masked(move) or unproved
    if not pointed:
        return NotImplemented if _positional(move) and _other_dim(move) else unproved
    (dim, *more) = pointed
    first = move.indices[dim]
    own = move.index(dim)
    assert own is not None and own.points is not None
    place = SamplePlace(dim, own.points.outer, own.points.inner)
    length = own.points.outer * own.points.order.size * own.points.inner
    if more or not same(move.call.operands[0].shape[dim], length):
        return unproved
    if base is not FILLED and base != Rows(place, own.points.order):
        return unproved
    if target_name(move.call.target) != "index_put" and own.place.dim != (dim if _positional(move) else 0):
        return unproved
    if any(not move.beside(first, move.indices[d]) for d in moving):
        return unproved
    if _counts_up(node, move, own):
        return Rows(place, own.points.order, Points(own.order, own.place.outer, own.place.inner, each=True))
    return Rows(place, own.points.order) if _source_beside(move, dim, own) else unproved


def _beside_rows(move: Move) -> State:
    """Return the rows of `x[:, :, i] = value`: those of x, if i is of later dims and no row of the value is moved."""
    base, value = move.states[0], None if move.source is None else move.states[move.source]
    if not isinstance(base, Rows) or target_name(move.call.target) != "index_put" or base.points is not None:
        return NotImplemented
    at = sorted(move.indices)
    masks = any(move.call.operands[i].dtype in (torch.bool, torch.uint8) for i in move.indices.values())
    if masks or base.place.dim >= at[0] or at != list(range(at[0], at[0] + len(at))):
        return NotImplemented
    if value is None:
        return base
    assert move.source is not None
    full, tensor = move.wide + move.call.operands[0].ndim - len(at), move.call.operands[move.source]
    if not isinstance(value, Rows) or full - base.place.dim != tensor.ndim - value.place.dim:
        return NotImplemented
    return base if base == replace(value, place=replace(value.place, dim=base.place.dim)) else NotImplemented


def _masked(move: Move) -> Rows | None:
    """Return the rows of `x[mask] = value`, if the mask has the rows of x and the value depends on no sample."""
    base = move.states[0]
    value = None if move.source is None else move.states[move.source]
    if value is not None or len(move.indices) != 1:
        return None
    ((dim, operand),) = move.indices.items()
    mask = move.states[operand]
    assert isinstance(mask, Rows)
    moved = replace(mask, place=replace(mask.place, dim=mask.place.dim + dim))
    return moved if base is FILLED or base == moved else None


def _other_dim(move: Move) -> bool:
    """Return whether a scatter moves no rows: all operands with rows have them in one dim, which is not indexed."""
    rows = [s for s in move.states if isinstance(s, Rows)]
    return len({(r.place, r.order) for r in rows}) == 1 and rows[0].place.dim not in move.indices


def _counts_up(node: fx.Node, move: Move, own: Rows) -> bool:
    """Return whether 0, 1, 2 … are written through a permutation, which gives its inverse."""
    if move.source is None or own.points is None or not own.points.each:
        return False
    source, written = operands(node)[move.source], move.states[move.source]
    plain = move.call.operands[move.source].ndim == move.call.operands[move.indices[0]].ndim == 1
    return plain and isinstance(written, Rows) and is_range(source)


def _source_beside(move: Move, dim: int, own: Rows) -> bool:
    """Return whether the rows of the source are aligned with those of the index."""
    if move.source is None:
        return True
    source, tensor = move.states[move.source], move.call.operands[move.source]
    if not isinstance(source, Rows):
        return not isinstance(source, Across)
    if source.points is not None or source.order != own.order:
        return False
    if (source.place.outer, source.place.inner) != (own.place.outer, own.place.inner):
        return False
    index = move.call.operands[move.indices[dim]]
    if (
        target_name(move.call.target) == "index_put"
    ):  # the dims of the indices replace the indexed dims, or come first if apart
        at = sorted(move.indices)
        adjacent = at == list(range(at[0], at[0] + len(at)))
        full = move.wide + move.call.operands[0].ndim - len(at)
        where = (at[0] if adjacent else 0) + move.wide - index.ndim + own.place.dim
        return full - where == tensor.ndim - source.place.dim
    return source.place.dim == dim


def _positional(move: Move) -> bool:
    """Return whether the index has all dims of the first operand, as in scatter."""
    return target_name(move.call.target).startswith("scatter")
