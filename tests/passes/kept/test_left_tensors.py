"""Tensors that a pass leaves in attributes: refused where the next pass reads them, allowed where none does."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import UnsupportedOp
from autoptd.passes.trace.trace import trace


class Model(nn.Module):
    """A layer between others, which the subclasses write."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.start()

    def start(self) -> None: ...

    def step(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.step(self.layer(x))).square().mean()


class Memory(Model):
    def start(self) -> None:
        self.memory: Tensor | None = None

    def step(self, h: Tensor) -> Tensor:
        y = h if self.memory is None else h + self.memory
        self.memory = h.detach()
        return y


class Mean(Model):
    def start(self) -> None:
        self.mean = torch.zeros(4)

    def step(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class History(Model):
    def start(self) -> None:
        self.history = deque([torch.zeros(())], maxlen=4)

    def step(self, h: Tensor) -> Tensor:
        self.history.append(h.detach().mean())
        return h / (torch.stack(list(self.history)).sum() + 1)


class Growing(Model):
    def start(self) -> None:
        self.scale = torch.tensor(1.0)

    def step(self, h: Tensor) -> Tensor:
        self.scale = self.scale * 1.1
        return h * self.scale


class Drawn(Model):
    """Numbers that the first pass draws, for all."""

    def start(self) -> None:
        self.projection: Tensor | None = None

    def step(self, h: Tensor) -> Tensor:
        if self.projection is None:
            self.projection = torch.randn(4, 4)
        return h @ self.projection


class Pair(Model):
    def start(self) -> None:
        self.pair = (torch.zeros(()), 1)

    def step(self, h: Tensor) -> Tensor:
        y = h - self.pair[0]
        self.pair = (h.detach().mean(), 1)
        return y


class Run:
    """An object that holds a tensor."""

    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = torch.zeros(())


class InObject(Model):
    def start(self) -> None:
        self.run = Run()

    def step(self, h: Tensor) -> Tensor:
        y = h - self.run.mean
        self.run.mean = h.detach().mean()
        return y


class OwnGenerator(Model):
    def start(self) -> None:
        self.generator = np.random.default_rng(0)

    def step(self, h: Tensor) -> Tensor:
        return h * float(self.generator.uniform(0.5, 1))


class PythonGenerator(OwnGenerator):
    def start(self) -> None:
        self.generator = random.Random(0)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Memory, "memory"),
        (Mean, "mean"),
        (History, "history"),
        (Growing, "scale"),
        (Drawn, "projection"),
        (Pair, "pair"),
        (InObject, "mean of object Run"),
    ],
)
def test_a_tensor_that_the_next_pass_reads_is_refused(kind: type[Model], name: str) -> None:
    with pytest.raises(UnsupportedOp, match=f"reads {name} of the pass before") as caught:
        trace(kind(), {"x": torch.ones(2, 4)})
    assert caught.value.where == name and "register_buffer" in caught.value.fix
    assert "a table of sizes" in caught.value.fix


@pytest.mark.parametrize("kind", [OwnGenerator, PythonGenerator])
def test_generators_of_a_module_are_refused(kind: type[Model]) -> None:
    with pytest.raises(UnsupportedOp, match="changes generator, a Python value, in every pass"):
        trace(kind(), {"x": torch.ones(2, 4)})


class Noted(Model):
    """The statistics of this pass, read behind the layer, and what no line reads."""

    def start(self) -> None:
        self.losses: list[Tensor] = []
        self.seen: list[Tensor] = []

    def step(self, h: Tensor) -> Tensor:
        self.mean, self.losses = h.mean(1, keepdim=True), []
        self.losses.append(h.square().mean())
        self.seen.append(h.detach())
        return (h - self.mean) * sum(self.losses) + self.mean


class Cached(Model):
    """Tables of buffers and numbers, computed by the first pass."""

    def start(self) -> None:
        self.register_buffer("rates", torch.linspace(0.1, 1.0, 4))
        self.table: Tensor | None = None
        self.ones: Tensor | None = None

    def step(self, h: Tensor) -> Tensor:
        if self.table is None or self.ones is None:
            self.table, self.ones = torch.outer(torch.arange(16.0), self.rates).cos(), torch.ones(4)
        return h * self.table[3] * self.ones


@pytest.mark.parametrize("kind", [Noted, Cached])
def test_what_no_later_pass_reads_and_caches_are_allowed(kind: type[Model]) -> None:
    model = kind()
    before = {name: x for name, x in vars(model).items() if not name.startswith("_")}
    trace(model, {"x": torch.ones(2, 4)})
    assert before == {name: x for name, x in vars(model).items() if not name.startswith("_")}


class Recurrent(Model):
    """A recurrent layer, which lists its parameters."""

    def start(self) -> None:
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def step(self, h: Tensor) -> Tensor:
        y: Tensor = self.rnn(h)[0]
        return y


def test_lists_of_parameters_are_left_by_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[object] = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: times.append(args) or export(*args, **kwargs))
    trace(Recurrent(), {"x": torch.ones(2, 3, 4)})
    assert len(times) == 1
