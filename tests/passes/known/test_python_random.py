"""Models that draw fractions with Python's random module: as on one process, and different in every step."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from random import random as fraction
from random import uniform

import pytest
import torch
from torch import Tensor, nn
from torch.random import fork_rng
from torch.utils.checkpoint import checkpoint

import autoptd
from autoptd.errors import UnsupportedOp
from autoptd.passes.known.python_random import fractions_drawn_by_torch
from autoptd.passes.trace.trace import trace
from autoptd.verification.smaller.smaller import Subject
from autoptd.verification.trial import trial_on
from autoptd.verification.verdict import judge


class Skipping(nn.Module):
    """Skips layers by `random.uniform`."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.layers, self.rate = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), rate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and random.uniform(0, 1) < self.rate:
                continue
            x = x + layer(x).tanh()
        return self.end(x).square().mean()

    def end(self, x: Tensor) -> Tensor:
        return x


class Scaled(Skipping):
    """Scales what all samples are by fractions, drawn by functions of their own names."""

    def end(self, x: Tensor) -> Tensor:
        return x * (1 + fraction()) + uniform(-1, 3)


class Chosen(Skipping):
    """Chooses by a number that Python needs."""

    def end(self, x: Tensor) -> Tensor:
        return x * random.choice([1, 2])


def trained(model: nn.Module, fix: dict[str, int]) -> object:
    torch.manual_seed(0)
    data = [{"x": torch.randn(8, 8, dtype=torch.float64)} for _ in range(4)]
    source = autoptd.trace(model.double(), inputs=data[0], precision="fp64")
    planned = autoptd.plan(source, world=2, cluster="dgx-h100", batch=8, optimizer="sgd", fix=fix)
    trial = trial_on(Subject(source, planned, source), data)
    verdict = judge(trial, planned)
    assert trial.drops and verdict.agrees, verdict.faults
    return trial.expected


MODELS = {"skips": Skipping(), "never skips": Skipping(0.0), "scales": Scaled(), "scales all": Scaled(0.0)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fix", [{"dp": 2, "micro": 2}, {"tp": 2}], ids=str)
def test_trains_as_one_process(name: str, fix: dict[str, int]) -> None:
    trained(MODELS[name], fix)


def test_layers_are_skipped_in_some_steps() -> None:
    expected = trained(Skipping(), {"dp": 2})
    assert len({name for step in expected for name in step.gradients}) == 6  # type: ignore[attr-defined]
    assert {len(step.gradients) for step in expected} != {6}  # type: ignore[attr-defined]


def test_other_draws_are_refused() -> None:
    with pytest.raises(UnsupportedOp, match="Python's random module"):
        autoptd.trace(Chosen(), inputs={"x": torch.empty(4, 8)})


def test_the_module_is_left_as_it_was() -> None:
    with fractions_drawn_by_torch(Skipping()):
        assert isinstance(random.random(), Tensor) and isinstance(fraction(), Tensor)
        assert isinstance(random.randint(1, 2), int)
    assert isinstance(random.random(), float) and isinstance(fraction(), float)


@contextmanager
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@contextmanager
def kept() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@contextmanager
def imported() -> Iterator[None]:
    with fork_rng():
        yield


class Projected(nn.Module):
    """A layer behind noise that is drawn under a seed."""

    def __init__(self, seed: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.layer, self.seed = nn.Linear(4, 4), seed

    def forward(self, x: Tensor) -> Tensor:
        with self.seed():
            noise = torch.randn(4, 4, dtype=x.dtype)
        return self.layer(x @ noise).square().mean()


@pytest.mark.parametrize(("seed", "name"), [(seeded, "manual_seed"), (kept, "get_rng_state"), (imported, "fork_rng")])
def test_seeds_in_forward_are_refused(seed: Callable[[], AbstractContextManager[None]], name: str) -> None:
    with pytest.raises(UnsupportedOp, match=f"forward calls torch.*{name}") as caught:
        trace(Projected(seed), {"x": torch.ones(2, 4)})
    assert "test_python_random.py" in caught.value.where and "register_buffer" in caught.value.fix


@pytest.mark.parametrize("wrapped", [False, True])
def test_seeds_are_refused_before_and_after_dynamo_wraps_them(monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    """The import of torch._dynamo puts a wrapper in the place of torch.manual_seed."""
    own = torch.random.manual_seed
    monkeypatch.setattr(torch, "manual_seed", torch._disable_dynamo(own) if wrapped else own)
    with pytest.raises(UnsupportedOp, match=r"torch\.manual_seed"):
        trace(Projected(seeded), {"x": torch.ones(2, 4)})


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(x).square().mean()


def test_traces_of_two_threads_refuse_seeds() -> None:
    """Neither gives back what the other has patched."""
    stop, failed = threading.Event(), list[Exception]()

    def others() -> None:
        while not stop.is_set():
            try:
                trace(Slow(4, 4), {"x": torch.ones(2, 4)})
            except Exception as error:  # noqa: BLE001
                failed.append(error)

    class Seeded(Slow):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.05)
            with seeded():
                return super().forward(x + torch.randn(4, dtype=x.dtype))

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(6):
            with pytest.raises(UnsupportedOp, match=r"torch\.manual_seed"):
                trace(Seeded(4, 4), {"x": torch.ones(2, 4)})
    finally:
        stop.set()
        thread.join()
    assert not failed


@pytest.mark.parametrize("draw", [torch.randn, torch.rand, lambda *n, **k: torch.empty(*n).bernoulli_(0.5, **k)])
@pytest.mark.parametrize("sized", [True, False])
def test_a_generator_of_its_own_is_refused(draw: Callable[..., Tensor], sized: bool) -> None:
    class Noisy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            noise = draw(x.shape[0] if sized else 1, 4, generator=self.generator)
            return super().forward(x + noise).square().mean()

    with pytest.raises(UnsupportedOp, match=r"a torch\.Generator of its own") as caught:
        trace(Noisy(), {"x": torch.ones(2, 4)})
    assert "test_python_random.py" in caught.value.where and "leave generator= out" in caught.value.fix


def test_checkpoints_keep_states_of_generators() -> None:
    """State of torch's own, for what it computes again."""

    class Checkpointed(Projected):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False).square().mean()

    trace(Checkpointed(seeded), {"x": torch.ones(2, 4)})
