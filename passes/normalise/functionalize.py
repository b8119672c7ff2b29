"""Functionalisation: rewrites in-place ops on fresh tensors to functional ones, refuses writes to the model's state."""

from __future__ import annotations

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import op_name, source_line
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten


def remove_mutation(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `relu_(x)` on a fresh tensor to `relu(x)`, and let later readers of x read the result.

    The tracer has functionalised writes through views. Raises UnsupportedOp for writes to parameters, buffers, inputs.
    """
    _refuse_running_statistics(graph)
    state = {**traced.buffers, **traced.parameters, **traced.inputs}
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not node.target._schema.is_mutable:
            continue
        written = _written(node)
        if written.name in state:
            raise UnsupportedOp(
                f"{node.target} writes to {state[written.name]}",
                where=source_line(node),
                fix="compute a new tensor instead",
            )
        if written is not node.args[0]:
            raise UnsupportedOp(
                f"{node.target} writes to the tensor passed as out=",
                where=source_line(node),
                fix="use the returned tensor; a module that updates its buffers this way in training, such as a "
                "spectral norm, can be put in eval mode",
            )
        functional = _functional(node.target)
        if functional is None:
            raise UnsupportedOp(
                f"{node.target} writes in place", where=source_line(node), fix="use its functional form"
            )
        node.target = functional
        later = [user for user in written.users if order[user] > order[node]]
        result = _keep_dtype(graph, node, written)
        for user in later:
            user.replace_input_with(written, result)


def _written(node: fx.Node) -> fx.Node:
    """Return the tensor that an op writes to: its first argument, or the one passed as `out`."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {a.name: x for a, x in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    found = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    written = next((x for x in found if isinstance(x, fx.Node)), node.args[0])
    assert isinstance(written, fx.Node)
    return written


def _keep_dtype(graph: fx.Graph, node: fx.Node, written: fx.Node) -> fx.Node:
    """Cast the result to the dtype of `written`, if needed: `x.add_(y)` has the dtype of x, `x + y` the wider one."""
    dtype = written.meta["val"].dtype
    if all(o.meta["val"].dtype == dtype for o in node.all_input_nodes):
        return node
    with graph.inserting_after(node):
        cast = graph.call_function(aten.to.dtype, (node, dtype))
    cast.meta = dict(node.meta)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast


def _refuse_running_statistics(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and "batch_norm" in op_name(node) and len(node.args) > 5 and node.args[5] is True:
            raise UnsupportedOp(
                f"{node.target} computes statistics over this batch, which no split of the batch can reproduce",
                where=source_line(node),
                fix="use GroupNorm or LayerNorm; or put it in eval mode, where it uses its running statistics",
            )


def _functional(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    packet = getattr(torch.ops.aten, target._schema.name.split("::")[1].removesuffix("_"), None)
    name = target._overloadname
    return getattr(packet, name, None) if packet is not None and name in packet.overloads() else None
