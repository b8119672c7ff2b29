"""Branches on whether a mask has anything, or all: left out of the program where they change nothing without rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import UnsupportedOp
from autoptd.passes.trace import trace
from tests.passes.interpret import assert_unchanged, normalised
from tests.passes.normalise.test_normalise import batch, model_of

Body = Callable[[nn.Module, Tensor], Tensor]


def some(h: Tensor, above: float = 0.3) -> Tensor:
    return h.detach()[..., 0] > above


def rows_written(self: nn.Module, h: Tensor) -> Tensor:
    """Several masks, one of them of few rows: some microbatches have none."""
    for above in (0.1, 0.9):
        mask = some(h, above)
        if mask.any():
            h = h.clone()
            h[mask] = self.second.bias
    return h


def rows_computed(self: nn.Module, h: Tensor) -> Tensor:
    mask, rest = some(h, 0.6), some(h, -0.2)
    if mask.any():
        h = h.index_put((mask,), self.second(h[mask]))
    if not torch.all(rest):
        h = torch.where(~rest.unsqueeze(-1), self.second(h), h)
    return h


def filled(self: nn.Module, h: Tensor) -> Tensor:
    """Masks made of others, and a branch that is taken if nothing is left out."""
    mask = some(h)
    for i in range(3):
        part = mask & (h.detach()[..., 1] > 0.2 * i)
        if torch.any(part):
            h = h.masked_fill((part & mask)[..., None], 0.5)
        if part.all():
            h = h.masked_fill(~part[..., None], 0.1)
    return h


def checked(self: nn.Module, h: Tensor) -> Tensor:
    if some(h).all():
        raise ValueError("no row is left")
    return h


@pytest.mark.parametrize("body", [rows_written, rows_computed, filled, checked])
def test_branches_on_rows_are_taken(body: Body) -> None:
    assert_unchanged(model_of(body), batch())


def scaled(self: nn.Module, h: Tensor) -> Tensor:
    return h * 2 if some(h).any() else h


def others_filled(self: nn.Module, h: Tensor) -> Tensor:
    mask = some(h)
    return h.masked_fill(~mask[..., None], 0.0) if mask.any() else h


def mask_changed(self: nn.Module, h: Tensor) -> Tensor:
    """The rows of the write are not those that the branch has asked for."""
    mask = some(h)
    if mask.any():
        mask[:, :2] = True
        h = h.masked_fill(mask[..., None], 0.0)
    return h


def spread(self: nn.Module, h: Tensor) -> Tensor:
    """A write that changes a shape, whatever it selects."""
    mask, bias = some(h), self.second.bias
    if mask.any():
        bias = bias.masked_fill(mask[..., None], 0.0)
    return h * bias.sum() / 8


def another_mask(self: nn.Module, h: Tensor) -> Tensor:
    mask, other = some(h), some(h, 0.5)
    return h.masked_fill(mask[..., None], 0.0) if other.any() else h


@pytest.mark.fault("turns without rows")
@pytest.mark.parametrize("body", [scaled, others_filled, mask_changed, spread, another_mask])
def test_branches_that_change_something_without_rows_are_refused(body: Body) -> None:
    with pytest.raises(UnsupportedOp, match="depends on whether a mask selects any rows") as error:
        normalised(model_of(body), batch())
    assert "(test_normalise.py:" in error.value.where and error.value.fix


@pytest.mark.parametrize("body", [mask_changed, spread])
def test_what_is_refused_would_be_wrong(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"x": batch()["x"] * 1e-3}
    model = model_of(body)
    model.first.bias.data.fill_(-1.0)  # nothing is above 0.3
    monkeypatch.setattr(trace, "prove_turns", lambda *args: None)
    with pytest.raises(AssertionError):
        assert_unchanged(model, data)
