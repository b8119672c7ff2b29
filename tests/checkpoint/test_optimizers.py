"""Checkpoints of optimizers beside AdamW: any plan goes on where another stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import CheckpointError
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.testing.process_pool import ProcessPool
from tests.checkpoint.saved import Made, batch, made, session_of, trainer_of
from tests.runtime.optimizers.whole_optimizers import Coded, FewBits, Orthogonal


class OfOwnTypes(torch.optim.Optimizer):
    """Keeps a momentum in float32, flags, and numbers of changed signs, whatever the type of the parameters."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                state, like = self.state[p], torch.zeros_like
                momentum = state.setdefault("momentum", like(p, dtype=torch.float32))
                rises = state.setdefault("rises", like(p, dtype=torch.bool))
                turns = state.setdefault("turns", like(p, dtype=torch.int32))
                rate = state.setdefault("rate", torch.ones((), dtype=torch.float32)).mul_(0.9)
                momentum.mul_(0.9).add_(p.grad.float())
                turns.add_(rises ^ (p.grad > 0))
                rises.copy_(p.grad > 0)
                p.sub_(group["lr"] * rate.double() * momentum.to(p.dtype) / (1 + turns))


class ElementsOfOwnTypes(OfOwnTypes):
    """`OfOwnTypes` for any elements of a parameter."""

    elementwise = True


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": ("muon", {"lr": 0.02, "adamw": {"lr": 1e-2, "eps": 1e-5}}),
    "adafactor": ("adafactor", {"lr": 0.02}),
    "orthogonal": (Orthogonal, {"lr": 0.02}),
    "few bits": (FewBits, {"lr": 0.02}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),  # its product of momenta is in float32
    "own types": (OfOwnTypes, {}),
    "elements of own types": (ElementsOfOwnTypes, {}),
}
READ = [
    ("muon", "all three", "dp 8"),
    ("adafactor", "dp 8, ZeRO 2 in fours", "all three, ZeRO 3, V"),
    ("orthogonal", "all three, ZeRO 3, V", "cut sequences"),
    ("orthogonal", "tp 4", "pp 2, uneven, ZeRO 0"),
    ("few bits", "all three", "dp 8, ZeRO 2 in fours"),
    ("nadam", "all three", "dp 8"),
    ("own types", "all three", "dp 8, ZeRO 2 in fours"),
    ("elements of own types", "pp 4, ZeRO 2", "all three, ZeRO 3, V"),
]


def run(c: Communicators, job: Made, name: str, root: str, steps: range, whole: bool = True) -> dict[str, Tensor]:
    """Load the checkpoint before the first step unless that is step 0; train; save after the last unless `whole`."""
    optimizer, options = OPTIMIZERS[name]
    trainer = trainer_of(c, job, optimizer, options)
    session = session_of(trainer, job.plan)
    if steps.start:
        session.load(Path(root), {}, optimizer=True)
    for step in steps:
        trainer.train_step(batch(step, c))
    if not whole:
        session.save(Path(root), steps.stop, {}, None)
        session.wait()
    return trainer.state_dict()


@pytest.mark.ranks
@pytest.mark.fault("states of an optimizer in another type")
@pytest.mark.parametrize(("name", "writer", "reader"), READ)
def test_another_plan_goes_on(name: str, writer: str, reader: str, pool: ProcessPool, tmp_path: Path) -> None:
    """Compare in float64: Muon rounds gradients to bfloat16, sums of float32 in another order often otherwise."""
    root, (first, second) = str(tmp_path), (made(each, "fp64") for each in (writer, reader))
    pool.run(first.layout.mesh, run, first, name, root, range(2), False)
    expected = pool.run(first.layout.mesh, run, first, name, root, range(4))[0]
    found = pool.run(second.layout.mesh, run, second, name, root, range(2, 4))
    again = pool.run(first.layout.mesh, run, first, name, root, range(2, 4))[0]
    for key, x in expected.items():
        assert torch.equal(again[key], x), key
        assert all((mine[key] - x).norm() <= 1e-12 * x.norm() for mine in found), key


class Boxed(Orthogonal):
    """Keeps a state that is no tensor and no number."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["box"] = [1]


def test_other_states_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    asked: dict[str, Any] = {"world": 1, "inputs": {"input": torch.zeros(2, 8)}, "loss": lambda out: out.square().sum()}
    parallel = autoptd.parallelize(model, **asked, batch=2, precision="fp32", optimizer=Boxed)
    parallel.train_step({"input": torch.ones(2, 8)})
    with pytest.raises(CheckpointError, match=r"state 'box' of 0.weight is a list") as caught:
        parallel.save(tmp_path)
    assert caught.value.fix


class OfOneScale(FewBits):
    """Keeps no scale per row."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            if isinstance(state["momentum"], Coded):
                state["momentum"].scale = state["momentum"].scale[:1]


def with_bits(optimizer: Any) -> autoptd.Parallel:
    torch.manual_seed(0)
    asked: dict[str, Any] = {"world": 1, "inputs": {"input": torch.zeros(2, 8)}, "loss": lambda out: out.square().sum()}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return autoptd.parallelize(model, **asked, batch=2, precision="fp32", optimizer=optimizer)


def test_states_in_parts_of_other_shapes_are_refused_and_change_nothing(tmp_path: Path) -> None:
    parallel, other = with_bits(FewBits), with_bits(type("FewBits", (OfOneScale,), {}))
    for each in (parallel, other):
        each.train_step({"input": torch.ones(2, 8)})
    before = other.state_dict()
    parallel.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"0.weight: momentum-codes \[8, 8\], momentum-scale \[8, 1\] in it"):
        other.load(tmp_path)
    assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())
    other.train_step({"input": torch.ones(2, 8)})
