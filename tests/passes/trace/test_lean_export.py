"""Export without work that no plan reads, by the one file that uses these private parts of torch. Seen in 2.13.0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from autoptd.passes.trace.trace import trace


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # torch.export makes a graph module of such a region
            scale = x.square().mean()
        return self.linear(x * scale).sum()


def test_code_is_written_for_the_result_only(monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], fx.GraphModule.recompile
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda module: written.append(module) or write(module))
    trace(Scaled(), {"x": torch.empty(3, 4)})
    assert len(written) <= 1


def test_no_memory_formats_are_looked_for() -> None:
    traced = trace(Scaled(), {"x": torch.empty(3, 4)})
    assert not any(node.meta.get("tensor_meta") for node in traced.graph.graph.nodes)
