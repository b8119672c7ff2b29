"""Recurrent layers without dropout draw no random numbers: they train as on one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.testing.parity import differences, train_alone, train_in_lockstep

SGD = {"lr": 0.1}


class Model(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)
        self.inner = kind(6, 4, **options)
        self.down = nn.Linear(8 if options.get("bidirectional") else 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.up(x))[0]).square().mean()


KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {"num_layers": 2}),
    "GRU": (nn.GRU, {"bidirectional": True}),
    "RNN": (nn.RNN, {"dropout": 0.0}),
}


@cache
def traced(name: str) -> tuple[Model, autoptd.TracedModel]:
    kind, options = KINDS[name]
    model = Model(kind, batch_first=True, **options).double()
    return model, autoptd.trace(model, inputs={"x": torch.empty(4, 5, 8, dtype=torch.float64)}, precision="fp64")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fix", [{"dp": 2, "micro": 2}, {"tp": 2}, {"pp": 2, "micro": 4}], ids=str)
def test_trains_as_one_process(name: str, fix: dict[str, Any]) -> None:
    model, source = traced(name)
    asked = {"world": 2, "cluster": "local", "batch": 8, "precision": "fp64", "optimizer": "sgd"}
    parallel = autoptd.parallelize(source, fix=fix, optimizer_options=SGD, **asked)
    batches = [{"x": torch.randn(8, 5, 8, dtype=torch.float64)} for _ in range(2)]
    ours = train_in_lockstep(parallel, batches)
    alone = train_alone(model, batches, loss=None, optimizer="sgd", optimizer_options=SGD, clip_norm=None)
    for found, expected in ((ours.gradients, alone.gradients), (ours.state, alone.state)):
        assert {n: d for n, d in differences(found, expected).items() if not d <= 1e-10} == {}
