"""Rewrite reductions over samples to sums: means, norms, variances and torch's losses.

    mean(x)                          Σ x / n
    cross_entropy(z, y, w)           Σ_i w[y_i] l_i / Σ_i w[y_i]       over the labels that are not ignored
    an elementwise loss              Σ l / n
    norm(x, p)                       (Σ |x|^p)^(1/p)
    var(x)                           (Σ x² - (Σ x)² / n) / (n - correction), in float64
    logsumexp(x)                     log Σ exp(x)

The number of elements n is a sum over samples too, `ops.element_count`; so is a batch size that the model divides by.
Ops without a row in `SPELLINGS` are not changed; `batch_sums.py` determines whether they are sums over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import sympy
import torch
from torch import fx

from autoptd.errors import TraceError
from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import counts_in, counts_samples, grows, is_whole
from autoptd.passes.graph import WRITTEN_FOR, info, is_float, numel, op_call, op_name, operands, source_line, write_op
from autoptd.passes.opcall import Size
from autoptd.passes.rules.op_notations import chosen
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's reduction codes


def write_sums_over_samples(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite every op in `SPELLINGS` that reduces over samples, and every use of the number of samples as a value."""
    for node in list(graph.nodes):
        if node.op != "call_function" or isinstance(node.meta["info"], tuple) or is_whole(node):
            continue
        if node.target in SPELLINGS and _reduces_samples(node):
            with graph.inserting_before(node):
                made = SPELLINGS[node.target](_SumWriter(graph, node))
            if made is not None:
                node.replace_all_uses_with(made)
        elif node.target in _NUMBERS and (is_float(info(node).dtype) or _is_counter(node)):
            _write_sizes(graph, node)


def _is_counter(node: fx.Node) -> bool:
    """Return whether an op computes whole numbers without samples, such as a buffer that counts them."""
    return node.target not in _FILLED and node.target not in _INEXACT and not counts_samples(info(node))


def _reduces_samples(node: fx.Node) -> bool:
    return not counts_samples(info(node)) and any(counts_samples(info(o)) for o in node.all_input_nodes)


@dataclass(frozen=True)
class _SumWriter:
    """Writer of ops that replace `node`."""

    graph: fx.Graph
    node: fx.Node

    def op(
        self, target: Any, args: tuple[Any, ...], shape: tuple[Size, ...], dtype: Any = None, **kwargs: Any
    ) -> fx.Node:
        made = write_op(self.graph, self.node, target, args, shape, dtype, kwargs)
        made.meta[WRITTEN_FOR] = op_name(self.node)
        return made

    def same(self, target: Any, x: fx.Node, *args: Any) -> fx.Node:
        """Write an op on `x` that preserves its shape and dtype."""
        return self.op(target, (x, *args), info(x).shape, info(x).dtype)

    def to(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if info(x).dtype == dtype else self.op(aten.to.dtype, (x, dtype), info(x).shape, dtype)

    def sum(self, x: fx.Node) -> fx.Node:
        """Write the sum of `x` over the dims that the node reduces."""
        gone, keep = _reduced_dims(self.node)
        if len(gone) == info(x).ndim and not keep:
            return self.op(aten.sum.default, (x,), (), info(x).dtype)
        return self.op(aten.sum.dim_IntList, (x, gone, keep), info(self.node).shape, info(x).dtype)

    def root(self, x: fx.Node, power: float) -> fx.Node:
        """Write `x ** power` for a power below 1, 0 where `x` is not positive, with a gradient of 0 there as norms and
        standard deviations of torch have."""
        none = self.op(aten.le.Scalar, (x, 0), info(x).shape, torch.bool)
        safe = self.op(aten.masked_fill.Scalar, (x, none, 1), info(x).shape, info(x).dtype)
        found = self.same(aten.sqrt.default, safe) if power == 0.5 else self.same(aten.pow.Tensor_Scalar, safe, power)
        return self.op(aten.masked_fill.Scalar, (found, none, 0), info(x).shape, info(x).dtype)

    def count(self, size: Size) -> fx.Node:
        return self.op(ops.element_count, (size,), (), torch.float64)

    def elements(self, x: fx.Node) -> fx.Node:
        """Write the number of elements of `x` that the node reduces to one."""
        return self.count(numel(info(x).shape[dim] for dim in _reduced_dims(self.node)[0]))

    def over(self, total: fx.Node, count: fx.Node) -> fx.Node:
        return self.op(aten.div.Tensor, (total, count), info(total).shape, info(total).dtype)


def _reduced_dims(node: fx.Node) -> tuple[list[int], bool]:
    """Return the dims of a reduction and its `keepdim`."""
    call = op_call(node)
    at, keep = _DIMS.get(node.target, (1, 2))  # type: ignore[arg-type]
    dims = call.arg(at, "dim", None)
    return sorted(chosen(dims, call.operands[0].ndim)), bool(call.arg(keep, "keepdim", False))


_DIMS: Mapping[Callable[..., Any], tuple[int, int]] = {
    aten.linalg_vector_norm.default: (2, 3),
    aten.norm.Scalar: (99, 99),
    aten.norm.ScalarOpt_dim: (2, 3),
    aten.std.default: (99, 99),
    aten.var.default: (99, 99),
    aten.std.dim: (1, 3),
    aten.var.dim: (1, 3),
    aten.std.correction: (1, 99),
    aten.var.correction: (1, 99),
}  # positions of `dim` and `keepdim`; 99: a keyword, or there is none


def _mean(w: _SumWriter) -> fx.Node:
    dtype = info(w.node).dtype
    x = w.to(w.node.all_input_nodes[0], torch.promote_types(dtype, torch.float32))  # a sum in 16 bits overflows
    return w.to(w.over(w.sum(x), w.elements(x)), dtype)


def _norm(w: _SumWriter) -> fx.Node | None:
    order = op_call(w.node).arg(1, "ord" if "linalg" in str(w.node.target) else "p", 2)
    order = 2 if order is None else order
    if not isinstance(order, (int, float)) or abs(order) == inf or order == 0:
        return None
    x = w.to(w.node.all_input_nodes[0], info(w.node).dtype)
    if order == 2:
        total = w.sum(w.same(aten.square.default, x))
        return w.root(total, 0.5)
    size = w.same(aten.abs.default, x)
    if order == 1:
        return w.sum(size)
    total = w.sum(w.same(aten.pow.Tensor_Scalar, size, order))
    return w.root(total, 1 / order) if order > 1 else w.same(aten.pow.Tensor_Scalar, total, 1 / order)


def _variance(w: _SumWriter) -> fx.Node:
    call, name = op_call(w.node), str(w.node.target)
    if name.endswith(".dim"):
        correction: Any = int(call.arg(2, "unbiased", True))
    elif name.endswith(".correction"):
        given = call.arg(2, "correction", None)
        correction = 1 if given is None else given
    else:
        correction = int(call.arg(1, "unbiased", True))
    x = w.to(w.node.all_input_nodes[0], torch.float64)  # the formula subtracts large numbers
    total, squares, count = w.sum(x), w.sum(w.same(aten.square.default, x)), w.elements(x)
    spread = w.same(aten.sub.Tensor, squares, w.over(w.same(aten.square.default, total), count))
    free = w.op(aten.sub.Tensor, (count, correction), (), torch.float64) if correction else count
    found = w.over(spread, free)
    if "std" in name:
        found = w.root(found, 0.5)
    return w.to(found, info(w.node).dtype)


def _log_sum_exp(w: _SumWriter) -> fx.Node:
    x = w.to(w.node.all_input_nodes[0], torch.float64)  # exp(100) and exp(-100) are no normal numbers in float32
    return w.to(w.same(aten.log.default, w.sum(w.same(aten.exp.default, x))), info(w.node).dtype)


def _elementwise(index: int, rows: bool = False) -> Callable[[_SumWriter], fx.Node | None]:
    """Return the rewrite of a loss whose argument `index` is `reduction`; a mean over elements, or over `rows`."""

    def write(w: _SumWriter) -> fx.Node | None:
        args, kwargs = list(w.node.args), dict(w.node.kwargs)
        given = args[index] if len(args) > index else kwargs.pop("reduction", MEAN)
        shapes = [info(o).shape for o in operands(w.node)[:2]]
        size = numel(shapes[0][:-1] if rows else _broadcast(*shapes))
        if given != MEAN or grows(sympy.simplify(size / BATCH)):  # pairs of samples have b² elements
            return None
        if len(args) > index:
            args[index] = SUM
        else:
            kwargs["reduction"] = SUM
        total = w.op(w.node.target, tuple(args), (), info(w.node).dtype, **kwargs)
        return w.over(total, w.count(size))

    return write


def _ctc(w: _SumWriter) -> fx.Node | None:
    """Write Σ l, or Σ l / max(1, labels of the sample) over the number of samples."""
    call = op_call(w.node)
    blank, reduction = call.arg(4, "blank", 0), call.arg(5, "reduction", MEAN)
    if reduction not in (MEAN, SUM) or info(w.node.all_input_nodes[0]).ndim != 3:
        return None
    samples, dtype = info(w.node.all_input_nodes[0]).shape[1], info(w.node).dtype
    args = (*w.node.args[:4], blank, 0, call.arg(6, "zero_infinity", False))
    losses = w.op(aten.ctc_loss.Tensor, args, (samples,), dtype)
    if reduction == MEAN:
        lengths = w.same(aten.clamp.default, w.to(w.node.args[3], dtype), 1)  # type: ignore[arg-type]
        losses = w.op(aten.div.Tensor, (losses, lengths), (samples,), dtype)
    total = w.op(aten.sum.default, (losses,), (), dtype)
    return total if reduction == SUM else w.over(total, w.count(samples))


def _broadcast(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...]:
    a, b = (1,) * (len(b) - len(a)) + tuple(a), (1,) * (len(a) - len(b)) + tuple(b)
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


_NAMES = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
_DEFAULTS = (None, None, None, MEAN, -100, 0.0)


def arguments_by_class(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a cross entropy or NLL loss by name."""
    pairs = enumerate(zip(_NAMES, _DEFAULTS, strict=True))
    return {name: node.args[i] if i < len(node.args) else node.kwargs.get(name, d) for i, (name, d) in pairs}


def _cross_entropy(w: _SumWriter) -> fx.Node | None:
    given = arguments_by_class(w.node)
    logits, labels, weight = given["input"], given["target"], given["weight"]
    if given["reduction"] not in (MEAN, SUM):
        return None
    if weight is not None and counts_samples(info(weight)):
        raise TraceError(
            f"the weights of classes have {info(weight).shape[0]} elements: they seem to be of samples, b",
            where=source_line(w.node),
            fix="give example inputs of another number of samples than there are classes",
        )
    soft = is_float(info(labels).dtype)
    total = _summed(w, given) if soft or weight is not None else _summed_plain(w, given)
    if given["reduction"] == SUM:
        return total
    if soft:  # a mean over rows, whatever their weights
        classes = info(logits).shape[1 if info(logits).ndim > 1 else 0]
        return w.over(total, w.count(sympy.sympify(numel(info(logits).shape)) / classes))
    return w.over(total, _valid(w, labels, given["ignore_index"], weight))


def _summed(w: _SumWriter, given: Mapping[str, Any]) -> fx.Node:
    args = tuple(
        SUM if name == "reduction" else given[name] for name in _NAMES[: 5 if "nll" in str(w.node.target) else 6]
    )
    return w.op(w.node.target, args, (), info(w.node).dtype)


def _summed_plain(w: _SumWriter, given: Mapping[str, Any]) -> fx.Node:
    logits, labels = given["input"], given["target"]
    if info(logits).ndim > 2:  # N C d1 … : the class dim last
        shape = info(logits).shape
        logits = w.op(aten.movedim.int, (logits, 1, -1), (shape[0], *shape[2:], shape[1]), info(logits).dtype)
    logits, labels = _leading(logits, labels)
    smoothing = {"label_smoothing": given["label_smoothing"]} if given["label_smoothing"] else {}
    return w.op(ops.cross_entropy, (logits, labels, given["ignore_index"]), (), info(w.node).dtype, **smoothing)


def _valid(w: _SumWriter, labels: fx.Node, ignore_index: int, weight: fx.Node | None) -> fx.Node:
    """Write the number of labels that are not ignored, or the sum of their weights."""
    labels = _before_reshape(labels) if weight is None else labels
    args = (labels, ignore_index) if weight is None else (labels, ignore_index, weight)
    return w.op(ops.valid_count, args, (), torch.float64)


def _negative_log_likelihood(w: _SumWriter) -> fx.Node | None:
    given = arguments_by_class(w.node)
    if given["reduction"] != MEAN:
        return None
    return w.over(_summed(w, given), _valid(w, given["target"], given["ignore_index"], given["weight"]))


def _leading(logits: fx.Node, labels: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Undo `logits.view(-1, V), labels.view(-1)`, so that the sequence is a separate dim, which can be split."""
    a, b = _before_reshape(logits), _before_reshape(labels)
    both = a is not logits and b is not labels
    same = both and info(a).shape == (*info(b).shape, info(logits).shape[-1])
    return (a, b) if same else (logits, labels)


def _before_reshape(node: fx.Node) -> fx.Node:
    if node.op == "call_function" and node.target is aten.reshape.default:
        return node.all_input_nodes[0]
    return node


SPELLINGS: Mapping[Any, Callable[[_SumWriter], fx.Node | None]] = {
    aten.binary_cross_entropy.default: _elementwise(3),
    aten.binary_cross_entropy_with_logits.default: _elementwise(4),
    aten.cosine_embedding_loss.default: _elementwise(4, rows=True),
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.ctc_loss.Tensor: _ctc,
    aten.hinge_embedding_loss.default: _elementwise(3),
    aten.huber_loss.default: _elementwise(2),
    aten.kl_div.default: _elementwise(2),
    aten.l1_loss.default: _elementwise(2),
    aten.linalg_vector_norm.default: _norm,
    aten.logsumexp.default: _log_sum_exp,
    aten.margin_ranking_loss.default: _elementwise(4),
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.mse_loss.default: _elementwise(2),
    aten.multi_margin_loss.default: _elementwise(5, rows=True),
    aten.multilabel_margin_loss.default: _elementwise(2, rows=True),
    aten.nll_loss_nd.default: _negative_log_likelihood,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.poisson_nll_loss.default: _elementwise(5),
    aten.smooth_l1_loss.default: _elementwise(2),
    aten.soft_margin_loss.default: _elementwise(2),
    aten.std.correction: _variance,
    aten.std.default: _variance,
    aten.std.dim: _variance,
    aten.triplet_margin_loss.default: _elementwise(7, rows=True),
    aten.var.correction: _variance,
    aten.var.default: _variance,
    aten.var.dim: _variance,
}

# ops whose number arguments are values, not sizes
_FILLED = frozenset({aten.full.default, aten.new_full.default, aten.scalar_tensor.default})
_NUMBERS = _FILLED | frozenset(
    {
        aten.add.Scalar,
        aten.add.Tensor,
        aten.div.Scalar,
        aten.div.Tensor,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.pow.Tensor_Scalar,
        aten.rsub.Scalar,
        aten.sub.Scalar,
        aten.sub.Tensor,
    }
)
_INEXACT = frozenset({aten.pow.Tensor_Scalar})  # of whole numbers
_AS_TENSORS: Mapping[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
}


def _write_sizes(graph: fx.Graph, node: fx.Node) -> None:
    """Replace numbers that depend on the number of samples by counts over the whole batch."""
    with graph.inserting_before(node):
        w = _SumWriter(graph, node)
        if node.target in _FILLED:
            value = node.args[-1]
            if counts_in(value) and not info(node).shape:
                node.replace_all_uses_with(w.to(_counted(w, value), info(node).dtype))
            return
        if not any(map(counts_in, node.args)):
            return
        dtype = torch.float64 if is_float(info(node).dtype) else torch.int64
        node.args = tuple(w.to(_counted(w, a), dtype) if counts_in(a) else a for a in node.args)
    node.target = _AS_TENSORS.get(node.target, node.target)


def _counted(w: _SumWriter, size: sympy.Expr) -> fx.Node:
    """Write a size over the whole batch: sums, products and powers of terms proportional to the number of samples."""
    if not grows(sympy.simplify(size / BATCH)):
        return w.count(size)
    if size.is_Add or size.is_Mul:
        target = aten.add.Tensor if size.is_Add else aten.mul.Tensor
        fixed, growing = size.as_independent(BATCH, as_Add=size.is_Add)
        terms = [_counted(w, term) for term in type(size).make_args(growing)]
        found = terms[0]
        for term in terms[1:]:
            found = w.op(target, (found, term), (), torch.float64)
        neutral = 0 if size.is_Add else 1
        return found if fixed == neutral else w.op(target, (found, fixed), (), torch.float64)
    if size.is_Pow and not grows(size.exp):
        return w.op(aten.pow.Tensor_Scalar, (_counted(w, size.base), float(size.exp)), (), torch.float64)
    return w.count(size)  # not proportional to b: `batch_sums` refuses it
