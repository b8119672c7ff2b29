"""Arrays of NumPy that become tensors are those of the time: changes that a tensor would share are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import UnsupportedOp

WIDTH = 4


class Decayed(nn.Module):
    def __init__(self, make: Callable[[Any], Tensor], changes: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.make, self.changes = make, changes

    def forward(self, x: Tensor) -> Tensor:
        share = np.ones(WIDTH)
        for layer in self.layers:
            x = layer(x * self.make(share))
            if self.changes:
                share *= 0.5
        return x.square().mean()


def traced(make: Callable[[Any], Tensor], changes: bool = True) -> autoptd.TracedModel:
    inputs = {"x": torch.randn(4, WIDTH, dtype=torch.float64)}
    return autoptd.trace(Decayed(make, changes).double(), inputs=inputs, precision="fp64")


@pytest.mark.parametrize(
    "make", [lambda a: torch.from_numpy(a), lambda a: torch.as_tensor(a), lambda a: torch.asarray(a)]
)
def test_memory_that_changes_is_refused(make: Callable[[Any], Tensor]) -> None:
    with pytest.raises(UnsupportedOp, match="changes a NumPy array whose memory a tensor shares"):
        traced(make)
    traced(make, changes=False)


def test_a_copy_is_exact() -> None:
    source = traced(torch.tensor)
    par = autoptd.parallelize(source, world=1, batch=4, cluster="local", optimizer="sgd")
    batch = {"x": torch.randn(4, WIDTH, dtype=torch.float64)}
    with torch.no_grad():
        assert float(par.eval_step(batch)) == pytest.approx(float(source.model(**batch)), rel=1e-12)
