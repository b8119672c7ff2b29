"""The notation of a view between two shapes."""

from __future__ import annotations

import pytest
import torch

from autoptd.passes.opcall import OpCall, TensorInfo
from autoptd.passes.rules.views import view
from autoptd.passes.trace.traced import BATCH

B = BATCH


@pytest.mark.parametrize(
    ("source", "target", "notation"),
    [
        ((B, 7, 24), (B, 7, 3, 4, 2), "d0 d1 (d2 d3 d4) -> d0 d1 d2 d3 d4"),
        ((6, 6), (4, 9), "(d0 3) 6 -> (d0 2) 9"),
        ((B, 0, 8), (B, 0), "d0 . . -> d0 ."),
        ((B, 1, 0, 8), (B, 1, 8, 0), "d0 1 . . -> d0 1 . ."),
        ((0, 4), (4, 0, 2), ". . -> . . ."),
    ],
)
def test_view(source: tuple[int, ...], target: tuple[int, ...], notation: str) -> None:
    infos = [TensorInfo(shape, torch.float32, False) for shape in (source, target)]
    call = OpCall(torch.ops.aten.reshape.default, (infos[0], list(target)), {}, (infos[1],))
    assert view(call) == notation
