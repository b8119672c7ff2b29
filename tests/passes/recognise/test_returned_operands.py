"""Ops that return an operand itself: it keeps its gradient in regions without gradients, and is written to with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.interpret import assert_unchanged

RETURNING: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda h: h.to(h.device, non_blocking=True),
    "type_as": lambda h: h.type_as(h),
    "contiguous": lambda h: h.contiguous(),
    "flatten": lambda h: h.flatten(2),
    "real": torch.real,
    "conj": lambda h: h.conj().resolve_conj().resolve_neg(),
    "conj_physical": torch.conj_physical,
    "positive": torch.positive,
    "atleast_2d": torch.atleast_2d,
    "atleast_3d of several": lambda h: torch.atleast_3d(h, h.exp())[0],  # type: ignore[no-untyped-call]
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h.exp(), h)[1],  # type: ignore[no-untyped-call]
    "to_dense": lambda h: h.to_dense(),
    "dropout": lambda h: F.dropout(h, 0.0),
    "dropout in eval mode": lambda h: F.dropout(h, 0.5, training=False),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.5, training=False),
    "feature_dropout": lambda h: F.dropout1d(h, 0.5, training=False),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h, 0.5, training=False),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda h: h.to(torch.float64, copy=True),
    "flatten": lambda h: h.flatten(1).view_as(h),
    "view": lambda h: h.view(h.shape),
    "expand": lambda h: h.expand_as(h),
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h[:, :1], h)[0],  # type: ignore[no-untyped-call]
    "clone": lambda h: h.clone(),
}


class Observed(nn.Module):
    """Two layers, and a look without gradients at what is between them."""

    def __init__(self, look: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.look = nn.Linear(8, 8), nn.Linear(8, 8), look

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            same = self.look(h)
            scale = same.square()
        return (self.second(h) * scale + 0.5 * same).square().mean()


class Written(nn.Module):
    """A tensor that is read and written to under two names."""

    def __init__(self, rename: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.rename = nn.Linear(8, 8), nn.Linear(8, 8), rename

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + 1
        same, again = self.rename(h), self.rename(self.rename(h))
        same += self.second.bias
        h.mul_(1.5)
        again[:, 0] -= 0.5
        return (h * self.second(same) + again).square().mean()


def unchanged(look: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert_unchanged(Observed(look).double(), {"x": torch.randn(6, 5, 8, dtype=torch.float64)})


@pytest.mark.parametrize("name", RETURNING)
def test_what_an_op_returns_keeps_its_gradient(name: str) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    assert RETURNING[name](x) is x
    unchanged(RETURNING[name])


@pytest.mark.parametrize("name", RETURNING)
def test_what_is_written_to_a_result_is_written_to_the_operand(name: str) -> None:
    torch.manual_seed(0)
    assert_unchanged(Written(RETURNING[name]).double(), {"x": torch.randn(6, 5, 8, dtype=torch.float64)})


@pytest.mark.parametrize("name", OTHERS)
def test_what_an_op_makes_has_no_gradient(name: str) -> None:
    unchanged(OTHERS[name])


def test_a_loss_that_is_only_looked_at() -> None:
    """Losses of torch broadcast their operands: equal ones are returned."""
    unchanged(lambda h: F.mse_loss(h, h.roll(1, -1), reduction="none"))
