"""One plan under other constants: what changes, and that nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.search.pipeline.evaluate import Staged, under
from tests.search.test_predictions import NODE, SEQ, gpt, planner


@pytest.fixture(scope="module")
def traced() -> autoptd.TracedModel:
    return autoptd.trace(gpt(), seq=SEQ)


# a host without dispatch time, which would dominate for a model as small as this
BUSY = NODE.model_copy(update={"device": NODE.device.model_copy(update={"dispatch_s": 0.0})})


def staged(traced: autoptd.TracedModel, cluster: Cluster = BUSY, **fix: Any) -> Staged:
    search = planner(traced, cluster=cluster, **fix)
    (candidate,) = search.candidates()
    return search.predict(candidate)


def with_matmul_rate(factor: float) -> Cluster:
    peaks = BUSY.device.matmul_flops_per_s
    faster = peaks.model_copy(update={name: factor * value for name, value in peaks.model_dump().items()})
    return BUSY.model_copy(update={"device": BUSY.device.model_copy(update={"matmul_flops_per_s": faster})})


WAYS: list[dict[str, Any]] = [
    {},
    {"zero": 3, "overlap": ["dp"]},
    {"recompute": "selective", "kernels": "compiled"},
    {"virtual": 2, "schedule": "interleaved", "overlap": ["p2p"]},
    {"cp": 2, "dp": 1, "overlap": ["tp"]},
]


@pytest.mark.parametrize("fix", WAYS, ids=str)
def test_a_plan_under_its_own_cluster_takes_as_long(traced: autoptd.TracedModel, fix: dict[str, Any]) -> None:
    plan = staged(traced, **fix)
    again = under(plan, BUSY)
    assert again.seconds == plan.seconds and again.stages == plan.stages and again.ends == plan.ends
    assert again.sends_s == plan.sends_s and again.memory == plan.memory


@pytest.mark.parametrize("fix", WAYS, ids=str)
def test_a_plan_under_a_faster_cluster(traced: autoptd.TracedModel, fix: dict[str, Any]) -> None:
    plan = staged(traced, **fix)
    quick, slow = under(plan, with_matmul_rate(2.0)), under(plan, with_matmul_rate(0.5))
    assert plan.seconds / 2 < quick.seconds < plan.seconds < slow.seconds < 2 * plan.seconds
    assert quick.seconds == under(under(slow, BUSY), with_matmul_rate(2.0)).seconds, "nothing of the others is left"
    assert [e.step_s for e in quick.ends] == [e.step_s for e in plan.ends]
    fresh = staged(traced, with_matmul_rate(2.0), **fix)
    assert quick.seconds == pytest.approx(fresh.seconds), "as planned there"


def test_a_plan_under_slower_links_and_memory(traced: autoptd.TracedModel) -> None:
    plan = staged(traced)
    half = {"memory_bytes_per_s": BUSY.device.memory_bytes_per_s / 2}
    links = tuple(level.model_copy(update={"bytes_per_s": level.bytes_per_s / 2}) for level in BUSY.levels)
    slow = BUSY.model_copy(update={"device": BUSY.device.model_copy(update=half), "levels": links})
    again = under(plan, slow)
    for before, after in zip(plan.ends, again.ends, strict=True):
        assert after.step_s == pytest.approx(2 * before.step_s)
        assert after.reduce_s > before.reduce_s and after.gather_s > before.gather_s
    assert all(after > before for before, after in zip(plan.sends_s, again.sends_s, strict=True))
    assert all(a.forward_tp_s > b.forward_tp_s for a, b in zip(again.stages, plan.stages, strict=True))
