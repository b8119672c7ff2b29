"""Cuts into stages: optimal by exhaustive search; long sequences in milliseconds; memory-saving cuts when none fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest

from autoptd.errors import PlanError
from autoptd.search.pipeline import partition as cuts
from autoptd.search.pipeline import windows
from autoptd.search.pipeline.partition import CutObjective, smallest_cut, solve_cuts
from autoptd.search.pipeline.windows import Floats, Measure, PartitionProblem, Windows
from tests.search.pipeline.random_cuts import Cuts, Problem, all_cuts, random_problem


def bound(problem: Problem) -> float:
    """Return the bound of the cut that `solve_cuts` finds, and assert that it is a valid cut."""
    try:
        found = solve_cuts(problem.partitioning, CutObjective(problem.rounds), problem.passes)
    except PlanError:
        assert problem.partitioning.stages > len(problem.partitioning.names) - len(problem.partitioning.uncut)
        return math.inf
    if found is None:
        return math.inf
    assert [first for first, _ in found] == [0, *(last + 1 for _, last in found[:-1])]
    assert all(first <= last for first, last in found) and found[-1][1] == len(problem.partitioning.names) - 1
    assert problem.partitioning.uncut.isdisjoint(first for first, _ in found)
    return problem.bound_s(found)


@pytest.mark.parametrize("start", range(0, 600, 200))
def test_the_best_cut_is_that_of_exhaustive_search(start: int) -> None:
    fits = 0
    for seed in range(start, start + 200):
        problem = random_problem(seed)
        best = problem.brute_force()
        assert bound(problem) == pytest.approx(best), seed
        fits += best < math.inf
    assert 100 < fits < 190  # both tight and loose problems occur


def _wrong_partitions() -> int:
    """Count random tables of stage times for which `best_partition` misses the optimum."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(150):
        n, stages = int(rng.integers(9, 12)), int(rng.integers(4, 6))
        starts = np.arange(n)[:, None] - np.arange(n)[None, :]
        times = np.where(starts >= 0, rng.integers(1, 100, (stages, n, n)).astype(float), np.inf)
        rounds = float(rng.choice([1, 2, 4]))
        per_cut = [[times[k, b, b - a] for k, (a, b) in enumerate(c)] for c in all_cuts(n, stages)]
        found = cuts.best_partition(times, rounds * times, starts)
        assert found is not None
        wrong += bool(found.value != min(rounds * max(t) + sum(t) for t in per_cut))
    return wrong


def test_any_stage_times_are_partitioned_best() -> None:
    assert _wrong_partitions() == 0


def test_no_partition_where_no_window_is_possible() -> None:
    starts = np.arange(3)[:, None] - np.arange(2)[None, :]
    times = np.full((2, 3, 2), np.inf)
    times[0, 1, 1] = 1.0  # segments 0 and 1 on the first stage, and no stage that could hold the last
    assert cuts.best_partition(times, times, starts) is None


# ---- long lines ----


def partitioning(base: list[float], stages: int, **extra: Any) -> PartitionProblem:
    """Make a problem without memory limits, unless `extra` gives some."""
    nothing, known = np.zeros(len(base)), sorted(set(base))
    given = {
        "names": tuple(known.index(s) for s in base),
        "base_s": (np.array(base),),
        "send_s": np.zeros((stages, len(base))),
        "alive": tuple(range(stages, 0, -1)),
        "pools": (0,) * stages,
        "state": nothing,
        "kept": nothing,
        "least_kept": nothing,
        "recompute_s": (math.inf,),
        "budget_bytes": (math.inf,),
    }
    return PartitionProblem(**{**given, **extra})


def asked(times: PartitionProblem) -> tuple[Measure, list[int]]:
    """Return the stage times of a model without memory limits, and a list that counts the windows queried."""
    before, count = np.concatenate([[0.0], np.cumsum(times.base_s[0])]), [0]

    def passes(stage: int, first: int, last: int) -> tuple[float, float]:
        count[0] += 1
        return float(before[last + 1] - before[first]), 0.0

    return passes, count


def test_two_hundred_segments_on_sixteen_stages_take_milliseconds() -> None:
    deep = partitioning([1.0, *[10.0, 20.0] * 100, 30.0], 16)
    passes, count = asked(deep)
    started = time.process_time()
    found = solve_cuts(deep, CutObjective(127.0), passes)
    assert time.process_time() - started < 0.3
    assert found is not None and max(sum(passes(k, *run)) for k, run in enumerate(found)) == 200.0
    assert count[0] < 1000, "windows that cannot be part of the best are not measured"


def test_equal_segments_are_cut_evenly() -> None:
    even = partitioning([1.0] * 12, 4)
    for rounds in (7.0, 0.0):  # with a single microbatch too, where all cuts take equally long
        assert solve_cuts(even, CutObjective(rounds), asked(even)[0]) == ((0, 2), (3, 5), (6, 8), (9, 11))


def test_segments_move_to_ranks_with_less_work() -> None:
    """Twelve chunks on two ranks, with a head as heavy as two segments: rank 1, which has it, holds fewer others."""
    seconds = np.array([0.1, *[1.0] * 64, 2.3])
    before = ((0, 5), *((i, i + 5) for i in range(6, 54, 6)), (54, 58), (59, 63), (64, 65))
    assert sum(last - first + 1 for first, last in before) == len(seconds)
    found = cuts.balanced(before, [0, 1] * 6, seconds, {7})
    assert found[0][0] == 0 and all(a + 1 == b for (_, a), (b, _) in pairwise(found)) and found[-1][1] == 65
    assert all(first <= last and first != 7 for first, last in found)
    busy_s = [sum(seconds[first : last + 1].sum() for first, last in found[rank::2]) for rank in range(2)]
    assert abs(busy_s[0] - busy_s[1]) <= 1.0


def test_ranks_that_share_evenly_keep_their_cut() -> None:
    even = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert cuts.balanced(even, [0, 1, 0, 1], np.ones(8), ()) == even


def test_a_heavy_head_leaves_its_stage_fewer_layers() -> None:
    headed = partitioning([1.0] * 10 + [2.0], 4)
    found = solve_cuts(headed, CutObjective(7.0), asked(headed)[0])
    assert found is not None and [last - first + 1 for first, last in found] == [3, 3, 3, 2]


def test_a_slower_device_gets_fewer_segments() -> None:
    base = np.ones(9)
    mixed = partitioning(
        [1.0] * 9,
        3,
        base_s=(base, 2 * base),
        pools=(0, 0, 1),
        recompute_s=(math.inf,) * 2,
        budget_bytes=(math.inf,) * 2,
    )
    found = solve_cuts(mixed, CutObjective(7.0), lambda k, i, j: ((j - i + 1) * (1.0, 1.0, 2.0)[k], 0.0))
    assert found is not None and [last - first + 1 for first, last in found] == [4, 4, 1]


def test_a_place_where_much_crosses_is_avoided() -> None:
    send = np.array([0.0, 0.0, 5.0, 0.0, 0.0, 0.0])
    crossed = partitioning([1.0] * 6, 2, send_s=np.stack([send, 0 * send]))
    assert solve_cuts(crossed, CutObjective(3.0), asked(crossed)[0]) == ((0, 3), (4, 5))


def test_more_memory_is_never_slower() -> None:
    for seed in range(60):
        problem = random_problem(seed)
        times = [bound(problem.with_budget(more)) for more in (0.0, 5.0, 20.0, 100.0)]
        assert times == sorted(times, reverse=True), seed


# ---- what does not fit ----


def without_temporary(problem: Problem) -> Problem:
    """Return the problem without places that may not be cut and without temporary memory."""
    bare = replace(problem.partitioning, uncut=frozenset(), temporary=np.zeros(1), whole_from=np.zeros(1, dtype=int))
    return replace(problem, partitioning=bare)


def least_excess(problem: Problem, found: Cuts) -> float:
    partitioning = problem.partitioning
    return max(
        sum(partitioning.state[i : j + 1])
        + (1 + partitioning.waste) * partitioning.alive[k] * sum(partitioning.least_kept[i : j + 1])
        - partitioning.budget_bytes[partitioning.pools[k]]
        for k, (i, j) in enumerate(found)
    )


def test_the_smallest_cut_is_that_of_exhaustive_search() -> None:
    for seed in range(300):
        problem = random_problem(seed)
        free = without_temporary(problem)
        found = smallest_cut(free.partitioning)
        assert found.value == pytest.approx(least_excess(free, found.cuts))
        least = min(least_excess(free, c) for c in all_cuts(len(free.partitioning.names), free.partitioning.stages))
        assert found.value == pytest.approx(least), seed


def test_a_cut_is_found_if_and_only_if_the_smallest_fits() -> None:
    """No cut fits if the one that recomputes everything does not."""
    fits = 0
    for seed in range(300):
        problem = random_problem(seed)
        free = without_temporary(problem)
        found = solve_cuts(free.partitioning, CutObjective(free.rounds), free.passes)
        assert (found is not None) == (smallest_cut(free.partitioning).value <= 0), seed
        fits += found is not None
    assert 50 < fits < 290


def test_more_stages_than_segments_are_refused() -> None:
    short = partitioning([1.0, 1.0], 3)
    for refused in (short, partitioning([1.0] * 3, 3, uncut=frozenset({1}))):
        with pytest.raises(PlanError, match="3 pipeline stages need at least as many segments; the model has 2"):
            solve_cuts(refused, CutObjective(3.0), asked(refused)[0])


# ---- planted bugs ----


def _wrong_anywhere() -> int:
    wrong = 0
    for seed in range(200):
        problem = random_problem(seed)
        try:
            wrong += bound(problem) != pytest.approx(problem.brute_force())
        except (AssertionError, IndexError, ValueError):
            wrong += 1
    return wrong


def _too_high(**wrong: Callable[[PartitionProblem], Any]) -> property:
    """Return lower bounds of windows with wrong values in the problem."""

    def lower_s(self: Windows) -> Floats:
        problem = replace(self.problem, **{name: value(self.problem) for name, value in wrong.items()})
        return Windows(problem, self.longest)._honest_lower_s  # type: ignore[attr-defined, no-any-return]

    return property(lower_s)


TOO_HIGH = {
    "recomputation at three times its cost": {"recompute_s": lambda p: tuple(3 * r for r in p.recompute_s)},
    "more temporary memory": {"temporary": lambda p: p.temporary + 4.0},
    "more waste": {"waste": lambda p: p.waste + 0.3},
}


def test_planted_bugs_are_caught() -> None:
    with mock.patch.object(cuts._Limits, "explore", lambda *_: None):  # only the most balanced partition
        assert _wrong_partitions()
    honest = Windows.__dict__["lower_s"].func
    for name, wrong in TOO_HIGH.items():
        with (
            mock.patch.object(Windows, "_honest_lower_s", property(honest), create=True),
            mock.patch.object(Windows, "lower_s", _too_high(**wrong)),
        ):
            assert _wrong_anywhere(), name
    with mock.patch.object(windows, "_BASE", 0):  # windows with equal ends are treated as equal
        assert _wrong_anywhere()
    with mock.patch.object(Windows, "_drop_unreachable", lambda self, usable: usable.fill(False)):
        assert _wrong_anywhere()
    assert not _wrong_anywhere()
