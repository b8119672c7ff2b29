"""Spelled-out norms become torch's ops where those compute the same, with the same roundings; others stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.passes.graph import operands
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.trace.trace import trace
from tests.passes.interpret import assert_unchanged, in_microbatches, names_of, whole

WIDTH = 8
BATCH = {"x": torch.randn(6, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


class Normed(nn.Module):
    """A linear layer, a norm by a formula of x, weight and bias, and another linear layer."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.randn(WIDTH))
        self.formula = formula
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        return self.after(self.formula(self.before(x), self.weight, self.bias)).double().square().mean()


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def layer(x: Tensor, eps: float = 1e-5) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + eps)


RMS: dict[str, Formula] = {
    "weight": lambda x, w, b: w * rms(x),
    "weight last": lambda x, w, b: rms(x) * w,
    "no weight": lambda x, w, b: rms(x) + b,
    "square": lambda x, w, b: x * torch.rsqrt(x.square().mean(-1, True) + 1e-5) * w,
    "product": lambda x, w, b: x * torch.rsqrt(1e-5 + (x * x).mean([2], keepdim=True)) * w,
    "quotient": lambda x, w, b: w * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "shifted weight": lambda x, w, b: rms(x) * (1.0 + w),
}
LAYER: dict[str, Formula] = {
    "weight and bias": lambda x, w, b: layer(x) * w + b,
    "weight": lambda x, w, b: w * layer(x),
    "bias": lambda x, w, b: layer(x) + b,
    "quotient": lambda x, w, b: (
        w * ((x - x.mean(-1, True)) / torch.sqrt(_centred(x).square().mean(-1, True) + 1e-5)) + b
    ),
}
OTHERS: dict[str, Formula] = {
    "two dims": lambda x, w, b: w * (x * torch.rsqrt(x.unflatten(-1, (2, 4)).pow(2).mean((-2, -1)) + 1e-6)[..., None]),
    "eps on the root": lambda x, w, b: w * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)),
    "a constant scale": lambda x, w, b: w * (x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + 1e-6)),
    "no eps": lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
    "cubes": lambda x, w, b: w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)),
    "of another tensor": lambda x, w, b: w * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "tokens": lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
    "a learnt eps": lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + b.exp().sum())),
    "not centred twice": lambda x, w, b: _centred(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "unbiased": lambda x, w, b: _centred(x) / (x.std(-1, keepdim=True) + 1e-6) * w + b,
}


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize(
    ("formula", "op"),
    [(f, "rms_norm") for f in RMS.values()] + [(f, "layer_norm") for f in LAYER.values()],
    ids=[*RMS, *(f"layer {name}" for name in LAYER)],
)
def test_norms_are_recognised(formula: Formula, op: str) -> None:
    names = names_of(assert_unchanged(Normed(formula), BATCH))
    assert op in names
    assert not {"rsqrt", "sqrt", "pow", "div"} & set(names[: names.index(op) + 2])


@pytest.mark.parametrize("formula", OTHERS.values(), ids=OTHERS.keys())
def test_others_stay(formula: Formula) -> None:
    assert not {"rms_norm", "layer_norm"} & set(names_of(assert_unchanged(Normed(formula), BATCH)))


def llama(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return w * rms(x.float()).to(x.dtype)


def t5(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * y.to(w.dtype)


def olmo(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (w * rms(x.float())).to(x.dtype)


def gemma(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (rms(x.float()) * (1.0 + w.float())).type_as(x)


def cohere(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (w.float() * layer(x.float())).to(x.dtype)


def by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return w * rms(x)


WITH_CASTS: Mapping[Formula, tuple[str, str]] = {  # the op, and the types of its operands, for a model in bf16
    llama: ("rms_norm", "bfloat16"),
    t5: ("", ""),  # each of two casts rounds its gradient
    olmo: ("rms_norm", "bfloat16 bfloat16"),
    gemma: ("rms_norm", "float32 float32"),
    cohere: ("layer_norm", "float32 float32"),
    by_hand: ("", ""),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("formula", WITH_CASTS)
def test_norms_in_float32_round_as_the_model_does(formula: Formula, precision: str) -> None:
    """Gradients of every parameter of the model in half precision, bit for bit with an RMS norm.

    torch's own layer norm adds in another order in float32 (the kernel of each processor in its own), so that one
    gradient in 150 may round to the neighbouring number; one cast fewer changes a quarter of them or more.
    """
    model = Normed(formula)
    traced = normalise(trace(model, BATCH, precision=precision))
    op, types = WITH_CASTS[formula]
    found = [n for n in traced.graph.graph.nodes if str(n.target).startswith(("aten.rms_norm", "aten.layer_norm"))]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    assert [str(n.target).split(".")[1] for n in found] == [op] * bool(op)
    for node in found:
        wanted = types.replace("bfloat16", str(dtype).removeprefix("torch."))
        assert " ".join(str(n.meta["info"].dtype).removeprefix("torch.") for n in operands(node)) == wanted
    model.to(dtype)
    expected, given = whole(model, BATCH), in_microbatches(model, traced, BATCH, [6])
    assert given.gradients.keys() == expected.gradients.keys()
    ours, theirs = (torch.cat([g[name].flatten() for name in g]) for g in (given.gradients, expected.gradients))
    different = ours != theirs
    assert different.double().mean() <= (0.03 if op == "layer_norm" else 0.0)
    assert torch.allclose(ours, theirs, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 16)


def test_torch_s_norms_compute_in_float32() -> None:
    """Recognition of half-precision norms relies on this; seen in torch 2.13."""
    x, w = torch.randn(50, 96, dtype=torch.bfloat16), torch.randn(96, dtype=torch.bfloat16)
    assert torch.equal(F.rms_norm(x, (96,), None, 1e-6), rms(x.float()).bfloat16())
    assert torch.equal(F.rms_norm(x, (96,), w, 1e-6), (w * rms(x.float())).bfloat16())
