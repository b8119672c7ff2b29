"""Predicted bytes of parameters, gradients and optimizer against what the runtime allocates: equal, to the byte."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny_model as tiny
import torch

from autoptd.passes.placements import BP, B, Split
from autoptd.runtime.axis import Axis
from autoptd.runtime.comm import Communicators
from autoptd.runtime.footprint import Packed, packed, state_bytes
from autoptd.runtime.layout import Layout, TensorSpec
from autoptd.runtime.lockstep import run_lockstep
from autoptd.runtime.mesh import Mesh
from autoptd.runtime.stage import Stage, parameter
from autoptd.runtime.trainer import Trainer

ODD = {  # odd sizes, two buckets of the split class, a frozen parameter
    "a": TensorSpec(Split(0), (14, 77)),
    "b": TensorSpec(B, (33,)),
    "c": TensorSpec(BP, (101,)),
    "d": TensorSpec(Split(1), (9, 22)),
    "e": TensorSpec(B, (13,), trainable=False),
    "f": TensorSpec(Split(0), (1024,)),
}


class Sum(Stage):
    """Its loss reads every parameter."""

    inputs = ("x",)
    is_last = True

    def forward(self, *counts: Any, x: torch.Tensor, **given: Any) -> torch.Tensor:
        return sum(p.float().sum() for p in self.parameters()) * x.float().sum()  # type: ignore[return-value]


def allocated(trainer: Trainer) -> tuple[int, int, int]:
    """Bytes of distinct storages: parameters (frozen ones too), gradients, optimizer state and main copy."""

    def storages(tensors: Any) -> int:
        found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
        return sum(found.values())

    buffers = trainer._buffers._buffers
    state = [t for s in trainer.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.ndim]
    return (
        storages(trainer.stage.parameters()),
        storages(b.grad for b in buffers),
        storages([*state, *(b.main for b in buffers)]),
    )


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_odd_sizes_over_dp_and_tp(zero: int, precision: str, optimizer: str) -> None:
    mesh = Mesh(dp=2, tp=2)
    layout = Layout(mesh, 1, 1, ("x",), ODD, zero=zero, precision=precision, bucket_elements=600)

    def body(c: Communicators) -> tuple[int, tuple[int, int, int]]:
        with torch.device("meta"):
            stage = Sum(Axis(c.tp))
            for name, spec in ODD.items():
                parameter(stage, name, spec.local_shape(mesh.tp), layout.dtype, spec.trainable)
        trainer = Trainer(stage, layout, c, optimizer)
        trainer.load_parameters({n: torch.ones(s.shape) for n, s in ODD.items()})
        trainer.train_step({"x": torch.ones(1)})
        return c.dp.rank, allocated(trainer)

    for rank, found in run_lockstep(mesh, body):
        expected = state_bytes(layout, 0, optimizer, rank)
        assert found == (expected.parameters, expected.gradients, expected.optimizer)
    assert expected.gradients > 4 * sum(math.prod(s.local_shape(2)) for s in ODD.values() if s.trainable)  # padding


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(dp=3), Mesh(2, 2, 2), Mesh(1, 1, 4)], ids=str)
@pytest.mark.parametrize(("zero", "bucket"), [(0, 40), (1, 40), (1, 10**6)])
def test_stages_with_tied_parameters(mesh: Mesh, zero: int, bucket: int) -> None:
    layout = tiny.layout(mesh, zero=zero, bucket_elements=bucket)

    def body(c: Communicators) -> tuple[int, int, int, tuple[int, int, int]]:
        trainer = Trainer(tiny.make_stage(Axis(c.tp), c.mesh.pp, c.stage), layout, c, "adamw")
        trainer.load_parameters(tiny.weights())
        trainer.train_step({n: x.chunk(mesh.dp)[c.dp.rank] for n, x in tiny.batch(mesh.dp * 6, 0).items()})
        idle = sum(p.param.numel() for p in trainer._pieces if p.name == "idle")
        return c.stage, c.dp.rank, idle, allocated(trainer)

    for stage, rank, idle, found in run_lockstep(mesh, body):
        expected = state_bytes(layout, stage, "adamw", rank)
        moments = expected.optimizer - 2 * 8 * idle  # made at the first gradient, which this one never gets
        assert found == (expected.parameters, expected.gradients, moments)


def test_buckets_are_padded_per_buffer() -> None:
    # 10 and 20 in one buffer, 40 in another: padded to 2 ranks × 32; a bucket of 15 closes after the 20
    parameters = [("x", 10), ("y", 40), ("x", 20)]
    assert _elements(packed(parameters, 2, 1)) == ((64, 64), (30 + 32, 8))
    assert _elements(packed(parameters, 2, 1, 15)) == ((64, 64, 64), (20 + 10 + 32, 8))
    assert _elements(packed(parameters, 2, 0)) == ((64, 64), (70, 70))


def _elements(found: Packed) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return found.buckets, found.stepped


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_the_first_rank_steps_most(dp: int) -> None:
    sizes = [("a", 5000), ("b", 70), ("a", 129), ("b", 3), ("a", 64)]
    found = packed(sizes, dp, 1, 100)
    assert max(found.stepped) == found.stepped_by(0)
    assert sum(found.stepped) == sum(n for _, n in sizes)
