"""Inputs that are cast to the dtype of a model's parameters."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from autoptd.passes.normalise.input_types import inputs_to_cast


class Read(nn.Module):
    """Multiplies `x` after `times` rounds of copies that are joined; `t` is used in arithmetic before its product."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.linear = times, nn.Linear(4, 4)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.cat([x.flip(-1), x.roll(1, -1)])[:6]
        return self.linear(x) + self.linear(t.sin())


@pytest.mark.parametrize("times", [0, 1, 20])
def test_an_input_is_cast_where_a_product_takes_it_moved_at_most(times: int) -> None:
    """Regression: each round doubled the paths back to the input, and all of them were walked."""
    found = torch.export.export(Read(times), (torch.ones(6, 4), torch.ones(6, 4))).graph
    start = time.process_time()
    assert inputs_to_cast(found, {"x": "x", "t": "t"}, [torch.float32], torch.float32) == {"x"}
    assert time.process_time() - start < 1
