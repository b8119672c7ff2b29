"""Costs of training: by hand, in every report, and refused where they would mean nothing."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from autoptd.arguments import check_as_planned
from autoptd.cost_models.cluster import Cluster, Pool
from autoptd.errors import ClusterError, PlanError
from autoptd.explain.compare import compare, comparison_data
from autoptd.explain.costs import CostQuestion, cost_lines
from autoptd.explain.plan import explain
from autoptd.explain.timeline import simulated_cost
from autoptd.plans.model import Plan
from autoptd.profile.toml import cluster_toml
from tests.sample_plan import CLUSTER, sample_plan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def on(**device: Any) -> Plan:
    """Return the sample plan on devices with these prices: 8 devices, 16 samples of 128 tokens in 0.25 s."""
    return sample_plan(cluster=CLUSTER.model_copy(update={"device": CLUSTER.device.model_copy(update=device)}))


def test_costs_by_hand():
    # 8 devices × 0.25 s = 2 device-seconds at 3.6 an hour: 0.002 for 2,048 tokens, 976.5625 for a billion
    # 1e6 tokens: 489 steps of 0.25 s = 122.25 s, 978 device-seconds: 0.978; at 720 W 704,160 J
    cost = on(price_per_hour=3.6, currency="USD", watts=720.0).cost(tokens=1e6)
    assert (cost.unit, cost.currency, cost.price_per_hour, cost.units, cost.steps) == ("tokens", "USD", 3.6, 1e6, 489)
    assert cost.device_hours_per_step == pytest.approx(2 / 3600)
    assert cost.per_step == pytest.approx(0.002) and cost.per_billion == pytest.approx(976.5625)
    assert cost.days == pytest.approx(122.25 / 86400) and cost.device_hours == pytest.approx(978 / 3600)
    assert cost.total == pytest.approx(0.978) and cost.energy_mwh == pytest.approx(704_160 / 3.6e9)


def test_nothing_is_made_up():
    cost = sample_plan().cost()
    assert cost_lines(cost) == [] and cost.device_hours_per_step == pytest.approx(2 / 3600)
    assert {cost.per_step, cost.per_billion, cost.units, cost.steps, cost.days, cost.total, cost.energy_mwh} == {None}
    run = sample_plan().cost(tokens=2048e6)
    assert cost_lines(run) == ["2.048B tokens: 1,000,000 steps, 2.89 days, 556 device-hours"]


def test_a_given_price_replaces_that_of_the_cluster():
    plan = on(price_per_hour=3.6, currency="USD")
    assert plan.cost(price_per_hour=7.2).per_step == pytest.approx(0.004)
    assert plan.cost(price_per_hour=7.2).currency == "USD"
    assert plan.cost(price_per_hour=7.2, currency="€").currency == "€"
    assert plan.cost().per_step == pytest.approx(0.002), "of one call only"


def test_a_model_without_a_sequence_counts_samples():
    plan = sample_plan(sizes={"b": 2})
    cost = plan.cost(price_per_hour=3.6, samples=160)
    assert (cost.unit, cost.steps) == ("samples", 10)
    assert cost.per_billion == pytest.approx(0.002 / 16 * 1e9)
    assert "samples/s" in explain(plan) and "tokens/s" not in explain(plan)
    with pytest.raises(PlanError, match="without a length in tokens") as error:
        plan.cost(tokens=1e9)
    assert error.value.fix == "give samples instead"


def test_samples_of_a_model_with_tokens_are_whole_samples():
    cost = sample_plan().cost(samples=160)
    assert (cost.units, cost.steps) == (160 * 128, 10)


@pytest.mark.parametrize("name", ["price_per_hour", "tokens", "samples"])
@pytest.mark.parametrize("value", [-1, 0, math.nan, math.inf, "1T", True])
def test_nonsense_is_refused(name: str, value: Any):
    with pytest.raises(PlanError) as error:
        sample_plan().cost(**{name: value})
    assert error.value.where == name and repr(value) in error.value.what


def test_tokens_and_samples_are_one_question():
    with pytest.raises(PlanError, match="both given"):
        CostQuestion(tokens=1e9, samples=1e9)


@pytest.mark.parametrize("field", ["price_per_hour", "watts"])
@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf, "cheap"])
def test_nonsense_in_a_cluster_is_refused(field: str, value: Any):
    data = CLUSTER.to_data()
    data["device"][field] = value
    with pytest.raises(ClusterError, match="1 error") as error:
        Cluster.from_data(data)
    assert f"device.{field}" in error.value.where


def test_types_of_device_have_prices_of_their_own():
    # 6 devices at 3.6 and 2 at 1.8 an hour, for 0.25 s: (21.6 + 3.6) / 3600 × 0.25
    first = CLUSTER.device.model_copy(update={"price_per_hour": 3.6, "currency": "USD"})
    other = first.model_copy(update={"name": "other", "price_per_hour": 1.8})
    cluster = CLUSTER.model_copy(update={"device": first, "others": (Pool(device=other, ranks=2),)})
    plan = sample_plan(cluster=Cluster.from_data(cluster.to_data()))
    assert plan.cost().per_step == pytest.approx(25.2 / 3600 * 0.25) and plan.cost().price_per_hour is None
    with pytest.raises(PlanError, match="one price is given for 2 types of device"):
        plan.cost(price_per_hour=2.5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"price_per_hour": None}, "price_per_hour is stated for some devices, but not for other"),
        ({"currency": "EUR"}, "devices have prices in several currencies: 'EUR', 'USD'"),
    ],
)
def test_prices_of_some_devices_are_refused(changes: dict[str, Any], said: str):
    first = CLUSTER.device.model_copy(update={"price_per_hour": 3.6, "currency": "USD"})
    other = first.model_copy(update={"name": "other", **changes})
    data = CLUSTER.model_copy(update={"device": first}).to_data() | {
        "others": [{"device": other.model_dump(), "ranks": 2}]
    }
    with pytest.raises(ClusterError) as error:
        Cluster.from_data(data)
    assert said in error.value.where


def test_plans_without_prices_have_the_bytes_that_they_had():
    text = sample_plan().to_json()
    assert all(name not in text for name in ("price_per_hour", "currency", "watts"))
    priced = on(price_per_hour=3.6, currency="USD", watts=700.0)
    again = Plan.from_json(priced.to_json())
    assert again == priced and again.cost() == priced.cost() and again.cluster.device.watts == 700.0


def test_a_cluster_with_a_price_says_so():
    assert "costs" not in CLUSTER.describe()
    cluster = on(price_per_hour=3.6, currency="USD", watts=700.0).cluster
    assert cluster.describe().splitlines()[2] == "  costs   3.6 USD per device-hour, 700 W"
    assert Cluster.from_data(tomllib.loads(cluster_toml(cluster))) == cluster


def test_a_plan_may_run_on_its_cluster_at_another_price():
    priced = on(price_per_hour=3.6, currency="USD", watts=700.0)
    check_as_planned(priced, cluster=CLUSTER, batch=None, seq=None, precision=None, optimizer=None)
    slower = CLUSTER.model_copy(update={"device": CLUSTER.device.model_copy(update={"memory_bytes_per_s": 1e12})})
    with pytest.raises(PlanError, match="with other figures"):
        check_as_planned(priced, cluster=slower, batch=None, seq=None, precision=None, optimizer=None)


def test_reports_show_the_figures_of_the_plan():
    plan = on(price_per_hour=3.6, currency="USD", watts=720.0)
    asked = CostQuestion(tokens=1e9)
    lines = cost_lines(asked.of(plan))
    assert lines[0] == "cost 0.002 USD per step, 977 USD per billion tokens (3.6 USD per device-hour)"
    assert lines[1] == "1B tokens: 488,282 steps, 1.41 days, 271 device-hours, 977 USD, 0.195 MWh"
    text = " ".join(explain(plan, 80, costs=asked).split())
    assert all(line in text for line in lines)


def test_a_comparison_has_both_costs():
    a = on(price_per_hour=3.6, currency="USD")
    b = sample_plan(cluster=a.cluster, predicted=a.predicted.model_copy(update={"step_time_s": 0.5}))
    text = compare(a, b, width=80, costs=CostQuestion(tokens=1e9))
    assert "cost per billion tokens" in text and "+977 (+100.0%)" in text and "days of 1B tokens" in text
    assert compare(a, a, costs=CostQuestion(tokens=1e9)).splitlines()[1:] == cost_lines(a.cost(tokens=1e9))
    data = comparison_data(a, b)["cost"]
    assert data == [a.cost().to_data(), b.cost().to_data()]
    euros = sample_plan(cluster=on(price_per_hour=3.6, currency="EUR").cluster)
    (row,) = (line for line in compare(a, euros).splitlines() if line.strip().startswith("cost per step"))
    assert row.split() == ["cost", "per", "step", "0.002", "USD", "0.002", "EUR"], "no difference of two currencies"


def test_a_simulation_has_the_cost_of_its_own_step():
    class Simulated:
        makespan_s = 0.5

    plan = on(price_per_hour=3.6)
    assert simulated_cost(plan, Simulated(), CostQuestion()).per_step == pytest.approx(0.004)  # type: ignore[arg-type]
