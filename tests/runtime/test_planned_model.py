"""Changes of a model between steps, which the program does not see: a step is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import RuntimeFault
from autoptd.parallel import Parallel
from autoptd.testing.parity import train_in_lockstep


class Annealed(nn.Module):
    """A loss with a weight that training loops change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.beta = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4)), 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return y.square().mean() + self.beta * y.abs().mean()


def weight(model: Annealed) -> None:
    model.beta = 0.5


def rate(model: Annealed) -> None:
    model.layers[1].p = 0.5  # type: ignore[union-attr]


def frozen(model: Annealed) -> None:
    model.layers[0].requires_grad_(False)


CHANGES: dict[str, Callable[[Annealed], object]] = {
    "beta": weight,
    "layers.1.p": rate,
    "layers.0.weight.requires_grad": frozen,
    "training": lambda model: model.eval(),
}


def made(world: int) -> tuple[Annealed, Parallel, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = Annealed().double(), {"x": torch.randn(4, 4, dtype=torch.float64)}
    fix, inputs = {"dp": world}, {"x": batch["x"][:2]}
    parallel = autoptd.parallelize(
        model, world=world, cluster="dgx-h100", batch=4, inputs=inputs, precision="fp64", fix=fix
    )
    return model, parallel, batch


@pytest.mark.fault("a changed model")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_step_with_a_changed_model_is_refused(name: str, world: int) -> None:
    model, parallel, batch = made(world)
    CHANGES[name](model)
    with pytest.raises(RuntimeFault, match=f"InputsError: {name} of the model was .* when it was planned") as caught:
        train_in_lockstep(parallel, [batch])
    assert "as an input of forward" in str(caught.value)


def test_a_model_that_is_as_it_was_planned_is_trained() -> None:
    model, parallel, batch = made(2)
    model.eval()
    model.train()
    model.note = object()  # type: ignore[assignment]
    train_in_lockstep(parallel, [batch])
