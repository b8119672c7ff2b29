"""16 bits: a plan's distance from double precision is at most three times that of one process in 16 bits."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor

from autoptd.compile.make_plan import make_plan
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.read import read_model
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.layout.mesh import Mesh
from autoptd.parallel import Parallel
from autoptd.passes.trace.loss import read_objective
from autoptd.progress import Silent
from autoptd.search.constraints.options import read_constraints
from autoptd.testing.parity import Trained, train_in_lockstep
from tests.parity.parity_check import alone, batches, case, source

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = (
    ("llama", "bf16", (Mesh(1, 4, 2),), "main"),
    ("nanogpt", "bf16", (Mesh(8, 1, 1), Mesh(2, 2, 2)), "main"),
    ("nanogpt", "fp16", (Mesh(2, 2, 2), Mesh(1, 2, 4)), "main"),
    ("nanogpt", "bf16", (Mesh(2, 2, 2), Mesh(1, 2, 4)), "compute"),
    ("nanogpt", "fp16", (Mesh(2, 2, 2),), "compute"),
)


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Return the relative error of the whole gradient."""
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
    objective, _ = read_objective(case(name).loss, batch)
    (objective.of_outputs(model(**batch), batch, objective.loss).float() * scale).backward()
    found = {n: p.grad.double() / scale for n, p in model.named_parameters() if p.grad is not None}
    return error(found, alone(name, "sgd").gradients)


def planned(name: str, precision: str, mesh: Mesh, clip_norm: float | None = None, **more: object) -> Parallel:
    origin = traced(name, precision)
    plan = make_plan(
        origin,
        world=mesh.world,
        cluster=Cluster.load("dgx-h100"),
        batch=16,
        precision=precision,
        optimizer="sgd",
        constraints=read_constraints({"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "micro": 2} | more),
        progress=Silent(),
    )
    program = make_program(origin, plan, read_sharding(origin, plan))
    return Parallel(plan, origin, program, "sgd", {"lr": 0.1}, clip_norm, 0)


def of_a_plan(name: str, precision: str, mesh: Mesh, gradients: str) -> float:
    made = planned(name, precision, mesh, gradients=gradients)
    return error(train_in_lockstep(made, batches(name)[:1]).gradients, alone(name, "sgd").gradients)


@pytest.mark.parametrize(("name", "precision", "meshes", "gradients"), CASES)
def test_as_near_the_truth_as_one_process(name: str, precision: str, meshes: tuple[Mesh, ...], gradients: str) -> None:
    limit = 3 * of_one_process(name, precision)
    assert 1e-5 < limit < 0.1
    for mesh in meshes:
        found = of_a_plan(name, precision, mesh, gradients)
        assert found <= limit, (mesh, found, limit)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_of_the_compute_type_are_widened_to_step(zero: int) -> None:
    """A gradient that is neither accumulated nor reduced is equal in both dtypes; sums of microbatches differ.

    ZeRO 3 accumulates in the main dtype anyway, as FSDP does: only the sum over dp ranks is narrow.
    """

    def trained(gradients: str, micro: int) -> Trained:
        made = planned("nanogpt", "bf16", Mesh(), clip_norm=0.5, micro=micro, gradients=gradients, zero=zero)
        return train_in_lockstep(made, batches("nanogpt")[:3])

    one, same = trained("main", 16), trained("compute", 16)
    assert one.losses == same.losses and one.norms == same.norms and min(one.norms) > 0.5
    assert all(torch.equal(x, same.state[name]) for name, x in one.state.items())
    several, rounded = trained("main", 2), trained("compute", 2)
    assert several.losses[0] == rounded.losses[0] and (several.norms[0] != rounded.norms[0]) == (zero < 3)
    assert abs(several.norms[0] / rounded.norms[0] - 1) < 0.01
