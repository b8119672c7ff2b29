"""Models that take nested inputs, flags and nested targets: trained as in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import AutoptdError, RuntimeFault
from autoptd.testing.parity import differences, train_alone, train_in_lockstep

SAMPLES, WIDTH = 8, 6
SGD = {"lr": 0.1}


@dataclass
class Features:
    dense: Tensor
    others: list[Tensor]
    scale: float = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, 2)

    def forward(self, features: Features, mode: str = "sum", extra: Tensor | None = None) -> dict[str, Tensor]:
        a, b = self.first(features.dense), self.second(features.others[0])
        h = a * b if mode == "product" else a + b
        h = h if extra is None else h + extra
        return {"out": self.head(h.tanh()) * features.scale}


def of_parts(outputs: dict[str, Tensor], wanted: dict[str, Tensor]) -> Tensor:
    return (outputs["out"][:, 0] - wanted["a"]).square().mean() + (outputs["out"][:, 1] - wanted["b"]).abs().mean()


def of_batch(outputs: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
    return (outputs["out"] - batch["features"].dense[:, :2]).square().mean() * batch["features"].scale


def batch(seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(SAMPLES, WIDTH, generator=rng, dtype=torch.float64) for _ in range(2))
    targets = {"wanted": {name: torch.randn(SAMPLES, generator=rng, dtype=torch.float64) for name in "ab"}}
    return {"features": Features(x, [y], 0.5), "mode": "product", "extra": None}, targets


def parallel(fix: dict[str, Any], **given: Any) -> tuple[nn.Module, autoptd.Parallel]:
    torch.manual_seed(0)
    model = Net().double()
    asked = {"world": 2, "cluster": "local", "batch": SAMPLES, "precision": "fp64", "optimizer": "sgd"}
    found = autoptd.parallelize(model, inputs=batch()[0], fix=fix, optimizer_options=SGD, **asked, **given)
    return model, found


@pytest.mark.parametrize("fix", [{"dp": 2, "micro": 2}, {"tp": 2}, {"pp": 2, "micro": 4}], ids=str)
@pytest.mark.parametrize("by", ["targets", "batch"])
def test_trains_as_one_process(fix: dict[str, Any], by: str) -> None:
    given = {"loss": of_parts, "targets": batch()[1]} if by == "targets" else {"loss": of_batch}
    model, found = parallel(fix, **given)
    batches = [{**inputs, **(targets if by == "targets" else {})} for inputs, targets in map(batch, range(2))]
    ours = train_in_lockstep(found, batches)
    alone = train_alone(model, batches, optimizer="sgd", optimizer_options=SGD, **given)
    for mine, expected in ((ours.gradients, alone.gradients), (ours.state, alone.state)):
        assert {n: d for n, d in differences(mine, expected).items() if not d <= 1e-10} == {}


def test_another_flag_is_refused_and_no_rank_waits() -> None:
    _, found = parallel({"dp": 2, "micro": 2}, loss=of_batch)
    inputs = batch()[0]
    with pytest.raises((AutoptdError, RuntimeFault), match="mode is 'sum', but the plan was made for 'product'"):
        train_in_lockstep(found, [{**inputs, "mode": "sum"}], timeout_s=20)
