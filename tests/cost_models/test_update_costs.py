"""Costs of optimizers' updates, worked out by hand, and their state against that of torch's classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoptd.cost_models.memory import MOMENTS, UPDATE_COSTS, state_elements
from autoptd.runtime.optimizers.named import NAMED, READS


def test_by_hand() -> None:
    muon, adafactor = UPDATE_COSTS["muon"], UPDATE_COSTS["adafactor"]
    assert muon.elements((3, 5), True) == 15 and muon.elements((3, 5), False) == 30
    assert muon.flops((3, 5)) == muon.flops((5, 3)) == 5 * (4 * 9 * 5 + 2 * 27)
    assert adafactor.elements((3, 5), True) == 8 and adafactor.elements((7,), True) == 7
    assert adafactor.elements((), True) == 1 and muon.flops(()) == 0
    assert adafactor.elements((2, 3, 5), True) == 16 and adafactor.flops((3, 5)) == 0
    with pytest.raises(ValueError, match="unknown term '3 k'"):
        state_elements("n + 3 k", (2,))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(12, 7), (5,), (2, 3, 4)])
def test_torch_keeps_as_much(name: str, shape: tuple[int, ...]) -> None:
    reads = READS[NAMED[name].make]  # type: ignore[index]
    if name == "muon" and len(shape) != 2:
        return
    weight = nn.Parameter(torch.ones(shape))
    weight.grad = torch.ones(shape)
    made = NAMED[name].make([weight])
    made.step()
    kept = sum(x.numel() for x in made.state[weight].values() if isinstance(x, torch.Tensor) and x.ndim)
    assert kept == UPDATE_COSTS[name].elements(shape, reads == "whole")


def test_every_optimizer_has_its_cost() -> None:
    assert UPDATE_COSTS.keys() == MOMENTS.keys() == {*NAMED, "custom", "custom-whole"}
    for name, named in NAMED.items():
        assert (READS[named.make] == "whole") == (UPDATE_COSTS[name].whole != "none")  # type: ignore[index]
