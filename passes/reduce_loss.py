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

import sympy
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
    if node.op == "call_function" and len(node.users) == 1 and _depends_on_batch(node, traced):
        terms = _linear_terms(node, traced)
        if terms:
            for term in terms:
                _rewrite(graph, traced, term, loss)
            return
    made = _as_sum_and_count(graph, traced, node) if _depends_on_batch(node, traced) else None
    if made is None:
        _weigh_by_samples(graph, node, loss, traced)
        return
    total, count = made
    if count is not None:
        _divide(graph, node, total, count, loss)
    elif total is not node:
        node.replace_all_uses_with(total)


def _linear_terms(node: fx.Node, traced: Traced) -> list[fx.Node]:
    """The scalars that a sum, a scaling by a constant or a cast is made of; none for any other op."""
    tensors, numbers = node.all_input_nodes, [a for a in node.args if not isinstance(a, fx.Node)]
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        alike = len(node.args) == 2 and not numbers and all(info(a).ndim == 0 for a in tensors)
        return tensors if alike and len(tensors) == 2 else []
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        varying = [a for a in tensors if not _constant(a, traced)]
        sized = any(isinstance(a, sympy.Basic) and BATCH in a.free_symbols for a in numbers)
        scaled = varying == [node.args[0]] or (node.target is aten.mul.Tensor and len(varying) == 1)
        return varying if scaled and not sized else []
    return tensors[:1] if node.target in _SAME_VALUE else []


_SAME_VALUE = (
    aten.neg.default,
    aten.to.dtype,
    aten._to_copy.default,
    aten.reshape.default,
    aten.squeeze.default,
)


def _constant(node: fx.Node, traced: Traced) -> bool:
    """Whether a tensor is the same for every batch and needs no gradient."""
    return not info(node).requires_grad and not _depends_on_batch(node, traced)


def _depends_on_batch(node: fx.Node, traced: Traced) -> bool:
    return any(n.name in traced.inputs for n in ancestors([node]))


def _as_sum_and_count(graph: fx.Graph, traced: Traced, node: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """(S, N) of a mean, (S, None) of a sum, None for what is neither."""
    match node.target:
        case aten.cross_entropy_loss.default:
            return _cross_entropy(graph, node, traced)
        case aten.nll_loss_nd.default:
            return _negative_log_likelihood(graph, node, traced)
        case aten.mean.default | aten.mean.dim if _over_samples(node):
            with graph.inserting_before(node):
                total = _new(graph, node, aten.sum.default, (node.args[0],))
                return total, _elements(graph, node, node.all_input_nodes[0])
        case aten.sum.default | aten.sum.dim_IntList if _over_samples(node):
            return node, None
        case target if target in _REDUCED and _over_samples(node):
            return _elementwise(graph, node, _REDUCED[target])
        case aten.div.Tensor:
            return _quotient(graph, traced, node)
    return None


def _over_samples(node: fx.Node) -> bool:
    """Whether a scalar reduces a tensor with a size for the samples: over those a sum is additive."""
    return any(
        isinstance(n, sympy.Basic) and BATCH in n.free_symbols for a in node.all_input_nodes for n in info(a).shape
    )


def _quotient(graph: fx.Graph, traced: Traced, node: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """`(x * mask).sum() / mask.sum()`, `x.sum() / x.size(0)`."""
    total, count = node.args
    if not isinstance(total, fx.Node) or not _adds_up(graph, traced, total):
        return None
    total = node.all_input_nodes[0]  # may have been rewritten
    if isinstance(count, fx.Node):
        additive = _additive_count(count, traced)
        return None if additive is None else (total, additive)
    if isinstance(count, sympy.Basic) and BATCH not in sympy.simplify(count / BATCH).free_symbols:
        with graph.inserting_before(node):
            return total, _new(graph, node, ops.element_count, (count,), grad=False)
    return None


def _adds_up(graph: fx.Graph, traced: Traced, node: fx.Node) -> bool:
    """Whether the values of a scalar over microbatches add up: sums, and what is linear in sums."""
    terms = _linear_terms(node, traced) if node.op == "call_function" else []
    if terms:
        return all(_adds_up(graph, traced, term) for term in terms)
    made = _as_sum_and_count(graph, traced, node)
    if made is None or made[1] is not None:
        return False
    if made[0] is not node:
        node.replace_all_uses_with(made[0])
    return True


def _is_sum(node: fx.Node) -> bool:
    return (
        node.op == "call_function" and node.target in (aten.sum.default, aten.sum.dim_IntList) and info(node).ndim == 0
    )


def _additive_count(node: fx.Node, traced: Traced) -> fx.Node | None:
    """The node whose values over microbatches add up: a sum over inputs, under casts and a guard against zero."""
    if not _countable(node, traced):
        return None
    while node.op == "call_function":
        if _is_sum(node):
            return node if _over_samples(node) else None
        cast = node.target in (aten.to.dtype, aten._to_copy.default)
        guard = node.target in (aten.clamp.default, aten.clamp_min.default) and node.args[1] in (1, 1.0)
        if not (cast or guard):
            return None
        node = node.all_input_nodes[0]
    return None


def _countable(node: fx.Node, traced: Traced) -> bool:
    """Whether a count is known from the inputs of the model alone, before any forward pass."""
    return all(n.name in traced.inputs for n in ancestors([node]) if n.op == "placeholder")


_NAMES = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
_DEFAULTS = (None, None, None, _MEAN, -100, 0.0)


def _given(node: fx.Node) -> dict[str, object]:
    """Arguments of cross entropy and its kin by name."""
    pairs = enumerate(zip(_NAMES, _DEFAULTS, strict=True))
    return {name: node.args[i] if i < len(node.args) else node.kwargs.get(name, d) for i, (name, d) in pairs}


def _cross_entropy(graph: fx.Graph, node: fx.Node, traced: Traced) -> tuple[fx.Node, fx.Node | None] | None:
    given = _given(node)
    logits, labels = given["input"], given["target"]
    assert isinstance(logits, fx.Node) and isinstance(labels, fx.Node)
    if not _over_samples(node):
        return None
    plain = given["weight"] is None and not info(labels).dtype.is_floating_point and info(logits).ndim > 1
    if not plain or not _countable(labels, traced):
        return (node, None) if given["reduction"] == _SUM else None
    with graph.inserting_before(node):
        if info(logits).ndim > 2:  # N C d1 … : the class dim last
            shape = info(logits).shape
            logits = _new(graph, logits, aten.movedim.int, (logits, 1, -1), (shape[0], *shape[2:], shape[1]))
        logits, labels = _leading(logits, labels)
        kwargs = {} if not given["label_smoothing"] else {"label_smoothing": given["label_smoothing"]}
        total = _new(graph, node, ops.cross_entropy, (logits, labels, given["ignore_index"]), kwargs=kwargs)
        if given["reduction"] == _SUM:
            return total, None
        count = _new(graph, node, ops.valid_count, (labels, given["ignore_index"]), grad=False)
        return total, count


def _negative_log_likelihood(graph: fx.Graph, node: fx.Node, traced: Traced) -> tuple[fx.Node, fx.Node | None] | None:
    given = _given(node)
    labels = given["target"]
    assert isinstance(labels, fx.Node)
    if given["weight"] is not None or given["reduction"] != _MEAN or not _countable(labels, traced):
        return (node, None) if given["reduction"] == _SUM else None
    with graph.inserting_before(node):
        args = (given["input"], labels, None, _SUM, given["ignore_index"])
        total = _new(graph, node, node.target, args)
        return total, _new(graph, node, ops.valid_count, (labels, given["ignore_index"]), grad=False)


def _leading(logits: fx.Node, labels: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Undo `logits.view(-1, V), labels.view(-1)`: the sequence stays a dim of its own, and may be split."""
    a, b = _before_reshape(logits), _before_reshape(labels)
    both = a is not logits and b is not labels
    same = both and info(a).shape == (*info(b).shape, info(logits).shape[-1])
    return (a, b) if same else (logits, labels)


def _before_reshape(node: fx.Node) -> fx.Node:
    if node.op == "call_function" and node.target is aten.reshape.default:
        return node.all_input_nodes[0]
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
        return total, _elements(graph, node, max(node.all_input_nodes[:2], key=lambda n: info(n).ndim))


def _elements(graph: fx.Graph, node: fx.Node, of: fx.Node) -> fx.Node:
    """A count that is known from the sizes: the number of elements of `of`."""
    return _new(graph, node, ops.element_count, (numel(info(of).shape),), grad=False)


def _weigh_by_samples(graph: fx.Graph, node: fx.Node, loss: Loss, traced: Traced) -> None:
    """A loss of unknown form is taken as a mean over samples: each microbatch weighs by its share of them.

    For a term that no input reaches, such as a penalty on parameters, that is exact.
    """
    if _depends_on_batch(node, traced):
        loss.notes.append(
            f"{node.target} is averaged over samples: its mean was not recognised, so ragged microbatches may differ"
        )
    after = node if node.op != "placeholder" else [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(after):
        total = graph.call_function(aten.mul.Tensor, (node, BATCH))
        total.meta = dict(node.meta)
    with graph.inserting_after(total):
        count = _new(graph, node, ops.element_count, (BATCH,), grad=False)
    _divide(graph, node, total, count, loss, [u for u in node.users if u is not total])


def _divide(
    graph: fx.Graph, node: fx.Node, total: fx.Node, count: fx.Node, loss: Loss, readers: list[fx.Node] | None = None
) -> None:
    """Give `total` over the global count to the readers of `node`."""
    name = f"{COUNT}_{len(loss.counts)}"
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        whole = graph.placeholder(name)
    whole.meta["info"] = TensorInfo((), info(count).dtype, False)
    order = {n: i for i, n in enumerate(graph.nodes)}
    with graph.inserting_after(max((total, count), key=order.__getitem__)):
        share = graph.call_function(aten.div.Tensor, (total, whole))
        share.meta = {**total.meta}
    for user in list(node.users) if readers is None else readers:
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
