"""Labels of all samples in one list, as `ctc_loss` takes them, as a row for each sample.

    ctc_loss(scores, labels[mask], steps, mask.sum(-1))     labels, mask [b, l]

The list has the marked labels of the first sample, then those of the second, and so on. A sample's row has its own
marked labels first, in their order, which is what the lengths count.
"""

from __future__ import annotations

import torch
from torch import fx

from autoptd.passes.graph import info, operands, write_op
from autoptd.passes.normalise.drop import share_repeated
from autoptd.passes.rewrites.row_selections import masked_rows
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten


def write_ctc_labels_by_sample(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite lists of labels that a mask selects, if the lengths are those of the mask."""
    found = [n for n in graph.nodes if n.target is aten.ctc_loss.Tensor and operands(n)[1].target is masked_rows]
    if not found:
        return
    share_repeated(graph, traced)  # the masks of labels and lengths are computed alike
    for node in found:
        listed, lengths = operands(node)[1], operands(node)[3]
        labels, mask, _ = listed.args
        assert isinstance(labels, fx.Node) and isinstance(mask, fx.Node)
        if info(mask).ndim != 2 or info(labels).ndim != 2 or not _counts(lengths, mask):
            continue
        shape = info(labels).shape
        with graph.inserting_before(node):
            marked = write_op(graph, node, aten.to.dtype, (mask, torch.int64), shape, torch.int64)
            order = write_op(
                graph, node, aten.argsort.stable, (marked,), shape, torch.int64, {"stable": True, "descending": True}
            )
            rows = write_op(graph, node, aten.gather.default, (labels, 1, order), shape, info(labels).dtype)
            kept = write_op(graph, node, aten.gather.default, (marked, 1, order), shape, torch.int64)
            rows = write_op(graph, node, aten.mul.Tensor, (rows, kept), shape, info(labels).dtype)
        node.replace_input_with(listed, rows)


def _counts(lengths: fx.Node, mask: fx.Node) -> bool:
    """Return whether lengths are the numbers of a mask's marks in each row."""
    while lengths.target is aten.to.dtype:
        lengths = lengths.args[0]  # type: ignore[assignment]
    if lengths.target is not aten.sum.dim_IntList or lengths.args[1] not in ([1], [-1], (1,), (-1,)):
        return False
    counted = lengths.args[0]
    while isinstance(counted, fx.Node) and counted.target is aten.to.dtype:
        counted = counted.args[0]
    return counted is mask
