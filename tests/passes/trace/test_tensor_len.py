"""`len` of a tensor is a size of the trace, and plain `len` before and after it."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from autoptd.passes.trace.tensor_len import symbolic_len, tensor_len
from tests.passes.interpret import assert_unchanged

HERE = sys.modules[__name__]


class ByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: len(self.layers)]:
            x = layer(x).reshape(len(x), -1)
        return x.square().sum() / len(x)


def test_the_number_of_samples_stays_a_size() -> None:
    assert_unchanged(ByLength().double(), {"x": torch.randn(6, 4, dtype=torch.float64)})


def test_len_is_given_back() -> None:
    model = ByLength()
    try:
        with symbolic_len(model):
            assert HERE.len is tensor_len and len(torch.zeros(3)) == 3 and len("four") == 4
            raise RuntimeError
    except RuntimeError:
        assert not hasattr(HERE, "len")


def test_a_module_keeps_its_own_len() -> None:
    HERE.len = own = lambda x: 7  # type: ignore[attr-defined]
    try:
        with symbolic_len(ByLength()):
            assert HERE.len is own
        assert HERE.len is own
    finally:
        del HERE.len
