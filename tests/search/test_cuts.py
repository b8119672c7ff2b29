"""Stages: exhaustive search, the recurrence and the integer program agree; what does not fit is explained."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from random_cuts import all_cuts, brute_force, random_problem

from autoptd.errors import PlanError
from autoptd.search import cuts, knapsack, windows
from autoptd.search.cuts import InfeasibleStages, SegmentCost, StageProblem, StageSolution, Unit, evaluate, solve_stages
from autoptd.search.cuts_ilp import solve_stages_ilp

GB = 1e9


def bound(problem: StageProblem, solve: Callable[[StageProblem], StageSolution] = solve_stages) -> float:
    """What `solve` finds, checked against the definition."""
    try:
        found = solve(problem)
    except InfeasibleStages:
        return math.inf
    assert found.gap == 0
    assert found == evaluate(problem, found.boundaries, found.recompute)
    assert all(b <= limit for b, limit in zip(found.memory_bytes, problem.budget_bytes, strict=True))
    ends = [-1, *(last for _, last in found.boundaries)]
    assert [first for first, _ in found.boundaries] == [end + 1 for end in ends[:-1]]
    assert ends[-1] == len(problem.segments) - 1
    return found.bound_s


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_optimum_is_that_of_exhaustive_search(start: int) -> None:
    for seed in range(start, start + 100):
        problem = random_problem(seed)
        assert bound(problem) == pytest.approx(brute_force(problem)), seed


def _wrong_partitions() -> int:
    """Of stage times without any structure, how often `best_partition` is not the best of all partitions."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(150):
        n, stages = int(rng.integers(9, 12)), int(rng.integers(4, 6))
        starts = np.arange(n)[:, None] - np.arange(n)[None, :]
        times = np.where(starts >= 0, rng.integers(1, 100, (stages, n, n)).astype(float), np.inf)
        ramp = float(rng.choice([1, 2, 4]))
        per_cut = [[times[k, b, b - a] for k, (a, b) in enumerate(c)] for c in all_cuts(n, stages)]
        found = cuts.best_partition(times, starts, ramp)
        assert found is not None
        wrong += bool(found[0] != min(ramp * max(t) + sum(t) for t in per_cut))
    return wrong


def test_any_stage_times_are_partitioned_best() -> None:
    assert _wrong_partitions() == 0


def test_the_integer_program_finds_the_same() -> None:
    for seed in range(120):
        problem = random_problem(seed)
        assert bound(problem, solve_stages_ilp) == pytest.approx(brute_force(problem)), seed


def gpt(layers: int = 100, stages: int = 16, microbatches: int = 128, budget: float = 45 * GB) -> StageProblem:
    attention = SegmentCost("attention", 0.010, 0.020, 0.8 * GB, 0.1 * GB, 0.010, 1.2 * GB, 0.3 * GB, 0.001)
    mlp = SegmentCost("mlp", 0.020, 0.040, 1.2 * GB, 0.1 * GB, 0.020, 2.4 * GB, 0.5 * GB, 0.001)
    embed = SegmentCost("embed", 0.001, 0.001, 0.1 * GB, 0.1 * GB, 0.001, 4 * GB, 0.0, 0.001)
    head = SegmentCost("head", 0.030, 0.060, 2 * GB, 0.2 * GB, 0.03, 4 * GB, 4 * GB, 0.0)
    in_flight = tuple(min(microbatches, stages - k) for k in range(stages))
    units = (Unit("embed", (embed,)), Unit("block", (attention, mlp), layers), Unit("head", (head,)))
    return StageProblem(units, stages, microbatches, (budget,) * stages, in_flight, "auto")


@pytest.mark.parametrize(("stages", "budget"), [(2, 250 * GB), (4, 150 * GB), (8, 110 * GB)])
def test_deep_models_agree_with_the_integer_program(stages: int, budget: float) -> None:
    problem = gpt(layers=48, stages=stages, budget=budget / 2)
    assert bound(problem) == pytest.approx(bound(problem, solve_stages_ilp))


def test_two_hundred_segments_on_sixteen_stages_take_milliseconds() -> None:
    problems = [gpt(budget=budget * GB) for budget in (40, 45, 50, 60, 70)]
    started = time.process_time()
    for problem in problems:
        solve_stages(problem)
    assert (time.process_time() - started) / len(problems) < 0.06


def flat(n: int, seconds: float = 1.0, **extra: float) -> tuple[Unit, ...]:
    values = {"activation_bytes": 0.0, "recompute_activation_bytes": 0.0, "recompute_s": 0.0, "parameter_bytes": 0.0}
    return (Unit("block", (SegmentCost("layer", seconds / 2, seconds / 2, **{**values, **extra}),), n),)


def test_equal_segments_are_cut_evenly() -> None:
    found = solve_stages(StageProblem(flat(12), 4, 8, (1.0,) * 4, (4, 3, 2, 1)))
    assert found.boundaries == ((0, 2), (3, 5), (6, 8), (9, 11))
    assert (found.bottleneck_s, found.bound_s) == (3.0, 7 * 3.0 + 12.0)


def test_one_microbatch_is_cut_evenly_too() -> None:
    found = solve_stages(StageProblem(flat(12), 4, 1, (1.0,) * 4, (1,) * 4))
    assert found.bottleneck_s == 3.0


def test_a_heavy_head_leaves_its_stage_fewer_layers() -> None:
    head = Unit("head", (SegmentCost("head", 1.0, 1.0, 0.0, 0.0, 0.0, 0.0),))
    found = solve_stages(StageProblem((*flat(10), head), 4, 8, (1.0,) * 4, (4, 3, 2, 1)))
    assert [last - first + 1 for first, last in found.boundaries] == [3, 3, 3, 2]


def test_recomputes_no_more_than_memory_demands() -> None:
    # 4 layers keep 10 bytes each; 25 fit: two layers have to go, for 1 s each.
    units = flat(4, activation_bytes=10.0, recompute_s=1.0)
    found = solve_stages(StageProblem(units, 1, 2, (30.0,), (1,)))
    assert found.recompute == ((0, 1),)
    assert found.times_s == (6.0,)
    assert found.memory_bytes == (30.0,)  # two kept, and one brought back at a time


def test_more_memory_is_never_slower() -> None:
    times = [solve_stages(gpt(layers=24, stages=4, budget=b * GB)).bound_s for b in (30, 35, 40, 50, 70, 100)]
    assert times == sorted(times, reverse=True)


# ---- what does not fit ----


def test_missing_bytes_are_those_of_the_leanest_cut() -> None:
    units = flat(4, parameter_bytes=10.0, activation_bytes=8.0, recompute_activation_bytes=1.0, temporary_bytes=0.0)
    problem = StageProblem(units, 2, 4, (30.0, 30.0), (2, 1), "none")
    with pytest.raises(InfeasibleStages) as error:
        solve_stages(problem)
    # 2 + 2: 20 + 2 * 16 = 52 and 20 + 16 = 36. 1 + 3: 26 and 54. The first is the leaner.
    assert error.value.boundaries == ((0, 1), (2, 3))
    assert error.value.missing_bytes == (22.0, 6.0)
    assert error.value.budget_bytes == 52.0
    assert not error.value.recompute_fits  # 20 + 2 * 2 + 7 = 31
    assert solve_stages(replace(problem, budget_bytes=(52.0, 52.0))).bound_s > 0
    with pytest.raises(InfeasibleStages, match="recompute"):
        solve_stages(replace(problem, budget_bytes=(31.0, 31.0)))


def test_the_bytes_named_are_enough_and_needed() -> None:
    checked = 0
    for seed in range(300):
        problem = random_problem(seed)
        try:
            solve_stages(problem)
        except InfeasibleStages as error:
            more = max(error.missing_bytes)
            enough = replace(problem, budget_bytes=tuple(b + more for b in problem.budget_bytes))
            assert brute_force(enough) < math.inf, seed
            less = replace(problem, budget_bytes=tuple(b + more - 0.5 for b in problem.budget_bytes))
            assert brute_force(less) == math.inf, seed
            assert error.recompute_fits == (brute_force(replace(problem, recompute="auto")) < math.inf), seed
            checked += 1
    assert checked > 50


def test_a_model_that_does_not_fit_names_stages_and_remedies() -> None:
    with pytest.raises(InfeasibleStages) as error:
        solve_stages(gpt(layers=12, stages=2, budget=20 * GB))
    assert "stage 0 (embed … " in str(error.value)
    assert "GiB missing" in str(error.value)
    assert "GiB per device" in str(error.value)


def test_more_stages_than_segments_are_refused() -> None:
    with pytest.raises(PlanError, match="3 pipeline stages need as many segments; the model has 2"):
        solve_stages(StageProblem(flat(2), 3, 4, (1.0,) * 3, (3, 2, 1)))


# ---- planted bugs, and a search that is given up ----


def _wrong_anywhere() -> int:
    wrong = 0
    for seed in range(150):
        problem = random_problem(seed)
        try:
            wrong += bound(problem) != pytest.approx(brute_force(problem))
        except (AssertionError, IndexError):
            wrong += 1
    return wrong


def _greedy(items: list[knapsack.Item], need: float, best: knapsack.Cover) -> knapsack.Cover:
    """Recompute by seconds per byte, never looking back."""
    counts, seconds = [], 0.0
    for item in sorted(items, key=lambda item: item.seconds / item.gain):
        taken = min(item.count, max(0, math.ceil(need / item.gain)))
        counts.append((item.kind, taken))
        need, seconds = need - taken * item.gain, seconds + taken * item.seconds
    return best if need > 0 or seconds >= best.seconds else knapsack.Cover(seconds, seconds, tuple(counts))


def test_planted_bugs_are_caught() -> None:
    with mock.patch.object(windows, "cheapest_cover", _greedy):
        assert _wrong_anywhere()
    with mock.patch.object(cuts._Bottlenecks, "explore", lambda *_: None):  # only the best balanced partition
        assert _wrong_partitions()
    with mock.patch.object(windows.Windows, "maxima", lambda self, values: self.sums(values)):  # workspaces added up
        assert _wrong_anywhere()


def test_a_knapsack_given_up_is_told_by_the_gap() -> None:
    parts = tuple(
        SegmentCost(f"s{i}", 1.0, 2.0, 100.0 + 7.3 * i % 11, 1.0, 1.0 + 0.073 * i % 0.11, 1.0) for i in range(14)
    )
    problem = StageProblem((Unit("all", parts),), 1, 4, (900.0,), (1,))
    exact = solve_stages(problem)
    assert exact.gap == 0
    with mock.patch.object(knapsack, "NODE_LIMIT", 30):
        rough = solve_stages(problem)
    assert rough.gap > 0
    assert rough.bound_s * (1 - rough.gap) <= exact.bound_s <= rough.bound_s
