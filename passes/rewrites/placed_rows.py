"""Features that a mask places into the tokens of their own sample, as images in a text.

    x[mask] = y,  x.masked_scatter(mask, y)     x [b, s, h], mask [b, s], y [b · t, h]

torch fills the marked rows of the whole batch in order, so a row is its own sample's only if every sample marks t rows.
They are filled sample by sample here: `ops.marked_rows` numbers the rows, and fails where a sample marks more or fewer,
and `ops.take_rows` takes each token's own.
"""

from __future__ import annotations

import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import grows
from autoptd.passes.graph import WRITTEN_FOR, info, numel, op_name, plain, write_op
from autoptd.passes.opcall import Size
from autoptd.passes.rules.views import quotient
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten
_SPREADS = ("expand", "expand_as", "broadcast_to", "unsqueeze", "to")


def write_placed_rows(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite writes of a sample's features to masked tokens, if there are equally many for each sample."""
    for node in list(graph.nodes):
        if node.target is aten.masked_scatter.default:
            x, mask, source = node.args
        elif node.target is aten.index_put.default and len(node.args[1]) == 1 and node.args[3:] in ((), (False,)):
            x, (mask,), source = node.args[:3]
        else:
            continue
        tokens = None if mask is None else mask_of_tokens(mask, info(node).shape)
        rows = _rows_of_a_sample(source, info(node).shape)
        if tokens is None or rows is None or info(source).dtype != info(node).dtype:
            continue
        (b, s, h), kind = info(node).shape, info(node).dtype
        with graph.inserting_before(node):
            kept = write_op(graph, node, aten.full.default, ([b, rows], True), (b, rows), torch.bool)
            apart = write_op(graph, node, aten.reshape.default, (source, [b, rows, h]), (b, rows, h), kind)
            flat = write_op(graph, node, aten.reshape.default, (tokens, [b, s]), (b, s), torch.bool)
            moved = write_moved_rows(graph, node, apart, kept, flat)
            spread = write_op(graph, node, aten.reshape.default, (tokens, [b, s, 1]), (b, s, 1), torch.bool)
            made = write_op(graph, node, aten.where.self, (spread, moved, x), (b, s, h), kind)
        node.replace_all_uses_with(made)


def write_moved_rows(graph: fx.Graph, like: fx.Node, x: fx.Node, kept: fx.Node, mask: fx.Node) -> fx.Node:
    """Insert the rows of x [b, t, h] that kept [b, t] marks where mask [b, s] does, in order within each sample."""
    (b, s), h = info(mask).shape, info(x).shape[2]
    index = write_op(graph, like, ops.marked_rows, (kept, mask), (b, s), torch.int64)
    index.meta[WRITTEN_FOR] = op_name(like)
    return write_op(graph, like, ops.take_rows, (x, index), (b, s, h), info(x).dtype)


def mask_of_tokens(mask: fx.Node, shape: tuple[Size, ...]) -> fx.Node | None:
    """Return a mask with one element for each row of a tensor [b, s, h], from which `mask` was spread over h."""
    while True:
        if info(mask).dtype is not torch.bool or len(shape) != 3:
            return None
        if info(mask).shape in (shape[:2], (*shape[:2], 1)):
            return mask
        source = mask.args[0] if mask.op == "call_function" and op_name(mask) in _SPREADS else None
        if not isinstance(source, fx.Node):
            return None
        mask = source


def _rows_of_a_sample(source: fx.Node, shape: tuple[Size, ...]) -> Size | None:
    """Return the number of rows of h features for each sample; None if it depends on how many samples there are."""
    if len(shape) != 3 or shape[0] != BATCH or info(source).ndim < 2:
        return None
    rows = quotient(numel(info(source).shape), BATCH * shape[2])
    return None if rows is None or grows(rows) else plain(rows)
