"""Buffers that no step changes: they are those of the weights or of the checkpoint, whatever the model began with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autoptd
from autoptd.api import Parallel
from autoptd.errors import CheckpointError
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep

STILL = ("directions", "norm.running_mean", "unread", "prototypes")
X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 4
BATCH = {"input": X, "targets": Y}


class Features(nn.Module):
    """Random features, a norm that stays in eval mode, a buffer that evaluation alone reads, and one that nothing does.

    Each of them begins with other values wherever a model is made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(8, 16))
        self.norm, self.head = nn.BatchNorm1d(16).eval(), nn.Linear(16, 4)
        nn.init.normal_(self.norm.running_mean)
        self.register_buffer("prototypes", torch.randn(4))
        self.register_buffer("unread", torch.randn(3))

    def forward(self, input: Tensor) -> Tensor:
        out = self.head(self.norm(torch.sin(input @ self.directions)))
        return out if self.training else out + self.prototypes


def made(**options: Any) -> Parallel:
    given = {"world": 1, "batch": 8, "precision": "fp32", "cluster": "dgx-h100", **options}
    return autoptd.parallelize(Features(), inputs={"input": X[:2]}, loss=nn.CrossEntropyLoss(), targets=Y[:2], **given)


def on_ranks(parallel: Parallel, body: Callable[[Parallel], Any]) -> Any:
    """Return what rank 0 returns."""
    values = parallel.initial_values()

    def started(c: Communicators) -> Any:
        mine = copy.copy(parallel)
        mine.start(c, values)
        return body(mine)

    return run_lockstep(parallel.layout.mesh, started)[0]


@pytest.mark.parametrize("fix", [{"dp": 1}, {"dp": 2, "tp": 2, "zero": 3}, {"pp": 2}], ids=str)
def test_a_checkpoint_brings_them(fix: dict[str, int], tmp_path: Path) -> None:
    first = made()
    expected = {name: x.clone() for name, x in first.state_dict().items()}
    first.save(tmp_path / "checkpoints")

    def body(mine: Parallel) -> dict[str, Tensor]:
        mine.load(tmp_path / "checkpoints")
        mine.export_weights(tmp_path / "out")
        return mine.state_dict()

    second = made(world=fix.get("dp", 1) * fix.get("tp", 1) * fix.get("pp", 1), fix=fix)
    found = on_ranks(second, body)
    assert not torch.equal(second._source.model.directions, expected["directions"])
    assert found.keys() == expected.keys()
    assert [name for name, x in found.items() if not torch.equal(x, expected[name])] == []
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name, x in written.items() if not torch.equal(x, expected[name])] == []


def test_a_folder_of_weights_brings_them(tmp_path: Path) -> None:
    save_file(weights := Features().state_dict(), tmp_path / "model.safetensors")
    parallel = made(weights=tmp_path)
    parallel.export_weights(tmp_path / "out")
    for found in (parallel.state_dict(), load_file(tmp_path / "out" / "model.safetensors")):
        assert [name for name in STILL if not torch.equal(found[name], weights[name])] == []


def test_an_evaluation_reads_those_of_the_last_checkpoint(tmp_path: Path) -> None:
    metrics = {"out": lambda out, batch: out[:, 0]}
    first, second = made(), made()
    first.save(tmp_path)
    expected = first.predict([BATCH], metrics)["out"]
    before = second.predict([BATCH], metrics)["out"]
    second.load(tmp_path)
    assert torch.equal(second.predict([BATCH], metrics)["out"], expected)
    assert not torch.equal(before, expected)


def test_others_of_another_shape_are_refused(tmp_path: Path) -> None:
    first = made()
    first.save(tmp_path)
    second = made()
    second._source.model.unread = torch.zeros(5)
    with pytest.raises(CheckpointError, match=r"unread: \[3\] in it, \[5\] in the model"):
        second.load(tmp_path)


class Versioned(nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 2}


def test_a_state_that_is_no_tensor_is_the_model_s(tmp_path: Path) -> None:
    model = Versioned(8, 4)
    parallel = autoptd.parallelize(
        model, world=1, inputs={"input": X[:2]}, loss=nn.CrossEntropyLoss(), targets=Y[:2], batch=8, precision="fp32"
    )
    parallel.train_step(BATCH)
    parallel.save(tmp_path / "checkpoints")
    parallel.load(tmp_path / "checkpoints")
    parallel.export_weights(tmp_path / "out")
    state = parallel.state_dict()
    Versioned(8, 4).load_state_dict(state)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == state.keys() - {"_extra_state"} == {"weight", "bias"}


class Head(nn.Module):
    """A table, and a head that may share its weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def test_two_tensors_are_not_read_as_one(tmp_path: Path) -> None:
    """The head of a checkpoint would be lost in a model whose head is the table."""
    untied, tied = (
        autoptd.parallelize(
            Head(tied=tied),
            world=1,
            inputs={"ids": Y[:2]},
            loss=nn.CrossEntropyLoss(),
            targets=Y[:2],
            batch=8,
            precision="fp32",
        )
        for tied in (False, True)
    )
    untied.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"head\.weight: not in the model"):
        tied.load(tmp_path)
