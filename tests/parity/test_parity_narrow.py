"""16 bits: a plan may be no further from the truth in double precision than three times one process in 16 bits."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from parity_check import alone, batches, case, source
from torch import Tensor

from autoptd.compile import TracedModel, make_plan, make_program, read_model, read_sharding
from autoptd.cost_models.cluster import Cluster
from autoptd.lockstep import train_in_lockstep
from autoptd.parallel import Parallel
from autoptd.passes.loss import loss_of
from autoptd.progress import Silent
from autoptd.runtime.mesh import Mesh
from autoptd.search.wishes import read_wishes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = (
    ("llama", "bf16", (Mesh(1, 4, 2),)),
    ("nanogpt", "bf16", (Mesh(8, 1, 1), Mesh(2, 2, 2))),
    ("nanogpt", "fp16", (Mesh(2, 2, 2), Mesh(1, 2, 4))),
)


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Of the whole gradient, relative."""
    off = sum(float((found[n].double() - x).square().sum()) for n, x in truth.items())
    return (off / sum(float(x.square().sum()) for x in truth.values())) ** 0.5


@cache
def traced(name: str, precision: str) -> TracedModel:
    inputs = {n: x[:2] for n, x in case(name).batch.items()}
    model = source(name).model
    return read_model(model, inputs=inputs, loss=case(name).loss, seq=None, precision=precision, progress=Silent())


def of_one_process(name: str, precision: str) -> float:
    model, scale = copy.deepcopy(case(name).model).to(DTYPES[precision]), 2.0**10
    batch = batches(name)[0]
    (loss_of(model(**batch), case(name).loss, batch).float() * scale).backward()
    found = {n: p.grad.double() / scale for n, p in model.named_parameters() if p.grad is not None}
    return error(found, alone(name, "sgd").gradients)


def of_a_plan(name: str, precision: str, mesh: Mesh) -> float:
    origin = traced(name, precision)
    plan = make_plan(
        origin,
        world=mesh.world,
        cluster=Cluster.load("dgx-h100"),
        batch=16,
        precision=precision,
        optimizer="sgd",
        wishes=read_wishes({"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "micro": 2}),
        progress=Silent(),
    )
    made = Parallel(plan, origin, make_program(origin, plan, read_sharding(origin, plan)), "sgd", {"lr": 0.1}, None, 0)
    return error(train_in_lockstep(made, batches(name)[:1]).gradients, alone(name, "sgd").gradients)


@pytest.mark.parametrize(("name", "precision", "meshes"), CASES)
def test_as_near_the_truth_as_one_process(name: str, precision: str, meshes: tuple[Mesh, ...]) -> None:
    limit = 3 * of_one_process(name, precision)
    assert 1e-5 < limit < 0.1
    for mesh in meshes:
        found = of_a_plan(name, precision, mesh)
        assert found <= limit, (mesh, found, limit)
