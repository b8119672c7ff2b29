"""Recurrent layers: as on one process, with dropout between layers drawn by key."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.passes.known.recurrence import layer_by_layer
from autoptd.verification.smaller.smaller import Subject
from autoptd.verification.trial import trial_on
from autoptd.verification.verdict import judge


class Model(nn.Module):
    """A recurrent net, whose outputs and last states both count."""

    def __init__(self, kind: type[nn.RNNBase], width: int, **options: Any) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)
        self.inner = kind(6, 4, batch_first=True, **options)
        self.down = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.inner(self.up(x))
        last = state[0] if isinstance(state, tuple) else state
        return self.down(y).square().mean() + (last[-1].square() * last.mean(0)).mean()


KINDS: dict[str, tuple[type[nn.RNNBase], int, dict[str, Any]]] = {  # kind, width of its outputs, options
    "LSTM": (nn.LSTM, 4, {"num_layers": 2}),
    "LSTM dropout": (nn.LSTM, 4, {"num_layers": 3, "dropout": 0.3}),
    "LSTM projected dropout": (nn.LSTM, 4, {"num_layers": 2, "dropout": 0.3, "proj_size": 2, "bidirectional": True}),
    "GRU": (nn.GRU, 8, {"bidirectional": True}),
    "GRU dropout": (nn.GRU, 4, {"num_layers": 2, "dropout": 0.3, "bias": False}),
    "RNN": (nn.RNN, 4, {"dropout": 0.0}),
    "RNN dropout": (nn.RNN, 4, {"num_layers": 2, "dropout": 0.3, "nonlinearity": "relu"}),
}


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    kind, width, options = KINDS[name]
    return Model(kind, width, **options).double()


@cache
def traced(name: str) -> autoptd.TracedModel:
    return autoptd.trace(model_of(name), inputs={"x": torch.empty(4, 5, 8, dtype=torch.float64)}, precision="fp64")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fix", [{"dp": 2, "micro": 2}, {"tp": 2}, {"pp": 2, "micro": 4}], ids=str)
def test_trains_as_one_process(name: str, fix: dict[str, Any]) -> None:
    source = traced(name)
    plan = autoptd.plan(source, world=2, cluster="dgx-h100", batch=8, optimizer="sgd", fix=fix)
    batches = [{"x": torch.randn(8, 5, 8, dtype=torch.float64)} for _ in range(2)]
    trial = trial_on(Subject(source, plan, source), batches)
    assert trial.drops and bool(trial.draws) == ("dropout" in name)
    verdict = judge(trial, plan)
    assert verdict.agrees, verdict.faults


@pytest.mark.parametrize("name", [name for name in KINDS if "dropout" in name])
@pytest.mark.parametrize("everything", [True, False])
def test_layers_one_by_one_are_torchs_recurrent_net(
    name: str, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take away everything between layers, or nothing, and compare values and gradients."""
    model, x = model_of(name), torch.randn(4, 5, 8, dtype=torch.float64)
    model.inner.dropout = float(everything)
    wanted = _with_gradients(model, x)
    model.inner.dropout = 0.5
    monkeypatch.setattr(F, "dropout", lambda x, p, train: x * 0 if everything else x)
    with layer_by_layer():
        found = _with_gradients(model, x)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def _with_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters())]
