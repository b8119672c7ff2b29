"""One model on one mesh against one process: the plan, and what must agree."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.api import Parallel
from autoptd.compile.make_plan import make_plan
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.read import read_model
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.layout.mesh import Mesh
from autoptd.ops import context_attention as ring
from autoptd.ops import library as ops
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.search.constraints.options import read_constraints
from autoptd.testing.parity import Trained, differences, train_alone, train_in_lockstep
from tests.parity.mixture_models import MIXTURES
from tests.parity.normed_models import NORMED
from tests.parity.parity_models import DROPOUT, FEW_MESHES, MODELS, ONCE, SKEWED, Case
from tests.parity.random_models import RANDOM
from tests.parity.updating_models import UPDATING

TOLERANCE = 1e-10
STEPS = 2  # the second step sees the effects of the first; a few tests run more
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "adamw": {"lr": 3e-3, "weight_decay": 0.1},
}
MESHES = [Mesh(8 // tp // pp, tp, pp) for pp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if tp * pp <= 8]
assert len(MESHES) == 10


def trained_apart(
    model: nn.Module,
    steps: Sequence[Mapping[str, Tensor]],
    options: Mapping[str, Any],
    fix: Mapping[str, Any],
    cluster: str | Cluster = "dgx-h100",
) -> tuple[float, Trained]:
    """Train by AdamW under a plan and in one process: the largest relative error, and what the process had.

    The error is of gradients, parameters and losses; one that has a gradient where the other has none is infinite.
    """
    part = autoptd.parallelize(
        model,
        world=fix["dp"] * fix["tp"] * fix["pp"],
        inputs=steps[0],
        batch=8,
        cluster=cluster,
        precision="fp64",
        optimizer="adamw",
        optimizer_options=dict(options),
        fix={"cp": 1, **fix},
    )
    found = train_in_lockstep(part, steps)
    wanted = train_alone(model, steps, optimizer="adamw", optimizer_options=dict(options))
    assert not found.diverged
    errors = {**differences(found.gradients, wanted.gradients), **differences(found.state, wanted.state)}
    losses = (abs(a / b - 1) for a, b in zip(found.losses, wanted.losses, strict=True))
    return max(*errors.values(), *losses), wanted


@dataclass(frozen=True)
class Variant:
    """Options of a plan on a mesh."""

    zero: int = 1
    recompute: str = "none"
    micro: int = 2
    clip_norm: float | None = None
    sequence_parallel: bool = True
    splits: tuple[tuple[str, str], ...] = ()  # parameters with a fixed placement
    schedule: str = "1f1b"
    virtual: int = 1  # chunks per rank
    overlap: tuple[str, ...] = ("dp", "p2p")
    sends: str = "whole"
    shards: int = 0  # dp ranks that share one copy; 0: all
    context: str = "ring"  # attention over cp ranks
    dropout: str = "exact"  # masks of attention
    loss: str = "auto"
    gathers: str = "kept"
    offload: float = 0.0  # share of the optimizer state in host memory
    cuts: tuple[str, ...] = ()  # modules that begin a stage
    bulk: bool = False  # plan as for large models, whose latencies are negligible


def bulk(cluster: Cluster) -> Cluster:
    """Return the cluster without latencies: tiny tensors are planned like large ones."""
    device = cluster.device.model_copy(update={"launch_s": 0.0, "dispatch_s": 0.0, "multiprocessors": None})
    prompt = {"latency_s": 0.0, "in_switch": None, "protocols": ("plain",)}
    levels = tuple(level.model_copy(update=prompt) for level in cluster.levels)
    return cluster.model_copy(update={"device": device, "levels": levels})


@cache
def case(name: str) -> Case:
    every = (MODELS, DROPOUT, FEW_MESHES, ONCE, SKEWED, MIXTURES, UPDATING, NORMED, RANDOM)
    return {name: make for models in every for name, make in models.items()}[name]()


@cache
def source(name: str) -> TracedModel:
    found = case(name)
    inputs = {n: x[:2] for n, x in found.batch.items()}
    return read_model(found.model, inputs=inputs, loss=found.loss, seq=None, precision="fp64", progress=Silent())


@cache
def planned(name: str, mesh: Mesh, variant: Variant) -> Plan:
    constraints = {
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "context": variant.context,
        "dropout": variant.dropout,
        "zero": variant.zero,
        "recompute": variant.recompute,
        "micro": variant.micro,
        "sequence_parallel": variant.sequence_parallel,
        "splits": dict(variant.splits),
        "schedule": variant.schedule,
        "virtual": variant.virtual,
        "overlap": list(variant.overlap),
        "sends": variant.sends,
        "loss": variant.loss,
        "gathers": variant.gathers,
        "offload": variant.offload,
        **({"shards": variant.shards} if variant.shards else {}),
        **({"cuts": list(variant.cuts)} if variant.cuts else {}),
        **({"ep": mesh.ep, "etp": mesh.sharers} if mesh.ep > 1 or mesh.etp else {}),
    }
    cluster = Cluster.load("dgx-h100")
    return make_plan(
        source(name),
        world=mesh.world,
        cluster=bulk(cluster) if variant.bulk else cluster,
        batch=16,
        precision="fp64",
        optimizer="sgd",
        constraints=read_constraints(constraints),
        progress=Silent(),
    )


def parallel(name: str, plan: Plan, optimizer: str, clip_norm: float | None = None, seed: int = 0) -> Parallel:
    origin = source(name)
    program = make_program(origin, plan, read_sharding(origin, plan))
    plan = plan.model_copy(update={"optimizer": optimizer})
    return Parallel(plan, origin, program, optimizer, OPTIONS[optimizer], clip_norm, seed)


def batches(name: str, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Return the case's batch, rolled by one sample per step, so that microbatches differ in every step."""
    return [{n: x.roll(step, 0) for n, x in case(name).batch.items()} for step in range(steps)]


@cache
def alone(name: str, optimizer: str, clip_norm: float | None = None, steps: int = STEPS) -> Trained:
    found = case(name)
    options = OPTIONS[optimizer]
    return train_alone(
        found.model,
        batches(name, steps),
        loss=found.loss,
        optimizer=optimizer,
        optimizer_options=options,
        clip_norm=clip_norm,
    )


def float32_loss(name: str) -> bool:
    """Return whether the model computes its loss in float32 whatever its own precision."""
    return name in ("gpt2", "mpt")


def complaints(name: str, found: Trained, expected: Trained) -> list[str]:
    """List all values that differ by more than their tolerance."""
    # float32 numbers are summed in another order; gradients are not affected
    loose = 1e-6 if float32_loss(name) else TOLERANCE
    wrong = []
    for what, mine, theirs, limit in (
        ("loss", found.losses, expected.losses, loose),
        ("norm", found.norms, expected.norms, TOLERANCE),
    ):
        assert mine, "no step was taken"
        for step, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            if not abs(x - y) <= limit * abs(y):
                wrong.append(f"{what} of step {step}: {x!r} instead of {y!r}")
    for what, tensors, wanted in (
        ("gradient", found.gradients, expected.gradients),
        ("state", found.state, expected.state),
    ):
        wrong += [f"{what} {n}: off by {d:.1e}" for n, d in differences(tensors, wanted).items() if not d <= TOLERANCE]
    wrong += [f"copies of {n} differ" for n in found.diverged]
    return wrong


def check(name: str, mesh: Mesh, variant: Variant, optimizer: str, steps: int = STEPS) -> list[str]:
    """Train both ways and return the differences."""
    plan = planned(name, mesh, variant)
    assert (plan.mesh.dp, plan.mesh.tp, plan.mesh.pp, plan.mesh.cp) == (mesh.dp, mesh.tp, mesh.pp, mesh.cp)
    assert mesh.ep == 1 or (plan.mesh.ep, plan.mesh.etp) == (mesh.ep, mesh.etp)
    made = parallel(name, plan, optimizer, variant.clip_norm)
    found = train_in_lockstep(made, batches(name, steps))
    return complaints(name, found, alone(name, optimizer, variant.clip_norm, steps))


def with_files(made: Parallel, files: Mapping[str, str]) -> Parallel:
    """Return the same plan with other sources."""
    return Parallel(
        made.plan,
        made._source,
        replace(made.program, files=dict(files)),
        made._optimizer,
        made._optimizer_options,
        made._clip_norm,
        made._seed,
    )


def spoil_ring(monkeypatch: pytest.MonkeyPatch, pattern: str, by: str) -> None:
    """Patch ring attention with its source edited; at least one place must change."""
    text = Path(ring.__file__).read_text()
    spoilt = re.sub(pattern, by, text)
    assert spoilt != text, "nothing was planted"
    module = types.ModuleType("spoilt")
    monkeypatch.setitem(sys.modules, "spoilt", module)  # dataclasses look up their module there
    exec(compile(spoilt, "spoilt", "exec"), module.__dict__)
    monkeypatch.setattr(ops, "ring_attention", module.ring_attention)


torch.set_num_threads(1)


def step_off_by(model: nn.Module, batch: Mapping[str, Tensor], **fix: int) -> float:
    """Return the largest difference of a step's gradients and state on four ranks from those of one process."""
    inputs = {n: x[:2] for n, x in batch.items()}
    ask = {"world": 4, "cluster": "dgx-h100", "batch": 6, "precision": "fp64", "optimizer": "sgd"}
    par = autoptd.parallelize(model, inputs=inputs, optimizer_options={"lr": 0.05}, fix=fix, **ask)  # type: ignore[arg-type]
    found = train_in_lockstep(par, [batch])
    alone = train_alone(model, [batch], optimizer="sgd", optimizer_options={"lr": 0.05})
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=TOLERANCE)
    return max((differences(found.gradients, alone.gradients) | differences(found.state, alone.state)).values())
