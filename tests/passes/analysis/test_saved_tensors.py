"""Tensors that autograd saves, and the work of an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import getitem
from typing import Any

import pytest
import sympy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import autoptd
from autoptd.ops import library as ops
from autoptd.passes.analysis.flops import CONVOLUTIONS, PRODUCTS, Work, flops, gradient_products, work
from autoptd.passes.analysis.saved_tensors import ATTENTION, DROPOUT, RMS_NORM, SavedForBackward, saved_tensors
from autoptd.passes.graph import op_call
from autoptd.passes.opcall import OpCall, Sizes, TensorInfo
from tests.passes.rules.rule_samples import SAMPLES, examples

aten = torch.ops.aten
b, s = sympy.symbols("b s", integer=True, positive=True)


def real(*shape: Any, grad: bool = True) -> TensorInfo:
    return TensorInfo(shape, torch.float32, grad)


def call(target: Any, *args: Any, out: Any, **kwargs: Any) -> OpCall:
    return OpCall(target, args, kwargs, out if isinstance(out, tuple) else (out,))


X = real(b, s, 64)
WHOLE_CHUNKS = real(b, 256 * sympy.ceiling(s / 256), 64)  # as many tokens where a scan was traced for whole chunks
INDICES = TensorInfo((b, s), torch.int64, False)
STATISTIC = real(b, s, 1, grad=False)


def named(target: Callable[..., Any]) -> str:
    """Return a name that is the same in every process; `str` of a function contains its address."""
    return str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (call(aten.linear.default, X, real(128, 64), real(128), out=real(b, s, 128)), SavedForBackward((0, 1))),
        (call(aten.linear.default, X, real(128, 64, grad=False), out=real(b, s, 128)), SavedForBackward((1,))),
        (call(aten.gelu.default, X, out=X), SavedForBackward((0,))),
        (call(aten.mul.Tensor, X, WHOLE_CHUNKS, out=X), SavedForBackward((0, 1))),
        (call(aten.relu.default, X, out=X), SavedForBackward((), (0,))),
        (call(aten.softmax.int, X, -1, out=X), SavedForBackward((), (0,))),
        (call(aten.layer_norm.default, X, [64], out=X), SavedForBackward((0,), (), (STATISTIC, STATISTIC))),
        (call(aten.rms_norm.default, X, [64], real(64), out=X), SavedForBackward((0, 1), (), (STATISTIC,))),
        (call(aten.embedding.default, real(100, 64), INDICES, out=X), SavedForBackward((1,))),
        (call(aten.mul.Tensor, X, X, out=X), SavedForBackward((0, 1))),
        (call(aten.mul.Tensor, X, real(64, grad=False), out=X), SavedForBackward((1,))),
        (call(aten.mul.Tensor, X, 2.0, out=X), SavedForBackward()),
        (call(aten.add.Tensor, X, X, out=X), SavedForBackward()),
        (call(aten.view.default, X, [b * s, 64], out=real(b * s, 64)), SavedForBackward()),
        (call(aten.dropout.default, X, 0.0, True, out=X), SavedForBackward()),
        (call(aten.dropout.default, X, 0.1, False, out=X), SavedForBackward()),
        (
            call(aten.dropout.default, X, 0.1, True, out=X),
            SavedForBackward(extra=(TensorInfo((b, s, 64), torch.bool, False),)),
        ),
        (call(ops.cross_entropy, X, INDICES, out=real()), SavedForBackward((1,), (), (real(b * s, 64, grad=False),))),
        (call(aten.gelu.default, real(b, s, 64, grad=False), out=X), SavedForBackward()),
    ],
    ids=lambda x: named(x.target) if isinstance(x, OpCall) else "",
)
def test_saved(op: OpCall, expected: SavedForBackward) -> None:
    assert saved_tensors(op) == expected


def test_attention_keeps_no_scores() -> None:
    q, kv = real(b, 8, s, 16), real(b, 2, s, 16)
    attention = call(aten.scaled_dot_product_attention.default, q, kv, kv, None, 0.0, True, out=q, enable_gqa=True)
    rows = TensorInfo((b, 8, s), torch.float32, False)
    assert saved_tensors(attention) == SavedForBackward((0, 1, 2), (0,), (rows,))


# kernels of these save what suits the device: cuDNN a block of its own, a CPU what its steps need
RECURRENT = {aten.gru.input, aten.lstm.input, aten.rnn_relu.input, aten.rnn_tanh.input}
OBSERVED = [t for t in SAMPLES if t not in ATTENTION | DROPOUT | RMS_NORM | RECURRENT]


@pytest.mark.parametrize("target", OBSERVED, ids=named)
def test_meta_tensors_keep_what_real_ones_keep(target: Any) -> None:
    """Every op of the table saves the same operands and outputs as in a run on a CPU."""
    for example in examples(target):
        kept: set[int] = set()

        def keep(x: torch.Tensor, kept: set[int] = kept) -> torch.Tensor:
            kept.add(x.untyped_storage()._cdata)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = target(*example.args, **example.kwargs)
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        before = [x.untyped_storage()._cdata for x in example.operands]
        after = [y.untyped_storage()._cdata for y in outputs]
        found = saved_tensors(example.call())
        assert found.operands == tuple(i for i, x in enumerate(before) if x in kept)
        assert found.outputs == tuple(i for i, y in enumerate(after) if y in kept and y not in before)


@pytest.mark.parametrize("target", sorted(PRODUCTS | CONVOLUTIONS | ATTENTION, key=named), ids=named)
def test_flops_are_those_of_torch(target: Any) -> None:
    for example in examples(target):
        diagonal = target is aten.einsum.default and example.args[0] in ("ii->i", "ij,ij->i")
        if any(x.ndim == 1 for x in example.operands[:2]) or diagonal:
            continue  # torch counts only products of matrices by matmul
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            example.target(*example.args, **example.kwargs)
        assert flops(example.call()) == counter.get_total_flops(), example.args


LAYERS: list[tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = [
    (lambda: torch.nn.ConvTranspose1d(8, 16, 4, 2), (3, 8, 10)),
    (lambda: torch.nn.ConvTranspose2d(8, 16, 4, 2, groups=2), (3, 8, 10, 12)),
    (lambda: torch.nn.ConvTranspose3d(8, 16, 2), (3, 8, 4, 5, 6)),
    (lambda: torch.nn.LSTMCell(24, 32), (5, 24)),
    (lambda: torch.nn.GRUCell(24, 32), (5, 24)),
    (lambda: torch.nn.RNN(24, 32, batch_first=True), (5, 7, 24)),
    (lambda: torch.nn.GRU(24, 32, 2, bidirectional=True, batch_first=True), (5, 7, 24)),
    (lambda: torch.nn.LSTM(24, 32, 2, batch_first=True), (5, 7, 24)),
]


class Squares(torch.nn.Module):
    """A layer, and the mean of the squares of what it returns first."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (y[0] if isinstance(y, tuple) else y).float().pow(2).mean()


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=[str(i) for i in range(len(LAYERS))])
def test_layers_count_the_products_that_torch_runs(layer: Any, shape: tuple[int, ...]) -> None:
    """Transposed convolutions, recurrent layers and cells."""
    module, x = Squares(layer()), torch.randn(shape)
    folded = autoptd.trace(module, inputs={"x": x}, precision="fp32").folded
    nodes = (n for s in folded.segments for n in s.nodes if n.op == "call_function" and n.target is not getitem)
    number = Sizes({symbol: shape[dim] for symbol, (_, dim) in folded.traced.sizes.items()})
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        module(x)  # torch does not count the LSTM of MKL-DNN
    assert sum(number(flops(op_call(n))) for n in nodes) == counter.get_total_flops() > 0


def test_backward_multiplies_for_the_operands_with_gradients() -> None:
    w, rows, bias = real(64, 32), real(b, 32), real(32)
    still = real(b, 64, grad=False)
    assert gradient_products(call(aten.linear.default, X, real(128, 64), out=real(b, s, 128))) == (True, True)
    assert gradient_products(call(aten.addmm.default, bias, real(b, 64), w, out=rows)) == (True, True)
    assert gradient_products(call(aten.addmm.default, bias, still, w, out=rows)) == (False, True)
    states, weights = real(1, b, 32, grad=False), [real(96, 64), real(96, 32)]
    steps = (real(b, s, 64, grad=False), states, weights, False, 1, 0.0, True, False, True)
    gru = call(aten.gru.input, *steps, out=(real(b, s, 32), real(1, b, 32)))
    assert gradient_products(gru) == (True, True)
    frozen = [replace(t, requires_grad=False) for t in weights]
    gru = call(aten.gru.input, *steps[:2], frozen, *steps[3:], out=(real(b, s, 32, grad=False),))
    assert gradient_products(gru) == (False, False)


def test_a_substitution_takes_half_of_a_product() -> None:
    solve = call(aten.linalg_solve_triangular.default, real(b, 64, 64), real(b, 64, 128), out=real(b, 64, 128))
    assert work(solve).kind == "matmul" and flops(solve) == b * 64 * 64 * 128


def test_work() -> None:
    linear = call(aten.linear.default, X, real(128, 64), real(128), out=real(b, s, 128))
    assert work(linear) == Work("matmul", 2 * b * s * 64 * 128, 256 * b * s + 4 * (64 * 128 + 128), 512 * b * s)
    embedding = call(aten.embedding.default, real(100, 64), INDICES, out=X)
    assert work(embedding) == Work("memory", 0, 256 * b * s + 8 * b * s, 256 * b * s)
    heads = real(b, 8, s, 16)
    attention = call(aten.scaled_dot_product_attention.default, heads, heads, heads, None, 0.0, True, out=heads)
    assert work(attention) == Work("attention", 4 * b * 8 * s * s * 16, 3 * 512 * b * s, 512 * b * s, causal=True)
    for view in (
        call(aten.view.default, X, [b * s, 64], out=real(b * s, 64)),
        call(aten.transpose.int, X, 0, 1, out=real(s, b, 64)),
        call(aten.to.dtype, X, torch.float32, out=X),
    ):
        assert work(view) == Work("view")
    assert work(call(aten.to.dtype, X, torch.float64, out=TensorInfo(X.shape, torch.float64))).kind == "memory"
    assert work(call(aten.gelu.default, X, out=X)) == Work("memory", 0, 256 * b * s, 256 * b * s)
