"""The solver: relaxation first, the same answer from either program, limits and failures told."""

from __future__ import annotations

import math
import random

import pulp
import pytest

from autoptd.search import solver
from autoptd.search.solver import Program, SolverFailed, minimise


def knapsack(items: int, seed: int = 0) -> Program:
    """Cover a need at the least cost: fractional in the relaxation."""
    rng, program = random.Random(seed), Program()
    sizes = {program.add_variable(rng.uniform(50, 60), whole=True): rng.uniform(50, 60) for _ in range(items)}
    program.add_row(sizes, low=sum(sizes.values()) / 2)
    return program


def test_a_whole_relaxation_is_the_answer() -> None:
    program = Program()
    a, b = program.add_variable(2.0, whole=True), program.add_variable(3.0, whole=True)
    program.add_row({a: 1.0, b: 1.0}, low=1.0)
    outcome = minimise(program)
    assert (outcome.status, outcome.values, outcome.objective, outcome.gap) == ("optimal", (1.0, 0.0), 2.0, 0.0)


def test_a_fractional_relaxation_is_branched_on() -> None:
    program = Program()
    variables = [program.add_variable(1.0, whole=True) for _ in range(3)]
    for pair in ((0, 1), (1, 2), (0, 2)):
        program.add_row({variables[i]: 1.0 for i in pair}, low=1.0)
    assert minimise(program).objective == 2.0  # the relaxation says 1.5


def test_infeasible_is_a_status() -> None:
    program = Program()
    program.add_row({program.add_variable(1.0, whole=True): 2.0}, low=1.0, high=1.0)
    assert minimise(program).status == "infeasible"
    nothing = Program()
    nothing.add_row({}, low=1.0)
    assert minimise(nothing).status == "infeasible"
    assert minimise(Program()).status == "optimal"


def test_the_same_program_gives_the_same_answer() -> None:
    assert minimise(knapsack(30)) == minimise(knapsack(30))


def test_small_costs_are_not_lost_in_tolerances() -> None:
    program = Program()
    dear, cheap = (program.add_variable(1e-9 * cost, whole=True) for cost in (1.0 + 1e-6, 1.0))
    program.add_row({dear: 1.0, cheap: 1.0}, low=1.0)
    assert minimise(program).values == (0.0, 1.0)


def test_a_time_limit_gives_the_best_found_and_its_gap() -> None:
    outcome = minimise(knapsack(400), time_limit_s=0.3)
    assert outcome.status in ("feasible", "optimal")
    assert outcome.bound <= outcome.objective
    assert 0 <= outcome.gap < 0.05


def _fails(program: Program, time_limit_s: float) -> solver.Outcome:
    raise pulp.PulpError("library not found")


@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD:DeprecationWarning")
def test_a_missing_solver_is_replaced_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    best = minimise(knapsack(12)).objective
    monkeypatch.setitem(solver._SOLVERS, "HiGHS", _fails)
    outcome = minimise(knapsack(12))
    assert outcome.solver == "CBC"
    assert outcome.objective == pytest.approx(best)
    assert outcome.notes == ("solver HiGHS failed (library not found)", "solved with CBC instead")


def test_no_solver_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(solver._SOLVERS, "HiGHS", _fails)
    monkeypatch.setitem(solver._SOLVERS, "CBC", _fails)
    with pytest.raises(SolverFailed, match="library not found"):
        minimise(knapsack(3))


def test_bounds_of_variables_hold() -> None:
    program = Program()
    program.add_variable(-1.0, upper=2.5, whole=True)
    program.add_variable(1.0, lower=0.5, upper=None)
    assert minimise(program).values == (2.0, 0.5)
    assert math.isclose(minimise(program).objective, -1.5)
