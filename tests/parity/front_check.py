"""A model, a batch and a loss, as users pass them to `autoptd.parallelize`, against one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import autoptd
from autoptd.api import Parallel
from autoptd.passes.trace.loss import Targets
from autoptd.testing.parity import train_alone, train_in_lockstep
from tests.parity.parity_check import OPTIONS, complaints

WIDTH, SAMPLES = 16, 15  # of 16 planned samples: the last microbatch of the last rank is short
CUBE = (2, 2, 2)  # dp, tp, pp
MESHES = ((2, 1, 1), (1, 2, 1), (1, 1, 2), CUBE)


class Plain(nn.Module):
    """Three layers that return an output, not a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, 32), nn.Linear(32, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Scored(Plain):
    """`Plain` that returns a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def x() -> dict[str, Tensor]:
    return {"x": random(SAMPLES, WIDTH)}


def planned(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    loss: Callable[..., Tensor] | None = None,
    targets: Targets | None = None,
    mesh: tuple[int, int, int] = CUBE,
    traced: int = 2,
    **options: Any,
) -> Parallel:
    """Parallelize the model for this mesh; only `traced` samples of inputs and targets are used for tracing."""
    dp, tp, pp = mesh
    some = targets[:traced] if isinstance(targets, Tensor) else targets and {n: t[:traced] for n, t in targets.items()}
    options = {"precision": "fp64", "optimizer": "sgd", "optimizer_options": OPTIONS["sgd"]} | options
    constraints = {"dp": dp, "tp": tp, "pp": pp, "micro": 2} | options.pop("fix", {})
    return autoptd.parallelize(
        model, world=dp * tp * pp, cluster="dgx-h100", batch=16, inputs={n: t[:traced] for n, t in inputs.items()},
        loss=loss, targets=some, fix=constraints, **options,
    )  # fmt: skip


def wrong(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    loss: Callable[..., Tensor] | None = None,
    targets: Targets | None = None,
    mesh: tuple[int, int, int] = CUBE,
    plain: nn.Module | None = None,
    **options: Any,
) -> list[str]:
    """Return the differences from one process after two steps in float64. `plain`: the reference, default `model`."""
    made = planned(model, inputs, loss, targets, mesh, **options)
    named = {"targets": targets} if isinstance(targets, Tensor) else dict(targets or {})
    batches = [{n: t.roll(step, 0) for n, t in {**inputs, **named}.items()} for step in range(2)]
    alone = train_alone(
        plain or model, batches, loss=loss, targets=targets, optimizer="sgd", optimizer_options=OPTIONS["sgd"]
    )
    found = train_in_lockstep(made, batches)
    names = set(alone.state) ^ set(found.state)
    return [f"{name} on one side only" for name in sorted(names)] + complaints("front", found, alone)
