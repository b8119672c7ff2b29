"""Why an op lies as it does, and two plans compared term by term."""

from __future__ import annotations

from typing import Any

import pytest

from autoptd.answers.op_alternatives import OpAlternatives, find, op_alternatives, op_alternatives_text
from autoptd.answers.query import PlanQuery
from autoptd.compile.program import read_sharding
from autoptd.compile.traced import TracedModel
from autoptd.errors import PlanError
from autoptd.explain.breakdown import CostTerm, compared, memory_terms, step_terms, time_terms
from autoptd.explain.choices import changes, short
from autoptd.explain.compare import compare, comparison_data
from autoptd.plans.model import Plan
from tests.answers.small import nodes_of_four
from tests.sample_plan import sample_plan

FIX: dict[str, Any] = {"tp": 4, "pp": 1, "micro": 8, "recompute": "none"}


@pytest.fixture(scope="module")
def planned(traced: TracedModel) -> Plan:
    return PlanQuery(traced, 4, nodes_of_four(), 32, fix=FIX).plan()


@pytest.fixture(scope="module")
def linear(traced: TracedModel, planned: Plan) -> OpAlternatives:
    found, _ = op_alternatives(planned, traced, linear_name(traced, planned))
    return found[0]


def linear_name(traced: TracedModel, planned: Plan) -> str:
    """A parameter that is split in the plan."""
    return next(n for n, text in planned.splits.parameters.items() if text.startswith("S") and "0" in n)


def test_the_plans_own_choice_is_free_and_the_rest_is_not_cheaper(linear: OpAlternatives):
    """The splits are the optimum of the same program, so nothing is cheaper than the plan's own."""
    assert [a.chosen for a in linear.alternatives].count(True) == 1
    assert linear.alternatives[0].chosen and linear.alternatives[0].label == linear.slot.chosen
    totals = [a.total_s for a in linear.alternatives if a.total_s is not None]
    assert len(totals) > 1 and totals == sorted(totals) and totals[0] == 0.0
    assert all(total >= -1e-9 for total in totals)


def test_an_alternative_costs_what_the_placement_fixed_by_hand_costs(
    traced: TracedModel, planned: Plan, linear: OpAlternatives
):
    """The same by another road: a plan with the parameter placed so, and its splits ILP."""
    other = next(a for a in linear.alternatives if not a.chosen and a.total_s is not None)
    name = linear.slot.name
    by_hand = PlanQuery(traced, 4, nodes_of_four(), 32, fix={**FIX, "splits": {name: other.label}}).plan()
    m = planned.schedule.microbatches
    slower = by_hand.predicted.step_time_s - planned.predicted.step_time_s
    assert slower / m == pytest.approx(other.total_s, rel=0.05, abs=2e-5)


def test_names(traced: TracedModel, planned: Plan):
    sharding = read_sharding(traced, planned)
    kind, strategies = next((k, s) for k, s in planned.strategies.items() if len(s) > 2)
    op = next(iter(strategies))
    (slot,) = find(traced.folded, sharding, f"{kind}/{op}")
    assert (slot.kind, slot.name, slot.chosen) == (kind, op, strategies[op])
    assert {s.name for s in find(traced.folded, sharding, kind)} == set(strategies)
    name = linear_name(traced, planned)
    module = name.rpartition(".")[0]
    assert [s.name for s in find(traced.folded, sharding, name)] == [name]
    last = name.replace("0", "3", 1)
    assert last in planned.splits.parameters
    assert find(traced.folded, sharding, last) == find(traced.folded, sharding, name), "a layer stands for its kind"
    assert find(traced.folded, sharding, module) == find(traced.folded, sharding, module.partition(".")[2])
    with pytest.raises(PlanError, match="nothing is called 'nowhere'"):
        find(traced.folded, sharding, "nowhere")


def test_text(traced: TracedModel, planned: Plan, linear: OpAlternatives):
    module = linear.slot.name.rpartition(".")[0]
    found, left = op_alternatives(planned, traced, module)
    for width in (80, 120):
        text = op_alternatives_text(planned, [linear, *found], left, width)
        assert max(map(len, text.splitlines())) <= width
        assert linear.slot.chosen in text and "plan" in text


# --- compare ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fix",
    [
        FIX,
        {"tp": 1, "pp": 4, "micro": 2, "recompute": "full"},
        {"tp": 2, "pp": 2, "micro": 1},
        {"dp": 4, "zero": 3},
        {"dp": 4, "overlap": ("dp", "p2p")},
        {"tp": 1, "pp": 2, "virtual": 2, "micro": 1},
        {"tp": 1, "pp": 4, "micro": 1, "overlap": ()},
    ],
    ids=str,
)
def test_terms_sum_up_to_the_step(traced: TracedModel, fix: dict[str, Any]):
    plan = PlanQuery(traced, 4, nodes_of_four(), 32, fix=fix).plan()
    terms = step_terms(plan)
    assert sum(terms.values()) == pytest.approx(plan.predicted.step_time_s, rel=1e-6)
    assert all(value >= 0 for name, value in terms.items() if name != "hidden_behind_compute")
    assert ("recompute" in terms) == (fix.get("recompute") == "full")
    assert "other" not in terms
    assert ("hidden_behind_compute" in terms) <= ("dp" in plan.method.overlap)
    assert ("pipeline_sends" in terms) <= (plan.mesh.pp > 1)
    assert "pipeline_sends" in terms or fix.get("overlap") != ()
    if plan.zero < 3:
        assert terms["backward_compute"] > terms["forward_compute"] > 0
    assert sum(memory_terms(plan).values()) == plan.predicted.memory_bytes


def test_plans_are_compared_in_the_same_terms(traced: TracedModel, planned: Plan):
    """Where one cannot tell forward from backward, neither does."""
    other = PlanQuery(traced, 4, nodes_of_four(), 32, fix={"dp": 4, "zero": 3}).plan()
    a, b = time_terms(planned, other)
    assert "forward_compute" in step_terms(planned)
    assert "compute" in a and "compute" in b and "forward_compute" not in a
    rows = compared(a, b)
    assert [abs(t.difference) for t in rows] == sorted((abs(t.difference) for t in rows), reverse=True)
    whole = other.predicted.step_time_s - planned.predicted.step_time_s
    assert sum(t.difference for t in rows) == pytest.approx(whole, rel=1e-6)
    data = comparison_data(planned, other)
    assert data["time_s"][0] == rows[0].to_data()  # type: ignore[index]
    for width in (80, 120):
        text = compare(planned, other, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert text.splitlines()[1].startswith("B takes ") and rows[0].name.replace("_", " ") in text.splitlines()[1]


def test_compared_by_hand():
    assert compared({"x": 1.0, "y": 2.0, "z": 5.0}, {"y": 1.5, "z": 5.0, "w": 3.0}) == [
        CostTerm("w", 0.0, 3.0),
        CostTerm("x", 1.0, 0.0),
        CostTerm("y", 2.0, 1.5),
    ]


def test_choices_in_words():
    a = sample_plan()
    assert short(a) == "dp2 tp2 pp2 micro2 recompute 1/6"
    assert changes(a, a) == []
    none = tuple(stage.model_copy(update={"recompute": ()}) for stage in a.stages)
    b = sample_plan(zero=0, stages=none)
    assert short(b) == "dp2 tp2 pp2 micro2 zero0"
    cut = sample_plan(stages=(a.stages[0].model_copy(update={"last": 3}), a.stages[1].model_copy(update={"first": 4})))
    assert changes(a, cut) == ["different stage cuts"]
    assert changes(a, b) == ["recompute 1 → 0 of 6 segments", "ZeRO 1 → 0"]
