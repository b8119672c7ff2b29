"""The program of masks that select nothing: writes of their rows leave a tensor as it is.

x.index_add(0, t, rows), x[t] = rows        x: no rows, which are known by their number
x[mask] = v, x.masked_fill(mask, v)         x
rows.add_(v)                                rows
where(mask, a, b), where(~mask, b, a)       b
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from autoptd.passes.graph import drop_unread, op_name, substitute
from autoptd.passes.normalise.drop import drop_asserts
from autoptd.passes.normalise.view_writes import writes_to

_PUTS = ("index_add", "index_put", "masked_scatter", "index_copy")
_NOT = ("bitwise_not", "logical_not")
_MOVES = {  # ops after which a mask that selects nothing, or all, is one
    *("permute", "transpose", "t", "to", "squeeze", "unsqueeze", "view", "reshape", "flatten", "expand", "expand_as"),
    *("broadcast_to", "slice", "select", "contiguous", "clone", "detach", "alias"),
}


def without_rows(program: ExportedProgram, sizes: set[sympy.Symbol], zeros: set[str] | None = None) -> Any:
    """Return a copy of a program without what it does with rows of these numbers, and without what is not read.

    zeros: gets the names of means of such rows, which are taken for zero; None: they are not.
    """
    graph = copy.deepcopy(program.graph)
    masks = masks_without(graph, sizes)
    for node in list(graph.nodes):
        kept = operand_left(node, sizes, masks)
        if kept is not None:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    _drop_zeros(graph, program, sizes, zeros)
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
        drop_unread(graph)
    return SimpleNamespace(graph=graph, graph_signature=program.graph_signature, constants=program.constants)


def rows_of(node: fx.Node) -> set[sympy.Symbol]:
    """Return the symbols of the first size of a tensor."""
    value = node.meta.get("val")
    size = value.shape[0] if isinstance(value, Tensor) and value.ndim else None
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _is_empty(x: Any, sizes: set[sympy.Symbol]) -> bool:
    """Return whether a tensor has no element if these numbers of rows are zero."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    return isinstance(value, Tensor) and any(
        isinstance(size, torch.SymInt) and size.node.expr in sizes for size in value.shape
    )


def operand_left(node: fx.Node, sizes: set[sympy.Symbol], masks: Mapping[fx.Node, bool]) -> fx.Node | None:
    """Return the operand that an op gives if the masks select nothing, or all, as `masks` says; None if it gives none.

    An operand of another shape is none: what is read of it is not what is read of the op.
    """
    name, given, args = op_name(node).rstrip("_"), node.all_input_nodes, node.args
    kept: Any = None
    puts = name in _PUTS and any(rows_of(x) & sizes for x in reversed(given))
    if puts or (op_name(node).endswith("_") and _is_empty(args[0], sizes)):
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


_MEANS = (
    "mean",
    "cross_entropy_loss",
    "nll_loss_nd",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
)
_SAME = ("lift_fresh_copy", "lift_fresh", "detach", "detach_", "to", "_to_copy", "clone", "alias", "type_as", "view")


def _drop_zeros(graph: fx.Graph, program: ExportedProgram, sizes: set[sympy.Symbol], means: set[str] | None) -> None:
    """Take out single numbers that are zero and are added, and write a loss that is zero as the number."""
    specs = program.graph_signature.input_specs
    constants = {s.arg.name: program.constants.get(s.target) for s in specs if s.target is not None}
    zeros = set[fx.Node]()
    for node in list(graph.nodes):
        value, given = node.meta.get("val"), node.all_input_nodes
        if node.op == "output":
            node.args = substitute(node.args, lambda n: 0.0 if n in zeros else n)
        elif not isinstance(value, Tensor) or value.ndim:
            continue
        elif means is not None and op_name(node) in _MEANS and rows_of(given[0]) & sizes:
            means.add(node.name)
            zeros.add(node)
        elif _is_zero(node, constants.get(node.name), zeros):
            zeros.add(node)
        elif op_name(node) == "add" and len(given) == 2 and not node.kwargs and not zeros.isdisjoint(given):
            (other,) = (x for x in given if x not in zeros)
            if (other.meta["val"].shape, other.meta["val"].dtype) == (value.shape, value.dtype):
                node.replace_all_uses_with(other)


def _is_zero(node: fx.Node, held: Any, zeros: set[fx.Node]) -> bool:
    """Return whether a single number is zero: a constant, or made of such numbers alone."""
    if node.op == "placeholder":
        known = isinstance(held, Tensor) and not (held.is_meta or isinstance(held, FakeTensor))
        return known and held.numel() == 1 and not held
    name, given = op_name(node), node.all_input_nodes
    if not given or not zeros.issuperset(given):
        return False
    other = node.args[1] if len(node.args) > 1 else None
    if name == "add":
        return isinstance(other, fx.Node) and not node.kwargs
    return name in _SAME or (name in ("mul", "div") and isinstance(other, (int, float)) and 0 < abs(other) < math.inf)


def masks_without(graph: fx.Graph, sizes: set[sympy.Symbol]) -> dict[fx.Node, bool]:
    """Return the masks that select nothing (False), or all (True), if these numbers of rows are zero."""
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten.nonzero.default and rows_of(node) & sizes:
            mask = node.args[0]
            found[mask] = False
            if op_name(mask) in _NOT:
                found[mask.args[0]] = True
    found = {mask: every for mask, every in found.items() if _is_mask(mask)}
    for node in graph.nodes:
        of = [found.get(x) for x in node.all_input_nodes]
        if node in found or not any(x is not None for x in of) or not _is_mask(node):
            continue
        name = op_name(node)
        if name in _NOT:
            found[node] = not of[0]
        elif name.strip("_").removeprefix("bitwise_").removeprefix("logical_") in ("and", "or") and len(of) == 2:
            settles = name.strip("_").endswith("or")
            if settles in of or None not in of:
                found[node] = settles in of if settles else settles not in of
        elif name in _MOVES and of[0] is not None:
            found[node] = of[0]
    return found


def sizes_of_masks(
    graph: fx.Graph, sizes: set[sympy.Symbol], masks: Mapping[fx.Node, bool]
) -> dict[fx.Node, frozenset[sympy.Symbol]]:
    """Return for each of `masks_without` the numbers of rows by which it selects nothing, or all."""
    found: dict[fx.Node, frozenset[sympy.Symbol]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten.nonzero.default and (own := rows_of(node) & sizes):
            mask = node.args[0]
            for x in (mask, *mask.all_input_nodes) if op_name(mask) in _NOT else (mask,):
                found[x] = found.get(x, frozenset()) | own
    for node in graph.nodes:
        if node in masks and node not in found:
            found[node] = frozenset().union(*(found.get(x, frozenset()) for x in node.all_input_nodes))
    return found


def _is_mask(node: fx.Node) -> bool:
    """Return whether a node is a mask that nothing writes to."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.bool and not writes_to(node)
