"""The program of masks that select nothing: writes of their rows leave a tensor as it is.

x.index_add(0, t, rows), x[t] = rows        x: no rows, which are known by their number
x[mask] = v, x.masked_fill(mask, v)         x
where(mask, a, b), where(~mask, b, a)       b
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from autoptd.passes.graph import op_name
from autoptd.passes.normalise.drop import drop_asserts
from autoptd.passes.normalise.view_writes import writes_to

_PUTS = ("index_add", "index_put", "masked_scatter", "index_copy")
_MOVES = {  # ops after which a mask that selects nothing, or all, is one
    *("permute", "transpose", "t", "to", "squeeze", "unsqueeze", "view", "reshape", "flatten", "expand", "expand_as"),
    *("broadcast_to", "slice", "select", "contiguous", "clone", "detach", "alias"),
}


def without_rows(program: ExportedProgram, sizes: set[sympy.Symbol]) -> Any:
    """Return a copy of a program without what it does with rows of these numbers, and without what is not read."""
    graph = copy.deepcopy(program.graph)
    masks = _masks(graph, sizes)
    for node in list(graph.nodes):
        kept = _left(node, sizes, masks)
        if kept is not None:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in order:
        source = node.args[0] if op_name(node) == "clone" and len(node.args) == 1 else None
        if isinstance(source, fx.Node) and all(order[w] < order[node] for x in (node, source) for w in writes_to(x)):
            node.replace_all_uses_with(source)
    for _ in range(2):
        drop_asserts(graph, None)  # type: ignore[arg-type]
        for node in reversed(list(graph.nodes)):
            if op_name(node) == "detach_" and not node.users:  # of a constant, such as the number of an expert
                graph.erase_node(node)
        graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))  # numbers are drawn by key
    return SimpleNamespace(graph=graph, graph_signature=program.graph_signature, constants=program.constants)


def rows_of(node: fx.Node) -> set[sympy.Symbol]:
    """Return the symbols of the first size of a tensor."""
    value = node.meta.get("val")
    size = value.shape[0] if isinstance(value, Tensor) and value.ndim else None
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _left(node: fx.Node, sizes: set[sympy.Symbol], masks: Mapping[fx.Node, bool]) -> fx.Node | None:
    """Return the operand that an op gives if the masks select nothing, or all, as `masks` says; None if it gives none.

    An operand of another shape is none: what is read of it is not what is read of the op.
    """
    name, given, args = op_name(node).rstrip("_"), node.all_input_nodes, node.args
    kept: Any = None
    if name in _PUTS and any(rows_of(x) & sizes for x in reversed(given)):
        kept = args[0]
    elif name in ("masked_fill", "masked_scatter", "index_put") and len(args) > 1:
        mask: Any = args[1]
        mask = mask[0] if isinstance(mask, (list, tuple)) and len(mask) == 1 else mask
        kept = args[0] if masks.get(mask) is False else None
    elif name == "where" and len(args) == 3 and args[0] in masks:
        kept = args[1 if masks[args[0]] else 2]  # type: ignore[index]
    made, value = node.meta.get("val"), kept.meta["val"] if isinstance(kept, fx.Node) else None
    same = (
        isinstance(value, Tensor)
        and isinstance(made, Tensor)
        and (value.shape, value.dtype) == (made.shape, made.dtype)
    )
    return kept if same else None


def _masks(graph: fx.Graph, sizes: set[sympy.Symbol]) -> dict[fx.Node, bool]:
    """Return the masks that select nothing (False), or all (True), if these numbers of rows are zero."""
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten.nonzero.default and rows_of(node) & sizes:
            mask = node.args[0]
            found[mask] = False
            if op_name(mask) in ("bitwise_not", "logical_not"):
                found[mask.args[0]] = True
    found = {mask: every for mask, every in found.items() if _is_mask(mask)}
    for node in graph.nodes:
        of = [found.get(x) for x in node.all_input_nodes]
        if node in found or not any(x is not None for x in of) or not _is_mask(node):
            continue
        name = op_name(node)
        if name in ("bitwise_not", "logical_not"):
            found[node] = not of[0]
        elif name.strip("_").removeprefix("bitwise_").removeprefix("logical_") in ("and", "or") and len(of) == 2:
            settles = name.strip("_").endswith("or")
            if settles in of or None not in of:
                found[node] = settles in of if settles else settles not in of
        elif name in _MOVES and of[0] is not None:
            found[node] = of[0]
    return found


def _is_mask(node: fx.Node) -> bool:
    """Return whether a node is a mask that nothing writes to."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.bool and not writes_to(node)
