"""Step time against memory, and the sensitivity of a plan to assumptions about the cluster."""

from __future__ import annotations

from itertools import pairwise

import pytest

from autoptd.answers.pareto import Frontier, frontier, pareto_text
from autoptd.answers.query import PlanQuery
from autoptd.answers.reprice import step_time_on
from autoptd.answers.sensitivity import FACTORS, Reaction, sensitivity, sensitivity_text, variants
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster, Pool
from autoptd.cost_models.memory import MOST_MEASURED
from autoptd.errors import DoesNotFit
from autoptd.plans.model import Plan
from tests.answers.small import nodes_of_four
from tests.sample_plan import sample_plan


@pytest.fixture(scope="module")
def found(traced: TracedModel) -> tuple[PlanQuery, Frontier]:
    asked = PlanQuery(traced, 1, nodes_of_four(), 64)
    return asked, frontier(asked)


def test_each_point_is_the_fastest_for_its_memory(found: tuple[PlanQuery, Frontier]):
    asked, curve = found
    assert curve.complete and len(curve.points) >= 3
    assert curve.points[0] == asked.plan()
    for faster, leaner in pairwise(curve.points):
        assert leaner.predicted.step_time_s > faster.predicted.step_time_s
        assert leaner.predicted.memory_bytes < faster.predicted.memory_bytes
    for plan, nbytes in zip(curve.points, curve.device_bytes, strict=True):
        assert nbytes == max(asked.device_bytes(plan)) == pytest.approx(MOST_MEASURED * plan.predicted.memory_bytes)
        again = asked.with_memory(nbytes + 4096).plan()  # bytes of each part are rounded
        assert again.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s)
        assert again.predicted.memory_bytes == plan.predicted.memory_bytes


def test_below_the_most_memory_saving_plan_nothing_fits(found: tuple[PlanQuery, Frontier]):
    asked, curve = found
    assert curve.refused_bytes is not None and curve.refused_bytes < curve.device_bytes[-1]
    with pytest.raises(DoesNotFit):
        asked.with_memory(curve.refused_bytes).plan()


def test_a_spent_limit_is_reported(found: tuple[PlanQuery, Frontier]):
    ticks = iter(range(100))
    curve = frontier(found[0], time_limit_s=1.5, clock=lambda: float(next(ticks)))
    assert not curve.complete and len(curve.points) == 2
    assert "less memory was not tried" in pareto_text("title", curve)


def test_what_another_beats_is_left_out():
    from autoptd.answers.pareto import _undominated

    def plan(seconds: float, gib: int) -> Plan:
        said = sample_plan().predicted.model_copy(update={"step_time_s": seconds, "memory_bytes": gib})
        return sample_plan().model_copy(update={"predicted": said})

    fast, worse, even, memory_saving = plan(1.0, 8), plan(2.0, 9), plan(2.0, 8), plan(3.0, 4)
    found = _undominated([worse, memory_saving, even, fast], lambda plan: plan.predicted.memory_bytes)
    assert found == (fast, memory_saving)


def test_a_device_has_room_for_the_error_of_the_prediction(traced: TracedModel):
    said = sample_plan().predicted
    memory = tuple({"parameters": n} for n in (8 * 2**30, 2**30))
    plan = sample_plan(predicted=said.model_copy(update={"memory": memory}))
    asked = PlanQuery(traced, 1, nodes_of_four(), 64)
    assert asked.device_bytes(plan) == [pytest.approx(MOST_MEASURED * n) for n in (8 * 2**30, 2**30)]
    assert asked.with_changes(headroom=0.0).device_bytes(plan) == [8 * 2**30, 2**30]


def test_the_curve_reads_well(found: tuple[PlanQuery, Frontier]):
    for width in (80, 120):
        lines = pareto_text("title", found[1], width).splitlines()
        assert max(map(len, lines)) <= width
        assert "recompute 0 →" in "\n".join(lines)


# --- sensitivity --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fix", [{}, {"tp": 2, "pp": 2}, {"tp": 4, "recompute": "full", "zero": 0}])
def test_a_plan_repriced_where_it_was_made_takes_its_time(asked: PlanQuery, fix: dict):
    plan = asked.with_changes(**fix).plan()
    assert step_time_on(plan, asked.traced, asked.cluster) == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


def test_variants_change_one_thing():
    cluster = nodes_of_four()
    made = {name: variant(0.5) for name, variant in variants(cluster).items()}
    assert made["links in a node"].levels[0].bytes_per_s == cluster.levels[0].bytes_per_s / 2
    assert made["links in a node"].levels[1] == cluster.levels[1]
    assert made["links between nodes"].levels[1].bytes_per_s == cluster.levels[1].bytes_per_s / 2
    assert made["device memory"].device.memory_bytes == cluster.device.memory_bytes // 2
    assert made["matmul rate"].device.matmul_flops_per_s.bf16 == cluster.device.matmul_flops_per_s.bf16 / 2
    assert made["memory bandwidth"].device.memory_bytes_per_s == cluster.device.memory_bytes_per_s / 2
    assert all(variant(1.0) == cluster for variant in variants(cluster).values())


def test_variants_change_all_types_of_device():
    """An A100 has no products in fp8, whose rate is none however it is scaled."""
    cluster = of_two_types()
    made = {name: variant(0.5) for name, variant in variants(cluster).items()}
    assert made["matmul rate"].device.matmul_flops_per_s.fp8 == cluster.device.matmul_flops_per_s.fp8 / 2
    (other,), (own,) = made["matmul rate"].others, cluster.others
    assert other.device.matmul_flops_per_s.fp8 is None
    assert other.device.matmul_flops_per_s.bf16 == own.device.matmul_flops_per_s.bf16 / 2
    assert made["device memory"].others[0].device.memory_bytes == own.device.memory_bytes // 2
    assert all(variant(1.0) == cluster for variant in variants(cluster).values())


def test_a_plan_on_two_types_of_device_fits_if_each_holds_its_stages(traced: TracedModel):
    """Stages of the larger type may hold more than the smaller type has."""
    fix = {"pp": 2, "tp": 1, "micro": 48, "recompute": "none"}
    asked = PlanQuery(traced, 8, of_two_types(small=3), 384, fix)
    plan = asked.plan()
    needed, large = asked.device_bytes(plan), asked.cluster.device.memory_bytes
    assert min(memory_of_ranks(plan)) < max(needed) <= large
    rows = {(row.what, row.factor): row for row in sensitivity(asked, plan)}
    fits = all(n <= 0.8 * b for n, b in zip(needed, memory_of_ranks(plan), strict=True))
    assert rows["matmul rate", 0.8].chosen_s is not None
    assert (rows["device memory", 0.8].chosen_s is not None) == fits
    less = asked.with_memory(2**30).cluster
    assert (less.device.memory_bytes, less.others[0].device.memory_bytes) == (2**30, 2**30)
    more = asked.with_memory(100 * 2**30).cluster
    assert (more.device.memory_bytes, more.others[0].device.memory_bytes) == (100 * 2**30, 100 * 2**30)


def of_two_types(small: int = 40) -> Cluster:
    """Make a cluster of H100, and four A100 with this many GiB, which come second."""
    first, second = nodes_of_four(), Cluster.of("A100-SXM4-80GB", 4, 450e9, 25e9).device
    other = second.model_copy(update={"memory_bytes": small * 2**30, "context_bytes": 0})
    return first.model_copy(update={"others": (Pool(device=other, ranks=4),)})


def memory_of_ranks(plan: Plan) -> list[int]:
    return [plan.device_of(plan.route.stages_of(rank)[0]).memory_bytes for rank in range(plan.mesh.pp)]


def test_slower_links_between_nodes_change_what_hangs_on_them(asked: PlanQuery):
    """Data parallelism over slow links with little compute: the rate between nodes decides the step time."""
    slow = asked.with_changes(cluster=nodes_of_four(inter=1e9), pp=1, tp=1)
    rows = {(row.what, row.factor): row for row in sensitivity(slow, slow.plan())}
    assert len(rows) == 5 * len(FACTORS)
    less, more = (rows["links between nodes", factor] for factor in FACTORS)
    assert less.best_s is not None and more.best_s is not None
    chosen_s = less.chosen.predicted.step_time_s
    assert less.best_s > chosen_s * 1.02 and more.best_s < chosen_s * 0.98
    assert all(row.regret is not None and row.regret >= 0 for row in rows.values())
    for width in (80, 120):
        assert max(map(len, sensitivity_text("title", list(rows.values()), width).splitlines())) <= width


def test_a_plan_that_no_longer_fits(asked: PlanQuery):
    asked = asked.with_changes(recompute="none", world=1, batch=64, micro=32)
    tight = asked.with_memory(int(max(asked.device_bytes(asked.plan())) * 1.05)).with_changes(micro=None)
    rows = {(row.what, row.factor): row for row in sensitivity(tight, asked.plan())}
    row = rows["device memory", 0.8]
    assert row.chosen_s is None and row.regret is None
    assert row.best_s is not None and "micro 32 → " in " ".join(row.changed)
    assert "does not fit with device memory -20%" in sensitivity_text("title", list(rows.values()))


def test_regret_by_hand():
    chosen = sample_plan()
    other = sample_plan(predicted=chosen.predicted.model_copy(update={"step_time_s": 0.2}), zero=0)
    assert Reaction("x", 0.8, chosen, other, 0.25).regret == pytest.approx(0.25)
    assert Reaction("x", 0.8, chosen, other, 0.25).changed == ("ZeRO 1 → 0",)
    kept = Reaction("x", 0.8, chosen, other, 0.15)  # the search missed the chosen plan, which is then the best known
    assert (kept.regret, kept.changed, kept.best_s) == (0.0, (), 0.15)
    refused = Reaction("x", 0.8, chosen, DoesNotFit("no"), None)
    assert (refused.best_s, refused.regret) == (None, None)
