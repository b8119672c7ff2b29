"""Dtypes of nodes computed from global loss counts: a count is float64, and running each op shows its result's dtype.

    Σ l (float32, 0-dim) / loss_count_0 (float64, 0-dim)      float64
    x (float32, [b, s, h]) / loss_count_0                     float32, as torch promotes

If an op does not accept the mixture, the operand is cast back to the dtype that the model had there.
"""

from __future__ import annotations

import torch
from torch import fx

from autoptd.passes.graph import concrete, info, operands, substitute, write_op
from autoptd.passes.losses.loss_form import is_count
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.trace.fake import fake_cpu
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten


def settle_scalar_types(graph: fx.Graph, traced: Traced) -> None:
    """Correct the dtype in `meta["info"]` of nodes computed from counts."""
    before = {node: torch.float64 for node in graph.nodes if is_count(node)}
    for node in list(graph.nodes):
        wide = [o for o in dict.fromkeys(operands(node)) if o in before] if node.op == "call_function" else []
        if not wide or isinstance(node.meta["info"], tuple):
            continue
        tensor = info(node)
        try:
            dtype = _run(node, traced)
        except RuntimeError:
            _cast_back(graph, node, wide, before)
            continue
        if dtype != tensor.dtype:
            before[node] = tensor.dtype
            node.meta["info"] = TensorInfo(tensor.shape, dtype, tensor.requires_grad)


def _run(node: fx.Node, traced: Traced) -> torch.dtype:
    """Return the dtype of an op's result, by running it on fake tensors."""
    with fake_cpu(), torch.no_grad():

        def empty(operand: fx.Node) -> object:
            shape = concrete(tuple(info(operand).shape), traced.example)
            return torch.empty(shape, dtype=info(operand).dtype)

        args = concrete(substitute(node.args, empty), traced.example)
        kwargs = {k: concrete(substitute(v, empty), traced.example) for k, v in node.kwargs.items()}
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    assert isinstance(made, torch.Tensor)
    return made.dtype


def _cast_back(graph: fx.Graph, node: fx.Node, wide: list[fx.Node], before: dict[fx.Node, torch.dtype]) -> None:
    with graph.inserting_before(node):
        for operand in wide:
            if info(operand).dtype != before[operand]:
                cast = write_op(
                    graph, node, aten.to.dtype, (operand, before[operand]), info(operand).shape, before[operand]
                )
                node.replace_input_with(operand, cast)
