"""Cross entropies of rows that a model weighs or selects itself, written with their classes in the last dim.

cross_entropy(z, y, reduction="none")        row_cross_entropy(z, y): of z [..., v] over a vocabulary that tp splits
"""

from __future__ import annotations

import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.graph import info, is_float, write_op
from autoptd.passes.losses.loss_spellings import arguments_by_class
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten


def write_row_losses(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite cross entropies without a reduction, of labels, without weights of classes or smoothing."""
    for node in list(graph.nodes):
        if node.target is not aten.cross_entropy_loss.default:
            continue
        given = arguments_by_class(node)
        logits, labels = given["input"], given["target"]
        plain = given["weight"] is None and not given["label_smoothing"] and not is_float(info(labels).dtype)
        if given["reduction"] or not plain or info(logits).ndim < 2:
            continue
        with graph.inserting_before(node):
            if info(logits).ndim > 2:
                shape = info(logits).shape
                shape, dtype = (shape[0], *shape[2:], shape[1]), info(logits).dtype
                logits = write_op(graph, node, aten.movedim.int, (logits, 1, -1), shape, dtype)
            args = logits, labels, given["ignore_index"]
            made = write_op(graph, node, ops.row_cross_entropy, args, info(node).shape, info(node).dtype)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
