"""Scans of logarithmic depth compute what loops over tokens compute, and carry the same gradients."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mamba import modeling_mamba

from autoptd.passes.known.replace import _same_parameters
from autoptd.passes.known.scans import SCANS, linear_recurrence, selective_scan


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13])
def test_a_linear_recurrence_is_that_of_the_loop(steps: int) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(2, 3, steps, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, h = linear_recurrence(a, b), torch.zeros(2, 3, 4, dtype=torch.float64)
    expected = []
    for t in range(steps):
        h = a[:, :, t] * h + b[:, :, t]
        expected.append(h)
    loop = torch.stack(expected, 2)
    torch.testing.assert_close(found, loop, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(loop)
    mine, theirs = (torch.autograd.grad((x * weight).sum(), (a, b), allow_unused=True) for x in (found, loop))
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(torch.zeros_like(y) if x is None else x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gated", [True, False])
def test_a_selective_scan_is_that_of_transformers(gated: bool) -> None:
    torch.manual_seed(0)
    b, c, t, n = 2, 6, 7, 4
    x, dt, z = (torch.randn(b, c, t) for _ in range(3))
    enters, leaves = (torch.randn(b, n, t) for _ in range(2))
    given = [x, dt, -torch.rand(c, n), enters, leaves, torch.randn(c), z if gated else None, torch.randn(c), True, True]
    original = modeling_mamba.mamba_selective_scan
    assert _same_parameters(original, SCANS["mamba_selective_scan"])
    for mine, theirs in zip(selective_scan(*given), original(*given), strict=True):
        torch.testing.assert_close(mine, theirs)
