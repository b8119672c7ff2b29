"""Torch's random ops, each as ops on one draw of `autoptd.ops.random`: `normal_(m, s)` is a draw of mean 0, times s,
plus m.

`DISTRIBUTIONS` maps an op to a function of a `Writer`, which writes the ops into a graph (`draws.py`) or runs
them on tensors: the plain model is verified with the draws of the program (`verification/keyed.py`). Each has one draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from autoptd.ops import library as ops

aten = torch.ops.aten
Shape = tuple[Any, ...]
Given = Mapping[str, Any]  # arguments by the schema's names, with defaults


class Writer(Protocol):
    """Writer of ops. A tensor is a node of a graph, or a tensor."""

    def draw(self, target: Callable[..., Any], shape: Shape, *options: Any, dtype: torch.dtype) -> Any:
        """Write a draw: `target(shape, *options, dtype)`."""

    def op(self, target: Any, args: Sequence[Any], shape: Shape, dtype: torch.dtype) -> Any:
        """Write an op whose result has this shape and dtype."""

    def shape(self, x: Any) -> Shape | None:
        """Return the shape of a tensor; None for a number."""

    def dtype(self, x: Any) -> torch.dtype: ...

    def fixed(self, x: Any) -> Any:
        """Return a tensor through which no gradient flows, or the number."""


Distribution = Callable[[Writer, Given, Shape, torch.dtype], Any]


def _uniform(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return _moved(w, w.draw(ops.uniform, shape, dtype=dtype), high - low, low, shape, dtype)


def _normal(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    z = w.draw(ops.normal, shape, dtype=dtype)
    return _moved(w, z, given.get("std", 1.0), given.get("mean", 0.0), shape, dtype)


def _log_normal(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    return w.op(aten.exp.default, (_normal(w, given, shape, dtype),), shape, dtype)


def _exponential(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    return _moved(w, w.draw(ops.exponential, shape, dtype=dtype), 1 / given["lambd"], 0.0, shape, dtype)


def _geometric(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    """Draw the number of trials until the first success: an exponential number, rounded up."""
    waited = w.draw(ops.exponential, shape, dtype=_wide(dtype))
    rate = -math.log1p(-given["p"]) if given["p"] < 1 else math.inf
    trials = w.op(aten.ceil.default, (_moved(w, waited, 1 / rate, 0.0, shape, _wide(dtype)),), shape, _wide(dtype))
    return _cast(w, w.op(aten.clamp_min.default, (trials, 1), shape, _wide(dtype)), shape, dtype)


def _cauchy(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    angle = _moved(w, w.draw(ops.uniform, shape, dtype=dtype), math.pi, -math.pi / 2, shape, dtype)
    return _moved(w, w.op(aten.tan.default, (angle,), shape, dtype), given["sigma"], given["median"], shape, dtype)


def _bernoulli(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    """Draw 1 with probability `p`, a number or a tensor; of `bernoulli(self)` the probabilities are `self`."""
    p = w.fixed(given.get("p", given["self"]))
    less = aten.lt.Scalar if w.shape(p) is None else aten.lt.Tensor
    found = w.op(less, (w.draw(ops.uniform, shape, dtype=torch.float32), p), shape, torch.bool)
    return w.op(aten.to.dtype, (found, dtype), shape, dtype)


def _integers(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    return w.draw(ops.integers, shape, given.get("low", 0), given["high"], dtype=dtype)


def _permutation(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    """Draw a permutation: the order of as many fractions."""
    order = w.op(aten.argsort.default, (w.draw(ops.uniform, shape, dtype=torch.float64),), shape, torch.int64)
    return _cast(w, order, shape, dtype, torch.int64)


def _multinomial(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    """Draw classes by the race of exponential numbers: weight / number is largest with a probability ~ weight."""
    weights, count = w.fixed(given["self"]), given["num_samples"]
    sizes, kind = w.shape(weights), w.dtype(weights)
    assert sizes is not None
    each = count > 1 and given["replacement"]  # a race for each
    raced = (*sizes[:-1], count, sizes[-1]) if each else sizes
    if each:
        weights = w.op(aten.unsqueeze.default, (weights, -2), (*sizes[:-1], 1, sizes[-1]), kind)
    times = w.draw(ops.exponential, raced, dtype=kind)
    speeds = w.op(aten.div.Tensor, (weights, times), raced, kind)
    if each or count == 1:
        return w.op(aten.argmax.default, (speeds, -1, not each), shape, dtype)
    order = w.op(aten.argsort.default, (speeds, -1, True), raced, dtype)
    return w.op(aten.slice.Tensor, (order, -1, 0, count), shape, dtype)


def _rrelu(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    x, low, high = given["self"], given["lower"], given["upper"]
    if not given["training"]:
        return w.op(aten.leaky_relu.default, (x, (low + high) / 2), shape, dtype)
    slope = _moved(w, w.draw(ops.uniform, shape, dtype=dtype), high - low, low, shape, dtype)
    is_above = w.op(aten.gt.Scalar, (x, 0), shape, torch.bool)
    return w.op(aten.where.self, (is_above, x, w.op(aten.mul.Tensor, (x, slope), shape, dtype)), shape, dtype)


def _feature_dropout(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    """Drop whole features: those of one sample and channel are dropped together."""
    mask = w.draw(ops.dropout_mask, _of_features(shape), given["p"], dtype=dtype)
    return w.op(aten.mul.Tensor, (given["input"], mask), shape, dtype)


_DROPPED = -1.7580993408473766  # SELU's limit: −scale · alpha (Klambauer et al. 2017, section 3)


def _alpha_dropout(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    """Replace dropped elements by the limit of SELU, then keep mean 0 and variance 1, as in torch's formula.

    y = a (x m (1 − p) + limit (1 − m (1 − p))) − a p limit, with the mask m of dropout; its mean is 1, of which y = x.
    """
    of_mask = _of_features(shape) if given.get("features") else shape
    p, x = given["p"], given["input"]
    mask = w.draw(ops.dropout_mask, of_mask, p, dtype=dtype)
    if p == 1:
        return w.op(aten.mul.Tensor, (x, mask), shape, dtype)
    a = ((_DROPPED**2 * p + 1) * (1 - p)) ** -0.5
    # points (mask, factor, shift) of dropped, kept and, without dropout, all elements: one parabola through each three
    kept = 1 / (1 - p)
    factor = _parabola(w, mask, (0.0, kept, 1.0), (0.0, a, 1.0), of_mask, dtype)
    shift = _parabola(w, mask, (0.0, kept, 1.0), (a * _DROPPED * (1 - p), -a * _DROPPED * p, 0.0), of_mask, dtype)
    scaled = w.op(aten.mul.Tensor, (x, factor), shape, dtype)
    return w.op(aten.add.Tensor, (scaled, shift), shape, dtype)


def _parabola(w: Writer, x: Any, at: Sequence[float], values: Sequence[float], shape: Shape, dtype: torch.dtype) -> Any:
    """Write c0 + x (c1 + x c2), which has the given values at the three points, the first of which is 0."""
    (_, s, t), (c0, f, g) = at, values
    slope_s, slope_t = (f - c0) / s, (g - c0) / t
    c2 = (slope_s - slope_t) / (s - t)
    inner = _moved(w, x, c2, slope_s - c2 * s, shape, dtype)
    return _moved(w, w.op(aten.mul.Tensor, (x, inner), shape, dtype), 1.0, c0, shape, dtype)


def _of_features(shape: Shape) -> Shape:
    return (*shape[:2], *(1,) * len(shape[2:]))


def _moved(w: Writer, x: Any, by: Any, to: Any, shape: Shape, dtype: torch.dtype) -> Any:
    """Write x · by + to; each is a number or a tensor without gradient."""
    if not _is(by, 1):
        x = w.op(aten.mul.Tensor, (x, w.fixed(by)), shape, dtype)
    return x if _is(to, 0) else w.op(aten.add.Tensor, (x, w.fixed(to)), shape, dtype)


def _is(value: Any, number: float) -> bool:
    return isinstance(value, (int, float)) and value == number


def _cast(w: Writer, x: Any, shape: Shape, dtype: torch.dtype, have: torch.dtype | None = None) -> Any:
    have = _wide(dtype) if have is None else have
    return x if have == dtype else w.op(aten.to.dtype, (x, dtype), shape, dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _featured(w: Writer, given: Given, shape: Shape, dtype: torch.dtype) -> Any:
    return _alpha_dropout(w, {**given, "features": True}, shape, dtype)


DISTRIBUTIONS: Mapping[Any, Distribution] = {
    **dict.fromkeys((aten.rand.default, aten.rand_like.default, aten.uniform.default), _uniform),
    **dict.fromkeys((aten.randn.default, aten.randn_like.default, aten.normal_functional.default), _normal),
    **dict.fromkeys(
        (aten.normal.float_float, aten.normal.float_Tensor, aten.normal.Tensor_float, aten.normal.Tensor_Tensor),
        _normal,
    ),
    **dict.fromkeys((aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor), _bernoulli),
    **dict.fromkeys((aten.randint.default, aten.randint.low), _integers),
    **dict.fromkeys((aten.randint_like.default, aten.randint_like.low_dtype), _integers),
    aten.alpha_dropout.default: _alpha_dropout,
    aten.cauchy.default: _cauchy,
    aten.exponential.default: _exponential,
    aten.feature_alpha_dropout.default: _featured,
    aten.feature_dropout.default: _feature_dropout,
    aten.geometric.default: _geometric,
    aten.log_normal.default: _log_normal,
    aten.multinomial.default: _multinomial,
    aten.randperm.default: _permutation,
    aten.rrelu.default: _rrelu,
}
# whose results have a gradient: they read more of their operand than its shape and probabilities
OF_OPERAND = frozenset({_alpha_dropout, _featured, _feature_dropout, _rrelu})
# in place -> functional form of another name
FUNCTIONAL: Mapping[Any, Any] = {
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
}
