"""Inline the subgraphs that the tracer creates for `with torch.no_grad()`."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import source_line
from autoptd.passes.normalise.view_writes import is_write, sharing, with_gradient, written_views
from autoptd.passes.recognise.returned_operands import returned_operand

aten = torch.ops.aten


def inline_regions(graph: fx.Graph, root: fx.GraphModule, buffers: Collection[str]) -> None:
    """Replace no-grad regions by their bodies, with detached inputs.

    Raises UnsupportedOp for a no-grad region that writes to a tensor with a gradient: such a tensor has new numbers
    and its old gradient, which no functional op has.

    Buffers, placeholders of these names, are not, so that a norm of the region updates its own.

    An op that returns its operand (see `returned_operands`) returns it with its gradient, within such a region too:
    later readers of the operand read that op's result.
    """
    _inline_all(graph, root, buffers)
    for node in _hidden_writes(graph):
        raise UnsupportedOp(
            f"forward writes under no_grad to a tensor that has a gradient ({node.target})",
            where=source_line(node),
            fix="compute a new tensor: x + (new - x).detach() has the numbers of `new` and the gradient of x; outside "
            "of no_grad, a write has its own gradient",
        )


def _hidden_writes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield writes that no-grad regions make to tensors with a gradient, of their own or by an earlier write."""
    order, graded = dict[fx.Node, int](), set[fx.Node]()
    for node in filter(is_write, graph.nodes):
        views = written_views(node)
        cuts = [view for view in views if view.meta.get(_CUT)]
        if not cuts or views[-1].op == "placeholder":  # the model's state
            continue
        order = order or {n: i for i, n in enumerate(graph.nodes)}
        graded = graded or with_gradient(graph)
        for cut in cuts:
            attached = written_views(cut.args[0], detached=False)[-1]  # type: ignore[arg-type]
            if any(n in graded and order[n] < order[node] for n in (attached, *sharing(attached))):
                yield node


_CUT = "detached for a no-grad region"


def _inline_all(graph: fx.Graph, root: fx.GraphModule, buffers: Collection[str]) -> None:
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *args = node.args
            _inline(graph, root, node, body, args, buffers, detached=not enabled)
        elif name == "wrap_with_autocast":  # enabled; others are left out of the trace (`lean_export.py`)
            raise UnsupportedOp(
                "the model contains an autocast region", where=source_line(node), fix="pass precision= instead"
            )
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            raise UnsupportedOp(
                f"{node.target} cannot be planned",
                where=source_line(node),
                fix="write the branch with torch.where; leave recompute to the plan",
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
    _inline_all(sub, inner_root, within)  # regions in it are named as its own, which the root may have given others
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
                    copied[inner].meta.update(given.meta | {_CUT: True})
                    copied[inner].meta.update({k: begins[k] for k in ("nn_module_stack", "stack_trace") if k in begins})
            elif inner.op == "output":
                results = inner.args[0]
            else:
                copied[inner] = graph.node_copy(inner, lambda n: copied[n])
                operand = returned_operand(inner)
                if operand in unchanged:
                    unchanged[inner] = unchanged[operand]
    copied |= unchanged
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(copied[results[user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(node)
