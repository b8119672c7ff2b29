"""Annotate every node with shape, dtype and whether a gradient flows to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.custom_grad.ops import OwnFunction
from autoptd.passes.graph import infos, is_float, is_getitem, op_name, operands, source_line
from autoptd.passes.losses.loss_form import loss_node
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.random.distributions import DISTRIBUTIONS, OF_OPERAND
from autoptd.passes.trace.traced import Traced
from autoptd.text import fold_names


def annotate(graph: fx.Graph, traced: Traced) -> None:
    """Set `meta["info"]`. A gradient flows to what is computed from a trainable parameter without a detach between."""
    for node in graph.nodes:
        if node.op == "output":
            continue
        grad = node.name in traced.parameters and traced.parameters[node.name] not in traced.frozen
        if node.op == "call_function" and op_name(node) != "detach" and not _draws_alone(node):
            grad = any(t.requires_grad for o in operands(node) for t in infos(o))
        if is_getitem(node) and isinstance(node.args[0].target, OwnFunction):  # type: ignore[union-attr]
            grad = infos(node.args[0])[node.args[1]].requires_grad  # type: ignore[arg-type, index]
        node.meta["info"] = _with_grad(node.meta["shapes"], grad)
        if isinstance(node.target, OwnFunction):
            node.meta["info"] = _where_differentiable(node.meta["info"], node.target.differentiable)


def forget_unreached(graph: fx.Graph, traced: Traced) -> None:
    """Take the gradient from what the loss is computed from by detached tensors alone: none flows back to it.

    Parameters that are read before such a tensor have no gradient in one process. A stage that sends it must not be
    sent zeros for it, which would be one.
    """
    reached = _reached(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node not in reached:
            node.meta["info"] = _with_grad(node.meta["info"], False)


def note_trained(graph: fx.Graph, traced: Traced) -> None:
    """Note, for `refuse_untrained`, a reader of each parameter to which a gradient flows from the loss."""
    for node in _reached(graph):
        if node.op == "placeholder" and node.users and _has_gradient(node):
            node.meta[_TRAINED] = next(iter(node.users))


def refuse_untrained(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp if a parameter that has a gradient reaches the loss no more, as what read it was dropped.

    That was overwritten as a whole, or empty. In one process the gradient is zeros, and an optimizer goes on. Notes are
    taken from all nodes: passes copy the meta of a placeholder.
    """
    reached, readers = _reached(graph), {n: n.meta.pop(_TRAINED, None) for n in graph.nodes}
    lost = [n for n, reader in readers.items() if n.op == "placeholder" and reader is not None and n not in reached]
    if lost:
        names = ", ".join(fold_names(traced.parameters[n.name] for n in lost))
        raise UnsupportedOp(
            f"what is computed from {names} is overwritten as a whole, or empty: in one process the gradient is zeros, "
            "and weight decay still changes the values; a program would not train them",
            where=source_line(readers[lost[0]]),
            fix="freeze them by requires_grad_(False), or leave out that computation; if it is empty, give example "
            "inputs of the shape of those of training",
        )


_TRAINED = "trained by"


def _reached(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes to which a gradient flows from the loss; all if it has none, as metrics."""
    loss = loss_node(graph)
    reached = {loss} if any(t.requires_grad for t in infos(loss)) else set(graph.nodes)
    for node in reversed(graph.nodes):
        if any(user in reached and user.op != "output" and _has_gradient(user) for user in node.users):
            reached.add(node)
    return reached


def _has_gradient(node: fx.Node) -> bool:
    return any(t.requires_grad for t in infos(node))


def _draws_alone(node: fx.Node) -> bool:
    """Return whether an op draws numbers through which no gradient flows, even if it takes probabilities."""
    return node.target in DISTRIBUTIONS and DISTRIBUTIONS[node.target] not in OF_OPERAND


def _with_grad(shapes: object, grad: bool) -> object:
    if isinstance(shapes, TensorInfo):
        return TensorInfo(shapes.shape, shapes.dtype, grad and is_float(shapes.dtype))
    assert isinstance(shapes, tuple)
    return tuple(_with_grad(s, grad) for s in shapes if s is not None)


def _where_differentiable(found: object, differentiable: Sequence[bool]) -> object:
    """Return the infos of a function's outputs, without a gradient for those that are not differentiable."""
    if isinstance(found, TensorInfo):
        return found if differentiable[0] else replace(found, requires_grad=False)
    assert isinstance(found, tuple)
    return tuple(map(_where_differentiable, found, ([flows] for flows in differentiable)))
