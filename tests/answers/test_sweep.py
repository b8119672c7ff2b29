"""Sweeps: each point is the plan of a separate search, and the figures beside it follow their formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autoptd
from autoptd.answers.query import PlanQuery
from autoptd.answers.sweep import SweepPoint, reason, shown, sweep
from autoptd.answers.sweep_text import sweep_text
from autoptd.errors import ClusterError, DoesNotFit, InputsError, PlanError
from autoptd.explain.costs import CostQuestion
from autoptd.plans.model import Plan
from tests.answers.small import small_gpt
from tests.sample_plan import sample_plan


def planned(world: int, tokens_per_s: float) -> Plan:
    """Return the sample plan with `world` data-parallel ranks and a step of one second."""
    plan = sample_plan()
    said = plan.predicted.model_copy(update={"memory": plan.predicted.memory[:1]})
    stage = plan.stages[0].model_copy(update={"last": 5, "recompute": ()})
    mesh = plan.mesh.model_copy(update={"dp": world, "tp": 1, "pp": 1})
    schedule = plan.schedule.model_copy(update={"microbatches": 1})
    made = sample_plan(world=world, batch=2 * world, mesh=mesh, schedule=schedule, stages=(stage,), predicted=said)
    rate = {"tokens_per_s": tokens_per_s, "step_time_s": 1.0}
    return made.model_copy(update={"predicted": made.predicted.model_copy(update=rate)})


def points(*found: tuple[int, float]) -> list[SweepPoint]:
    plans = [planned(*pair) for pair in found]
    return [
        SweepPoint({"world": plan.world}, plan, CostQuestion(3.6), plans[0], plans[i - 1] if i else None)
        for i, plan in enumerate(plans)
    ]


def test_a_point_is_the_plan_by_itself(asked: PlanQuery):
    found = sweep(asked, {"world": [4, 8], "tp": [1, 2]})
    assert [point.values for point in found] == [
        {"world": 4, "tp": 1},
        {"world": 4, "tp": 2},
        {"world": 8, "tp": 1},
        {"world": 8, "tp": 2},
    ]
    alone = autoptd.plan(asked.traced, world=8, cluster=asked.cluster, batch=32, fix={"tp": 2})
    assert found[3].plan == alone.model_copy(update={"model": "small"})
    assert found[2].first == found[0].plan, "points with another tp are not compared"
    assert found[3].before == found[1].plan


def test_another_length_is_that_of_its_own_trace(asked: PlanQuery):
    (point,) = sweep(asked, {"seq": [128]})
    alone = autoptd.plan(small_gpt(), seq=128, world=8, cluster=asked.cluster, batch=32)
    assert point.plan is not None
    assert point.plan.to_json() == alone.model_copy(update={"model": "small"}).to_json()
    assert point.plan.sizes["s"] == 128


def test_efficiency_by_hand():
    # 4 devices 400 tokens/s; 8 devices 700: 87.5 of 100 each, the 4 added 75 each; 16 devices 900: the 8 added 25 each
    first, second, third = points((4, 400.0), (8, 700.0), (16, 900.0))
    assert [first.efficiency, second.efficiency, third.efficiency] == pytest.approx([1.0, 0.875, 0.5625])
    assert first.added is None
    assert [second.added, third.added] == pytest.approx([0.75, 0.25])
    assert [first.pays, second.pays, third.pays] == [True, True, False]


def test_cost_by_hand():
    # 8 devices × 1 s at 3.6 an hour: 0.008; 16 samples of 128 tokens a step: 0.008 / 2048e-9 = 3,906.25 a billion
    point = points((4, 400.0), (8, 700.0))[1]
    assert point.device_seconds == 8.0 and point.cost is not None
    assert point.cost.per_step == pytest.approx(0.008)
    assert point.cost.per_billion == pytest.approx(3906.25)
    data = point.to_data()
    assert data["cost"] == point.cost.to_data() and data["unit"] == "tokens"


def test_what_has_no_plan_is_a_point(asked: PlanQuery):
    asked = asked.with_changes(recompute="none", world=1, batch=64)
    tight = asked.with_memory(max(asked.device_bytes(asked.with_changes(micro=32).plan())) * 3 // 4)
    found = sweep(tight, {"micro": [32, 1], "tp": [1, 3]})
    assert [point.fits for point in found] == [False, False, True, False]
    data = [point.to_data() for point in found]
    assert data[0]["error"] == "DoesNotFit" and "does not fit" in data[0]["reason"]
    assert data[1]["error"] == "PlanError" and "not divisible by tp 3" in data[1]["reason"]
    assert found[2].first == found[2].plan and found[2].efficiency == 1.0
    for width in (80, 120):
        text = sweep_text("title", found, [], width)
        assert max(map(len, text.splitlines())) <= width
        assert "[1] does not fit" in text and text.count("not possible") == 1


def test_a_world_that_a_cluster_has_not_is_a_point(asked: PlanQuery):
    *inner, last = asked.cluster.levels
    small = asked.cluster.model_copy(update={"levels": (*inner, last.model_copy(update={"ranks": 8}))})
    within, beyond = sweep(replace(asked, cluster=small), {"world": [8, 16]})
    assert within.fits and not beyond.fits
    assert "a world of 16 is larger than cluster" in beyond.to_data()["reason"]


def test_wrong_points_are_refused_before_any_plan(asked: PlanQuery, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PlanQuery, "plan", lambda *_: pytest.fail("planned"))
    with pytest.raises(ClusterError):
        sweep(asked, {"cluster": ["dgx-h100", "nowhere"]})


def test_a_model_without_sequence_has_none_to_sweep(asked: PlanQuery):
    with pytest.raises(InputsError, match="no sequence"):
        replace(asked, traced=replace(asked.traced, sizes={})).with_changes(seq=8)


def test_texts():
    assert [shown(v) for v in (8, "a", True, (), ("dp", "p2p"))] == ["8", "a", "true", "none", "dp+p2p"]
    assert reason(DoesNotFit("no", where="closest: x\nstage 0 lacks 1 GiB")) == "does not fit: stage 0 lacks 1 GiB"
    assert reason(PlanError("tp 3\nno")) == "not possible: tp 3"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "costs", [CostQuestion(), CostQuestion(2.5), CostQuestion(tokens=1e12), CostQuestion(2.5, "USD", tokens=1e12)]
)
def test_the_table_fits_and_marks_what_no_longer_pays(width: int, costs: CostQuestion):
    rows = [
        SweepPoint(p.values, p.found, costs, p.first, p.before) for p in points((4, 400.0), (8, 700.0), (16, 900.0))
    ]
    lines = sweep_text("title", rows, ["a note"], width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[4:7]] == ["4", "8", "16"]
    assert ["!" in line for line in lines[4:7]] == [False, False, True]
    assert any(line.startswith("! at 16 devices") for line in lines)
    assert ("per Gtok" in lines[3]) == (costs.price_per_hour is not None)
    assert ("days" in lines[3]) == (costs.tokens is not None)
    assert ("total" in lines[3]) == (width > 80 and None not in (costs.tokens, costs.price_per_hour))


def test_the_cheapest_point_is_named():
    # a step of a second costs a device-second each: per token it is the world over its tokens, the same here, but for
    # the second point, whose price is half
    a, b, c = points((4, 400.0), (8, 700.0), (16, 900.0))
    rows = [a, replace(b, costs=CostQuestion(1.8)), c]
    assert "cheapest: world 8, 1,953 per billion tokens" in sweep_text("title", rows, [], 80)
    mixed = [a, replace(b, costs=CostQuestion(1.8, "EUR")), c]
    text = sweep_text("title", mixed, [], 120)
    assert "cheapest" not in text and "1,953 EUR" in text, "prices in several currencies are not compared"
