"""The solver: relaxation first, equal answers from both programs, limits and failures reported."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading

import pulp
import pytest

from autoptd.search import solver
from autoptd.search.solver import IntegerProgram, SolverFailed, minimise

Costs = dict[int, float]


def knapsack(items: int, seed: int = 0, whole: bool = True) -> tuple[IntegerProgram, Costs]:
    """Return a covering problem (a demand at least cost) whose relaxation is fractional."""
    rng, program = random.Random(seed), IntegerProgram()
    costs = {program.variable(whole=whole): rng.uniform(50, 60) for _ in range(items)}
    sizes = {variable: rng.uniform(50, 60) for variable in costs}
    program.demand(1, sizes, sum(sizes.values()) / 2)
    return program, costs


def test_a_whole_relaxation_is_the_answer() -> None:
    program = IntegerProgram()
    a, b = program.variable(whole=True), program.variable(whole=True)
    program.demand(1, {a: 1, b: 1}, 1)
    outcome = minimise(program, {a: 2.0, b: 3.0})
    assert (outcome.status, outcome.values, outcome.objective, outcome.gap) == ("optimal", (1.0, 0.0), 2.0, 0.0)


def test_a_program_is_stated_once_and_solved_for_other_costs() -> None:
    program = IntegerProgram()
    a, b, idle = (program.variable(whole=True) for _ in range(3))
    program.demand(1, {a: 1, b: 1, idle: 0}, 1)
    assert minimise(program, {a: 2.0, b: 3.0}).values == (1.0, 0.0, 0.0)
    assert minimise(program, {a: 4.0, b: 3.0, idle: -1.0}).values == (0.0, 1.0, 1.0)
    assert minimise(program, {b: 1.0}).values == (1.0, 0.0, 0.0), "what is not named costs nothing"
    with pytest.raises(AssertionError, match="solved already"):
        program.demand(2, {a: 1}, high=0)


def test_constraints_carry_their_number() -> None:
    program = IntegerProgram()
    a = program.variable()
    program.demand(7, {a: 1}, 0)
    program.demand(2, {a: 1}, high=1)
    program.price({})
    assert [constraint.name for constraint in solver._in_pulp(program)[0].constraints()] == ["(7)_1", "(2)_2"]


def test_a_fractional_relaxation_is_branched_on() -> None:
    program = IntegerProgram()
    variables = [program.variable(whole=True) for _ in range(3)]
    for i, j in ((0, 1), (1, 2), (0, 2)):
        program.demand(1, {variables[i]: 1, variables[j]: 1}, 1)
    assert minimise(program, dict.fromkeys(variables, 1.0)).objective == 2.0  # the relaxation says 1.5


def test_infeasible_is_a_status() -> None:
    program = IntegerProgram()
    program.demand(1, {program.variable(whole=True): 2}, 1, 1)
    assert minimise(program, {}).status == "infeasible"
    nothing = IntegerProgram()
    nothing.demand(1, {}, 1)
    assert minimise(nothing, {}).status == "infeasible"
    assert minimise(IntegerProgram(), {}).status == "optimal"


def test_the_same_program_gives_the_same_answer() -> None:
    assert minimise(*knapsack(30)) == minimise(*knapsack(30))


def test_small_costs_are_not_lost_in_tolerances() -> None:
    program = IntegerProgram()
    dear, cheap = program.variable(whole=True), program.variable(whole=True)
    program.demand(1, {dear: 1, cheap: 1}, 1)
    assert minimise(program, {dear: 1e-9 * (1.0 + 1e-6), cheap: 1e-9}).values == (0.0, 1.0)


def test_a_time_limit_gives_the_best_found_and_its_gap() -> None:
    outcome = minimise(*knapsack(400), time_limit_s=0.3)
    assert outcome.status in ("feasible", "optimal")
    assert outcome.bound <= outcome.objective
    assert 0 <= outcome.gap < 0.05


@pytest.mark.parametrize("whole", [False, True])
def test_a_time_limit_is_of_one_program(whole: bool) -> None:
    """A process that has planned for long has no less time for the next program, and no more."""
    highs = solver._highs_of(threading.get_ident())
    while highs.getRunTime() < 2:
        minimise(*knapsack(400))
    program, costs = knapsack(30) if whole else knapsack(400, whole=False)
    assert minimise(program, costs, time_limit_s=1.0).status == "optimal"
    began_s = highs.getRunTime()
    minimise(*knapsack(400), time_limit_s=0.1)
    assert highs.getRunTime() - began_s < 1.0


def _fails(program: IntegerProgram, time_limit_s: float) -> solver.Outcome:
    raise pulp.PulpError("library not found")


@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD:DeprecationWarning")
def test_a_missing_solver_is_replaced_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    best = minimise(*knapsack(12)).objective
    monkeypatch.setitem(solver._SOLVERS, "HiGHS", _fails)
    outcome = minimise(*knapsack(12))
    assert outcome.solver == "CBC"
    assert outcome.objective == pytest.approx(best)
    assert outcome.notes == ("solver HiGHS failed (library not found)", "solved with CBC instead")


def test_no_solver_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(solver._SOLVERS, "HiGHS", _fails)
    monkeypatch.setitem(solver._SOLVERS, "CBC", _fails)
    with pytest.raises(SolverFailed, match="library not found"):
        minimise(*knapsack(3))


def test_bounds_of_variables_hold() -> None:
    program = IntegerProgram()
    costs = {program.variable(upper=2.5, whole=True): -1.0, program.variable(lower=0.5, upper=math.inf): 1.0}
    outcome = minimise(program, costs)
    assert outcome.values == (2.0, 0.5)
    assert math.isclose(outcome.objective, -1.5)


def test_a_solver_prints_nothing() -> None:
    """HiGHS 1.16 prints a banner when the first solver of a process is made."""
    code = "from autoptd.search.solver import _new_highs; _new_highs(); print('only this')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "only this\n"


def test_a_process_without_standard_output_has_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert solver._new_highs() is not None
