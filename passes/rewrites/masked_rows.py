"""Rows that a mask selects, as in `cross_entropy(logits[mask], labels[mask])`, whose number depends on data.

    x[mask]        x [b, s, h], mask [b, s]: u rows    ->  all b · s rows, those that are not selected filled
    f(x[mask])     an op of each row                   ->  the op of all rows
    sum over rows  a sum, a mean, a loss               ->  of where(mask, rows, 0); a mean's divisor is mask.sum()
    y[mask] = ...  the rows, back at their places      ->  where(mask, rows, y)

First a size that counts selected rows is named after all of them, and each selection becomes a `masked_rows` node; when
every op has its final form, ops of rows are followed by their rules, and reductions masked. Everything else that such
rows can be used for depends on how many they are, and is refused: their order, their number, draws of random numbers.

The fill is in the domain of most functions (0.5, 0 for integers), so that rows that are not selected have finite
gradients, which the mask makes zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import sympy
import torch
from torch import Tensor, fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.batch.batch_dims import SamplePlace, makes_new
from autoptd.passes.batch.batch_independence import SUMS, output_places
from autoptd.passes.batch.rows import Order, Rows
from autoptd.passes.graph import info, is_getitem, numel, op_call, op_name, operands, source_line, write_op
from autoptd.passes.normalise.drop import share_repeated
from autoptd.passes.normalise.size_functions import in_sympy
from autoptd.passes.opcall import Size, is_random
from autoptd.passes.random.draws import given_of
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
_BY_CLASS = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)
_FIX = (
    "sum over the selected rows, or keep all rows and multiply by the mask: (loss * mask).sum() / mask.sum(); "
    "use mask.sum() for their number"
)

_DENSE = (
    "keep all rows and multiply by the mask: out + expert(x) * (gates * (chosen == i)).sum(-1, keepdim=True); or sort "
    "the rows by expert and multiply them at once (torch._grouped_mm)"
)


def masked_rows(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return rows of x [..., *mask.shape, ...] with the dims of the mask, from `dim` on, as one."""
    return x.flatten(dim, dim + mask.ndim - 1)


def put_rows(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """Return x [*mask.shape, ...] with the selected ones of all `rows` in place of its own."""
    spread = mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
    return torch.where(spread, rows.reshape(x.shape), x)


def name_masked_sizes(graph: fx.Graph, traced: Traced) -> None:
    """Give sizes that count selected rows the size of the mask, where they are sizes of tensors only."""
    named: dict[sympy.Symbol, fx.Node] = {}
    for node in graph.nodes:
        if found := _selection(node):
            size = node.meta["val"].shape[found.dim].node.expr
            shape = [
                sympy.sympify(n.node.expr if isinstance(n, torch.SymInt) else n) for n in found.mask.meta["val"].shape
            ]
            if isinstance(size, sympy.Symbol) and not any(n.free_symbols - traced.symbol.keys() for n in shape):
                named[size] = found.mask
                traced.symbol[size] = in_sympy(sympy.prod(shape).subs(traced.symbol))
    if not named:
        return
    for node in graph.nodes:
        new = _symbols(node) & named.keys() if node.target not in _INDICES and not _selection(node) else set()
        if new and not any(new & _symbols(x) for x in node.all_input_nodes):
            _refuse(node, "makes as many rows as a mask selects")
    _write_counts(graph, named)


def _symbols(node: fx.Node) -> set[sympy.Symbol]:
    """Return the symbols of the sizes of a tensor, or of a size."""
    value = node.meta.get("val")
    sizes = [n for x in (value if isinstance(value, (tuple, list)) else [value]) for n in getattr(x, "shape", [x])]
    return {s for n in sizes if hasattr(n, "node") for s in n.node.expr.free_symbols}


@dataclass(frozen=True)
class _Selection:
    """Rows of `x` that a mask selects, whose dim in the result is `dim`."""

    x: fx.Node
    mask: fx.Node
    dim: int


def _selection(node: fx.Node) -> _Selection | None:
    """Return the selection that a node is: `x[mask]`, `x[mask.nonzero()...]`, `x.masked_select(mask)`; else None."""
    if node.op != "call_function" or node.target not in _SELECTS:
        return None
    val, args = node.meta.get("val"), list[Any](node.args)
    if node.target is aten.index.Tensor:
        found = _only_mask(args[1])
    elif node.target is aten.index_select.default:
        found = _only_mask([*[None] * int(args[1]), args[2]])
    else:
        found = (args[1], 0) if args[0].meta["val"].shape == args[1].meta["val"].shape else None
    if found is None or not isinstance(val, Tensor) or not _counts_rows(val.shape[found[1]]):
        return None
    return _Selection(args[0], *found)


_SELECTS = (aten.index.Tensor, aten.index_select.default, aten.masked_select.default)


_INDICES = (aten.nonzero.default, aten.where.default)


def _counts_rows(size: Any) -> bool:
    """Return whether a size depends on data."""
    symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
    return bool(symbols) and all(str(s).startswith("u") for s in symbols)


def _only_mask(indices: Any) -> tuple[fx.Node, int] | None:
    """Return the mask that is the only index of an op, itself or as indices of what is true, and its position."""
    given = [(index, i) for i, index in enumerate(indices) if index is not None]
    if len(given) == 1 and given[0][0].meta["val"].dtype is torch.bool:
        return given[0]
    columns = [_column(index) for index, _ in given]
    mask, first = next(((c[0], i) for c, (_, i) in zip(columns, given, strict=True) if c), (None, 0))
    if mask is None or columns != [(mask, k) for k in range(mask.meta["val"].ndim)]:
        return None
    return (mask, first) if [i for _, i in given] == list(range(first, first + len(given))) else None


def _column(index: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the mask, and which of its dims, of indices where it is true."""
    column = 0
    while index.op == "call_function" and index.target not in _INDICES:
        name, args = op_name(index), index.args
        owner: Any = args[0]
        if name == "getitem" and (owner.target is aten.where.default or owner.args[1:] == (1,)):
            column, index = args[1], owner if owner.target is aten.where.default else owner.args[0]  # type: ignore[assignment]
        elif name == "select" and args[1] in (1, -1):
            column, index = args[2], args[0]  # type: ignore[assignment]
        elif name in ("squeeze", "view", "reshape", "flatten", "alias") and index.meta["val"].ndim == 1:
            index = args[0]  # type: ignore[assignment]
        else:
            return None
    if index.op != "call_function":
        return None
    mask = index.args[0]
    assert isinstance(mask, fx.Node)
    return mask, column % mask.meta["val"].ndim


def _write_counts(graph: fx.Graph, named: dict[sympy.Symbol, fx.Node]) -> None:
    """Replace numbers of selected rows that a tensor is divided by, and refuse those that are used otherwise."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, (torch.SymInt, torch.SymFloat)) or not value.node.expr.free_symbols & named.keys():
            continue
        for user in list(node.users):
            if isinstance(user.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)) or _is_shape(user, node):
                continue
            mask = named.get(value.node.expr)
            if mask is None or user.target not in (aten.div.Tensor, aten.mul.Tensor):
                _refuse(user, "reads the number of rows that a mask selects")
            with graph.inserting_before(user):
                count = graph.call_function(aten.sum.default, (mask,))
                count.meta = {k: v for k, v in user.meta.items() if k in ("nn_module_stack", "stack_trace")}
                with mask.meta["val"].fake_mode:
                    count.meta["val"] = torch.empty((), dtype=torch.int64)
            user.replace_input_with(node, count)


def _is_shape(user: fx.Node, size: fx.Node) -> bool:
    """Return whether an op takes a size as one of its result's, and draws no numbers."""
    listed = any(isinstance(a, (list, tuple)) and size in a for a in (*user.args, *user.kwargs.values()))
    return listed and (makes_new(user) or op_name(user) in ("view", "reshape", "expand", "unflatten", "_unsafe_view"))


def mark_masked_rows(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite selections, and writes of selected rows to their places, as nodes that `follow_masked_rows` rewrites."""
    for node in list(graph.nodes):
        made: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        if found := _selection(node):
            made = masked_rows, (found.x, found.mask, found.dim)
        elif rows := _put_back(node):
            made = put_rows, (node.args[0], *rows)
        if made is not None:
            with graph.inserting_before(node):
                new = write_op(graph, node, *made, info(node).shape, info(node).dtype)
            new.meta["info"] = info(node)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _put_back(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return mask and rows of a write of as many rows as a mask selects."""
    if node.target is aten.index_put.default and node.args[3:] in ((), (False,)):
        found, rows = _only_mask(node.args[1]), node.args[2]
    elif node.target is aten.masked_scatter.default:
        found, rows = _only_mask([node.args[1]]), node.args[2]
    else:
        return None
    value = rows.meta.get("val") if isinstance(rows, fx.Node) else None
    if found is None or found[1] != 0 or not isinstance(value, Tensor) or not value.ndim:
        return None
    return (found[0], rows) if _counts_rows(value.shape[0]) else None  # type: ignore[return-value]


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
            return
        masks = {s.mask for s in given.values()}
        if node.target is put_rows:
            masks.add(node.args[1])  # type: ignore[arg-type]
        if len(masks) > 1:
            _refuse(node, "combines rows that different masks select")
        if node.target is put_rows:
            if given.keys() != {2} or given[2].place != SamplePlace(0):
                _refuse(node, "moves rows that a mask selects")
            return
        (mask,) = masks
        if node.op == "output" or is_random(node.target):
            _refuse(node, "draws random numbers for" if node.op != "output" else "returns", "rows that a mask selects")
        for reduced in (self._loss, self._mean):
            if reduced(node, given, mask):
                return
        self._by_rule(node, given, mask)

    def _by_rule(self, node: fx.Node, given: dict[int, _Selected], mask: fx.Node) -> None:
        size, call = numel(info(mask).shape), op_call(node)
        for i, x in enumerate(operands(node)):
            if i not in given and size in info(x).shape and not makes_new(x):
                _refuse(node, "combines all rows with those that a mask selects")
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
            _refuse(node, "works across rows that a mask selects")
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
        if each != 1:
            count = write_op(self.graph, like, aten.mul.Tensor, (count, each), (), torch.int64)
        return write_op(self.graph, like, aten.div.Tensor, (total, count), info(total).shape, info(total).dtype)

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
                _refuse(node, "combines all rows with those that a mask selects")
            self._mask_operand(node, target, given[1], named["ignore_index"])
            return True
        if not {0, 1} <= given.keys() or info(x).shape != info(target).shape or node.target in _BY_CLASS:
            _refuse(node, "is not known of rows that a mask selects")
        with self.graph.inserting_before(node):
            named["reduction"], shape = 0, info(x).shape
            each = write_op(self.graph, node, node.target, tuple(named.values()), shape, info(node).dtype)
            kept = self.where(node, each, given[0], 0)
            made = write_op(self.graph, node, aten.sum.default, (kept,), (), info(node).dtype)
            if reduction == 1:
                others = numel(n for i, n in enumerate(shape) if i != given[0].place.dim) * given[0].place.outer
                made = self._per_row(node, made, mask, others * given[0].place.inner)
        node.replace_all_uses_with(made)
        return True


def follow_masked_rows(graph: fx.Graph, traced: Traced) -> None:
    """Mask what is computed from selected rows, and write their selection as all rows. Raises UnsupportedOp."""
    if not any(n.target in (masked_rows, put_rows) for n in graph.nodes):
        return
    for node in graph.nodes:
        if node.target in _INDICES:
            raise UnsupportedOp(
                f"{op_name(node)} gives as many indices as there are true elements, a number that depends on data, and "
                "they do more than to select these elements",
                where=source_line(node),
                fix=_DENSE,
            )
    share_repeated(graph, traced)  # masks are the same if they are computed alike
    follower = MaskedRows(graph)
    for node in list(graph.nodes):
        follower.follow(node)
    for node in [n for n in graph.nodes if n.target in (masked_rows, put_rows)]:
        x, mask = node.args[:2]
        with graph.inserting_before(node):
            if node.target is masked_rows:
                shape = list(info(node).shape)
                rows = write_op(graph, node, aten.reshape.default, (x, shape), info(node).shape, info(node).dtype)
                fill = 0.5 if info(node).dtype.is_floating_point or info(node).dtype.is_complex else 0
                made = follower.where(node, rows, follower.states[node][0], fill)  # type: ignore[arg-type]
            else:
                ones = (*info(mask).shape, *(1,) * (info(x).ndim - info(mask).ndim))
                spread = write_op(graph, node, aten.reshape.default, (mask, list(ones)), ones, torch.bool)
                kind = info(node).dtype
                rows = write_op(
                    graph, node, aten.reshape.default, (node.args[2], list(info(x).shape)), info(x).shape, kind
                )
                made = write_op(graph, node, aten.where.self, (spread, rows, x), info(x).shape, kind)
        node.replace_all_uses_with(made)


def _refuse(node: fx.Node, does: str, what: str = "") -> NoReturn:
    raise UnsupportedOp(f"{op_name(node)} {does} {what}".strip(), where=source_line(node), fix=_FIX)
