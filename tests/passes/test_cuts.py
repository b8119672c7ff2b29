"""Cuts: none within a module that many tensors cross, if few enter and leave it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.passes.test_fold import Stack, folded

WIDTH, PARTS = 8, 6


class Mixer(nn.Module):
    """x + out(mix(x)), where the mixture computes `PARTS` tensors, each in many steps, before it reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(WIDTH, WIDTH * PARTS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.up(x).chunk(PARTS, -1))
        for _ in range(10):
            parts = [(y * 0.9).sin() for y in parts]
        y = parts[0]
        for part in parts[1:]:
            y = y @ part.mT @ part
        return x + self.out(y)


def test_a_module_that_many_tensors_cross_is_one_segment() -> None:
    found = folded(Stack([Mixer(), Mixer(), Mixer()]), x=torch.ones(6, 5, 4, dtype=torch.float64))
    owners = [{found.traced.parameters[p.name].rpartition(".")[0] for p in s.parameters} for s in found.segments]
    assert {"blocks.1.up", "blocks.1.out"} in owners
    assert all(len(s.receives) <= 2 for s in found.segments)
