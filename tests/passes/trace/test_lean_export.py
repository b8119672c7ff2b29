"""Export without work that no plan reads, by the one file that uses these private parts of torch. Seen in 2.13.0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autoptd
from autoptd.passes.trace import lean_export
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


@pytest.mark.parametrize("installed", [True, False])
def test_einsum_with_and_without_a_library_that_orders_it(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library makes numbers of the operands' sizes, which would fix the number of samples."""
    asked = []

    def last_first(equation: str, *operands: Any, shapes: bool = False, optimize: Any = None) -> Any:
        asked.extend(n for x in operands for n in (x if shapes else x.shape))
        return [(1, 2), (0, 1)], None

    library = SimpleNamespace(contract_path=last_first) if installed else None
    backend = SimpleNamespace(
        enabled=installed, strategy="auto", is_available=lambda: installed, get_opt_einsum=lambda: library
    )
    monkeypatch.setattr(torch.backends, "opt_einsum", backend)
    monkeypatch.setattr(lean_export, "opt_einsum", backend)

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bsi,ij,jk->bsk", x, self.first, self.second).sum()

    autoptd.trace(Products(), inputs={"x": torch.randn(3, 5, 4)}, precision="fp32")
    assert bool(asked) == installed and all(type(n) is int for n in asked)
