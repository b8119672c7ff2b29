"""One or more calls of every op of the rule table, with sizes that two and four ranks can split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autoptd.ops import library as ops
from autoptd.passes.rules.prove import Example

aten = torch.ops.aten
RNG = torch.Generator().manual_seed(7)


def real(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RNG, dtype=torch.float64).requires_grad_()


def positive(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=RNG, dtype=torch.float64) + 0.2).requires_grad_()


def definite(count: int, size: int) -> Tensor:
    near = torch.rand(count, size, size, generator=RNG, dtype=torch.float64) / (2 * size)
    return (torch.eye(size, dtype=torch.float64) + near).requires_grad_()


def unit(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=RNG, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def fixed(*shape: int) -> Tensor:
    return real(*shape).detach()


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=RNG)


def distinct(*shape: int) -> Tensor:
    """Return rows that are permutations: no two sources are written to one place."""
    *rows, length = shape
    return torch.rand(*rows, length, generator=RNG).argsort(-1)


def flags(*shape: int) -> Tensor:
    return torch.rand(shape, generator=RNG) < 0.5


def labels(high: int, *shape: int) -> Tensor:
    return whole(high, *shape).masked_fill(torch.rand(shape, generator=RNG) < 0.3, -100)


def signs(*shape: int) -> Tensor:
    return flags(*shape).double() * 2 - 1


def weights(classes: int) -> Tensor:
    return torch.linspace(0.5, 2.0, classes, dtype=torch.float64)


def recurrent(gates: int, states: int, batch_first: bool, layers: int = 2, both: bool = False) -> tuple[Any, ...]:
    """Return a call of a recurrent op: 4 samples, 3 steps, widths 6 and 5."""
    directions, parameters = 1 + both, list[Tensor]()
    for layer in range(layers):
        width = 6 if layer == 0 else 5 * directions
        for _ in range(directions):
            parameters += [real(5 * gates, width), real(5 * gates, 5), real(5 * gates), real(5 * gates)]
    x = real(4, 3, 6) if batch_first else real(3, 4, 6)
    carried = [real(layers * directions, 4, 5) for _ in range(states)]
    return x, carried if states > 1 else carried[0], parameters, True, layers, 0.0, False, both, batch_first


Sample = tuple[Any, ...]  # positional arguments, and optionally a dict of keyword arguments last
X = (4, 8)

MAPS = ["abs", "cos", "cosh", "erf", "exp", "expm1", "gelu", "hardsigmoid", "hardswish", "hardtanh", "mish", "neg"]
MAPS += ["relu", "relu6", "round", "floor", "selu", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "square"]
MAPS += ["tan", "tanh", "elu", "leaky_relu", "log_sigmoid", "nan_to_num", "isfinite", "isinf", "isnan"]
MAPS += ["clone", "contiguous", "alias", "detach", "detach_", "lift_fresh_copy", "zeros_like", "ones_like", "_to_copy"]
POSITIVE = ["log", "log1p", "sqrt", "rsqrt", "reciprocal"]
COMPARISONS = ["eq", "ge", "gt", "le", "lt", "ne"]
BITS = ["__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "logical_and", "logical_or"]
REDUCTIONS = ["amax", "amin", "argmax", "argmin", "max", "min", "mean", "sum"]


def many() -> dict[Any, list[Sample]]:
    """Return samples of similar ops."""
    found: dict[Any, list[Sample]] = {}
    for name in MAPS:
        found[getattr(aten, name).default] = [(real(*X),)]
    for name in POSITIVE:
        found[getattr(aten, name).default] = [(positive(*X),)]
    for name in COMPARISONS:
        found[getattr(aten, name).Scalar] = [(whole(4, *X), 2)]
        found[getattr(aten, name).Tensor] = [(whole(4, *X), whole(4, 8)), (fixed(*X), fixed(4, 1))]
    for name in BITS:
        op = getattr(aten, name)
        found[op.default if name.startswith("logical") else op.Tensor] = [(flags(*X), flags(4, 1))]
    for name in BITS[:3]:
        found[getattr(aten, name).Scalar] = [(flags(*X), True), (whole(4, *X), 3)]
    for name in REDUCTIONS:
        found[getattr(aten, name).default] = [(real(*X),)]
    return found


SAMPLES: dict[Callable[..., Any], list[Sample]] = many() | {
    aten._log_softmax.default: [(real(4, 8, 2), 1, False)],
    aten._safe_softmax.default: [(real(4, 8), -1)],
    aten._softmax.default: [(real(4, 8), -1, False)],
    aten._unsafe_view.default: [(real(4, 6, 8), [24, 8])],
    aten._weight_norm.default: [
        (real(8, 8), positive(8, 1), 0),
        (real(8, 8), positive(1, 8), 1),
        (real(4, 6, 2), positive(4, 1, 1)),
        (real(4, 8), positive(), -1),
    ],
    aten.adaptive_avg_pool2d.default: [(real(2, 4, 8, 8), [2, 2])],
    aten.add.Scalar: [(real(*X), 2.0)],
    aten.add.Tensor: [(real(4, 8), real(8)), (real(4, 8), real(4, 1)), (real(4, 8), 1.5), (real(8), fixed(4, 8))],
    aten.addmm.default: [
        (real(8), real(4, 6), real(6, 8)),
        (real(4, 1), real(4, 8), real(8, 2)),
        (real(4, 4), real(4, 4), real(4, 4), {"alpha": 2}),
    ],
    aten.all.default: [(flags(*X),)],
    aten.all.dim: [(flags(*X), 1)],
    aten.any.default: [(flags(*X),)],
    aten.any.dim: [(flags(*X), 0, True)],
    aten.arange.default: [(8,)],
    aten.arange.start: [(2, 8)],
    aten.arange.start_step: [(0, 8, 2)],
    aten.argsort.default: [(fixed(*X),), (fixed(*X), 0, True)],
    aten.avg_pool2d.default: [(real(2, 4, 8, 8), [2, 2]), (real(4, 8, 8), [2, 2])],
    aten.baddbmm.default: [(real(8, 2), real(4, 8, 6), real(4, 6, 2)), (real(4, 1, 2), real(4, 8, 6), real(4, 6, 2))],
    aten.batch_norm.default: [(real(4, 8, 3), real(8), real(8), None, None, True, 0.1, 1e-5, False)],
    aten.binary_cross_entropy.default: [
        (unit(4, 8), fixed(4, 8).sigmoid()),
        (unit(4, 8), fixed(4, 8).sigmoid(), None, 2),
    ],
    aten.binary_cross_entropy_with_logits.default: [(real(*X), unit(*X).detach(), None, None, r) for r in (0, 1, 2)],
    aten.bitwise_not.default: [(flags(*X),)],
    aten.bmm.default: [(real(4, 8, 6), real(4, 6, 2))],
    aten.cat.default: [
        ([real(4, 8), real(4, 8)], -1),
        ([real(4, 2), real(8, 2)], 0),
        ([real(4, 8), fixed(4, 8), real(4, 8)],),
    ],
    aten.chunk.default: [(real(4, 24), 3, -1), (real(4, 10), 3, 1)],
    aten.clamp.Tensor: [(real(*X), fixed(8), None)],
    aten.clamp.default: [(real(*X), -0.5, 0.5)],
    aten.clamp_max.default: [(real(*X), 0.5)],
    aten.clamp_min.default: [(real(*X), 0.5)],
    aten.concat.default: [([real(4, 8), real(4, 8)], 1)],
    aten.constant_pad_nd.default: [(real(4, 8), [1, 2]), (real(4, 8), [0, 0, 1, 2], 0.0), (real(4, 8), [1, 2], 3.0)],
    aten.conv1d.default: [
        (real(2, 4, 9), real(8, 4, 3), real(8)),
        (real(2, 4, 9), real(8, 2, 3), None, [1], [1], [1], 2),
        (real(2, 8, 9), real(16, 2, 3), real(16), [1], [1], [1], 4),
        (real(2, 24, 9), real(24, 1, 3), real(24), [1], [2], [1], 24),
        (real(2, 4, 8), real(8, 4, 1), real(8)),
        (real(2, 8, 8), real(16, 2, 1), real(16), [1], [0], [1], 4),
        (real(2, 4, 8), real(8, 4, 1), None, [2]),
        (real(2, 4, 6), real(8, 4, 1), None, [1], [1]),
        (real(4, 9), real(8, 4, 3), real(8)),
        (real(8, 9), real(16, 2, 3), real(16), [1], [1], [1], 4),
    ],
    aten.conv2d.default: [
        (real(2, 4, 8, 8), real(8, 4, 2, 2), real(8), [2, 2]),
        (real(4, 4, 5, 5), real(8, 4, 3, 3)),
        (real(2, 4, 8, 7), real(8, 4, 1, 3)),
        (real(2, 4, 8, 8), real(8, 4, 1, 1), real(8), [1, 2]),
    ],
    aten.conv3d.default: [(real(2, 4, 3, 3, 3), real(4, 4, 2, 2, 2), real(4))],
    aten.cosine_embedding_loss.default: [
        (real(4, 8), real(4, 8), signs(4), 0.1, 2),
        (real(4, 8), real(4, 8), signs(4), 0.1, 0),
    ],
    aten.cross_entropy_loss.default: [
        (real(4, 8), whole(8, 4)),
        (real(4, 8, 2), whole(8, 4, 2), None, 2),
        (real(4, 8), positive(4, 8), weights(8), 2),
        (real(4, 8), whole(8, 4), weights(8), 0, -100, 0.1),
        (real(4, 8, 2), positive(4, 8, 2), None, 0),
    ],
    aten.ctc_loss.Tensor: [
        (real(5, 4, 3), whole(2, 4, 2) + 1, torch.tensor([5, 4, 5, 3]), torch.tensor([2, 1, 0, 1]), 0, reduction)
        for reduction in (0, 1, 2)
    ],
    aten.cummax.default: [(real(4, 8), -1)],
    aten.cumsum.default: [(real(4, 8), -1)],
    aten.div.Scalar: [(real(*X), 3.0)],
    aten.div.Tensor: [(real(*X), positive(8)), (real(*X), 4.0), (3.0, positive(*X))],
    aten.div.Tensor_mode: [(fixed(*X), 2.0, {"rounding_mode": "floor"})],
    aten.dropout.default: [(real(*X), 0.0, True), (real(*X), 0.5, False)],
    aten.einsum.default: [
        ("bhqd,bhkd->bhqk", [real(4, 2, 4, 6), real(4, 2, 8, 6)]),
        ("...i,ij", [real(4, 8), real(8, 4)]),
        ("ii->i", [real(4, 4)]),
        ("ij,ij->i", [real(4, 1), real(4, 8)]),
    ],
    aten.embedding.default: [(real(8, 4), whole(8, 2, 6)), (real(8, 4), whole(8, 4), 3)],
    aten.empty.memory_format: [],
    aten.empty_like.default: [],
    aten.expand.default: [(real(4, 1, 8), [4, 6, 8]), (real(8), [4, -1]), (real(4, 1, 8), [-1, 2, -1])],
    aten.expand_as.default: [(real(4, 1, 8), fixed(2, 4, 6, 8))],
    aten.eye.default: [(4,)],
    aten.fill.Tensor: [(real(*X), torch.tensor(2.0, dtype=torch.float64))],
    aten.flatten.using_ints: [(real(4, 8, 6), 1), (real(2, 4, 3, 4), 2, 3)],
    aten.flip.default: [(real(*X), [1])],
    aten.floor_divide.default: [(fixed(*X), fixed(8).abs() + 1)],
    aten.full.default: [([4, 8], 1.0)],
    aten.full_like.default: [(real(*X), 2.0)],
    aten.gather.default: [(real(4, 8), 1, whole(8, 4, 2)), (real(4, 8), 0, whole(4, 4, 6))],
    aten.glu.default: [(real(4, 8), -1)],
    aten.group_norm.default: [(real(4, 8, 3), 2, real(8), real(8))],
    aten.gru.input: [recurrent(3, 1, True), recurrent(3, 1, False, 1, True)],
    aten.hinge_embedding_loss.default: [(real(4, 8), signs(4, 8), 1.0, 2)],
    aten.histc.default: [(fixed(8).abs(), 4, 0, 3), (fixed(4, 8).abs(), 4, 0, 4), (fixed(8).abs(), 4)],
    aten.huber_loss.default: [(real(4, 8), real(4, 8)), (real(4, 8), real(4, 8), 2)],
    aten.index.Tensor: [
        (real(8, 6, 4), [whole(8, 4)]),
        (real(8, 6, 4), [None, whole(6, 4, 2)]),
        (real(8, 6, 4), [whole(8, 4), None, whole(4, 4)]),
        (real(8, 6, 4), [whole(8, 4, 1), whole(6, 2)]),
    ],
    aten.index_add.default: [
        (real(8, 6, 4), 0, whole(8, 5), real(5, 6, 4)),
        (real(4, 8), 1, whole(8, 12), real(4, 12), {"alpha": 2}),
    ],
    aten.index_put.default: [(real(8, 4), [torch.randperm(8, generator=RNG)], real(8, 4))],
    aten.index_select.default: [(real(8, 6), 0, whole(8, 4))],
    aten.kl_div.default: [(real(4, 8), unit(4, 8).detach()), (real(4, 8), unit(4, 8).detach(), 2)],
    aten.l1_loss.default: [(real(*X), real(*X), r) for r in (0, 1, 2)],
    aten.layer_norm.default: [
        (real(4, 6, 8), [8], real(8), real(8)),
        (real(4, 6, 8), [6, 8]),
        (real(4, 8), [8], real(8)),
    ],
    aten.linalg_cholesky.default: [(definite(6, 4),)],
    aten.linalg_solve_triangular.default: [
        (real(2, 4, 4), real(2, 4, 6), {"upper": False, "unitriangular": True}),
        (real(2, 4, 4), real(2, 6, 4), {"upper": True, "left": False, "unitriangular": True}),
    ],
    aten.linear.default: [
        (real(4, 6, 8), real(12, 8), real(12)),
        (real(8), real(4, 8)),
        (fixed(2, 8), real(4, 8), real(4)),
    ],
    aten.log_softmax.int: [(real(4, 8), 1)],
    aten.logical_not.default: [(flags(*X),)],
    aten.logsumexp.default: [(real(4, 8), [1])],
    aten.lstm.input: [recurrent(4, 2, True), recurrent(4, 2, False, 1, True)],
    aten.margin_ranking_loss.default: [(real(4, 8), real(4, 8), signs(4, 8), 0.1, 2)],
    aten.masked_fill.Scalar: [(real(4, 8), flags(8), 0.0), (real(4, 8), flags(4, 1), -1e4)],
    aten.masked_fill.Tensor: [(real(4, 8), flags(4, 8), torch.tensor(0.5, dtype=torch.float64))],
    aten.matmul.default: [
        (real(4, 6, 8), real(8, 2)),
        (real(4, 2, 6, 8), real(2, 8, 4)),
        (real(8), real(8, 4)),
        (real(4, 8), real(8)),
        (real(8), real(8)),
        (real(4, 1, 2, 6), real(1, 4, 6, 2)),
    ],
    aten.max.dim: [(real(4, 8), 1)],
    aten.max.other: [(real(*X), real(8))],
    aten.max_pool2d.default: [(real(2, 4, 8, 8), [2, 2])],
    aten.max_pool2d_with_indices.default: [(real(2, 4, 8, 8), [2, 2])],
    aten.maximum.default: [(real(*X), real(8))],
    aten.mean.dim: [(real(4, 8, 6), [1]), (real(4, 8), [-1], True), (real(4, 8), None)],
    aten.min.dim: [(real(4, 8), 0, True)],
    aten.min.other: [(real(*X), real(4, 1))],
    aten.minimum.default: [(real(*X), real(*X))],
    aten.mm.default: [(real(4, 8), real(8, 6))],
    aten.movedim.int: [(real(4, 6, 8), 0, 2)],
    aten.movedim.intlist: [(real(4, 6, 8), [0, 1], [-1, 0])],
    aten.mse_loss.default: [(real(*X), fixed(*X), r) for r in (0, 1, 2)],
    aten.mul.Scalar: [(real(*X), 3.0)],
    aten.mul.Tensor: [(real(4, 8), real(8)), (real(4, 8), 0.5), (real(4, 1), real(4, 8)), (real(4, 8), flags(4, 8))],
    aten.multi_margin_loss.default: [
        (real(8, 4), whole(4, 8), 1, 1, None, 2),
        (real(8, 4), whole(4, 8), 1, 1, weights(4), 2),
    ],
    aten.multilabel_margin_loss.default: [(real(8, 4), whole(4, 8, 4), 2)],
    aten.mv.default: [(real(4, 8), real(8))],
    aten.narrow.default: [(real(4, 8), 1, 0, 4), (real(4, 8), 1, 0, 8)],
    aten.native_layer_norm.default: [(real(4, 6, 8), [8], real(8), real(8), 1e-5)],
    aten.new_empty.default: [],
    aten.new_full.default: [(real(*X), [4, 2], 1.0)],
    aten.new_ones.default: [(real(*X), [4, 2])],
    aten.new_zeros.default: [(real(*X), [4, 2])],
    aten.nll_loss.default: [(real(4, 8), whole(8, 4))],
    aten.nll_loss_nd.default: [
        (real(4, 8), whole(8, 4)),
        (real(4, 8), whole(8, 4), weights(8), 2),
        (real(4, 8, 2), whole(8, 4, 2), None, 0),
    ],
    aten.one_hot.default: [(whole(4, 2, 6), 4)],
    aten.ones.default: [([4, 2],)],
    aten.pad.default: [
        (real(4, 8), [0, 1]),
        (real(4, 8), [1, 1, 0, 0], "constant", 2.0),
        (real(2, 4, 8), [1, 1], "reflect"),
    ],
    aten.permute.default: [(real(4, 6, 8), [2, 0, -2])],
    aten.poisson_nll_loss.default: [(real(4, 8), positive(4, 8).detach(), True, False, 1e-8, 2)],
    aten.polar.default: [(real(*X), real(8))],
    aten.pow.Scalar: [(2.0, real(*X))],
    aten.pow.Tensor_Scalar: [(real(*X), 3)],
    aten.pow.Tensor_Tensor: [(positive(*X), real(8))],
    aten.remainder.Scalar: [(fixed(*X), 2)],
    aten.remainder.Tensor: [(fixed(*X), fixed(8))],
    aten.repeat.default: [(real(4, 8), [1, 3]), (real(4, 8), [2, 2, 1])],
    aten.repeat_interleave.self_int: [
        (real(4, 8), 3, 1),
        (real(4, 8), 2),
        (real(4, 8), 3, 1, {"output_size": 24}),
        (real(4, 1, 8), 4, 1, {"output_size": 4}),
    ],
    aten.reshape.default: [(real(4, 12, 2), [4, -1]), (real(4, 24), [4, 3, 4, 2])],
    aten.rms_norm.default: [(real(4, 6, 8), [8], real(8)), (real(4, 8), [8])],
    aten.rnn_relu.input: [recurrent(1, 1, True)],
    aten.rnn_tanh.input: [recurrent(1, 1, False)],
    aten.roll.default: [(real(4, 8), [1], [1]), (real(4, 8), [2])],
    aten.rsub.Scalar: [(real(*X), 1.0)],
    aten.rsub.Tensor: [(real(*X), real(8))],
    aten.scalar_tensor.default: [(2.0,)],
    aten.scaled_dot_product_attention.default: [
        (real(2, 4, 6, 2), real(2, 4, 8, 2), real(2, 4, 8, 2)),
        (real(2, 4, 6, 2), real(2, 4, 6, 2), real(2, 4, 6, 2), None, 0.0, True),
        (real(2, 8, 4, 2), real(2, 4, 6, 2), real(2, 4, 6, 2), None, 0.0, False, {"enable_gqa": True}),
        (real(2, 8, 4, 2), real(2, 2, 4, 2), real(2, 2, 4, 2), None, 0.0, True, {"enable_gqa": True}),
        (real(2, 12, 4, 2), real(2, 3, 6, 2), real(2, 3, 6, 2), None, 0.0, False, {"enable_gqa": True}),
        (real(2, 4, 6, 2), real(2, 4, 6, 2), real(2, 4, 6, 2), flags(2, 1, 6, 6) | torch.eye(6, dtype=torch.bool)),
        (real(2, 4, 4, 2), real(2, 4, 6, 2), real(2, 4, 6, 2), real(4, 4, 6)),
        (real(4, 6, 2), real(4, 6, 2), real(4, 6, 2)),
    ],
    aten.scatter.src: [(real(4, 8), 1, distinct(4, 8), real(4, 8)), (real(4, 8), 0, distinct(8, 4).t(), real(4, 8))],
    aten.scatter.value: [(real(4, 8), 1, whole(8, 4, 2), 3.0)],
    aten.scatter_add.default: [
        (real(4, 8), 1, whole(8, 4, 12), real(4, 12)),
        (real(8, 4), 0, whole(8, 6, 2), real(6, 2)),
    ],
    aten.select.int: [(real(4, 8, 6), 1, 3)],
    aten.select_scatter.default: [(real(4, 8, 6), real(4, 6), 1, 3)],
    aten.slice.Tensor: [(real(4, 8), 1, 2, 6), (real(4, 8), 1, 0, 9223372036854775807), (real(4, 8), 0, 0, 4, 2)],
    aten.slice_scatter.default: [(real(4, 8), real(4, 4), 1, 2, 6), (real(4, 8), real(2, 8), 0, 0, 2)],
    aten.smooth_l1_loss.default: [(real(*X), real(*X), r) for r in (0, 1, 2)],
    aten.soft_margin_loss.default: [(real(4, 8), signs(4, 8), 2)],
    aten.softmax.int: [(real(4, 8), -1), (real(4, 8, 6), 1)],
    aten.sort.default: [(real(4, 8),)],
    aten.split.Tensor: [(real(4, 24), 8, 1), (real(4, 10), 4, -1)],
    aten.split.sizes: [(real(4, 24), [8, 8, 8], 1)],
    aten.split_with_sizes.default: [(real(4, 24), [12, 12], -1), (real(4, 24), [8, 16], -1)],
    aten.squeeze.default: [(real(4, 1, 8),)],
    aten.squeeze.dim: [(real(4, 1, 8), 1), (real(4, 2, 8), 1)],
    aten.squeeze.dims: [(real(1, 4, 1, 8), [0, 2])],
    aten.stack.default: [([real(4, 8), real(4, 8)], 1), ([real(4), fixed(4)], -1)],
    aten.std.correction: [(real(4, 8), [1], {"correction": 1, "keepdim": True})],
    aten.std.dim: [(real(4, 8), [1], True, True)],
    aten.sub.Scalar: [(real(*X), 1.0)],
    aten.sub.Tensor: [(real(4, 8), real(4, 1)), (real(4, 8), 1.0)],
    aten.sum.dim_IntList: [(real(4, 8, 6), [1]), (real(4, 8), [-1], True), (real(4, 8), [])],
    aten.t.default: [(real(4, 8),)],
    aten.to.device: [(real(*X), torch.device("cpu"), torch.float64)],
    aten.to.dtype: [(real(*X), torch.float32), (real(*X), torch.int64)],
    aten.to.dtype_layout: [(real(*X), {"dtype": torch.float32, "layout": torch.strided, "device": "cpu"})],
    aten.to.other: [(real(*X), fixed(2, 3, 4))],
    aten.topk.default: [(real(4, 8), 2)],
    aten.transpose.int: [(real(4, 6, 8), -1, 1)],
    aten.tril.default: [(real(4, 8, 8),)],
    aten.triplet_margin_loss.default: [(real(4, 8), real(4, 8), real(4, 8), 1.0, 2.0, 1e-6, False, 2)],
    aten.triu.default: [(real(4, 8, 8), 1)],
    aten.type_as.default: [(real(*X), fixed(3))],
    aten.unbind.int: [(real(4, 3, 8), 1)],
    aten.unflatten.int: [(real(4, 24), -1, [3, 4, 2]), (real(4, 8), 1, [4, -1])],
    aten.unsqueeze.default: [(real(4, 8), 1), (real(4, 8), -1)],
    aten.upsample_bilinear2d.vec: [(real(2, 4, 3, 3), [6, 6], False, None)],
    aten.upsample_nearest2d.vec: [(real(2, 4, 3, 3), [6, 6], None)],
    aten.var.correction: [(real(4, 8), [0], {"correction": 0})],
    aten.var.dim: [(real(4, 8), [1])],
    aten.view.default: [
        (real(2, 4, 24), [2, 4, 3, 4, 2]),
        (real(4, 6, 8), [24, 8]),
        (real(8, 6), [4, 12]),
        (real(2, 3, 4), [-1]),
        (real(4, 1, 8), [4, 8, 1]),
    ],
    aten.view_as_complex.default: [(real(4, 8, 2),)],
    aten.view_as_real.default: [(torch.complex(real(4, 8), real(4, 8)),)],
    aten.where.ScalarOther: [(flags(*X), real(*X), 0.0)],
    aten.where.ScalarSelf: [(flags(*X), 0.0, real(*X))],
    aten.where.self: [(flags(4, 8), real(4, 8), real(8)), (flags(4, 1), real(4, 8), fixed(4, 8))],
    aten.zeros.default: [([4, 2],)],
    ops.attention: [
        (real(2, 8, 4, 2), real(2, 4, 4, 2), real(2, 4, 4, 2), None, 0.0, True, {"enable_gqa": True}),
        (real(2, 4, 4, 2), real(2, 4, 6, 2), real(2, 4, 6, 2), flags(2, 1, 1, 6) | torch.ones(6, dtype=torch.bool)),
    ],
    aten.unfold.default: [(real(4, 9, 8), 1, 3, 2), (real(8, 4, 7), -1, 7, 7), (real(9, 4), 0, 4, 4)],
    ops.row_cross_entropy: [(real(4, 2, 8), labels(8, 4, 2)), (real(4, 8), whole(8, 4), 3)],
    ops.cross_entropy: [
        (real(4, 2, 8), labels(8, 4, 2)),
        (real(4, 8), labels(8, 4), -100, 0.1),
        (real(4, 8), whole(8, 4), 3),
    ],
    ops.dropout: [(real(*X), 0.0, "a", None)],
    ops.dropout_mask: [([4, 8, 1], 0.5, torch.float64)],
    ops.exponential: [([4, 8], torch.float64)],
    ops.grouped_mm: [
        (real(12, 8), real(4, 8, 6), torch.tensor([2, 2, 9, 12], dtype=torch.int32)),
        (real(12, 4), real(8, 4, 8), torch.arange(1, 9, dtype=torch.int32)),
    ],
    ops.integers: [([8, 4], 2, 7, torch.int64)],
    ops.marked_columns: [(real(4, 6), torch.eye(6)[:4] + torch.eye(6)[1:5] > 0, 2)],
    ops.marked_rows: [(torch.eye(6)[:4] + torch.eye(6)[1:5] > 0, torch.eye(6)[2:] + torch.eye(6)[:4] > 0)],
    ops.normal: [([4, 8, 4], torch.float64)],
    ops.sample_conv: [
        (real(4, 8, 6), real(4, 8, 8, 3), real(4, 8), [1], [1], [1], 1),
        (real(4, 8, 5, 4), real(4, 16, 2, 1, 3), None, [1, 1], [0, 0], [1, 1], 4),
    ],
    ops.sum_by_index: [(real(8), whole(4, 8), 4), (real(4, 8), whole(6, 4, 8), 6)],
    ops.in_training: [(real(*X), real(*X))],
    ops.sum_over_batch: [(real(*X),)],
    ops.sum_over_dp: [(real(*X),)],
    ops.take_rows: [(real(4, 3, 8), torch.tensor([[0, 2, 1, 1, 0, 2]] * 4))],
    ops.uniform: [([8], torch.float64), ([], torch.float64)],
    ops.valid_count: [(labels(4, 4, 8),), (labels(8, 4, 8), -100, weights(8))],
}


def examples(target: Callable[..., Any]) -> list[Example]:
    """Return the samples of a row as calls."""
    found = []
    for sample in SAMPLES[target]:
        kwargs: Mapping[str, Any] = sample[-1] if isinstance(sample[-1], dict) else {}
        found.append(Example(target, sample[:-1] if kwargs else sample, kwargs))
    return found
