"""Random small models on random clusters: plans are valid, fit, and train as one process does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import DoesNotFit, PlanError
from autoptd.models.nanogpt import GPTSizes as NanoSizes
from autoptd.models.nanogpt import NanoGPT
from autoptd.plans.model import Plan
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.search.random_tasks import random_cluster

SEQ, TOLERANCE, STEPS = 8, 1e-10, 2
Fix = dict[str, Any]
FIXES: list[Fix] = [{}, {}, {}, {"recompute": "full"}, {"pp": 2}, {"tp": 2}, {"tp": 2, "pp": 2}]
FIXES += [{"tp": 2, "gathers": "again"}, {"tp": 2, "recompute": "selective", "gathers": "again"}]
SGD = {"lr": 0.05, "momentum": 0.9}


class Perceptron(nn.Module):
    """Residual layers of two products, of random widths."""

    def __init__(self, width: int, inner: list[int]) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, n) for n in inner)
        self.down = nn.ModuleList(nn.Linear(n, width) for n in inner)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for up, down in zip(self.up, self.down, strict=True):
            y = y + down(torch.tanh(up(y)))
        return F.mse_loss(self.norm(y), x.flip(-1))


def random_model(rng: random.Random, samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a random model in double precision, and a batch of `samples` samples."""
    torch.manual_seed(rng.randrange(2**16))
    if rng.random() < 0.5:
        heads = rng.choice([2, 3, 4])
        sizes = NanoSizes(
            vocab=rng.choice([24, 36]), max_seq=SEQ, layers=rng.randint(1, 3), heads=heads, width=8 * heads
        )
        ids = torch.randint(0, sizes.vocab, (samples, SEQ + 1))
        return NanoGPT(sizes).double(), {"idx": ids[:, :-1], "targets": ids[:, 1:]}
    width = rng.choice([6, 8, 12])
    inner = [rng.choice([8, 12, 24, 25]) for _ in range(rng.randint(1, 5))]
    return Perceptron(width, inner).double(), {"x": torch.randn(samples, width, dtype=torch.float64)}


def slow_devices(rng: random.Random) -> Cluster:
    """Return a cluster slow enough that a toy can be as much work as a large model, so that all meshes occur."""
    cluster, slower = random_cluster(rng), 10 ** rng.uniform(0, 5)
    own = cluster.device
    rates = {name: rate / slower for name, rate in own.matmul_flops_per_s.model_dump().items() if rate}
    device = own.model_copy(
        update={
            "matmul_flops_per_s": own.matmul_flops_per_s.model_copy(update=rates),
            "memory_bytes_per_s": own.memory_bytes_per_s / slower,
            "multiprocessors": None,
        }
    )
    links = tuple(
        level.model_copy(update={"bytes_per_s": level.bytes_per_s / slower ** rng.uniform(0.5, 1), "in_switch": None})
        for level in cluster.levels
    )
    return cluster.model_copy(update={"device": device, "levels": links})


def holding(cluster: Cluster, nbytes: float) -> Cluster:
    own = cluster.device
    held = own.model_copy(update={"memory_bytes": max(own.context_bytes + 1, int(nbytes))})
    return cluster.model_copy(update={"device": held})


def planned(traced: autoptd.TracedModel, cluster: Cluster, world: int, batch: int, tight: float, fix: Fix) -> Plan:
    """Return a plan for less memory than the best plan needs, if there is one, and otherwise the best plan."""
    plan = autoptd.plan(
        traced, world=world, cluster=holding(cluster, 2**36), batch=batch, precision="fp64", optimizer="sgd"
    )
    fullest = max(plan.predicted.memory, key=lambda held: sum(held.values()) - held["overhead"])
    fixed = fullest["context"] + fullest["communication"]
    work = sum(fullest.values()) - fullest["overhead"] - fixed
    try:
        less = holding(cluster, fixed + tight * work)
        return autoptd.plan(traced, world=world, cluster=less, batch=batch, fix=fix, precision="fp64", optimizer="sgd")
    except DoesNotFit:
        return plan


def check_form(plan: Plan, world: int, batch: int) -> None:
    mesh = plan.mesh
    assert mesh.dp * mesh.tp * mesh.pp == world and plan.not_runnable == ()
    assert plan.schedule.microbatches == -(-batch // (mesh.dp * plan.micro))
    assert len(plan.stages) == mesh.pp * plan.schedule.virtual
    assert plan.predicted.memory_bytes <= plan.cluster.device.memory_bytes
    assert sum(plan.predicted.time_s.values()) == pytest.approx(plan.predicted.step_time_s)
    assert Plan.from_json(plan.to_json()) == plan


@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes
@given(
    seed=st.integers(0, 2**16),
    world=st.sampled_from([2, 3, 4, 6, 8]),
    batch=st.sampled_from([2, 4, 6, 8, 12, 24]),
    tight=st.sampled_from([0.5, 0.8, 0.95, 1.1]),
    fix=st.sampled_from(FIXES),
)
def test_any_plan_trains_as_one_process(seed: int, world: int, batch: int, tight: float, fix: Fix) -> None:
    rng = random.Random(seed)
    model, data = random_model(rng, batch)
    traced = autoptd.trace(model, inputs={n: x[:2] for n, x in data.items()}, precision="fp64")
    try:
        plan = planned(traced, slow_devices(rng), world, batch, tight, fix)
    except PlanError:  # the world does not divide anything of this model, or not as requested
        return
    check_form(plan, world, batch)
    batches = [{n: x.roll(step, 0) for n, x in data.items()} for step in range(STEPS)]
    made = autoptd.parallelize(traced, world=world, plan=plan, optimizer="sgd", optimizer_options=SGD)
    mine = train_in_lockstep(made, batches)
    alone = train_alone(model, batches, loss=None, optimizer="sgd", optimizer_options=SGD, clip_norm=None)
    assert mine.losses == pytest.approx(alone.losses, rel=TOLERANCE)
    for found, expected in ((mine.gradients, alone.gradients), (mine.state, alone.state)):
        assert {n: d for n, d in differences(found, expected).items() if not d <= TOLERANCE} == {}
    assert not mine.diverged
