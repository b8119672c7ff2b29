"""Inline the subgraphs that the tracer creates for `with torch.no_grad()` and disabled autocast."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import source_line

aten = torch.ops.aten


def inline_regions(graph: fx.Graph, root: fx.GraphModule) -> None:
    """Replace no-grad and disabled-autocast regions by their bodies; inputs of a no-grad region are detached."""
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *args = node.args
            _inline(graph, root, node, body, args, detached=not enabled)
        elif name == "wrap_with_autocast":
            _, _, enabled, _, body, *args = node.args
            if enabled:
                raise UnsupportedOp(
                    "the model contains an autocast region", where=source_line(node), fix="pass precision= instead"
                )
            _inline(graph, root, node, body, args, detached=False)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            raise UnsupportedOp(
                f"{node.target} cannot be planned",
                where=source_line(node),
                fix="write the branch with torch.where; leave recompute to the plan",
            )


def _inline(graph: fx.Graph, root: fx.GraphModule, node: fx.Node, body: object, args: list, *, detached: bool) -> None:
    assert isinstance(body, fx.Node)
    sub = getattr(root, str(body.target)).graph
    inputs = iter(args)
    copied: dict[fx.Node, fx.Node] = {}
    begins: dict[str, object] = next((n.meta for n in sub.nodes if n.op == "call_function"), {})
    with graph.inserting_before(node):
        for inner in sub.nodes:
            if inner.op == "placeholder":
                given = next(inputs)
                copied[inner] = given
                if detached and isinstance(given, fx.Node) and isinstance(given.meta.get("val"), torch.Tensor):
                    copied[inner] = graph.call_function(aten.detach.default, (given,))
                    copied[inner].meta.update(given.meta)
                    copied[inner].meta.update({k: begins[k] for k in ("nn_module_stack", "stack_trace") if k in begins})
            elif inner.op == "output":
                results = inner.args[0]
            else:
                copied[inner] = graph.node_copy(inner, lambda n: copied[n])
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(copied[results[user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(node)
