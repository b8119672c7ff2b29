"""The search moves optimizer state to host memory where that is faster than to recompute, or the only way to fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autoptd
from autoptd.cost_models.cluster import Cluster, HostMemory
from autoptd.cost_models.memory import MOST_MEASURED, Memory
from autoptd.errors import DoesNotFit
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.search.constraints.options import read_constraints
from autoptd.search.planner import Planner
from autoptd.search.task import Task
from autoptd.search.variants import SHARES


@pytest.fixture(scope="module")
def gpt() -> autoptd.TracedModel:
    return autoptd.trace(NanoGPT(GPTSizes(vocab=512, max_seq=256, layers=8, heads=8, width=1024)), seq=256)


def cluster(memory_gib: float, **host: float) -> Cluster:
    base = Cluster.of("H100-SXM5-80GB", 8, 450e9, 50e9)
    rates = HostMemory(**host)  # type: ignore[arg-type]
    device = base.device.model_copy(update={"memory_bytes": int(memory_gib * 2**30), "host": rates})
    return base.model_copy(update={"device": device})


def planned(gpt: autoptd.TracedModel, memory_gib: float, world: int = 2, host: Any = None, **fix: Any) -> Plan:
    return autoptd.plan(gpt, world=world, cluster=cluster(memory_gib, **(host or {})), batch=64, fix=fix)


def needed(plan: Plan) -> list[int]:
    return [Memory(**memory).needed for memory in plan.predicted.memory]


SLOW = {"to_bytes_per_s": 1e8, "from_bytes_per_s": 1e8, "step_bytes_per_s": 1e8}


def test_where_there_is_room_nothing_is_offloaded(gpt: autoptd.TracedModel) -> None:
    assert planned(gpt, 80.0).method.offload == ()


def test_it_fits_where_nothing_else_does(gpt: autoptd.TracedModel) -> None:
    plan = planned(gpt, 3.2)
    assert any(plan.method.offload) and plan.zero < 3
    assert max(needed(plan)) * MOST_MEASURED <= 3.2 * 2**30
    with pytest.raises(DoesNotFit):
        planned(gpt, 3.2, offload=0)
    assert any("of the optimizer state is in host memory" in note for note in plan.notes)


@pytest.mark.parametrize("host", [{}, SLOW], ids=["fast", "slow"])
def test_it_is_weighed_against_recomputation(gpt: autoptd.TracedModel, host: dict[str, float]) -> None:
    """No slower than without, and not taken where the host is slow."""
    for memory_gib in (3.6, 4.2):
        plan, without = planned(gpt, memory_gib, host=host), planned(gpt, memory_gib, host=host, offload=0)
        assert plan.predicted.step_time_s <= without.predicted.step_time_s * (1 + 1e-9)
        assert any(plan.method.offload) == (memory_gib == 3.6 and not host)


def test_no_rank_offloads_more_than_it_needs(gpt: autoptd.TracedModel) -> None:
    """Any rank with less of it would not fit with the recomputation of the plan."""
    small = cluster(3.6)
    fix = {"pp": 4, "tp": 1, "schedule": "1f1b", "recompute": "none", "bucket_bytes": 4_000_000}
    task = Task(gpt.folded, small, 4, 64, gpt.sizes, "bf16", "adamw", read_constraints(fix))
    search = Planner(task, Silent(), gpt.known)
    best = search.answer().staged
    assert len(set(best.offload)) > 1, "ranks differ"
    limit = small.device.memory_bytes / MOST_MEASURED
    for rank, share in enumerate(best.offload):
        assert best.memory[rank].needed <= limit
        runs = list(best.route.of(best.solution.boundaries, rank))
        for less in (x for x in (0.0, *SHARES) if x < share):
            state = best.chunks.sharing([less]).on(rank).state(runs, best.solution.boundaries)
            assert replace(best.memory[rank], optimizer=state.optimizer).needed > limit


LINKED = {"to_bytes_per_s": 4e12, "from_bytes_per_s": 4e12}  # faster than to compute anything twice


def policies(plan: Plan) -> set[str]:
    return {policy for stage in plan.stages for policy in plan.policies(stage).values()}


def test_activations_go_to_the_host_where_that_is_faster_than_to_compute_them_again(gpt: autoptd.TracedModel) -> None:
    """All else is fixed. A slow link is worse than recomputation; a fast one is better, and recomputation is worse."""
    fix = {"dp": 2, "tp": 1, "pp": 1, "micro": 32, "zero": 1, "offload": 0}
    fast, slow, room = (
        planned(gpt, gib, host=host, **fix) for gib, host in ((5.0, LINKED), (5.0, SLOW), (80.0, LINKED))
    )
    assert "offload" in policies(fast) and policies(slow) and "offload" not in policies(slow) and not policies(room)
    assert fast.predicted.step_time_s < slow.predicted.step_time_s
    assert fast.predicted.time_s["activation_copies"] > 0 and "activation_copies" not in slow.predicted.time_s
    assert policies(planned(gpt, 4.2, host=SLOW, **fix)) == {"offload"}, "nothing else fits"
    again = planned(gpt, 5.0, host=LINKED, **fix, recompute="full")
    assert fast.predicted.step_time_s < again.predicted.step_time_s
    assert any("activations of some blocks are in host memory" in note for note in fast.notes)


def test_copies_take_their_bytes_by_the_rates_of_the_host(gpt: autoptd.TracedModel) -> None:
    fix = {"dp": 2, "tp": 1, "pp": 1, "micro": 8, "zero": 1, "kernels": "eager"}
    fixed, without = (planned(gpt, 80.0, host=LINKED, **fix, recompute=name) for name in ("offload", "none"))
    slower = planned(gpt, 80.0, host={**LINKED, "from_bytes_per_s": 1e12}, **fix, recompute="offload")
    copies_s, slower_s = (plan.predicted.time_s["activation_copies"] for plan in (fixed, slower))
    assert fixed.predicted.step_time_s - without.predicted.step_time_s == pytest.approx(copies_s)
    assert slower_s == pytest.approx(2.5 * copies_s), "one way takes four times as long"
    moved = copies_s * 2e12 / fixed.schedule.microbatches
    kept = without.predicted.memory[0]["activations"] - fixed.predicted.memory[0]["activations"]
    assert kept * 0.98 <= moved <= kept * 1.02


def test_what_a_stage_received_stays_on_the_device(gpt: autoptd.TracedModel) -> None:
    """A stage in the middle of the model holds its input for each of four microbatches in flight, and no more."""
    cuts = ["blocks.2", "blocks.4", "blocks.6"]
    fix = {"dp": 1, "tp": 1, "pp": 4, "micro": 16, "schedule": "gpipe", "recompute": "offload", "cuts": cuts}
    memory = planned(gpt, 80.0, world=4, **fix).predicted.memory
    assert memory[1]["activations"] == memory[2]["activations"] == 4 * 16 * 256 * 1024 * 2


def test_optimizers_of_whole_parameters_are_not_offloaded(gpt: autoptd.TracedModel) -> None:
    with pytest.raises(DoesNotFit):
        autoptd.plan(gpt, world=1, cluster=cluster(2.2), batch=64, optimizer="adafactor")


def test_a_plan_on_cpus_offloads_nothing(gpt: autoptd.TracedModel) -> None:
    local = Cluster.load("local")
    small = local.model_copy(update={"device": local.device.model_copy(update={"memory_bytes": 2**30})})
    with pytest.raises(DoesNotFit):
        autoptd.plan(gpt, world=1, cluster=small, batch=64)
    fixed = autoptd.plan(gpt, world=1, cluster="local", batch=2, fix={"offload": 0.5, "recompute": "offload"})
    assert any("it saves none" in note for note in fixed.notes)
