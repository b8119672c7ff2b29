"""Proof by execution that an op's result for all rows is the sum of those for each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoptd.passes.opcall import OpCall, TensorInfo
from autoptd.passes.rules.discover import adds_up

aten = torch.ops.aten
X = TensorInfo((4, 8), torch.float64)


@pytest.mark.parametrize(
    ("target", "args", "shape", "adds"),
    [
        (aten.sum.dim_IntList, ([0],), (8,), True),
        (aten.amax.default, ([0],), (8,), False),
        (aten.narrow.default, (0, 1, 1), (1, 8), False),  # does not run on one row
    ],
    ids=str,
)
def test_adds_up(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], adds: bool) -> None:
    call = OpCall(target, (X, *args), {}, (TensorInfo(shape, torch.float64),))
    assert adds_up(call, {0: 0}) is adds
