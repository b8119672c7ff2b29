"""Rows that a mask selects, as in `cross_entropy(logits[mask], labels[mask])`, whose number depends on data.

    x[mask]        x [b, s, h], mask [b, s]: u rows    ->  all b · s rows, those that are not selected filled
    f(x[mask])     an op of each row                   ->  the op of all rows
    sum over rows  a sum, a mean, a loss               ->  of where(mask, rows, 0); a mean's divisor is mask.sum()
    y[mask] = ...  the rows, back at their places      ->  where(mask, rows, y)
    y[other] = ... the rows, at places of another mask ->  moved there, in order within each sample (`placed_rows.py`)
    y.index_add    the rows, added at their places     ->  y + where(mask, rows, 0), summed over the mask's other dims

First a size that counts selected rows is named after all of them, and each selection becomes a `masked_rows` node
(`row_selections.py`); when every op has its final form, ops of rows are followed by their rules, and reductions masked.
Dropout is drawn for all rows, so that what is dropped of a row does not depend on which others are selected. Everything
else that such rows can be used for depends on how many they are, and is refused: their order, their number, other draws
of random numbers.

The fill is in the domain of most functions (0.5, 0 for integers, true for masks, so that attention sees something), so
that rows that are not selected have finite gradients, which the mask makes zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoptd.passes.batch.batch_dims import SamplePlace, grows, makes_new
from autoptd.passes.batch.batch_independence import SUMS, output_places
from autoptd.passes.batch.rows import Order, Rows
from autoptd.passes.graph import OF_ROWS, OR_ZERO, info, is_getitem, numel, op_call, operands, plain, write_op
from autoptd.passes.normalise.drop import share_repeated
from autoptd.passes.opcall import Size
from autoptd.passes.random.draws import draws, given_of
from autoptd.passes.rewrites.placed_rows import write_moved_rows
from autoptd.passes.rewrites.row_selections import INDICES, REPEATED, add_rows, masked_rows, put_rows, refuse
from autoptd.passes.rules.views import quotient
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten
_DENSE = (
    "keep all rows and multiply by the mask: out + expert(x) * (gates * (chosen == i)).sum(-1, keepdim=True); or sort "
    "the rows by expert and multiply them at once (torch._grouped_mm)"
)
_ELEMENTWISE = (
    *(aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default),
    *(aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.kl_div.default),
    *(aten.soft_margin_loss.default, aten.poisson_nll_loss.default),
)
_BY_CLASS = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)


@dataclass(frozen=True)
class _Selected:
    """Rows of all samples, of which `mask` selects some, at a place in a tensor."""

    mask: fx.Node
    place: SamplePlace


@dataclass
class MaskedRows:
    """The walk through a graph that finds where tensors have selected rows, and masks what is computed across them."""

    graph: fx.Graph
    states: dict[fx.Node, tuple[_Selected | None, ...]] = field(default_factory=dict)

    def state(self, node: fx.Node) -> _Selected | None:
        return self.states.get(node, (None,))[0]

    def follow(self, node: fx.Node) -> None:
        """Record where the results of an op have selected rows, or rewrite it if it reduces them."""
        if node.target is masked_rows:
            self.states[node] = (_Selected(node.args[1], SamplePlace(node.args[2])),)  # type: ignore[arg-type]
            return
        if is_getitem(node):
            owner, index = node.args
            self.states[node] = (self.states[owner][index] if owner in self.states else None,)  # type: ignore[index]
            return
        given = {i: s for i, o in enumerate(operands(node)) if (s := self.state(o)) is not None}
        if not given:
            if (repeated := node.meta.get(REPEATED)) is not None:
                self.states[node] = (_Selected(repeated[0], SamplePlace(repeated[1])),)
            return
        if node.target in _BACK:
            self._put(node, given)
            return
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            given = self._aligned(node, given)
        mask, *others = {s.mask for s in given.values()}
        if others:
            refuse(node, "combines rows that different masks select")
        if node.target is aten.dropout.default:  # whether an element is dropped does not depend on other rows
            self.states[node], node.meta[OF_ROWS] = (given[0],), True
            return
        if node.op == "output" or draws(node.target, node.args, node.kwargs):
            refuse(node, "draws random numbers for" if node.op != "output" else "returns", "rows that a mask selects")
        for written in (self._loss, self._mean, self._one_each):
            if written(node, given, mask):
                return
        self._by_rule(node, given, mask)

    def _put(self, node: fx.Node, given: dict[int, _Selected]) -> None:
        """Let the rows of a write be those of its own mask."""
        mask, rows = node.args[1:3]
        if given.keys() != {2} or (given[2].place.dim, given[2].place.outer) != (0, 1):
            refuse(node, "moves rows that a mask selects")
        if given[2].mask is mask:
            return
        if node.target is add_rows:
            refuse(node, "combines rows that different masks select")
        rest = (numel(info(node).shape) / numel(info(mask).shape),)  # type: ignore[arg-type]
        with self.graph.inserting_before(node):
            node.replace_input_with(rows, self._moved(node, rows, given[2].mask, mask, rest))  # type: ignore[arg-type]

    def _aligned(self, node: fx.Node, given: dict[int, _Selected]) -> dict[int, _Selected]:
        """Let the operands of a pointwise op have their rows where one mask selects some.

        Others are selected by another mask, or are as many for each sample.
        """
        ndim, place = info(node).ndim, SamplePlace(0)
        if any(s.place != place or info(operands(node)[i]).ndim != ndim for i, s in given.items()):
            return given
        size, aligned = info(node).shape[0], dict(given)
        mask = next((s.mask for s in given.values() if numel(info(s.mask).shape) == size), None)
        for i, x in enumerate(operands(node)):
            shape = info(x).shape
            each = quotient(shape[0], BATCH) if len(shape) == ndim and i not in given else None
            if mask is None or (i in given and given[i].mask is mask):
                continue
            if i in given:
                kept = given[i].mask
            elif each is not None and shape[0] != size:
                whole = (BATCH, plain(each))
                with self.graph.inserting_before(node):
                    kept = write_op(self.graph, node, aten.full.default, (list(whole), True), whole, torch.bool)
            else:
                continue
            with self.graph.inserting_before(node):
                node.replace_input_with(x, self._moved(node, x, kept, mask, shape[1:]))
            aligned[i] = _Selected(mask, place)
        return aligned

    def _moved(self, like: fx.Node, x: fx.Node, kept: fx.Node, mask: fx.Node, rest: tuple[Size, ...]) -> fx.Node:
        """Insert rows of x, of shape `rest`, that `kept` selects where `mask` selects some, sample by sample.

        What `kept` selects may be several rows each: a picture has some for each of its patches.
        """
        sizes = [quotient(numel(info(m).shape), BATCH) for m in (kept, mask)]
        by_sample = [quotient(info(m).shape[0], BATCH) is not None for m in (kept, mask)]
        each = quotient(numel(info(x).shape), numel(info(kept).shape) * numel(rest))
        if not all(by_sample) or each is None or any(n is None or grows(n) for n in sizes):
            refuse(like, "combines rows that different masks select")
        before, after = (plain(n) for n in sizes if n is not None)
        chosen, places = (self.reshaped(like, m, (BATCH, n)) for m, n in ((kept, before), (mask, after)))
        if each != 1:
            wide = (BATCH, before, plain(each))
            chosen = self.reshaped(like, chosen, (BATCH, before, 1))
            chosen = write_op(self.graph, like, aten.expand.default, (chosen, list(wide)), wide, torch.bool)
            before = plain(before * each)
            chosen = self.reshaped(like, chosen, (BATCH, before))
        source = self.reshaped(like, x, (BATCH, before, numel(rest)))
        made = write_moved_rows(self.graph, like, source, chosen, places)
        return self.reshaped(like, made, (numel(info(mask).shape), *rest))

    def _by_rule(self, node: fx.Node, given: dict[int, _Selected], mask: fx.Node) -> None:
        size, call = numel(info(mask).shape), op_call(node)
        for i, x in enumerate(operands(node)):
            if i not in given and size in info(x).shape and not makes_new(x):
                refuse(node, "combines all rows with those that a mask selects")
        found = output_places(call, {i: Rows(s.place, Order(size, mask)) for i, s in given.items()})
        if found == SUMS and node.target in (
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.matmul.default,
            aten.mm.default,
        ):
            for i in given:
                self._mask_operand(node, operands(node)[i], given[i], 0)
            return
        if isinstance(found, str) or any(place is None for place in found):
            refuse(node, "works across rows that a mask selects")
        self.states[node] = tuple(None if place is None else _Selected(mask, place) for place in found)

    def _mask_operand(self, node: fx.Node, x: fx.Node, selected: _Selected, fill: float) -> None:
        with self.graph.inserting_before(node):
            made = self.where(node, x, selected, fill)
        node.replace_input_with(x, made)

    def where(self, like: fx.Node, x: fx.Node, selected: _Selected, fill: float) -> fx.Node:
        """Insert x with `fill` in rows that are not selected."""
        shape, kind = info(x).shape, info(x).dtype
        number = write_op(self.graph, like, aten.scalar_tensor.default, (fill,), (), kind, {"dtype": kind})
        spread = self.spread(like, selected, shape)
        return write_op(self.graph, like, aten.where.self, (spread, x, number), shape, kind)

    def reshaped(self, like: fx.Node, x: object, shape: tuple[Size, ...]) -> fx.Node:
        """Insert x in another shape."""
        kind = info(x).dtype  # type: ignore[arg-type]
        return write_op(self.graph, like, aten.reshape.default, (x, list(shape)), shape, kind)

    def spread(self, like: fx.Node, selected: _Selected, shape: Sequence[Size]) -> fx.Node:
        """Insert the mask of rows as [1, ..., rows, ..., 1]."""
        place, rows = selected.place, numel(info(selected.mask).shape)
        flat = write_op(self.graph, like, aten.reshape.default, (selected.mask, [1, rows, 1]), (1, rows, 1), torch.bool)
        if (place.outer, place.inner) != (1, 1):
            wide = (place.outer, rows, place.inner)
            flat = write_op(self.graph, like, aten.expand.default, (flat, list(wide)), wide, torch.bool)
        around = tuple(n if i == place.dim else 1 for i, n in enumerate(shape))
        return write_op(self.graph, like, aten.reshape.default, (flat, list(around)), around, torch.bool)

    def _mean(self, node: fx.Node, given: dict[int, _Selected], mask: fx.Node) -> bool:
        """Rewrite a mean over rows as their sum over their number."""
        if node.target not in (aten.mean.default, aten.mean.dim):
            return False
        x, selected = operands(node)[0], given[0]
        named = given_of(node.target, node.args, node.kwargs)
        dims = [d % info(x).ndim for d in named.get("dim") or range(info(x).ndim)]
        if selected.place.dim not in dims:
            return False
        with self.graph.inserting_before(node):
            kept = self.where(node, x, selected, 0)
            arguments = (kept,) if node.target is aten.mean.default else (kept, dims, named["keepdim"])
            target = aten.sum.default if node.target is aten.mean.default else aten.sum.dim_IntList
            total = write_op(self.graph, node, target, arguments, info(node).shape, info(node).dtype)
            others = numel(info(x).shape[d] for d in dims if d != selected.place.dim) * selected.place.outer
            made = self._per_row(node, total, mask, others * selected.place.inner)
        node.replace_all_uses_with(made)
        return True

    def _per_row(self, like: fx.Node, total: fx.Node, mask: fx.Node, each: Size) -> fx.Node:
        """Insert a total over the number of selected rows, of `each` elements."""
        count = write_op(self.graph, like, aten.sum.default, (mask,), (), torch.int64)
        if OR_ZERO in like.meta:
            count = self._or_one(like, count, mask)
        if each != 1:
            count = write_op(self.graph, like, aten.mul.Tensor, (count, each), (), torch.int64)
        return write_op(self.graph, like, aten.div.Tensor, (total, count), info(total).shape, info(total).dtype)

    def _or_one(self, like: fx.Node, count: fx.Node, mask: fx.Node) -> fx.Node:
        """Insert a count plus one if a mask selects nothing."""
        rows = write_op(self.graph, like, aten.sum.default, (mask,), (), torch.int64)
        none = write_op(self.graph, like, aten.eq.Scalar, (rows, 0), (), torch.bool)
        return write_op(self.graph, like, aten.add.Tensor, (count, none), (), torch.int64)

    def _class_mean(self, node: fx.Node, named: dict[str, Any], selected: _Selected) -> None:
        """Rewrite a mean over rows whose label counts as their sum over their number, or over one without rows."""
        x, target = operands(node)[:2]
        if named.get("weight") is not None or named["reduction"] != 1 or info(target).ndim != 1:
            refuse(node, "is not known to be zero without the rows that a mask selects")
        shape, rows = info(target).shape, numel(info(selected.mask).shape)
        with self.graph.inserting_before(node):
            self._mask_operand(node, target, selected, named["ignore_index"])
            named |= {"self": x, "target": operands(node)[1], "reduction": 0}
            each = write_op(self.graph, node, node.target, tuple(named.values()), shape, info(node).dtype)  # type: ignore[arg-type]
            total = write_op(self.graph, node, aten.sum.default, (each,), (), info(node).dtype)
            counts = write_op(
                self.graph, node, aten.ne.Scalar, (operands(node)[1], named["ignore_index"]), (rows,), torch.bool
            )
            count = write_op(self.graph, node, aten.sum.default, (counts,), (), torch.int64)
            count = self._or_one(node, count, selected.mask)
            made = write_op(self.graph, node, aten.div.Tensor, (total, count), (), info(node).dtype)
        node.replace_all_uses_with(made)

    def _one_each(self, node: fx.Node, given: dict[int, _Selected], mask: fx.Node) -> bool:
        """Rewrite `rows.view(b, -1, h)[:, -1]`, as of the last token of each sample, if a sample has one such row."""
        if node.target is not aten.reshape.default or given[0].place != SamplePlace(0):
            return False
        x, shape = operands(node)[0], info(node).shape
        ends = all(u.target is aten.select.int and u.args[1] == 1 and u.args[2] in (0, -1) for u in node.users)
        if not ends or len(shape) < 3 or shape[0] != BATCH or info(x).shape[1:] != shape[2:]:
            return False
        with self.graph.inserting_before(node):
            places = write_op(self.graph, node, aten.full.default, ([BATCH, 1], True), (BATCH, 1), torch.bool)
            made = self._moved(node, x, mask, places, shape[2:])
        for user in list(node.users):
            user.replace_all_uses_with(made)
        return True

    def _loss(self, node: fx.Node, given: dict[int, _Selected], mask: fx.Node) -> bool:
        """Rewrite a loss that torch reduces over rows."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        named = given_of(node.target, node.args, node.kwargs)
        reduction = named.get("reduction", 0)
        if reduction == 0:
            return False
        x, target = operands(node)[:2]
        if node.target in _BY_CLASS and not info(target).dtype.is_floating_point:
            if not {0, 1} <= given.keys() or given[0].place != SamplePlace(0):
                refuse(node, "combines all rows with those that a mask selects")
            if OR_ZERO in node.meta:
                self._class_mean(node, named, given[1])
            else:
                self._mask_operand(node, target, given[1], named["ignore_index"])
            return True
        if not {0, 1} <= given.keys() or info(x).shape != info(target).shape or node.target not in _ELEMENTWISE:
            refuse(node, "is not known of rows that a mask selects")
        with self.graph.inserting_before(node):
            named["reduction"], shape = 0, info(x).shape
            options = {a.name: named.pop(a.name) for a in node.target._schema.arguments if a.kwarg_only}
            each = write_op(self.graph, node, node.target, tuple(named.values()), shape, info(node).dtype, options)
            kept = self.where(node, each, given[0], 0)
            made = write_op(self.graph, node, aten.sum.default, (kept,), (), info(node).dtype)
            if reduction == 1:
                others = numel(n for i, n in enumerate(shape) if i != given[0].place.dim) * given[0].place.outer
                made = self._per_row(node, made, mask, others * given[0].place.inner)
        node.replace_all_uses_with(made)
        return True


def follow_masked_rows(graph: fx.Graph, traced: Traced) -> None:
    """Mask what is computed from selected rows, and write their selection as all rows. Raises UnsupportedOp."""
    if not any(n.target in (masked_rows, *_BACK) for n in graph.nodes):
        return
    for node in graph.nodes:
        if node.target in INDICES:
            refuse(
                node,
                "gives as many indices as there are true elements, a number that depends on data, and they do more "
                "than to select these elements",
                fix=_DENSE,
            )
    share_repeated(graph, traced)  # masks are the same if they are computed alike
    follower = MaskedRows(graph)
    for node in list(graph.nodes):
        follower.follow(node)
    for node in list(graph.nodes):
        write = {masked_rows: _all_rows, put_rows: _put, add_rows: _add}.get(node.target)
        if write is not None:
            with graph.inserting_before(node):
                made = write(follower, node)
            node.replace_all_uses_with(made)


_BACK = (put_rows, add_rows)  # of rows to their places


def _all_rows(follower: MaskedRows, node: fx.Node) -> fx.Node:
    selected, kind = follower.states[node][0], info(node).dtype
    assert selected is not None
    fill = 0.5 if kind.is_floating_point or kind.is_complex else kind is torch.bool
    return follower.where(node, follower.reshaped(node, node.args[0], info(node).shape), selected, fill)


def _put(follower: MaskedRows, node: fx.Node) -> fx.Node:
    x, mask, rows = node.args
    shape, kind = info(node).shape, info(node).dtype
    spread = follower.reshaped(node, mask, (*info(mask).shape, *(1,) * (len(shape) - info(mask).ndim)))  # type: ignore[arg-type]
    return write_op(
        follower.graph, node, aten.where.self, (spread, follower.reshaped(node, rows, shape), x), shape, kind
    )


def _add(follower: MaskedRows, node: fx.Node) -> fx.Node:
    x, mask, rows, column = node.args
    shape, wide = info(node).shape, info(mask).shape  # type: ignore[arg-type]
    selected = follower.state(rows)  # type: ignore[arg-type]
    assert selected is not None
    kept = follower.where(node, rows, selected, 0)  # type: ignore[arg-type]
    others = [d for d in range(len(wide)) if d != column]
    kept = follower.reshaped(node, kept, (*wide, *shape[1:]))
    if others:
        kept = write_op(follower.graph, node, aten.sum.dim_IntList, (kept, others), shape, info(node).dtype)
    return write_op(follower.graph, node, aten.add.Tensor, (x, kept), shape, info(node).dtype)
