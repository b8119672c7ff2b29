"""Stage cuts of the integer program equal those of the dynamic program, on random problems and for whole plans."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

import autoptd
from autoptd.errors import AutoptdError, DoesNotFit, PlanError
from autoptd.models.load import load_model
from autoptd.progress import Silent
from autoptd.search.constraints.options import read_constraints
from autoptd.search.pipeline import cut_ilp as cut_program
from autoptd.search.pipeline import partition as cuts
from autoptd.search.pipeline import stages
from autoptd.search.pipeline.cut_ilp import StageOption, integer_cut
from autoptd.search.pipeline.partition import CutObjective, solve_cuts
from autoptd.search.pipeline.windows import Cuts, Measure, PartitionProblem
from autoptd.search.planner import Planner
from autoptd.search.task import Task
from tests.search.pipeline.random_cuts import Problem, random_problem
from tests.search.random_tasks import random_task


def options(problem: Problem) -> Callable[[int, int, int], list[StageOption]]:
    """Return every set of recomputed segments, whether it fits or not."""

    def ways(stage: int, first: int, last: int) -> list[StageOption]:
        own, found = [problem.segment(i) for i in range(first, last + 1)], []
        base = problem.seconds_without(stage, first, last)
        for chosen in itertools.product((False, True), repeat=len(own)):
            kept = sum(s.least_kept if again else s.kept for s, again in zip(own, chosen, strict=True))
            recompute_s = sum(s.recompute_s for s, again in zip(own, chosen, strict=True) if again)
            found.append(StageOption(base + recompute_s, problem.share(stage, first, last, kept)))
        return found

    return ways


def wrong(seeds: range) -> int:
    """Count random problems that the integer program cuts worse than the dynamic program, or not at all."""
    different = 0
    for seed in seeds:
        problem = random_problem(seed)
        if problem.partitioning.stages > len(problem.partitioning.names) - len(problem.partitioning.uncut):
            continue
        found = solve_cuts(problem.partitioning, CutObjective(problem.rounds), problem.passes, options(problem))
        quick = solve_cuts(problem.partitioning, CutObjective(problem.rounds), problem.passes)
        bounds = [math.inf if cut is None else problem.bound_s(cut) for cut in (found, quick)]
        different += bounds[0] != pytest.approx(bounds[1])
    return different


def test_both_solvers_cut_random_lines_equally_well() -> None:
    assert wrong(range(40)) == 0


def _dropped(*numbers: int) -> Callable[..., None]:
    demand = cut_program.IntegerProgram.demand

    def without(self: cut_program.IntegerProgram, this: int, *row: Any, **limits: float) -> None:
        if this not in numbers:
            demand(self, this, *row, **limits)

    return without


def _is_caught(seed: int) -> bool:
    try:
        return wrong(range(seed, seed + 1)) > 0
    except (AutoptdError, KeyError):  # unbounded, or a stage without segments
        return True


@pytest.mark.parametrize("numbers", [(1, 3), (2,), (4,), (5,), (6,)], ids=str)
def test_every_constraint_is_needed(numbers: tuple[int, ...]) -> None:
    """Dropped one by one, but (1) and (3) together: either implies the other if all runs of a stage line up."""
    with mock.patch.object(cut_program.IntegerProgram, "demand", _dropped(*numbers)):
        assert any(map(_is_caught, range(40)))


def test_the_way_to_recompute_is_chosen_by_what_fits_and_the_slowest_stage() -> None:
    """Two segments on two stages: the first fits only if it is recomputed, at 5 s rather than 3 s."""
    runs = {(0, 0, 0): [StageOption(3.0, 1.2), StageOption(5.0, 0.9)], (1, 1, 1): [StageOption(4.0, 0.5)]}
    assert integer_cut(runs, 2, 10.0) == (pytest.approx(10 * 5 + 5 + 4), ((0, 0), (1, 1)))
    full = {(0, 0, 0): [StageOption(3.0, 1.2)], (1, 1, 1): [StageOption(4.0, 0.5)]}
    assert integer_cut(full, 2, 10.0) is None
    assert integer_cut({(0, 0, 0): [], (1, 1, 1): []}, 2, 10.0) is None
    assert integer_cut({(0, 0, 0): [StageOption(1.0, 0.5)], (1, 1, 2): [StageOption(1.0, 0.5)]}, 4, 1.0) is None


def compared(task: Task, model: autoptd.TracedModel) -> int:
    """Search with the integer program; return the number of cuts made, each as good as the dynamic program's."""
    count = 0

    def both(
        partitioning: PartitionProblem, objective: CutObjective, passes: Measure, options: cuts.Options | None = None
    ) -> Cuts | None:
        nonlocal count
        count += 1
        assert options is not None
        found, quick = solve_cuts(partitioning, objective, passes, options), solve_cuts(partitioning, objective, passes)
        assert bound_s(partitioning, objective, passes, found) == pytest.approx(
            bound_s(partitioning, objective, passes, quick), rel=1e-9
        )
        return found

    constraints = replace(task.constraints, method=replace(task.constraints.method, cut_solver="ilp"))
    with mock.patch.object(stages, "solve_cuts", both), contextlib.suppress(PlanError, DoesNotFit):
        Planner(replace(task, constraints=constraints, effort=0), Silent(), model.known).answer()
    return count


def bound_s(partitioning: PartitionProblem, objective: CutObjective, passes: Measure, cut: Cuts | None) -> float:
    if cut is None:
        return math.inf
    measured = [passes(k, *run) or (math.inf, math.inf) for k, run in enumerate(cut)]
    times = [sum(m) + float(partitioning.send_s[k, cut[k][1]]) for k, m in enumerate(measured)]
    return objective.rounds * max(times) + sum(times)


def test_cuts_of_random_tasks_are_equally_good() -> None:
    assert sum(compared(task, model) for model, task in map(random_task, range(4, 11))) > 20


@pytest.mark.parametrize(("name", "seq"), [("gpt2", 1024)])
def test_plans_of_shipped_models_are_equal(name: str, seq: int) -> None:
    model = autoptd.trace(load_model(name)[0], seq=seq)
    found = [
        autoptd.plan(model, world=8, cluster="dgx-h100", fix={"pp": 4, "tp": 1, "cut_solver": solver}).to_json()
        for solver in ("dynamic", "ilp")
    ]
    assert found[0].replace('"dynamic"', '"ilp"') == found[1]


def test_a_solver_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="cut_solver 'simplex' is not possible") as error:
        read_constraints({"cut_solver": "simplex"})
    assert "possible: 'dynamic', 'ilp'" in str(error.value)


def test_a_solver_that_does_not_finish_is_an_error() -> None:
    with (
        mock.patch.object(cut_program, "minimise", return_value=mock.Mock(status="unknown")),
        pytest.raises(AutoptdError, match="not found within"),
    ):
        integer_cut({(0, 0, 0): [StageOption(1.0, 0.5)]}, 1, 1.0)
