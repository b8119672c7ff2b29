"""The rule table: one row per op, in alphabetical order.

A row is a notation (`factor_notation`, `op_notations`), the operands that may be partial sums (`linear`), and the sizes
that shrink with a split (`local`); tests/passes/rules proves each. For an op without a row, `discover` finds factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoptd.layout.placements import B
from autoptd.ops import library as ops
from autoptd.passes.graph import numel
from autoptd.passes.opcall import OpCall, Size, TensorInfo
from autoptd.passes.rules import op_notations as n
from autoptd.passes.rules.attention import ATTENTION
from autoptd.passes.rules.convolutions import conv, conv_groups, sample_conv, sample_conv_groups
from autoptd.passes.rules.factors import Implementation, Rule
from autoptd.passes.rules.local_arguments import copies, inner_shape, length, part_sizes, shape
from autoptd.passes.rules.sequences import ctc, recurrent, windows
from autoptd.passes.rules.views import view

aten = torch.ops.aten


# Operands that may be partial sums.


def first(call: OpCall) -> Sequence[frozenset[int]]:
    """Return the first operand alone, if it is the first argument (a number divided by a tensor is not linear)."""
    return (frozenset({0}),) if isinstance(call.args[0], TensorInfo) else ()


def second(call: OpCall) -> Sequence[frozenset[int]]:
    """Return the second operand alone."""
    return (frozenset({1}),)


def together(call: OpCall) -> Sequence[frozenset[int]]:
    """Return all operands at once, as for a concatenation."""
    return (frozenset(range(len(call.operands))),)


def both(call: OpCall) -> Sequence[frozenset[int]]:
    """Return both operands at once, unless one of the two is a number."""
    return together(call) if len(call.operands) == 2 else ()


def each(call: OpCall) -> Sequence[frozenset[int]]:
    """Return one operand at a time, as for a product."""
    return tuple(frozenset({i}) for i in range(len(call.operands)))


def product_and_bias(call: OpCall) -> Sequence[frozenset[int]]:
    """Return either factor of x w + b, with the bias (third)."""
    bias = {2} & {len(call.operands) - 1}
    return frozenset({0} | bias), frozenset({1} | bias)


def bias_and_product(call: OpCall) -> Sequence[frozenset[int]]:
    """Return either factor of b + x w, with the bias (first)."""
    return frozenset({0, 1}), frozenset({0, 2})


def branches(call: OpCall) -> Sequence[frozenset[int]]:
    """Return both branches of `where` at once."""
    return (frozenset({1, 2}),) if len(call.operands) == 3 else ()


def first_and_third(call: OpCall) -> Sequence[frozenset[int]]:
    """Return the tensor that an indexed write changes and the source, at once."""
    return (frozenset({0, 2}),)


def if_zero(index: int, name: str) -> Callable[[OpCall], Sequence[frozenset[int]]]:
    """Return `linear` of ops that fill in a value: the first operand if that value is zero."""

    def linear(call: OpCall) -> Sequence[frozenset[int]]:
        zero = call.arg(index, name, None) in (None, 0) and call.args[2:3] not in (("reflect",), ("replicate",))
        return first(call) if zero else ()

    return linear


# Own distributed implementations.


def softmax_collectives(call: OpCall) -> tuple[tuple[str, Size], ...]:
    """Return the all-reduces of each position's maximum, then of its sum of exponentials and its target's logit."""
    count = numel(call.operands[1].shape)
    return ("all_reduce", count), ("all_reduce", 2 * count)


VOCABULARY_LOOKUP = Implementation(
    "vocab_parallel", "v", applies=lambda call: not (call.arg(3, "scale_grad_by_freq") or call.arg(4, "sparse"))
)
VOCABULARY_LOSS = Implementation(
    "vocab_parallel", "v", (B,), softmax_collectives, lambda call: not call.arg(3, "label_smoothing", 0.0)
)
EXPERTS = Implementation("expert_parallel", "e")

# The function that an emitted program calls for an op and an implementation: f(its tensors, tp, its options).
IMPLEMENTATIONS: Mapping[tuple[Callable[..., Any], str], Callable[..., Any]] = {
    (aten.embedding.default, "vocab_parallel"): ops.vocab_embedding,
    (ops.cross_entropy, "vocab_parallel"): ops.vocab_cross_entropy,
    (ops.row_cross_entropy, "vocab_parallel"): ops.vocab_row_cross_entropy,
    (ops.grouped_mm, "expert_parallel"): ops.expert_mm,
}

POINTWISE = Rule(n.elementwise)
CAST = Rule(n.elementwise, first)
ADDITION = Rule(n.elementwise, both)
VIEW = Rule(view, first)
RESHAPE = Rule(view, first, shape(1))
FACTORY = Rule(n.whole)
DRAW = Rule(n.drawn, local=shape(0))
STATISTIC = Rule(n.reduce())
PLANE = Rule(n.pool(2))
RECURRENT = Rule(recurrent)

RULES: Mapping[Callable[..., Any], Rule] = {
    aten.__and__.Scalar: POINTWISE,
    aten.__and__.Tensor: POINTWISE,
    aten.__or__.Scalar: POINTWISE,
    aten.__or__.Tensor: POINTWISE,
    aten.__xor__.Scalar: POINTWISE,
    aten.__xor__.Tensor: POINTWISE,
    aten._log_softmax.default: Rule(n.unsplittable()),
    aten._safe_softmax.default: Rule(n.unsplittable()),
    aten._softmax.default: Rule(n.unsplittable()),
    aten._to_copy.default: CAST,
    aten._unsafe_view.default: RESHAPE,
    aten._weight_norm.default: Rule(n.weight_norm, second),
    aten.abs.default: POINTWISE,
    aten.adaptive_avg_pool2d.default: Rule(n.pool(2), first),
    aten.add.Scalar: POINTWISE,
    aten.add.Tensor: ADDITION,
    aten.addmm.default: Rule(n.addmm, bias_and_product),
    aten.alias.default: CAST,
    aten.all.default: STATISTIC,
    aten.all.dim: STATISTIC,
    aten.amax.default: STATISTIC,
    aten.amin.default: STATISTIC,
    aten.any.default: STATISTIC,
    aten.any.dim: STATISTIC,
    aten.arange.default: FACTORY,
    aten.arange.start: FACTORY,
    aten.arange.start_step: FACTORY,
    aten.argmax.default: STATISTIC,
    aten.argmin.default: STATISTIC,
    aten.argsort.default: Rule(n.unsplittable()),
    aten.avg_pool2d.default: Rule(n.pool(2), first),
    aten.baddbmm.default: Rule(n.addmm, bias_and_product),
    aten.batch_norm.default: Rule(n.channels),
    aten.binary_cross_entropy.default: Rule(n.loss(3)),
    aten.binary_cross_entropy_with_logits.default: Rule(n.loss(4)),
    aten.bitwise_and.Tensor: POINTWISE,
    aten.bitwise_not.default: POINTWISE,
    aten.bitwise_or.Tensor: POINTWISE,
    aten.bmm.default: Rule("b m k, b k n -> b m n", each),
    aten.cat.default: Rule(n.cat, together),
    aten.chunk.default: Rule(n.parts(), first),
    aten.clamp.Tensor: POINTWISE,
    aten.clamp.default: POINTWISE,
    aten.clamp_max.default: POINTWISE,
    aten.clamp_min.default: POINTWISE,
    aten.clone.default: CAST,
    aten.concat.default: Rule(n.cat, together),
    aten.constant_pad_nd.default: Rule(n.pad, if_zero(2, "value")),
    aten.contiguous.default: CAST,
    aten.conv1d.default: Rule(conv, product_and_bias, conv_groups),
    aten.conv2d.default: Rule(conv, product_and_bias, conv_groups),
    aten.conv3d.default: Rule(conv, product_and_bias, conv_groups),
    aten.cos.default: POINTWISE,
    aten.cosh.default: POINTWISE,
    aten.cosine_embedding_loss.default: Rule(n.row_loss(4)),
    aten.cross_entropy_loss.default: Rule(n.class_loss),
    aten.ctc_loss.Tensor: Rule(ctc),
    aten.cummax.default: Rule(n.unsplittable()),
    aten.cumsum.default: Rule(n.unsplittable(), first),
    aten.detach.default: CAST,
    aten.detach_.default: CAST,
    aten.div.Scalar: CAST,
    aten.div.Tensor: Rule(n.elementwise, first),
    aten.div.Tensor_mode: POINTWISE,
    aten.dropout.default: POINTWISE,
    aten.einsum.default: Rule(n.einsum, each),
    aten.elu.default: POINTWISE,
    aten.embedding.default: Rule("v d, ... -> ... d", first, implementations=(VOCABULARY_LOOKUP,)),
    aten.empty.memory_format: FACTORY,
    aten.empty_like.default: POINTWISE,
    aten.eq.Scalar: POINTWISE,
    aten.eq.Tensor: POINTWISE,
    aten.erf.default: POINTWISE,
    aten.exp.default: POINTWISE,
    aten.expand.default: Rule("... -> ...", first, shape(1)),
    aten.expand_as.default: Rule(n.elementwise, first),
    aten.expm1.default: POINTWISE,
    aten.eye.default: FACTORY,
    aten.fill.Tensor: POINTWISE,
    aten.flatten.using_ints: VIEW,
    aten.flip.default: Rule(n.unsplittable(1, "dims"), first),
    aten.floor.default: POINTWISE,
    aten.floor_divide.default: POINTWISE,
    aten.full.default: FACTORY,
    aten.full_like.default: POINTWISE,
    aten.gather.default: Rule(n.gather, first),
    aten.ge.Scalar: POINTWISE,
    aten.ge.Tensor: POINTWISE,
    aten.gelu.default: POINTWISE,
    aten.glu.default: Rule(n.splits_backward),
    aten.group_norm.default: Rule(n.samples),
    aten.gru.input: RECURRENT,
    aten.gt.Scalar: POINTWISE,
    aten.gt.Tensor: POINTWISE,
    aten.hardsigmoid.default: POINTWISE,
    aten.hardswish.default: POINTWISE,
    aten.hardtanh.default: POINTWISE,
    aten.hinge_embedding_loss.default: Rule(n.loss(3)),
    aten.histc.default: Rule(lambda c: "... -> ." if c.arg(2, "min", 0) < c.arg(3, "max", 0) else n.whole(c)),
    aten.huber_loss.default: Rule(n.loss(2)),
    aten.index.Tensor: Rule(n.index, first),
    aten.index_add.default: Rule(n.index_add, first_and_third),
    aten.index_put.default: Rule(n.whole),
    aten.index_select.default: Rule(n.index_select, first),
    aten.isfinite.default: POINTWISE,
    aten.isinf.default: POINTWISE,
    aten.isnan.default: POINTWISE,
    aten.kl_div.default: Rule(n.loss(2)),
    aten.l1_loss.default: Rule(n.loss(2)),
    aten.layer_norm.default: Rule(n.normalised),
    aten.le.Scalar: POINTWISE,
    aten.le.Tensor: POINTWISE,
    aten.leaky_relu.default: POINTWISE,
    aten.lift_fresh_copy.default: CAST,
    aten.linalg_cholesky.default: PLANE,  # of matrices that discovery, with random ones, cannot make
    aten.linalg_solve_triangular.default: Rule(n.triangular, second),
    aten.linear.default: Rule(n.linear, product_and_bias),
    aten.log.default: POINTWISE,
    aten.log1p.default: POINTWISE,
    aten.log_sigmoid.default: POINTWISE,
    aten.log_softmax.int: Rule(n.unsplittable()),
    aten.logical_and.default: POINTWISE,
    aten.logical_not.default: POINTWISE,
    aten.logical_or.default: POINTWISE,
    aten.logsumexp.default: STATISTIC,
    aten.lstm.input: RECURRENT,
    aten.lt.Scalar: POINTWISE,
    aten.lt.Tensor: POINTWISE,
    aten.margin_ranking_loss.default: Rule(n.loss(4)),
    aten.masked_fill.Scalar: Rule(n.elementwise, if_zero(2, "value")),
    aten.masked_fill.Tensor: POINTWISE,
    aten.matmul.default: Rule(n.matmul, each),
    aten.max.default: STATISTIC,
    aten.max.dim: STATISTIC,
    aten.max.other: POINTWISE,
    aten.max_pool2d.default: PLANE,
    aten.max_pool2d_with_indices.default: PLANE,
    aten.maximum.default: POINTWISE,
    aten.mean.default: Rule(n.reduce(), first),
    aten.mean.dim: Rule(n.reduce(), first),
    aten.min.default: STATISTIC,
    aten.min.dim: STATISTIC,
    aten.min.other: POINTWISE,
    aten.minimum.default: POINTWISE,
    aten.mish.default: POINTWISE,
    aten.mm.default: Rule("m k, k n -> m n", each),
    aten.movedim.int: Rule(n.permutation(n.move), first),
    aten.movedim.intlist: Rule(n.permutation(n.move), first),
    aten.mse_loss.default: Rule(n.loss(2)),
    aten.mul.Scalar: CAST,
    aten.mul.Tensor: Rule(n.elementwise, each),
    aten.multi_margin_loss.default: Rule(n.row_loss(5, weight=2)),
    aten.multilabel_margin_loss.default: Rule(n.row_loss(2)),
    aten.mv.default: Rule("m k, k -> m", each),
    aten.nan_to_num.default: POINTWISE,
    aten.narrow.default: Rule(n.slice_, first, length),
    aten.native_layer_norm.default: Rule(n.normalised),
    aten.ne.Scalar: POINTWISE,
    aten.ne.Tensor: POINTWISE,
    aten.neg.default: CAST,
    aten.new_empty.default: FACTORY,
    aten.new_full.default: FACTORY,
    aten.new_ones.default: FACTORY,
    aten.new_zeros.default: FACTORY,
    aten.nll_loss.default: FACTORY,
    aten.nll_loss_nd.default: Rule(n.class_loss),
    aten.one_hot.default: Rule(n.one_hot),
    aten.ones.default: FACTORY,
    aten.ones_like.default: POINTWISE,
    aten.pad.default: Rule(n.pad, if_zero(3, "value")),
    aten.permute.default: Rule(n.permutation(lambda call, ndim: call.args[1]), first),
    aten.poisson_nll_loss.default: Rule(n.loss(5)),
    aten.polar.default: POINTWISE,
    aten.pow.Scalar: POINTWISE,
    aten.pow.Tensor_Scalar: POINTWISE,
    aten.pow.Tensor_Tensor: POINTWISE,
    aten.reciprocal.default: POINTWISE,
    aten.relu.default: POINTWISE,
    aten.relu6.default: POINTWISE,
    aten.remainder.Scalar: POINTWISE,
    aten.remainder.Tensor: POINTWISE,
    aten.repeat.default: Rule(n.repeat, first),
    aten.repeat_interleave.self_int: Rule(n.repeat_interleave, first, copies),
    aten.reshape.default: RESHAPE,
    aten.rms_norm.default: Rule(n.normalised),
    aten.rnn_relu.input: RECURRENT,
    aten.rnn_tanh.input: RECURRENT,
    aten.roll.default: Rule(n.unsplittable(2, "dims", None), first),
    aten.round.default: POINTWISE,
    aten.rsqrt.default: POINTWISE,
    aten.rsub.Scalar: POINTWISE,
    aten.rsub.Tensor: ADDITION,
    aten.scalar_tensor.default: FACTORY,
    aten.scaled_dot_product_attention.default: ATTENTION,
    aten.scatter.src: Rule(n.scatter, first_and_third),
    aten.scatter.value: Rule(n.scatter),
    aten.scatter_add.default: Rule(n.scatter, first_and_third),
    aten.select.int: Rule(n.remove, first),
    aten.select_scatter.default: Rule(n.scattered(removed=True), together),
    aten.selu.default: POINTWISE,
    aten.sigmoid.default: POINTWISE,
    aten.sign.default: POINTWISE,
    aten.silu.default: POINTWISE,
    aten.sin.default: POINTWISE,
    aten.sinh.default: POINTWISE,
    aten.slice.Tensor: Rule(n.slice_, first),
    aten.slice_scatter.default: Rule(n.scattered(removed=False), together),
    aten.smooth_l1_loss.default: Rule(n.loss(2)),
    aten.soft_margin_loss.default: Rule(n.loss(2)),
    aten.softmax.int: Rule(n.unsplittable()),
    aten.softplus.default: POINTWISE,
    aten.sort.default: Rule(n.unsplittable()),
    aten.split.Tensor: Rule(n.parts(), first, part_sizes),
    aten.split.sizes: Rule(n.parts(), first, part_sizes),
    aten.split_with_sizes.default: Rule(n.parts(), first, part_sizes),
    aten.sqrt.default: POINTWISE,
    aten.square.default: POINTWISE,
    aten.squeeze.default: Rule(n.whole, first),
    aten.squeeze.dim: Rule(n.squeeze, first),
    aten.squeeze.dims: Rule(n.squeeze, first),
    aten.stack.default: Rule(n.stack, together),
    aten.std.correction: STATISTIC,
    aten.std.dim: Rule(n.reduce(keep=3)),
    aten.sub.Scalar: POINTWISE,
    aten.sub.Tensor: ADDITION,
    aten.sum.default: Rule(n.reduce(summed=True), first),
    aten.sum.dim_IntList: Rule(n.reduce(summed=True), first),
    aten.t.default: Rule(n.permutation(lambda call, ndim: range(ndim)[::-1]), first),
    aten.tan.default: POINTWISE,
    aten.tanh.default: POINTWISE,
    aten.to.device: CAST,
    aten.to.dtype: CAST,
    aten.to.dtype_layout: CAST,
    aten.to.other: Rule(n.first_only, first),
    aten.topk.default: Rule(n.unsplittable(2)),
    aten.transpose.int: Rule(n.permutation(n.swap), first),
    aten.tril.default: Rule(n.pool(2), first),
    aten.triplet_margin_loss.default: Rule(n.row_loss(7)),
    aten.triu.default: Rule(n.pool(2), first),
    aten.type_as.default: Rule(n.first_only, first),
    aten.unbind.int: Rule(n.remove, first),
    aten.unflatten.int: Rule(view, first, inner_shape),
    aten.unfold.default: Rule(windows, first),
    aten.unsqueeze.default: VIEW,
    aten.upsample_bilinear2d.vec: Rule(n.pool(2), first),
    aten.upsample_nearest2d.vec: Rule(n.pool(2), first),
    aten.var.correction: STATISTIC,
    aten.var.dim: Rule(n.reduce(keep=3)),
    aten.view.default: RESHAPE,
    aten.view_as_complex.default: Rule("... . -> ...", first),
    aten.view_as_real.default: Rule("... -> ... .", first),
    aten.where.ScalarOther: POINTWISE,
    aten.where.ScalarSelf: POINTWISE,
    aten.where.self: Rule(n.elementwise, branches),
    aten.zeros.default: FACTORY,
    aten.zeros_like.default: POINTWISE,
    ops.attention: ATTENTION,
    ops.cross_entropy: Rule("... v, ... -> ", implementations=(VOCABULARY_LOSS,)),
    ops.dropout: POINTWISE,
    ops.dropout_mask: DRAW,
    ops.exponential: DRAW,
    ops.grouped_mm: Rule(". k, e k n, . -> . n", each, implementations=(EXPERTS,)),
    ops.in_training: POINTWISE,
    ops.integers: DRAW,
    ops.marked_columns: Rule("n ., n . -> n .", first),
    ops.marked_rows: Rule("b ., b . -> b ."),
    ops.normal: DRAW,
    ops.row_cross_entropy: Rule("... v, ... -> ...", implementations=(VOCABULARY_LOSS,)),
    ops.sample_conv: Rule(sample_conv, product_and_bias, sample_conv_groups),
    ops.sum_by_index: Rule("... n, ... n -> ... .", first),
    ops.sum_over_batch: Rule("... -> ...", first),
    ops.sum_over_dp: Rule("... -> ...", first),
    ops.take_rows: Rule("b . h, b s -> b s h", first),
    ops.uniform: DRAW,
    ops.valid_count: Rule(n.counted),
}
