"""Tracing without data, by the one file that uses private parts of torch. Seen in torch 2.13.0."""

from __future__ import annotations

import torch
from torch import nn

from autoptd.passes.trace.fake import fake_cpu
from autoptd.passes.trace.trace import trace


def test_tensors_take_no_memory() -> None:
    with fake_cpu():
        x = torch.empty(1 << 40, dtype=torch.float64)  # 8 TiB
    assert x.shape == (1 << 40,) and x.device.type == "cpu"


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[..., [-2, 1]].sum()


def test_constants_that_a_forward_makes_keep_their_values() -> None:
    """The index list would become a tensor without values on the meta device."""
    with torch.device("meta"):
        model = Last()
    traced = trace(model, {"x": torch.empty(3, 4, device="meta")})
    values = [v.tolist() for name, v in traced.constants.items() if name not in traced.buffers]
    assert values == [[-2, 1]]
