"""Tensors that `expand` makes, and parts of them: all parts of such a dim are the same, even if it counts samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoptd.passes.graph import info, is_getitem, op_name, write_op
from autoptd.passes.rules.views import same
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")


def write_broadcasts_as_expand(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite results of `broadcast_tensors` to an `expand` each: a gradient flows from it to its operand alone."""
    for node in list(graph.nodes):
        if is_getitem(node) and node.args[0].target is aten.broadcast_tensors.default:
            tensors, shape = node.args[0].args[0], node.meta["shapes"].shape
            node.target, node.args = aten.expand.default, (tensors[node.args[1]], list(shape))


def write_parts_of_expanded(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite slices of dims that `expand` made to a smaller `expand`, and single rows to the row that is repeated."""
    for node in list(graph.nodes):
        if node.target is aten.select.int and node.args[1] in (0, -info(node.all_input_nodes[0]).ndim):
            _write_row_of_expanded(graph, node)
        if node.op != "call_function" or node.target is not aten.slice.Tensor:
            continue
        wide: Any = node.args[0]
        dim: Any = (*node.args, 0)[1]
        if wide.op != "call_function" or wide.target is not aten.expand.default:
            continue
        source: Any = wide.args[0]
        at = dim % info(wide).ndim - (info(wide).ndim - info(source).ndim)
        if at < 0 or (info(source).shape[at] == 1 and info(node).shape[dim] != 0):
            node.target = aten.expand.default
            node.args, node.kwargs = (source, list(info(node).shape)), {}


def _write_row_of_expanded(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite `expand(x)[i]`, maybe with dims within each row reshaped between, to a reshape of x."""
    wide: Any = node.args[0]
    rows = info(wide).shape[0]
    while op_name(wide) in _RESHAPES and same(info(wide.args[0]).shape[0], rows):
        wide = wide.args[0]
    if wide.target is not aten.expand.default or rows == 1:
        return
    source: Any = wide.args[0]
    if info(source).ndim == info(wide).ndim and info(source).shape[0] != 1:
        return
    shape = (1, *info(wide).shape[1:])
    with graph.inserting_before(node):
        one = write_op(graph, node, aten.expand.default, (source, list(shape)), shape)
    node.target, node.args = aten.reshape.default, (one, list(info(node).shape))
