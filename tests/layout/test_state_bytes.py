"""Predicted bytes of parameters, gradients and optimizer state equal the runtime's allocations, to the byte."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.codegen.emit import Program, load_stage
from autoptd.layout.host_memory import pinned_bytes
from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import BP, B, Split
from autoptd.layout.state_bytes import Packed, packed, state_bytes
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.ops.stage import Stage, parameter, stage_axes, submodule
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from autoptd.testing.process_pool import ProcessPool
from tests.pairwise import pairwise
from tests.runtime import tiny_model as tiny

ODD = {  # odd sizes, two buckets of tp-split parameters, a frozen parameter
    "a": TensorSpec(Split(0), (14, 77)),
    "b": TensorSpec(B, (33,)),
    "c": TensorSpec(BP, (101,)),
    "d": TensorSpec(Split(1), (9, 22)),
    "e": TensorSpec(B, (13,), trainable=False),
    "f": TensorSpec(Split(0), (1024,)),
}


class Sum(Stage):
    """Stage whose loss reads every parameter."""

    inputs = ("x",)
    is_last = True

    def forward(self, *counts: Any, x: torch.Tensor, **given: Any) -> torch.Tensor:
        return sum(p.float().sum() for p in self.parameters()) * x.float().sum()  # type: ignore[return-value]


def storages(tensors: Any) -> int:
    """Return the bytes of distinct storages."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}.values())


def allocated(trainer: Trainer) -> tuple[int, int, int]:
    """Return bytes of distinct storages: parameters (frozen ones too), gradients, optimizer state and main copy."""

    buffers = trainer._buffers._buffers
    state = [t for s in trainer.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.ndim]
    main = [b.main for b in buffers]
    parameters = [p for stage in trainer.stages for p in stage.parameters()]
    sharded = trainer.layout.zero == 3  # the main copy is the parameters themselves
    return (
        storages(parameters + main if sharded else parameters),
        storages([gradient for b in buffers for gradient in (b.grad, *b.grads.values())]),
        storages(state if sharded else state + main),
    )


UPDATES = (("adamw", "main"), ("sgd", "main"), ("adamw", "compute"))


@pytest.mark.parametrize(
    ("zero", "precision", "optimizer", "gradients"),
    [(zero, p, *update) for zero, p, update in pairwise(product(range(4), ("bf16", "fp32"), UPDATES))],
)
def test_odd_sizes_over_dp_and_tp(zero: int, precision: str, optimizer: str, gradients: str) -> None:
    mesh = Mesh(dp=2, tp=2)
    layout = Layout(mesh, 1, 1, ("x",), ODD, zero=zero, precision=precision, bucket_elements=600, gradients=gradients)

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
    elements = sum(math.prod(s.local_shape(2)) for s in ODD.values() if s.trainable)
    width = 2 if gradients == "compute" and precision == "bf16" and zero < 3 else 4
    assert expected.gradients > width * elements // (1 if zero < 2 else 2)  # padding


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize(
    ("zero", "precision", "gradients"), [(0, "bf16", "main"), (1, "fp32", "main"), (2, "bf16", "compute")]
)
def test_state_in_host_memory_is_not_counted(zero: int, precision: str, gradients: str, share: float) -> None:
    mesh = Mesh(dp=2, tp=2)
    options = {"zero": zero, "precision": precision, "bucket_elements": 600, "gradients": gradients}
    layout = Layout(mesh, 1, 1, ("x",), ODD, offload=(share,), **options)  # type: ignore[arg-type]

    def body(c: Communicators) -> tuple[int, tuple[int, int, int], int, int]:
        with torch.device("meta"):
            stage = Sum(Axis(c.tp))
            for name, spec in ODD.items():
                parameter(stage, name, spec.local_shape(mesh.tp), layout.dtype, spec.trainable)
        trainer = Trainer(stage, layout, c, "adamw")
        trainer.load_parameters({n: torch.ones(s.shape) for n, s in ODD.items()})
        trainer.train_step({"x": torch.ones(1)})
        on_host = [p.param for p in trainer.pieces if p.host_grad is not None]
        there = [t for p in on_host for t in trainer.optimizer.state.pop(p).values() if t.ndim]
        hosted = [x for b in trainer._buffers._buffers for x in (b.host, b._host_grad)]
        taken = sum(pinned_bytes(x.nbytes) + x.nbytes for x in hosted)  # as many moments as both, padding included
        assert storages(there) <= sum(x.nbytes for x in hosted)
        return c.dp.rank, allocated(trainer), storages(there), taken

    for rank, found, there, taken in run_lockstep(mesh, body):
        expected = state_bytes(layout, 0, "adamw", rank)
        assert found == (expected.parameters, expected.gradients, expected.optimizer)
        whole = state_bytes(replace(layout, offload=()), 0, "adamw", rank)
        moved = whole.optimizer - found[2]
        assert there > 0 and (moved == there if precision == "fp32" else moved > there), "main copies too, in bf16"
        assert (found[2] == 0) == (share == 1)
        assert expected.host == taken and whole.host == 0


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(dp=3), Mesh(2, 2, 2), Mesh(1, 1, 4)], ids=str)
@pytest.mark.parametrize(("zero", "bucket"), [(0, 40), (1, 40), (1, 10**6), (2, 40), (3, 40)])
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
        moments = expected.optimizer - 2 * 8 * idle  # moments are made at the first gradient; idle ones get none
        assert found == (expected.parameters, expected.gradients, moments)


class Blocks(Stage):
    """Three blocks in a row, with a parameter of the stage itself before them."""

    inputs = ("x",)
    is_last = True

    def forward(self, *counts: Any, x: torch.Tensor, **given: Any) -> torch.Tensor:
        x = x.to(self.scale.dtype) * self.scale
        for i in range(3):
            x = self.blocks.get_submodule(str(i))(x)
        return x.sum()


WHOLE = pairwise(product((2, 3), (300, 10**6), ((True, "main"), (False, "main"), (True, "compute"))))


@pytest.mark.parametrize(("zero", "bucket", "ahead", "gradients"), [(z, b, *how) for z, b, how in WHOLE])
def test_what_is_whole_at_a_time(zero: int, ahead: bool, gradients: str, bucket: int) -> None:
    """Blocks of 400, 480 and 360 elements (448, 512 and 384 with padding); 20 of the stage itself (64)."""
    specs = {"scale": TensorSpec(B, (20,))}
    specs |= {f"blocks.{i}.weight": TensorSpec(B, (n, 20), block=f"blocks.{i}") for i, n in enumerate((20, 24, 18))}
    mesh = Mesh(dp=2)
    layout = Layout(
        mesh,
        1,
        2,
        ("x",),
        specs,
        zero=zero,
        precision="bf16",
        bucket_elements=bucket,
        overlap=ahead,
        gradients=gradients,
    )
    width = 2 if gradients == "compute" else 4

    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.weight.T) @ self.weight

    def body(c: Communicators) -> tuple[int, int]:
        with torch.device("meta"):
            stage = Blocks(Axis(c.tp))
            for name, spec in specs.items():
                if spec.block:
                    submodule(stage, spec.block, Block())
                parameter(stage, name, spec.shape, layout.dtype)
        trainer = Trainer(stage, layout, c)
        trainer.load_parameters({n: torch.ones(s.shape) for n, s in specs.items()})
        found, gathered = [0], [0]
        buckets, reduction = trainer._buffers, trainer._buffers._reduction

        def look(*_: Any) -> None:
            found.append(storages([live.total for live in reduction._states]))
            wholes = [live.buffer.whole(live.bucket) for live in buckets._states]
            gathered.append(sum(x.untyped_storage().nbytes() for x in wholes))

        launch, settle = reduction._launch, reduction._settle
        reduction._launch = lambda live: look() or launch(live)  # type: ignore[method-assign]
        reduction._settle = lambda left: look() or settle(left)  # type: ignore[method-assign]
        for _ in range(2):
            trainer.train_step({"x": torch.ones(2, 20)})
        look()
        assert found[-1] == 0 and (zero == 2 or gathered[-1] == 0), "nothing stays"
        return max(found), max(gathered)

    kept, fullest = (state_bytes(layout, 0, "adamw", fullest=whole) for whole in (False, True))
    for found, gathered in run_lockstep(mesh, body):
        assert found == (width * (448 + 512) if ahead else width * 512)
        assert fullest.gradients - kept.gradients == width * (448 + 512)
        if zero == 2:
            assert fullest.parameters == kept.parameters
        else:
            assert fullest.parameters - kept.parameters == 2 * (64 + 448 + 512)
            assert gathered == (2 * (64 + 448 + 512) if ahead else 2 * (64 + 512))


def test_buckets_are_padded_per_buffer() -> None:
    # 10 and 20 in one buffer, 40 in another: padded to 2 ranks × 32; a bucket of 15 closes after the 20
    parameters = [("x", 10), ("y", 40), ("x", 20)]
    assert _elements(packed(parameters, 2, 2)) == ((64, 64), (30 + 32, 8))
    assert _elements(packed(parameters, 2, 2, 15)) == ((64, 64, 64), (20 + 10 + 32, 8))
    assert _elements(packed(parameters, 2, 1)) == ((64, 64), (70, 70))


def _elements(found: Packed) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return found.buckets, found.stepped


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_the_first_rank_steps_most(dp: int) -> None:
    sizes = [("a", 5000), ("b", 70), ("a", 129), ("b", 3), ("a", 64)]
    found = packed(sizes, dp, dp, 100)
    assert max(found.stepped) == found.stepped_by(0)
    assert sum(found.stepped) == sum(n for _, n in sizes)


# ---- a plan's bytes and those of real processes ----


def gpt() -> nn.Module:
    """Make a model with tied embeddings over a vocabulary that no tp divides, and a width that is not aligned."""
    return NanoGPT(GPTSizes(vocab=61, max_seq=16, width=36, layers=2, heads=4, bias=True))


class Odd(nn.Module):
    """Odd widths; one layer that every block shares, one frozen layer, one unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(26, 22)
        self.layers = nn.ModuleList(nn.Linear(22, 22) for _ in range(4))
        self.shared = nn.Linear(22, 22)
        self.frozen = nn.Linear(22, 22).requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(3, 47))
        self.head = nn.Linear(22, 13)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.table(idx))
        for layer in self.layers:
            x = x + torch.tanh(self.shared(layer(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


MODELS = {"gpt": (gpt, 61), "odd": (Odd, 13)}


@cache
def source(name: str, precision: str) -> autoptd.TracedModel:
    torch.manual_seed(0)
    batch = {n: x[:2] for n, x in samples(name).items()}
    return autoptd.trace(MODELS[name][0](), inputs=batch, precision=precision)


def samples(name: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, MODELS[name][1], (16, 8), generator=torch.Generator().manual_seed(1))
    return {"idx": ids, "targets": ids.clone()}


def rank_bytes(
    communicators: Communicators,
    program: Program,
    layout: Layout,
    values: dict[str, torch.Tensor],
    batch: dict[str, torch.Tensor],
    optimizer: str,
) -> tuple[int, tuple[int, int, int]]:
    """Return (pipeline rank, bytes of the storages alive after a step), in a worker."""
    with torch.device("meta"):
        held = layout.mesh.stages_of(communicators.stage)
        cut = stage_axes(layout, communicators.cp, communicators.ep, communicators.dp)
        stages = [load_stage(program, index)(Axis(communicators.tp), **cut) for index in held]
    trainer = Trainer(stages, layout, communicators, optimizer)
    trainer.load_parameters(values)
    trainer.train_step({n: x.chunk(layout.mesh.dp)[communicators.dp.rank] for n, x in batch.items()})
    return communicators.stage, allocated(trainer)


@pytest.mark.parametrize(
    ("zero", "bucket_bytes", "precision"), pairwise(product(range(4), (4, 5000, 10**6), ("bf16", "fp64")))
)
def test_a_plan_s_state_with_buckets_of_a_size(zero: int, bucket_bytes: int, precision: str) -> None:
    fix = {"dp": 2, "tp": 2, "pp": 2, "zero": zero, "micro": 1, "bucket_bytes": bucket_bytes}
    made = autoptd.parallelize(
        source("odd", precision), world=8, cluster="dgx-h100", batch=16, precision=precision, fix=fix
    )
    for stage, predicted in enumerate(made.plan.predicted.memory):
        held = state_bytes(made.layout, stage, "adamw", fullest=True)
        found = predicted["parameters"], predicted["gradients"], predicted["optimizer"]
        assert found == (held.parameters, held.gradients, held.optimizer), stage


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "mesh", "zero", "precision", "optimizer"),
    [
        ("gpt", Mesh(2, 2, 2), 1, "bf16", "adamw"),
        ("gpt", Mesh(2, 2, 2), 0, "bf16", "adamw"),
        ("gpt", Mesh(4, 1, 2), 1, "fp32", "adamw"),
        ("gpt", Mesh(4, 2, 1), 1, "bf16", "sgd"),
        ("gpt", Mesh(8, 1, 1), 1, "bf16", "adamw"),
        ("gpt", Mesh(2, 2, 2, 2), 1, "bf16", "adamw"),
        ("gpt", Mesh(dp=2, tp=2, cp=2), 1, "bf16", "adamw"),
        ("gpt", Mesh(pp=2, cp=4), 0, "fp32", "adamw"),
        ("odd", Mesh(2, 2, 2), 1, "bf16", "adamw"),
        ("odd", Mesh(2, 2, 2), 0, "fp32", "adamw"),
        ("odd", Mesh(4, 1, 2), 1, "fp32", "sgd"),
        ("odd", Mesh(4, 2, 1), 0, "bf16", "adamw"),
        ("odd", Mesh(8, 1, 1), 1, "bf16", "adamw"),
        ("gpt", Mesh(4, 1, 2), 2, "bf16", "adamw"),
        ("odd", Mesh(2, 2, 2), 2, "fp32", "sgd"),
        ("gpt", Mesh(2, 2, 2), 3, "bf16", "adamw"),
        ("odd", Mesh(8, 1, 1), 3, "bf16", "adamw"),
    ],
    ids=str,
)
def test_a_plan_s_state_is_what_processes_hold(
    pool: ProcessPool, name: str, mesh: Mesh, zero: int, precision: str, optimizer: str
) -> None:
    fix = {
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "zero": zero,
        "micro": 1,
        "virtual": mesh.virtual,
        "cp": mesh.cp,
    }
    model = source(name, precision)
    options = {"world": 8, "precision": precision, "optimizer": optimizer}
    plan = autoptd.plan(model, cluster="dgx-h100", batch=16, fix=fix, **options)
    made = autoptd.parallelize(model, plan=plan, **options)
    job = made.program, made.layout, made.initial_values(), samples(name), optimizer
    held = pool.run(mesh, rank_bytes, *job)
    for stage, predicted in enumerate(plan.predicted.memory):
        found = [rank for at, rank in held if at == stage]
        fullest = tuple(max(rank[i] for rank in found) for i in range(3))
        kept, most = (state_bytes(made.layout, stage, optimizer, fullest=whole) for whole in (False, True))
        assert fullest[:2] == (kept.parameters, kept.gradients), stage
        assert fullest[2] == predicted["optimizer"], stage
        # gathered parameters and full gradients are freed after a step
        assert (most.parameters, most.gradients) == (predicted["parameters"], predicted["gradients"]), stage
        assert zero >= 2 or kept == most
