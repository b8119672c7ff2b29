"""Copies of a model that train as it does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoptd.verification.copies import copied


class Remembers(nn.Module):
    """Holds the last state of its scan, as RecurrentGemma does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.ones(3)), None

    def forward(self, x: Tensor) -> Tensor:
        self.state = x * self.weight
        return self.state.sum()


def test_a_state_that_a_forward_pass_left_is_copied() -> None:
    model = Remembers()
    model(torch.arange(3.0)).backward()
    made = copied(model, None).model
    assert made.state is not model.state and not made.state.requires_grad
    assert torch.equal(made.state, model.state)
