"""Clusters of several types of device: stages go where they are quick and fit, and no plan is better."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import autoptd
from autoptd.cost_models.cluster import Cluster, Pool
from autoptd.cost_models.memory import MOST_MEASURED
from autoptd.errors import ClusterError, DoesNotFit, PlanError
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.search.planner import Planner, Task
from tests.search.every_plan import least_seconds
from tests.search.random_tasks import random_task, traced


def mixed(cluster: Cluster, ranks: int, speed: float, memory: float) -> Cluster:
    """Replace `ranks` devices by a type that is `speed` times as quick, with `memory` times the memory for training."""
    own = cluster.device
    flops = own.matmul_flops_per_s.model_copy(
        update={name: value * speed for name, value in own.matmul_flops_per_s.model_dump().items() if value}
    )
    other = own.model_copy(
        update={
            "name": "other",
            "matmul_flops_per_s": flops,
            "memory_bytes_per_s": own.memory_bytes_per_s * speed,
            "memory_bytes": int(own.context_bytes + (own.memory_bytes - own.context_bytes) * memory),
            "launch_s": own.launch_s / speed,
            "dispatch_s": own.dispatch_s / speed,
        }
    )
    return cluster.model_copy(update={"name": "mixed", "others": (Pool(device=other, ranks=ranks),)})


def random_mixed(seed: int) -> tuple[autoptd.TracedModel, Task]:
    model, task = random_task(seed)
    rng = random.Random(seed)
    cluster = mixed(task.cluster, task.world // 2, rng.uniform(0.3, 3), rng.uniform(0.5, 2))
    return model, replace(task, cluster=cluster)


def test_no_plan_is_better() -> None:
    compared = 0
    for seed in range(4, 18):  # the first seed has as many plans as all others together
        if random_task(seed)[1].world not in (2, 4):
            continue
        model, task = random_mixed(seed)
        try:
            found = Planner(task, Silent(), model.known).answer()
        except (DoesNotFit, PlanError):
            continue
        best, plans = least_seconds(Planner(task, Silent(), model.known))
        assert found.staged.seconds == pytest.approx(best, rel=1e-9) and found.gap <= 1e-9, seed
        compared += plans
    assert compared > 500


def planned(cluster: Cluster, **fix: object) -> Plan:
    return autoptd.plan(
        traced("gpt-3-512-512"),
        world=4,
        cluster=cluster,
        batch=32,
        fix={"pp": 2, "tp": 1, "cp": 1, "virtual": 1, **fix},
    )


def slow_links() -> Cluster:
    base = Cluster.of("A100-SXM4-80GB", 2, 300e9, 25e9)
    device = base.device.model_copy(update={"launch_s": 1e-9, "dispatch_s": 1e-9})
    return base.model_copy(update={"device": device})


def test_the_quicker_devices_take_more_of_the_model() -> None:
    plan = planned(mixed(slow_links(), 2, speed=3.0, memory=1.0), micro=1)
    held = {stage.device: stage.last - stage.first for stage in plan.stages}
    assert set(held) == {"other", "A100-SXM4-80GB"} and held["other"] > held["A100-SXM4-80GB"]
    even = planned(slow_links(), micro=1)
    assert plan.predicted.step_time_s < even.predicted.step_time_s
    assert [s.device for s in even.stages] == ["", ""]


def test_each_stage_fits_its_own_device() -> None:
    roomy = planned(slow_links(), micro=8)
    totals = [sum(m.values()) for m in roomy.predicted.memory]
    own = slow_links()
    device = own.device.model_copy(update={"memory_bytes": int(MOST_MEASURED * sum(totals)) // 2})
    small = own.model_copy(update={"device": device})
    ratio = (80 * 2**30 - device.context_bytes) / (device.memory_bytes - device.context_bytes)
    plan = planned(mixed(small, 2, speed=1.0, memory=ratio), micro=8)
    for stage, held in enumerate(plan.predicted.memory):
        assert sum(held.values()) <= plan.device_of(stage).memory_bytes
    assert Plan.from_json(plan.to_json()) == plan
    assert "assign ranks to nodes in this order" in " ".join(plan.notes)


def test_device_types_must_leave_ranks_and_make_whole_stages() -> None:
    with pytest.raises(ClusterError, match="is too small for 4 devices of other types"):
        planned(mixed(slow_links(), 4, 1.0, 1.0))
    with pytest.raises(PlanError):
        planned(mixed(slow_links(), 1, 1.0, 1.0))  # 3 and 1 devices cannot form two stages of two
