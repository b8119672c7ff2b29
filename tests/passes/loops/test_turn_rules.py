"""Ops of a loop over samples, written for all of its turns at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.test_run import WIDTH, trained

Turn = Callable[["Looped", Tensor], Tensor]


class Looped(nn.Module):
    """A loop over samples, each of which is a tensor [1, s, h]."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.a, self.b, self.turn = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), turn

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.cat([self.turn(self, row.unsqueeze(0)) for row in h])).square().mean()


TURNS: dict[str, Turn] = {
    "mT": lambda model, x: (x @ x.mT).softmax(-1) @ x,
    "triangle": lambda model, x: (x @ x.mT).tril() @ x,
    "einsum of both": lambda model, x: torch.einsum("bsh,bth->bst", x, x) @ x,
    "einsum with a weight": lambda model, x: torch.einsum("bsh, oh -> bso", x, model.b.weight),
}


@pytest.mark.parametrize("turn", TURNS)
def test_as_on_one_process(turn: str) -> None:
    torch.manual_seed(0)
    _, wrong = trained(Looped(TURNS[turn]), dp=2, tp=2)
    assert wrong == []
