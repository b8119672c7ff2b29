"""Keyed draws have torch's distributions, are independent, and depend on an element's key alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autoptd.ops import library as ops
from autoptd.ops.dropout import DropoutKey, Samples
from autoptd.ops.tp_axis import Slice
from autoptd.passes.random.distributions import DISTRIBUTIONS
from autoptd.passes.random.draws import given_of
from autoptd.verification.keyed_draws import Draw, TensorWriter

aten = torch.ops.aten
RNG = DropoutKey(7)
SHAPE = (200, 1000)
COUNT = 200 * 1000
DRAWS: dict[str, Callable[..., Tensor]] = {
    "uniform": lambda shape, key="a", rng=RNG, **where: ops.uniform(shape, torch.float64, key, rng, **where),
    "normal": lambda shape, key="a", rng=RNG, **where: ops.normal(shape, torch.float64, key, rng, **where),
    "exponential": lambda shape, key="a", rng=RNG, **where: ops.exponential(shape, torch.float64, key, rng, **where),
    "integers": lambda shape, key="a", rng=RNG, **where: ops.integers(shape, 3, 13, torch.int64, key, rng, **where),
    "mask": lambda shape, key="a", rng=RNG, **where: ops.dropout_mask(shape, 0.3, torch.float64, key, rng, **where),
}
EXPECTED = {  # mean and variance
    "uniform": (0.5, 1 / 12),
    "normal": (0.0, 1.0),
    "exponential": (1.0, 1.0),
    "integers": (7.5, 99 / 12),
    "mask": (1.0, 0.3 / 0.7),
}


def distance(x: Tensor, y: Tensor) -> float:
    """Return the largest difference of two empirical distribution functions, times the root of their sizes: above 2
    for equal distributions about once in 1,500 (Kolmogorov and Smirnov)."""
    x, y = (z.flatten().double().round(decimals=9).sort()[0] for z in (x, y))
    both = torch.cat((x, y))
    below = [torch.searchsorted(z, both, right=True) / len(z) for z in (x, y)]
    return float((below[0] - below[1]).abs().max()) * math.sqrt(len(x) * len(y) / (len(x) + len(y)))


def related(x: Tensor, y: Tensor) -> float:
    """Return the correlation of two samples in standard deviations of that of independent ones."""
    x, y = (z.double().flatten() - z.double().mean() for z in (x, y))
    return abs(float((x * y).mean() / (x.std() * y.std()))) * math.sqrt(len(x))


@pytest.mark.parametrize("name", DRAWS)
def test_moments(name: str) -> None:
    x = DRAWS[name](SHAPE).double()
    mean, variance = EXPECTED[name]
    fourth = float(((x - mean) ** 4).mean())
    assert abs(float(x.mean()) - mean) < 5 * math.sqrt(variance / COUNT)
    assert abs(float(((x - mean) ** 2).mean()) - variance) < 5 * math.sqrt(max(fourth - variance**2, 1e-9) / COUNT)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("along", ["elements", "rows", "ops", "steps", "seeds", "samples", "squares"])
def test_independent(name: str, along: str) -> None:
    draw = DRAWS[name]
    x = draw(SHAPE).double()
    pairs = {
        "elements": lambda: (x[:, 1:], x[:, :-1]),
        "rows": lambda: (x[1:], x[:-1]),
        "ops": lambda: (x, draw(SHAPE, key="b")),
        "steps": lambda: (x, draw(SHAPE, rng=replace(RNG, step=1))),
        "seeds": lambda: (x, draw(SHAPE, rng=replace(RNG, seed=8))),
        "samples": lambda: (x, draw(SHAPE, rng=replace(RNG, sample=200))),
        "squares": lambda: ((x[:, 1:] - x.mean()) ** 2, (x[:, :-1] - x.mean()) ** 2),
    }
    assert related(*pairs[along]()) < 5


def test_no_number_of_a_step_is_met_in_another() -> None:
    one, other = (ops.uniform((1000,), torch.float64, "a", replace(RNG, step=s)) for s in (0, 1))
    assert not set(one.tolist()) & set(other.tolist())


@pytest.mark.parametrize("bins", [2, 3, 7, 256])
def test_integers_are_equally_likely(bins: int) -> None:
    counts = ops.integers(SHAPE, 0, bins, torch.int64, "a", RNG).flatten().bincount(minlength=bins).double()
    chi_squared = float(((counts - COUNT / bins) ** 2 / (COUNT / bins)).sum())
    assert abs(chi_squared - (bins - 1)) < 6 * math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fractions_are_below_one_in_any_type(dtype: torch.dtype) -> None:
    x = ops.uniform(SHAPE, dtype, "a", RNG)
    assert x.dtype == dtype and float(x.min()) >= 0 and float(x.max()) < 1
    assert ops.exponential(SHAPE, dtype, "a", RNG).min() > 0
    assert ops.normal(SHAPE, dtype, "a", RNG).isfinite().all()


P = torch.linspace(0.05, 0.95, 1000, dtype=torch.float64).expand(SHAPE)
LIKE = torch.zeros(SHAPE, dtype=torch.float64)
OPS = {
    "uniform_": (aten.uniform.default, (LIKE, -2.0, 3.0)),
    "normal_": (aten.normal_functional.default, (LIKE, 1.0, 2.0)),
    "normal of tensors": (aten.normal.Tensor_Tensor, (P, P + 1)),
    "exponential_": (aten.exponential.default, (LIKE, 2.5)),
    "log_normal_": (aten.log_normal.default, (LIKE, 0.5, 0.25)),
    "cauchy_": (aten.cauchy.default, (LIKE, 1.0, 2.0)),
    "geometric_": (aten.geometric.default, (LIKE, 0.3)),
    "bernoulli_": (aten.bernoulli.p, (LIKE, 0.3)),
    "bernoulli": (aten.bernoulli.default, (P,)),
    "randint": (aten.randint.low, (-3, 9, list(SHAPE))),
    "randint_like": (aten.randint_like.default, (LIKE, 5)),
    "rand": (aten.rand.default, (list(SHAPE),)),
    "randn_like": (aten.randn_like.default, (LIKE,)),
    "randperm": (aten.randperm.default, (1000,)),
    "rrelu": (aten.rrelu.default, (P - 0.5, 0.1, 0.4, True)),
    "alpha_dropout": (aten.alpha_dropout.default, (P, 0.2, True)),
    "feature_dropout": (aten.feature_dropout.default, (P.reshape(200, 50, 20), 0.2, True)),
    "feature_alpha_dropout": (aten.feature_alpha_dropout.default, (P.reshape(200, 50, 20), 0.2, True)),
    "one of a multinomial": (aten.multinomial.default, (P[:, :40].expand(200, 40).repeat(50, 1), 1)),
    "several of it": (aten.multinomial.default, (P[:, :40].repeat(50, 1), 3)),
    "with replacement": (aten.multinomial.default, (P[:, :40].repeat(50, 1), 3, True)),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_have_the_distribution_of_torch(name: str) -> None:
    op, args = OPS[name]
    torch.manual_seed(3)
    theirs = op(*args)
    ours = TensorWriter(Draw("a", 0, Samples()), RNG).made(op, given_of(op, args, {}), theirs)
    assert ours.shape == theirs.shape
    if theirs.ndim == 3:  # the elements of a feature are dropped together
        ours, theirs = ours[..., 0], theirs[..., 0]
    assert distance(ours, theirs) < 2
    if theirs.ndim > 1:  # elements have different distributions
        assert distance(ours[:, 0], theirs[:, 0]) < 2 and distance(ours[:, -1], theirs[:, -1]) < 2


def test_features_are_dropped_together() -> None:
    op, args = OPS["feature_dropout"]
    x = TensorWriter(Draw("a", 0, Samples()), RNG).made(op, given_of(op, args, {}), args[0])
    dropped = (x == 0).double().mean(-1)
    assert set(dropped.flatten().tolist()) == {0.0, 1.0}


def test_a_permutation_is_one() -> None:
    op, args = OPS["randperm"]
    x = TensorWriter(Draw("a", 0, None), RNG).made(op, given_of(op, args, {}), torch.empty(1000, dtype=torch.int64))
    assert x.sort()[0].equal(torch.arange(1000)) and not x.equal(torch.arange(1000))


@pytest.mark.parametrize("name", DRAWS)
def test_a_slice_and_a_microbatch_draw_what_the_whole_draws(name: str) -> None:
    draw = DRAWS[name]
    whole = draw((8, 6, 4))
    later = draw((2, 6, 4), rng=replace(RNG, share=4, sample=2))
    assert later.equal(whole[6:])
    mine = draw((8, 3, 4), parts=[Slice(1, 1, 2, 1)])
    assert mine.equal(whole[:, 3:])
    merged = draw((8 * 6, 4), samples=Samples(0, 1, 6))
    assert merged.equal(draw((6 * 8, 4), samples=Samples(0, 6, 1)).view(6, 8, 4).transpose(0, 1).reshape(48, 4))


@pytest.mark.parametrize("name", DRAWS)
def test_one_draw_of_a_step_serves_all_microbatches(name: str) -> None:
    draw = DRAWS[name]
    for shape in ((), (5,)):
        assert draw(shape, samples=None).equal(draw(shape, samples=None, rng=replace(RNG, share=4, sample=2)))


def test_without_a_key_a_draw_is_its_mean() -> None:
    means = {n: float(draw((2, 2), rng=None).double().mean()) for n, draw in DRAWS.items()}
    assert means == {n: 7 if n == "integers" else mean for n, (mean, _) in EXPECTED.items()}


def test_masks_alone_are_off_in_evaluation() -> None:
    off = replace(RNG, active=False)
    assert DRAWS["mask"]((4, 4), rng=off).eq(1).all()
    assert DRAWS["uniform"]((4, 4), rng=off).equal(DRAWS["uniform"]((4, 4)))


def test_every_distribution_has_a_torch_op() -> None:
    named = {op for op, _ in OPS.values()}
    same = {aten.normal.float_float, aten.normal.float_Tensor, aten.normal.Tensor_float, aten.rand_like.default}
    same |= {aten.randn.default, aten.bernoulli.Tensor, aten.randint.default, aten.randint_like.low_dtype}
    assert named | same == set(DISTRIBUTIONS)
