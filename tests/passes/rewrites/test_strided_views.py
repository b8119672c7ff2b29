"""`as_strided` as windows, slices and permutations: the same elements as torch reads, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import UnsupportedOp
from autoptd.passes.rewrites import strided_views
from tests.parity.parity_check import TOLERANCE, step_off_by

WIDTH, TOKENS = 4, 12
View = Callable[[Tensor], Tensor]


def windows(x: Tensor) -> Tensor:
    """Read windows of eight tokens, four apart: [b, 2, 8, h]."""
    b, s, h = x.stride()
    return x.as_strided((x.size(0), x.size(1) // 4 - 1, 8, WIDTH), (b, 4 * s, s, h))


def chunks(x: Tensor) -> Tensor:
    """Read windows as Longformer does, from chunks that do not overlap."""
    x = x.view(x.size(0), torch.div(x.size(1), 4, rounding_mode="trunc"), 4, WIDTH)
    b, n, s, h = x.stride()
    return x.as_strided((x.size(0), 2 * x.size(1) - 1, 4, WIDTH), (b, n // 2, s, h))


def turned(x: Tensor) -> Tensor:
    b, s, h = x.stride()
    return x.as_strided((x.size(0), WIDTH, x.size(1)), (b, h, s))


def every_other(x: Tensor) -> Tensor:
    b, s, h = x.stride()
    return x.as_strided((x.size(0), x.size(1) // 2 - 1, 2), (b, 2 * s, h), s + 1)


def repeated(x: Tensor) -> Tensor:
    b, s, h = x.stride()
    return x.as_strided((x.size(0), 3, x.size(1), WIDTH), (b, 0, s, h))


def diagonal(x: Tensor) -> Tensor:
    """Read elements of a dim past its end: of the next token."""
    b, s, h = x.stride()
    return x.as_strided((x.size(0), 3, 4), (b, s + h, h))


class Strided(nn.Module):
    def __init__(self, view: View) -> None:
        super().__init__()
        self.one, self.view = nn.Linear(WIDTH, WIDTH), view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(torch.tanh(self.one(x)).contiguous()).square().mean()


def given() -> dict[str, Tensor]:
    return {"x": torch.randn(6, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("view", [windows, chunks, turned, every_other, repeated])
def test_as_on_one_process(view: View) -> None:
    torch.manual_seed(0)
    assert step_off_by(Strided(view).double(), given(), dp=2, tp=2, micro=1) <= TOLERANCE


def test_steps_into_the_next_row_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedOp, match="as_strided reads elements that are not proved"):
        autoptd.trace(Strided(diagonal), inputs=given(), precision="fp64")


def test_windows_of_another_step_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = strided_views._Writer._slice
    monkeypatch.setattr(
        strided_views._Writer, "_slice", lambda self, dim, start, end, step: plain(self, dim, start - 1, end - 1, step)
    )
    torch.manual_seed(0)
    with pytest.raises(AssertionError):
        assert step_off_by(Strided(every_other).double(), given(), dp=2, tp=2, micro=1) <= TOLERANCE
