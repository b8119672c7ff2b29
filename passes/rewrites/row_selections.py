"""Selections of rows by a mask, and writes of such rows to their places, as nodes that `masked_rows.py` follows.

    x[mask]                                  masked_rows(x, mask)
    i, t = torch.where(mask)                 a row for each true element of mask [k, n], its place in columns i and t
    x[i, t], x[t, i], x[t]                   masked_rows(x or x.t() or x expanded over k, mask)
    y[mask] = rows                           put_rows(y, mask, rows)
    y[torch.where(mask)] = value             y[mask] = value, the same for all rows
    y.index_add(0, t, rows)                  add_rows(y, mask, rows): several rows may have one place

So do mixtures of experts that loop over experts: `i, t = torch.where(chosen[e])` are those that chose expert e.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import sympy
import torch
from torch import Tensor, fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.batch.batch_dims import makes_new
from autoptd.passes.graph import info, op_name, operands, source_line, write_op
from autoptd.passes.normalise.size_functions import in_sympy
from autoptd.passes.random.draws import given_of
from autoptd.passes.rewrites.placed_rows import mask_of_tokens
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
REPEATED = "repeated for rows"  # mask and dim of a tensor that is repeated for each row that a mask selects
_FIX = (
    "sum over the selected rows, or keep all rows and multiply by the mask: (loss * mask).sum() / mask.sum(); "
    "use mask.sum() for their number"
)


def masked_rows(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return rows of x [..., *mask.shape, ...] with the dims of the mask, from `dim` on, as one."""
    return x.flatten(dim, dim + mask.ndim - 1)


def put_rows(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """Return x [*mask.shape, ...] with the selected ones of all `rows` in place of its own."""
    spread = mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
    return torch.where(spread, rows.reshape(x.shape), x)


def add_rows(x: Tensor, mask: Tensor, rows: Tensor, column: int) -> Tensor:
    """Return x [n, ...] plus the selected ones of all `rows`, each at its place in dim `column` of the mask."""
    spread = mask.reshape(*mask.shape, *(1,) * (x.ndim - 1))
    kept = torch.where(spread, rows.reshape(*mask.shape, *x.shape[1:]), 0)
    return x + kept.sum([d for d in range(mask.ndim) if d != column])


def name_masked_sizes(graph: fx.Graph, traced: Traced) -> None:
    """Give sizes that count selected rows the size of the mask, where they are sizes of tensors only."""
    named: dict[sympy.Symbol, fx.Node] = {}
    _write_numbers_as_masks(graph)
    _write_puts_by_mask(graph)
    for node in graph.nodes:
        if found := selection(node):
            size = node.meta["val"].shape[found.first].node.expr
            shape = [
                sympy.sympify(n.node.expr if isinstance(n, torch.SymInt) else n) for n in found.mask.meta["val"].shape
            ]
            if isinstance(size, sympy.Symbol) and not any(n.free_symbols - traced.symbol.keys() for n in shape):
                number = in_sympy(sympy.sympify(sympy.prod(shape)).xreplace(traced.symbol))
                if traced.symbol.setdefault(size, number) != number:
                    refuse(node, "selects as many rows as another mask")
                named[size] = found.mask
    if not named:
        return
    for node in graph.nodes:
        new = symbols_of(node) & named.keys() if node.target not in INDICES and not selection(node) else set()
        if new and not any(new & symbols_of(x) for x in node.all_input_nodes):
            refuse(node, "makes as many rows as a mask selects")
    _write_counts(graph, named)


def symbols_of(node: fx.Node) -> set[sympy.Symbol]:
    """Return the symbols of the sizes of a tensor, or of a size."""
    value = node.meta.get("val")
    sizes = [n for x in (value if isinstance(value, (tuple, list)) else [value]) for n in getattr(x, "shape", [x])]
    return {s for n in sizes if hasattr(n, "node") for s in n.node.expr.free_symbols}


def _write_numbers_as_masks(graph: fx.Graph) -> None:
    """Let `where` and `nonzero` read what is true of numbers."""
    for node in graph.nodes:
        if node.target not in INDICES or len(node.args) != 1 or node.args[0].meta["val"].dtype is torch.bool:
            continue
        with graph.inserting_before(node), node.args[0].meta["val"].fake_mode:
            mask = graph.call_function(aten.ne.Scalar, (node.args[0], 0))
            mask.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
            mask.meta["val"] = torch.empty(node.args[0].meta["val"].shape, dtype=torch.bool)
        node.args = (mask,)


def _write_puts_by_mask(graph: fx.Graph) -> None:
    """Let writes of one value for all places where a mask is true name the mask."""
    for node in graph.nodes:
        if node.target in (aten.index_put.default, aten.index_put_.default) and not _are_rows(node.args[2]):
            found = _by_mask(node.args[0], node.args[1])
            value, once = node.args[2].meta["val"], node.args[3:] in ((), (False,))
            if found is None or not once or found.first or found.columns != tuple(range(found.mask.meta["val"].ndim)):
                continue
            if value.ndim <= node.meta["val"].ndim - len(found.columns):
                node.args = (node.args[0], [found.mask], *node.args[2:])


@dataclass(frozen=True)
class Selection:
    """Rows of `x` that a mask selects, dim `first` of the result. columns: the dims of the mask that x has there."""

    x: fx.Node
    mask: fx.Node
    first: int
    columns: tuple[int, ...]


def selection(node: fx.Node) -> Selection | None:
    """Return the selection that a node is: `x[mask]`, `x[mask.nonzero()...]`, `x.masked_select(mask)`; else None."""
    if node.op != "call_function" or node.target not in _SELECTS:
        return None
    val, args = node.meta.get("val"), list[Any](node.args)
    if node.target is aten.index.Tensor:
        found = _by_mask(args[0], args[1])
    elif node.target is aten.gather.default:
        found = _gathered(*args[:3])
    elif node.target is aten.index_select.default:
        found = _by_mask(args[0], [*[None] * int(args[1]), args[2]])
    else:
        found = _by_mask(args[0], [args[1]]) if args[0].meta["val"].shape == args[1].meta["val"].shape else None
    if found is None or not isinstance(val, Tensor) or not _counts_rows(val.shape[found.first]):
        return None
    return found


_SELECTS = (aten.index.Tensor, aten.index_select.default, aten.masked_select.default, aten.gather.default)


def _gathered(x: fx.Node, dim: int, index: fx.Node) -> Selection | None:
    """Return the rows that `x.gather(0, i.expand(…))` selects: with as many columns as x, they are whole rows."""
    shape = x.meta["val"].shape
    if dim != 0 or index.meta["val"].shape[1:] != shape[1:]:
        return None
    if len(shape) > 1:
        if op_name(index) != "expand" or index.args[0].meta["val"].shape[1:] != (1,) * (len(shape) - 1):  # type: ignore[union-attr]
            return None
        index = index.args[0]  # type: ignore[assignment]
    if index.target is aten.nonzero.default and index.args[0].meta["val"].ndim == 1:  # type: ignore[union-attr]
        return Selection(x, index.args[0], 0, (0,))  # type: ignore[arg-type]
    return _by_mask(x, [index]) if index.meta["val"].ndim == 1 else None


_COLUMNS = (aten.where.default, aten.nonzero_numpy.default)  # a list of columns
INDICES = (aten.nonzero.default, *_COLUMNS)


def _counts_rows(size: Any) -> bool:
    """Return whether a size depends on data."""
    symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
    return bool(symbols) and all(str(s).startswith("u") for s in symbols)


def _by_mask(x: fx.Node, indices: Any) -> Selection | None:
    """Return what indices select of x, if they are one mask or columns of the places where one mask is true."""
    given = [(index, i) for i, index in enumerate(indices) if index is not None]
    if len(given) == 1 and given[0][0].meta["val"].dtype is torch.bool:
        mask, first = given[0]
        return Selection(x, mask, first, tuple(range(mask.meta["val"].ndim)))
    found = [_column(index) for index, _ in given]
    if not found or None in found or len({mask for mask, _ in found}) != 1:  # type: ignore[misc]
        return None
    columns, first = tuple(column for _, column in found), given[0][1]  # type: ignore[misc]
    adjacent = [i for _, i in given] == list(range(first, first + len(given)))
    return Selection(x, found[0][0], first, columns) if adjacent and len(set(columns)) == len(columns) else None  # type: ignore[index]


def _column(index: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the mask, and which of its dims, of indices where it is true."""
    column = 0
    while index.op == "call_function" and index.target not in INDICES:
        name, args = op_name(index), index.args
        owner: Any = args[0]
        if name == "getitem" and owner.target in _COLUMNS:
            column, index = args[1], owner  # type: ignore[assignment]
        elif name in ("getitem", "select") and (found := _table(owner, *(args[1:2] if name == "select" else ()))):
            column, index = args[-1], found  # type: ignore[assignment]
        elif name in ("squeeze", "view", "reshape", "flatten", "alias") and index.meta["val"].ndim == 1:
            index = args[0]  # type: ignore[assignment]
        else:
            return None
    if index.op != "call_function":
        return None
    mask = index.args[0]
    assert isinstance(mask, fx.Node)
    return mask, column % mask.meta["val"].ndim


def _table(x: fx.Node, *dim: Any) -> fx.Node | None:
    """Return the `nonzero` whose columns are the parts of x along a dim, which `unbind` names itself."""
    if not dim and op_name(x) == "unbind":
        x, *dim = x.args  # type: ignore[assignment]
        dim = dim or (0,)
    columns = -1
    while op_name(x) in ("t", "transpose", "numpy_T") and x.args[0].meta["val"].ndim == 2:  # type: ignore[union-attr]
        x, columns = x.args[0], -3 - columns  # type: ignore[assignment]
    return x if x.target is aten.nonzero.default and dim and dim[0] in (columns, columns + 2) else None


def _write_counts(graph: fx.Graph, named: dict[sympy.Symbol, fx.Node]) -> None:
    """Replace numbers of selected rows that a tensor is divided by, and refuse those that are used otherwise."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, (torch.SymInt, torch.SymFloat)) or not value.node.expr.free_symbols & named.keys():
            continue
        for user in list(node.users):
            mask = named.get(value.node.expr)
            if isinstance(user.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)) or _is_shape(user, node):
                if mask is not None and op_name(user) == "expand":
                    user.meta[REPEATED] = mask, user.args[1].index(node)  # type: ignore[union-attr]
                continue
            if mask is None or user.target not in (aten.div.Tensor, aten.mul.Tensor):
                refuse(user, "reads the number of rows that a mask selects")
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
    for node in graph.nodes:
        _write_sum_as_accumulated(node)
    for node in list(graph.nodes):
        made: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        if found := selection(node):
            made = masked_rows, (_with_dims_of_mask(graph, node, found), found.mask, found.first)
        elif rows := _put_back(node):
            made = put_rows, (node.args[0], *rows)
        elif added := _added(node):
            made = add_rows, (node.args[0], *added)
        if made is not None:
            with graph.inserting_before(node):
                new = write_op(graph, node, *made, info(node).shape, info(node).dtype)
            new.meta |= {key: node.meta[key] for key in ("info", "val")}
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _with_dims_of_mask(graph: fx.Graph, node: fx.Node, found: Selection) -> fx.Node:
    """Insert before a selection what it selects from, with all dims of the mask, in their order."""
    x, shape = found.x, list(info(found.x).shape)
    columns, first, wide = list(found.columns), found.first, list(info(found.mask).shape)
    if columns == list(range(len(wide))):
        return x
    order = [*range(first), *(first + columns.index(c) for c in sorted(columns))]
    order += range(len(order), len(shape))
    with graph.inserting_before(node):
        if order != list(range(len(shape))):
            shape = [shape[d] for d in order]
            x = write_op(graph, node, aten.permute.default, (x, order), tuple(shape), info(x).dtype)
        for column in range(len(wide)):
            if column not in columns:
                shape.insert(first + column, 1)
                x = write_op(graph, node, aten.unsqueeze.default, (x, first + column), tuple(shape), info(x).dtype)
        shape[first : first + len(wide)] = wide
        return write_op(graph, node, aten.expand.default, (x, shape), tuple(shape), info(x).dtype)


def _put_back(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return mask and rows of a write of as many rows as a mask selects."""
    if node.target is aten.index_put.default and node.args[3:] in ((), (False,)):
        found, rows = _by_mask(operands(node)[0], node.args[1]), node.args[2]
    elif node.target is aten.masked_scatter.default:
        mask: Any = node.args[1]
        mask = mask_of_tokens(mask, info(node).shape) or mask
        found, rows = _by_mask(operands(node)[0], [mask]), node.args[2]
    else:
        return None
    if found is None or found.first != 0 or found.columns != tuple(range(found.mask.meta["val"].ndim)):
        return None
    return (found.mask, rows) if _are_rows(rows) else None  # type: ignore[return-value]


def _added(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Return mask, rows and column of an addition of as many rows as a mask selects, at places in one of its dims."""
    if node.target is aten.index_add.default:
        named = given_of(node.target, node.args, node.kwargs)
        index, rows, plain = [named["index"]], named["source"], named["dim"] == 0 and named["alpha"] == 1
    elif node.target is aten.index_put.default and node.args[3:] == (True,):
        index, rows, plain = node.args[1], node.args[2], True  # type: ignore[assignment]
    else:
        return None
    found = _by_mask(node.args[0], index)  # type: ignore[arg-type]
    if found is None or not plain or found.first != 0 or len(found.columns) != 1 or not _are_rows(rows):
        return None
    return found.mask, rows, found.columns[0]


def _write_sum_as_accumulated(node: fx.Node) -> None:
    """Let y[t] = y[t] + rows add the rows, where t has no row twice."""
    if node.target is not aten.index_put.default or node.args[3:] not in ((), (False,)):
        return
    y, index, total = node.args[:3]
    found = _by_mask(y, index)  # type: ignore[arg-type]
    if (
        found is None
        or len(found.columns) != 1
        or not isinstance(total, fx.Node)
        or total.target is not aten.add.Tensor
    ):
        return
    own = next((x for x in total.args if isinstance(x, fx.Node) and x.target is aten.index.Tensor), None)
    rows = next((x for x in total.args if x is not own), None)
    alike = isinstance(rows, fx.Node) and (info(rows).shape, info(rows).dtype) == (info(total).shape, info(total).dtype)
    if own is None or own.args != (y, index) or total.kwargs or not alike or info(total).dtype != info(node).dtype:
        return
    if _once(found.mask, found.columns[0]):
        node.args = (y, index, rows, True)


def _once(mask: fx.Node, column: int) -> bool:
    """Return whether a mask of two dims has at most one true element for each index of one of them: where the numbers
    that `topk` or `sort` gives, which differ, are one number."""
    if op_name(mask) != "eq" or mask.meta["val"].ndim != 2:
        return mask.meta["val"].ndim == 1
    x, dim, other = mask.args[0], -1 - column, mask.args[1]
    if isinstance(other, fx.Node) and other.meta["val"].ndim:
        return False
    while isinstance(x, fx.Node) and op_name(x) in _SAME_NUMBERS:
        given: Any = x.args[0]
        if given.meta["val"].shape[-1] != x.meta["val"].shape[-1] or dim != -1:
            return False
        x = given
    if not isinstance(x, fx.Node) or op_name(x) != "getitem" or x.args[1] != 1 or x.meta["val"].ndim < 2:
        return False
    source: Any = x.args[0]
    if source.target is aten.topk.default:
        along = source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", -1)
    elif source.target is aten.sort.default:
        along = source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", -1)
    else:
        return False
    return (along - x.meta["val"].ndim if along >= 0 else along) == dim


_SAME_NUMBERS = ("view", "reshape", "contiguous", "clone", "detach", "alias", "_unsafe_view")


def _are_rows(rows: Any) -> bool:
    """Return whether a tensor has as many rows as a mask selects."""
    value = rows.meta.get("val") if isinstance(rows, fx.Node) else None
    return isinstance(value, Tensor) and value.ndim > 0 and _counts_rows(value.shape[0])


def refuse(node: fx.Node, does: str, what: str = "", fix: str = _FIX) -> NoReturn:
    """Raise the error of an op that needs the number or order of selected rows."""
    raise UnsupportedOp(f"{op_name(node)} {does} {what}".strip(), where=source_line(node), fix=fix)
