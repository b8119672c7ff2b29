"""Plans of the models of the parity tests, in any precision and with any optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autoptd.api import Parallel
from autoptd.compile.make_plan import make_plan
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.read import read_model
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.layout.mesh import Mesh
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.progress import Silent
from autoptd.search.constraints.options import read_constraints
from tests.parity.parity_check import OPTIONS, bulk
from tests.parity.parity_check import case as parity_case
from tests.parity.parity_models import Case, randomised
from tests.parity.test_parity_contrastive import Plain, filled_diagonal, views

EVERY_STEP: Mapping[str, Any] = {
    "schedule": "1f1b", "virtual": 1, "zero": 1, "recompute": "none", "offload": 0.0, "loss": "auto",
    "overlap": ["p2p"], "sends": "whole", "gathers": "kept", "context": "ring", "sequence_parallel": True,
}  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """A model and what its plan is pinned to. `fix`: besides `EVERY_STEP` and the mesh."""

    model: str
    mesh: Mesh = field(default_factory=Mesh)
    precision: str = "fp64"
    optimizer: str = "adamw"
    clip_norm: float | None = None
    fix: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        told = [f"{key} {value}" for key, value in self.fix.items()]
        clip = ["clipped"] * (self.clip_norm is not None)
        return ", ".join([f"{self.model}-{self.mesh}", self.precision, self.optimizer, *clip, *told])


def _wide_heads() -> Case:
    """Return a decoder whose heads are as wide as fused kernels take them."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 64, (16, 8), generator=generator)
    model = NanoGPT(GPTSizes(vocab=64, max_seq=8, width=32, layers=2, heads=4))
    return Case(randomised(model), {"idx": ids, "targets": ids.roll(-1, 1)})


def _two_views() -> Case:
    """Return a model whose loss compares all samples of the batch."""
    torch.manual_seed(0)
    return Case(Plain(filled_diagonal).double(), views(16))


OWN: Mapping[str, Any] = {"wide_heads": _wide_heads, "two_views": _two_views}


@cache
def case(name: str) -> Case:
    return OWN[name]() if name in OWN else parity_case(name)


@cache
def traced(name: str, precision: str) -> TracedModel:
    inputs = {n: x[:2] for n, x in case(name).batch.items()}
    return read_model(
        case(name).model, inputs=inputs, loss=case(name).loss, seq=None, precision=precision, progress=Silent()
    )


def made(ask: Ask) -> Parallel:
    """Return the program of a plan, not compiled."""
    mesh, origin = ask.mesh, traced(ask.model, ask.precision)
    axes = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp}
    axes |= {"ep": mesh.ep, "etp": mesh.sharers} if mesh.ep > 1 or mesh.etp else {}
    plan = make_plan(
        origin,
        world=mesh.world,
        cluster=bulk(Cluster.load("dgx-h100")),
        batch=16,
        precision=ask.precision,
        optimizer=ask.optimizer,
        constraints=read_constraints({**EVERY_STEP, **axes, "micro": 16 // mesh.dp // (2 * mesh.pp), **ask.fix}),
        progress=Silent(),
    )
    program = make_program(origin, plan, read_sharding(origin, plan))
    options = OPTIONS.get(ask.optimizer, {"lr": 3e-3})
    return Parallel(plan, origin, program, ask.optimizer, options, ask.clip_norm, 0)


def given(ask: Ask, steps: int) -> list[dict[str, Tensor]]:
    """Return one global batch per step."""
    return [{name: x.roll(step, 0) for name, x in case(ask.model).batch.items()} for step in range(steps)]
