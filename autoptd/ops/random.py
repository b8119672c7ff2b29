"""Keyed random tensors: each element is a function of its key alone (`dropout.py`), whatever the plan.

    uniform          32 bits of an element, or as many as its type holds, as a fraction in [0, 1)
    normal           √(−2 log u) cos(2π v) of two independent fractions (Box and Muller 1958)
    exponential      −log u
    integers         63 bits modulo a range
    dropout_mask     0 with probability p, else 1 / (1 − p)

Fractions take 2³² values at most, so a normal number is below 6.8 and an exponential one below 22.9. Without `rng`
every draw is its mean: the ranks of a plan and one process can then be compared though their draws cannot.

A shape is that of the local tensor. `samples`: position of the microbatch's samples in it; None if one draw serves all
samples. `parts`: the dims of which it is a slice (`Axis.part`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autoptd.ops.dropout import FIRST_DIM, DimSlice, DropoutKey, Elements, SamplePosition

_DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # binary digits of a number below 1
_MOST = 32


def uniform(
    shape: Sequence[int],
    dtype: torch.dtype,
    key: str = "",
    rng: DropoutKey | None = None,
    samples: SamplePosition = FIRST_DIM,
    parts: Sequence[DimSlice] = (),
) -> Tensor:
    """Draw numbers in [0, 1)."""
    if rng is None:
        return torch.full(tuple(shape), 0.5, dtype=dtype)
    return _fractions(_elements(shape, key, rng, samples, parts), dtype)


def normal(
    shape: Sequence[int],
    dtype: torch.dtype,
    key: str = "",
    rng: DropoutKey | None = None,
    samples: SamplePosition = FIRST_DIM,
    parts: Sequence[DimSlice] = (),
) -> Tensor:
    """Draw numbers of mean 0 and variance 1."""
    if rng is None:
        return torch.zeros(tuple(shape), dtype=dtype)
    elements, wide = _elements(shape, key, rng, samples, parts), torch.promote_types(dtype, torch.float32)
    length = _positive(elements, wide).log_().mul_(-2).sqrt_()
    return length.mul_(_fractions(elements.again(), wide).mul_(2 * math.pi).cos_()).to(dtype)


def exponential(
    shape: Sequence[int],
    dtype: torch.dtype,
    key: str = "",
    rng: DropoutKey | None = None,
    samples: SamplePosition = FIRST_DIM,
    parts: Sequence[DimSlice] = (),
) -> Tensor:
    """Draw positive numbers of mean 1."""
    if rng is None:
        return torch.ones(tuple(shape), dtype=dtype)
    found = _positive(_elements(shape, key, rng, samples, parts), torch.promote_types(dtype, torch.float32))
    return found.log_().neg_().clamp_min_(torch.finfo(dtype).tiny).to(dtype)


def integers(
    shape: Sequence[int],
    low: int,
    high: int,
    dtype: torch.dtype,
    key: str = "",
    rng: DropoutKey | None = None,
    samples: SamplePosition = FIRST_DIM,
    parts: Sequence[DimSlice] = (),
) -> Tensor:
    """Draw whole numbers from `low` to `high` - 1, each as likely to within (high - low) / 2⁶³."""
    if rng is None:
        return torch.full(tuple(shape), (low + high - 1) // 2, dtype=dtype)
    elements = _elements(shape, key, rng, samples, parts)
    upper, lower = _whole(elements), _whole(elements.again())
    return ((upper >> 1 << 32) + lower).remainder_(high - low).add_(low).to(dtype)


def dropout_mask(
    shape: Sequence[int],
    p: float,
    dtype: torch.dtype,
    key: str = "",
    rng: DropoutKey | None = None,
    samples: SamplePosition = FIRST_DIM,
    parts: Sequence[DimSlice] = (),
) -> Tensor:
    """Draw 0 with probability p and 1/(1-p) else; ones without an active `rng`, as dropout then does nothing."""
    if rng is None or not rng.active or p == 0:
        return torch.ones(tuple(shape), dtype=dtype, device=None if rng is None else rng.device)
    kept = _elements(shape, key, rng, samples, parts).keep(p).to(dtype)
    return kept if p == 1 else kept.mul_(1 / (1 - p))


DRAWS = frozenset({uniform, normal, exponential, integers, dropout_mask})


def _elements(
    shape: Sequence[int], key: str, rng: DropoutKey, samples: SamplePosition, parts: Sequence[DimSlice]
) -> Elements:
    return rng.elements(tuple(shape), key, samples, parts, rng.device or torch.device("cpu"))


def _whole(elements: Elements) -> Tensor:
    """Return numbers from 0 to 2³² - 1, int64, whose lower bits are as good as the upper ones."""
    found = elements.each(lambda bits, out: out.copy_(bits), torch.int64).bitwise_and_(2**_MOST - 1)
    return found.bitwise_xor_(found >> 16)


def _fractions(elements: Elements, dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1), multiples of 2⁻ⁿ for the n digits of the type."""
    digits = _DIGITS.get(dtype, _MOST)
    least = 2 ** (digits - 1)

    def fill(bits: Tensor, out: Tensor) -> None:
        out.copy_(bits >> (_MOST - digits)).add_(least).mul_(0.5**digits)

    return elements.each(fill, dtype)


def _positive(elements: Elements, dtype: torch.dtype) -> Tensor:
    """Return numbers in (0, 1): the middle of each interval that `_fractions` gives the start of."""
    return _fractions(elements, dtype).add_(0.5 ** (_DIGITS.get(dtype, _MOST) + 1))
