"""Sparse tensors that are added to dense ones, as sums by index.

w + torch.sparse_coo_tensor(places, values, w.shape)     w.index_put((places[0], places[1]), values, accumulate=True)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
_ADDS = {aten.add.Tensor: aten.index_put.default, aten.add_.Tensor: aten.index_put_.default}


def write_sparse_sums(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite additions of sparse tensors. Other ops of these are refused later."""
    for node in list(graph.nodes):
        added = node.args[1] if node.target in _ADDS and len(node.args) == 2 and not node.kwargs else None
        if not isinstance(added, fx.Node) or added.target is not aten.sparse_coo_tensor.indices_size:
            continue
        indices, values = (_fake(x) for x in added.args[:2])
        if _fake(node.args[0]).layout is torch.strided and values.dtype == _fake(node.args[0]).dtype:
            rows = [_row(graph, node, added.args[0], i) for i in range(int(indices.shape[0]))]
            node.target, node.args = _ADDS[node.target], (node.args[0], rows, added.args[1], True)


def _fake(x: Any) -> Tensor:
    value = x.meta["val"]
    assert isinstance(value, Tensor)
    return value


def _row(graph: fx.Graph, like: fx.Node, indices: Any, i: int) -> fx.Node:
    """Insert the indices of one dim before a node."""
    with graph.inserting_before(like):
        row = graph.call_function(aten.select.int, (indices, 0, i))
    row.meta = {key: x for key, x in like.meta.items() if key in ("nn_module_stack", "stack_trace")}
    with _fake(indices).fake_mode:  # type: ignore[attr-defined]
        row.meta["val"] = _fake(indices).select(0, i)
    return row
