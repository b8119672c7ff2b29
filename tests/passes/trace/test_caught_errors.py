"""Errors of a trace that forward catches: refused, since it goes on in another way than it does with data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import UnsupportedOp
from autoptd.passes.trace.trace import trace


class Scaled(nn.Module):
    """A layer whose result is multiplied by what a function returns."""

    def __init__(self, scale: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h * self.scale(h)).square().mean()


def of_number(h: Tensor) -> float:
    try:
        return 1 / float(h.detach().abs().max())
    except Exception:  # noqa: BLE001
        return 1.0


def of_branch(h: Tensor) -> float:
    try:
        return 2.0 if (h > 0).sum() > 3 else 3.0
    except Exception:  # noqa: BLE001
        return 1.0


def of_array(h: Tensor) -> float:
    try:
        return float(h.detach().numpy().mean())
    except Exception:  # noqa: BLE001
        return 1.0


@pytest.mark.parametrize("scale", [of_number, of_branch, of_array])
def test_errors_that_only_a_trace_raises_may_not_be_caught(scale: Callable[[Tensor], float]) -> None:
    with pytest.raises(UnsupportedOp, match="forward catches an error that only the trace raises") as caught:
        trace(Scaled(scale), {"x": torch.ones(2, 4)})
    assert "test_caught_errors.py" in caught.value.where


def of_shape(h: Tensor) -> float:
    try:
        h.view(-1, 3, 5)
    except RuntimeError:
        return 2.0
    return 1.0


def test_errors_of_the_model_itself_may_be_caught() -> None:
    trace(Scaled(of_shape), {"x": torch.ones(2, 4)})


def of_compiling(h: Tensor) -> float:
    return 2.0 if torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing() else 3.0


def test_code_that_asks_whether_it_is_compiled_takes_the_branch_that_it_takes_when_it_runs() -> None:
    traced = trace(Scaled(of_compiling), {"x": torch.ones(2, 4)})
    factors = [n.args[1] for n in traced.graph.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    assert factors == [3.0]
