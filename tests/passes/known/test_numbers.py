"""Sizes that a function needs as numbers: the trace starts again once, with all inputs that count the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoptd.passes.known.numbers import SizeNeeded, number
from autoptd.passes.known.scans import linear_recurrence
from autoptd.passes.trace import trace as tracing
from autoptd.passes.trace.trace import trace


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.enter = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        h = linear_recurrence(self.gate(x).sigmoid(), self.enter(x))
        return (h.sum(-1) * weights).mean()


def test_a_number_is_itself() -> None:
    assert number(5) == 5


def test_the_inputs_of_a_size_are_found() -> None:
    specs = {"x": ((6, 6, 4), torch.float32), "y": ((6, 8), torch.float32), "z": ((6, 4, 6), torch.float32)}
    assert SizeNeeded(frozenset({6})).dims(specs) == {("x", 1), ("z", 2)}


def test_a_scan_is_traced_with_its_tokens_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    exports, export = list[Any](), torch.export.export
    monkeypatch.setattr(tracing.torch.export, "export", lambda *a, **k: exports.append(k) or export(*a, **k))
    found = trace(Scan(), {"x": torch.randn(3, 12, 4), "weights": torch.randn(3, 12)})
    assert {str(s) for s in found.sizes} == {"b"}
    assert len(exports) == 2  # the first ends at the scan
