"""Make the loss independent of how the batch is divided.

A model's loss is a mean over this call's valid tokens, so the mean of microbatch means is not the mean of the batch.
Every mean is rewritten as sum ÷ count, and the count is taken over the whole global batch:

    loss = Σ c_i · mean_i        becomes        share = Σ c_i · S_i / N_i

S_i is a sum over this microbatch; N_i, a placeholder, is the count over all microbatches of all data-parallel ranks,
known before the first backward because it depends on model inputs alone. Shares add up to the loss, so gradients are
added, never averaged: this division is the only owner of the factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from autoptd.errors import TraceError
from autoptd.passes.graph import ancestors, info, numel
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.trace import BATCH, Traced
from autoptd.runtime import ops

aten = torch.ops.aten
COUNT = "loss_count"  # names of the placeholders: loss_count_0, loss_count_1 …
_MEAN, _SUM = 1, 2  # torch's reduction codes
_REDUCED = {
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.kl_div.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}  # elementwise losses -> index of their `reduction` argument


@dataclass
class Loss:
    """What the rewritten graph computes: per count, the node that gives it for one microbatch."""

    counts: list[fx.Node] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def rewrite_loss(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite every mean that the loss is a weighted sum of; `graph` then has one `loss_count_i` placeholder each."""
    output = next(n for n in graph.nodes if n.op == "output")
    total = output.args[0]
    while isinstance(total, (tuple, list)):
        total = total[0]
    assert isinstance(total, fx.Node)
    if not info(total).requires_grad:
        raise TraceError("no trainable parameter reaches the loss", fix="return a loss that depends on the parameters")
    loss = Loss()
    _rewrite(graph, traced, total, loss)
    total = output.args[0]
    while isinstance(total, (tuple, list)):
        total = total[0]
    output.args = (total, *loss.counts)
    graph.lint()
    traced.graph.meta["loss_notes"] = loss.notes


def _rewrite(graph: fx.Graph, traced: Traced, node: fx.Node, loss: Loss) -> None:
    """Replace `node`, a scalar that the loss is linear in, by its share."""
    if node.op == "call_function" and len(node.users) == 1:
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and _scalars(node) and len(node.args) == 2:
            for term in node.args:
                _rewrite(graph, traced, term, loss)  # type: ignore[arg-type]
            return
        if node.target in _SCALING and (
            not isinstance(node.args[-1], fx.Node) or len(node.args) == 1 or _constant(node.args[-1], traced)
        ):
            _rewrite(graph, traced, node.args[0], loss)  # type: ignore[arg-type]
            return
    if not info(node).requires_grad and node.op == "call_function":
        _weigh_by_samples(graph, node, loss, traced)
        return
    made = _as_sum_and_count(graph, traced, node)
    if made is None:
        _weigh_by_samples(graph, node, loss, traced)
        return
    total, count = made
    if count is None:
        node.replace_all_uses_with(total) if total is not node else None
        return
    _divide(graph, node, total, count, loss, traced)


_SCALING = (
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.to.dtype,
    aten._to_copy.default,
    aten.reshape.default,
    aten.squeeze.default,
)


def _scalars(node: fx.Node) -> bool:
    return all(isinstance(a, fx.Node) and info(a).ndim == 0 for a in node.args)


def _constant(node: object, traced: Traced) -> bool:
    """Whether a tensor is the same for every batch."""
    return not isinstance(node, fx.Node) or not any(
        n.name in traced.inputs or n.name in traced.parameters for n in ancestors([node])
    )


def _as_sum_and_count(graph: fx.Graph, traced: Traced, node: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """(S, N) of a mean, (S, None) of a sum, None for what is neither."""
    match node.target:
        case aten.cross_entropy_loss.default:
            return _cross_entropy(graph, node)
        case aten.mean.default:
            with graph.inserting_before(node):
                total = _new(graph, node, aten.sum.default, (node.args[0],))
                return total, _elements(graph, node, node.args[0])  # type: ignore[arg-type]
        case aten.sum.default:
            return node, None
        case target if target in _REDUCED:
            return _elementwise(graph, node, _REDUCED[target])
        case aten.div.Tensor:
            total, count = node.args
            additive = _additive_count(count, traced) if isinstance(count, fx.Node) else None
            if additive is not None and isinstance(total, fx.Node) and _is_sum(total):
                return total, additive
            return None
        case _:
            return None


def _is_sum(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (aten.sum.default, aten.sum.dim_IntList) and info(node).ndim == 0


def _additive_count(node: fx.Node, traced: Traced) -> fx.Node | None:
    """The node whose values over microbatches add up: a sum over inputs, under casts and a guard against zero."""
    if info(node).requires_grad or any(n.name in traced.parameters for n in ancestors([node])):
        return None
    while node.op == "call_function":
        if _is_sum(node):
            return node
        cast = node.target in (aten.to.dtype, aten._to_copy.default)
        guard = node.target in (aten.clamp.default, aten.clamp_min.default) and node.args[1] in (1, 1.0)
        if not (cast or guard):
            return None
        node = node.args[0]  # type: ignore[assignment]
    return None


def _cross_entropy(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    defaults = (None, None, None, _MEAN, -100, 0.0)
    given = {n: node.args[i] if i < len(node.args) else node.kwargs.get(n, d) for i, (n, d) in enumerate(zip(names, defaults, strict=True))}
    logits, labels = given["input"], given["target"]
    assert isinstance(logits, fx.Node) and isinstance(labels, fx.Node)
    if given["weight"] is not None or info(labels).dtype.is_floating_point or info(logits).ndim < 2:
        return None
    with graph.inserting_before(node):
        if info(logits).ndim > 2:  # N C d1 … : the class dim last
            shape = info(logits).shape
            logits = _new(graph, logits, aten.movedim.int, (logits, 1, -1), (shape[0], *shape[2:], shape[1]))
        logits, labels = _leading(logits, labels)
        kwargs = {} if not given["label_smoothing"] else {"label_smoothing": given["label_smoothing"]}
        total = _new(graph, node, ops.cross_entropy, (logits, labels, given["ignore_index"]), kwargs=kwargs)
        if given["reduction"] == _SUM:
            node.replace_all_uses_with(total)
            return total, None
        if given["reduction"] != _MEAN:
            return None
        count = _new(graph, node, ops.valid_count, (labels, given["ignore_index"]), grad=False)
        return total, count


def _leading(logits: fx.Node, labels: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Undo `logits.view(-1, V), labels.view(-1)`: the sequence stays a dim of its own, and may be split."""
    a, b = _before_reshape(logits), _before_reshape(labels)
    if a is not logits and b is not labels and info(a).shape[-1] == info(logits).shape[-1]:
        if info(a).shape[:-1] == info(b).shape:
            return a, b
    return logits, labels


def _before_reshape(node: fx.Node) -> fx.Node:
    if node.op == "call_function" and node.target is aten.reshape.default:
        return node.args[0]  # type: ignore[return-value]
    return node


def _elementwise(graph: fx.Graph, node: fx.Node, index: int) -> tuple[fx.Node, fx.Node | None] | None:
    reduction = node.args[index] if len(node.args) > index else node.kwargs.get("reduction", _MEAN)
    if reduction == _SUM:
        return node, None
    if reduction != _MEAN:
        return None
    args = list(node.args)
    kwargs = {k: v for k, v in node.kwargs.items() if k != "reduction"}
    if len(args) > index:
        args[index] = _SUM
    else:
        kwargs["reduction"] = _SUM
    with graph.inserting_before(node):
        total = _new(graph, node, node.target, tuple(args), kwargs=kwargs)
        return total, _elements(graph, node, max((args[0], args[1]), key=lambda n: info(n).ndim))


def _elements(graph: fx.Graph, node: fx.Node, of: fx.Node) -> fx.Node:
    """A count that is known from the sizes: the number of elements of `of`."""
    return _new(graph, node, ops.element_count, (numel(info(of).shape),), grad=False)


def _weigh_by_samples(graph: fx.Graph, node: fx.Node, loss: Loss, traced: Traced) -> None:
    """A loss of unknown form is taken as a mean over samples: each microbatch weighs by its share of them."""
    loss.notes.append(
        f"{node.target} is averaged over samples: its own mean was not recognised, so ragged microbatches may differ"
    )
    with graph.inserting_after(node):
        total = graph.call_function(aten.mul.Tensor, (node, BATCH))
        total.meta = dict(node.meta)
    with graph.inserting_after(total):
        count = _new(graph, node, ops.element_count, (BATCH,), grad=False)
    users = [u for u in node.users if u is not total]
    _divide(graph, node, total, count, loss, traced, users)


def _divide(
    graph: fx.Graph,
    node: fx.Node,
    total: fx.Node,
    count: fx.Node,
    loss: Loss,
    traced: Traced,
    users: list[fx.Node] | None = None,
) -> None:
    name = f"{COUNT}_{len(loss.counts)}"
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        whole = graph.placeholder(name)
    whole.meta["info"] = TensorInfo((), info(count).dtype, False)
    after = max((total, count), key=lambda n: list(graph.nodes).index(n))
    readers = users if users is not None else list(node.users)
    with graph.inserting_after(after):
        share = graph.call_function(aten.div.Tensor, (total, whole))
        share.meta = {**total.meta}
    for user in readers:
        user.replace_input_with(node, share)
    loss.counts.append(count)


def _new(
    graph: fx.Graph,
    like: fx.Node,
    target: object,
    args: tuple,
    shape: tuple | None = None,
    *,
    kwargs: dict | None = None,
    grad: bool = True,
) -> fx.Node:
    new = graph.call_function(target, args, kwargs or {})  # type: ignore[arg-type]
    new.meta = dict(like.meta)
    old = info(like)
    dtype = old.dtype if grad else torch.float32
    new.meta["info"] = TensorInfo(old.shape if shape is None else shape, dtype, old.requires_grad and grad)
    return new
