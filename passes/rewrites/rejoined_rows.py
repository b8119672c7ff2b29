"""Rows that a mask selects, taken apart by sample or by their own numbers and put together again: as they are.

    x[arange(n)[:, None], i]                                  x[:, i] of n selected rows
    cat([f(y) for y in x.split(mask.view(b, t).sum(1).tolist())])   f(x), where f keeps rows apart

The number of rows and the sizes of such a split depend on data. What is made of them does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoptd.passes.graph import drop_unread, op_name
from autoptd.passes.loops.join import JOIN
from autoptd.passes.rewrites.row_selections import selection
from autoptd.passes.rewrites.traced_values import refresh, unknown, written
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
_VIEWS = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "alias", "detach", "contiguous")
_ROWWISE = (*_VIEWS, "to", "_to_copy", "clone")


def write_rejoined_rows(graph: fx.Graph, traced: Traced) -> None:
    """Replace reads of selected rows by all of their numbers, and joined splits of them, by the rows themselves."""
    masks = {n.meta["val"].shape[s.first].node.expr: s.mask for n in graph.nodes if (s := selection(n))}
    if not masks:
        return
    for node in list(graph.nodes):
        if node.target is aten.index.Tensor:
            _read_by_numbers(graph, node, masks)
        elif node.target in (aten.cat.default, JOIN) and (whole := _joined(graph, node, masks)) is not None:
            node.replace_all_uses_with(whole)
            drop_unread(graph)


def _read_by_numbers(graph: fx.Graph, node: fx.Node, masks: dict[Any, fx.Node]) -> None:
    """Rewrite a read at all row numbers, one after another in the first dim, and at the same places of each row."""
    args: Any = node.args
    x, (first, *others) = args
    if first is None or None in others or not _counted(x, masks) or not _are_all_numbers(first, x):
        return
    ndim = first.meta["val"].ndim
    if any(i.meta["val"].dtype is torch.bool or i.meta["val"].ndim > ndim for i in others):
        return
    if any(i.meta["val"].ndim == ndim and i.meta["val"].shape[0] != 1 for i in others):
        return
    with graph.inserting_before(node):
        for dim in range(1, ndim) if not others else ():
            x = written(graph, node, aten.unsqueeze.default, x, dim)
        kept = [written(graph, node, aten.squeeze.dim, i, 0) if i.meta["val"].ndim == ndim else i for i in others]
        if kept and max(i.meta["val"].ndim for i in kept) != ndim - 1:
            return
        made = written(graph, node, aten.index.Tensor, x, [None, *kept]) if kept else x
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _counted(x: fx.Node, masks: dict[Any, fx.Node]) -> fx.Node | None:
    """Return the mask that selects as many rows as the first dim of x has, if one does."""
    shape = x.meta["val"].shape
    return masks.get(shape[0].node.expr) if shape and isinstance(shape[0], torch.SymInt) else None


def _are_all_numbers(index: fx.Node, x: fx.Node) -> bool:
    """Return whether an index [n, 1, ...] counts the n rows of x."""
    size = x.meta["val"].shape[0].node.expr
    shape = index.meta["val"].shape
    if not isinstance(shape[0], torch.SymInt) or shape[0].node.expr != size or any(n != 1 for n in shape[1:]):
        return False
    index = _source(index, _VIEWS)
    if index.target not in (aten.arange.default, aten.arange.start) or index.args[:-1] not in ((), (0,)):
        return False
    return isinstance(end := index.args[-1], fx.Node) and end.meta["val"].node.expr == size


def _source(x: fx.Node, through: Sequence[str]) -> fx.Node:
    """Return what a node is made of by ops of these names alone."""
    while x.op == "call_function" and op_name(x) in through:
        (x, *_) = x.all_input_nodes
    return x


def _joined(graph: fx.Graph, node: fx.Node, masks: dict[Any, fx.Node]) -> fx.Node | None:
    """Return what joined parts of selected rows, one for each sample, are of all of them; None if they are no such."""
    args: Any = node.args
    parts: list[fx.Node] = list(args[0])
    if len(args) > 1 and args[-1] != 0:  # the dim is the last argument of both, and 0 if `cat` is given none
        return None
    chain: list[fx.Node] = []
    while all(p.op == "call_function" and op_name(p) in _ROWWISE for p in parts):
        given = [(p.target, p.args[1:], p.kwargs) for p in parts]
        if any(g != given[0] for g in given) or any(len(p.all_input_nodes) > 1 for p in parts):
            return None
        chain.append(parts[0])
        parts = [p.all_input_nodes[0] for p in parts]
    whole = _split_by_sample(parts, masks)
    if whole is None or not all(map(_leads, chain)):
        return None
    with graph.inserting_before(node):
        for like in reversed(chain):
            whole = written(graph, like, like.target, whole, *like.args[1:], **like.kwargs)
    refresh(node, whole)
    return whole


def _leads(x: fx.Node) -> bool:
    """Return whether the rows of x are in its first dim alone."""
    first, *others = x.meta["val"].shape
    return isinstance(first, torch.SymInt) and not any(isinstance(n, torch.SymInt) and unknown(n) for n in others)


def _split_by_sample(parts: Sequence[fx.Node], masks: dict[Any, fx.Node]) -> fx.Node | None:
    """Return what was split into as many rows for each sample as the mask of these rows selects in it."""
    splits = {p.args[0] for p in parts if op_name(p) == "getitem"}
    if len(splits) != 1 or [p.args[1] for p in parts] != list(range(len(parts))):
        return None
    split: Any = splits.pop()
    if split.target is not aten.split_with_sizes.default or (*split.args[2:], 0)[0] != 0:
        return None
    x, sizes = split.args[:2]
    elements, mask = [_element(n) for n in sizes], _counted(x, masks)
    counted = {found[0] for found in elements if found is not None}
    if mask is None or [found and found[1] for found in elements] != list(range(len(parts))) or len(counted) != 1:
        return None
    return x if _sums_by_sample(counted.pop(), mask, len(parts)) else None


def _sums_by_sample(counts: Any, mask: fx.Node, samples: int) -> bool:
    """Return whether `counts` are what a mask selects in each sample of the example batch."""
    val = counts.meta["val"]
    if counts.target is not aten.sum.dim_IntList or val.ndim != 1 or _hint(val.shape[0]) != samples:
        return False
    summed, dims = counts.args[:2]
    ndim, views = summed.meta["val"].ndim, ("view", "reshape", "flatten")
    return {d % ndim for d in dims} == set(range(1, ndim)) and _source(summed, views) is _source(mask, views)


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _element(size: Any) -> tuple[fx.Node, int] | None:
    """Return the vector and the number of its element that a size was read from."""
    if not isinstance(size, fx.Node) or op_name(size) != "item":
        return None
    x: Any = _source(size.all_input_nodes[0], ("squeeze", "view", "reshape"))
    name, (vector, dim, first, *last) = op_name(x), (*x.args, None, None)[: max(3, len(x.args))]
    one = {"narrow": [1], "select": [], "slice": [first + 1] if isinstance(first, int) else None}.get(name)
    return (vector, first) if dim == 0 and last == one else None
