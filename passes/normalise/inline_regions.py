"""Inline the subgraphs that the tracer creates for `with torch.no_grad()` and disabled autocast."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import source_line

aten = torch.ops.aten


def inline_regions(graph: fx.Graph, root: fx.GraphModule, buffers: Collection[str]) -> None:
    """Replace no-grad and disabled-autocast regions by their bodies; inputs of a no-grad region are detached.

    Buffers, placeholders of these names, are not, so that a norm of the region updates its own.

    An op that returns its operand, such as a cast to the type that it has, returns it with its gradient, within such a
    region too. torch.export lets later readers of the operand read that op's result.
    """
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *args = node.args
            _inline(graph, root, node, body, args, buffers, detached=not enabled)
        elif name == "wrap_with_autocast":
            _, _, enabled, _, body, *args = node.args
            if enabled:
                raise UnsupportedOp(
                    "the model contains an autocast region", where=source_line(node), fix="pass precision= instead"
                )
            _inline(graph, root, node, body, args, buffers, detached=False)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            raise UnsupportedOp(
                f"{node.target} cannot be planned",
                where=source_line(node),
                fix="write the branch with torch.where; leave recompute to the plan",
            )


def returns_operand(node: fx.Node) -> bool:
    """Return whether an op returns its first operand itself, which it does if nothing is to be changed."""
    if node.target not in _RETURNING:
        return False
    source: Any = node.args[0]
    before, after, rest = source.meta.get("val"), node.meta.get("val"), (*node.args[1:], *node.kwargs.values())
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or True in rest:  # a copy
        return False
    alike = before.dtype == after.dtype and before.device == after.device and before.shape == after.shape
    return alike and (node.target is not aten.contiguous.default or before.is_contiguous())


_RETURNING = (
    *(aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout),
    *(aten.type_as.default, aten.contiguous.default),
)


def _is_buffer(given: object, buffers: Collection[str]) -> bool:
    return isinstance(given, fx.Node) and given.op == "placeholder" and given.name in buffers


def _inline(
    graph: fx.Graph,
    root: fx.GraphModule,
    node: fx.Node,
    body: object,
    args: list,
    buffers: Collection[str],
    *,
    detached: bool,
) -> None:
    assert isinstance(body, fx.Node)
    inner_root = getattr(root, str(body.target))
    sub = inner_root.graph
    within = {inner.name for inner, given in zip(sub.nodes, args, strict=False) if _is_buffer(given, buffers)}
    inline_regions(sub, inner_root, within)  # regions in it are named as its own, which the root may have given others
    inputs = iter(args)
    copied: dict[fx.Node, fx.Node] = {}
    unchanged: dict[fx.Node, fx.Node] = {}  # inputs, and what is returned as it is
    begins: dict[str, object] = next((n.meta for n in sub.nodes if n.op == "call_function"), {})
    with graph.inserting_before(node):
        for inner in sub.nodes:
            if inner.op == "placeholder":
                given = next(inputs)
                copied[inner] = unchanged[inner] = given
                tensor = isinstance(given, fx.Node) and isinstance(given.meta.get("val"), torch.Tensor)
                if detached and tensor and not _is_buffer(given, buffers):
                    copied[inner] = graph.call_function(aten.detach.default, (given,))
                    copied[inner].meta.update(given.meta)
                    copied[inner].meta.update({k: begins[k] for k in ("nn_module_stack", "stack_trace") if k in begins})
            elif inner.op == "output":
                results = inner.args[0]
            else:
                copied[inner] = graph.node_copy(inner, lambda n: copied[n])
                if inner.args and inner.args[0] in unchanged and returns_operand(inner):
                    unchanged[inner] = unchanged[inner.args[0]]  # type: ignore[index]
    copied |= unchanged
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(copied[results[user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(node)
