"""`torch.cov` and `torch.corrcoef` as ops on sizes; torch reads their divisor from a tensor, which a trace lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def cov(input: Tensor, *, correction: int = 1) -> Tensor:
    """Return the covariances of the rows of `input` [variables, observations], as `torch.cov` does without weights."""
    rows = input if input.ndim >= 2 else input.reshape(1, -1)
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.mH / (rows.size(1) - correction)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Return the correlations of the rows of `input` [variables, observations], between -1 and 1."""
    found = cov(input)
    if not found.ndim:
        return found / found
    scale = found.diagonal().real.sqrt()
    found = found / scale.unsqueeze(1) / scale
    return found if found.is_complex() else found.clamp(-1, 1)


COVARIANCES: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
}
