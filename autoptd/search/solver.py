"""Solve small mixed-integer programs with HiGHS.

    minimise  sum_j cost_j v_j   subject to   low_i <= sum_j a_ij v_j <= high_i,   lower_j <= v_j <= upper_j,
              v_j a whole number for some j

Constraints of an `IntegerProgram` carry the number of the equation that they state in the docstring of their module.
They are converted for HiGHS once, so that solving a program with another objective does not build it anew, and the
simplex method then starts from the last optimum (of 6,800 variables for a layer with experts: 13 instead of 28 ms).
Variables and rows keep the order in which they were added: with one thread and one seed, equal calls give equal optima.

`minimise` solves the linear relaxation first and returns it if it is integral; otherwise branch and bound starts from
it. If HiGHS is missing or fails, the program goes to CBC by way of PuLP, and the outcome's `notes` say so.

A search solves many programs of some thousand variables. Presolve is off for the relaxation: it would take longer than
the simplex iterations that it saves (25 of 30 ms on the 1,500 variables of a GPT layer).
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pulp
from numpy.typing import NDArray

from autoptd.errors import AutoptdError

WHOLE = 1e-7  # largest distance from a whole number at which a value counts as one
# Costs are scaled so that the largest has this size. Solvers stop at an absolute tolerance of 1e-9 (set below), which
# is then 1e-13 of the largest cost: relative differences of 1e-9, by which programs break ties, stay above it.
COST_SCALE = 1e4
TOLERANCE = 1e-9
_SETTINGS: dict[str, object] = {  # of the simplex method
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
    "dual_feasibility_tolerance": TOLERANCE,
    "primal_feasibility_tolerance": TOLERANCE,
    "presolve": "off",
}


class SolverFailed(AutoptdError, RuntimeError):
    """No solver is installed, or every one failed."""


class Row(NamedTuple):
    """A constraint; see `IntegerProgram.demand`."""

    number: int
    terms: Mapping[int, float]
    low: float
    high: float


class IntegerProgram:
    """A mixed-integer program: variables, numbered from 0, and constraints are added first, then costs may change."""

    def __init__(self) -> None:
        self.whole: list[bool] = []  # for each variable, whether it must be a whole number
        self.bounds: list[tuple[float, float]] = []  # of each variable
        self.rows: list[Row] = []
        self.possible = True  # whether every constraint without variables holds
        self.costs: list[float] = []
        self.scale = 1.0  # of costs in the objective
        self.basis: Any = None  # of the last optimum of the relaxation, which the simplex method starts from

    def variable(self, *, lower: float = 0.0, upper: float = 1.0, whole: bool = False) -> int:
        """Return a new variable."""
        self.bounds.append((lower, upper))
        self.whole.append(whole)
        return len(self.whole) - 1

    def demand(self, number: int, terms: Mapping[int, float], low: float = -math.inf, high: float = math.inf) -> None:
        """Demand low <= sum of coefficient * variable <= high.

        `terms`: coefficients by variable; `number`: of the equation in the docstring of the calling module."""
        assert "_arrays" not in self.__dict__, "the program has been solved already"
        if terms:
            self.rows.append(Row(number, terms, low, high))
        else:
            self.possible = self.possible and low <= 0 <= high

    def price(self, costs: Mapping[int, float]) -> None:
        """Set the objective, scaled; variables missing from `costs` cost nothing."""
        self.costs = [costs.get(variable, 0.0) for variable in range(len(self.whole))]
        largest = max(map(abs, self.costs), default=0.0)
        self.scale = COST_SCALE / largest if largest > 0 else 1.0

    @property
    def scaled(self) -> list[float]:
        """The coefficients of the objective."""
        return [cost * self.scale for cost in self.costs]

    def cost_of(self, values: Sequence[float]) -> float:
        return math.fsum(c * v for c, v in zip(self.costs, values, strict=True))

    @cached_property
    def _arrays(self) -> Any:
        """The program without its objective in the form of HiGHS, row-wise."""
        import highspy

        found = highspy.HighsLp()
        found.num_col_, found.num_row_ = len(self.whole), len(self.rows)
        found.col_lower_, found.col_upper_ = np.array(self.bounds, dtype=float).T
        found.row_lower_, found.row_upper_ = (np.array([row[i] for row in self.rows]) for i in (2, 3))
        found.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        found.a_matrix_.start_ = np.cumsum([0, *(len(row.terms) for row in self.rows)], dtype=np.int32)
        found.a_matrix_.index_ = np.array([v for row in self.rows for v in row.terms], dtype=np.int32)
        found.a_matrix_.value_ = np.array([c for row in self.rows for c in row.terms.values()], dtype=float)
        return found

    def arrays(self) -> Any:
        """Return the program in the form of HiGHS."""
        self._arrays.col_cost_ = np.array(self.scaled)
        return self._arrays


@dataclass(frozen=True)
class Outcome:
    """The result of a solver.

    `status`: "optimal"; "feasible" (stopped by the time limit; `bound` limits the optimum); "infeasible"; or "unknown"
    (stopped by the time limit without a solution). `values` is empty if there is no solution. `prices`: of each row of
    a program without whole variables, what a unit more of its limit adds to the optimum; where it is infeasible, those
    that prove so (Farkas 1902). Empty if the solver gives none.
    """

    status: str
    values: tuple[float, ...]
    objective: float
    bound: float  # no solution costs less
    solver: str
    notes: tuple[str, ...] = ()
    prices: tuple[float, ...] = ()

    @property
    def gap(self) -> float:
        """Largest relative distance of the optimum below `objective`; 0 if proved optimal."""
        if self.status == "optimal":
            return 0.0
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-300)


def minimise(program: IntegerProgram, costs: Mapping[int, float], time_limit_s: float = 60.0) -> Outcome:
    """Minimise the cost of a program, within about `time_limit_s` seconds.

    Raises `SolverFailed` when neither HiGHS nor CBC gives an answer.
    """
    if not program.possible:
        return Outcome("infeasible", (), math.inf, math.inf, "none")
    if not program.whole:
        return Outcome("optimal", (), 0.0, 0.0, "none")
    program.price(costs)
    notes: list[str] = []
    for name, solve in _SOLVERS.items():
        try:
            outcome = solve(program, time_limit_s)
        except (pulp.PulpError, ImportError, OSError) as error:
            notes.append(f"solver {name} failed ({error or type(error).__name__})")
            continue
        if notes:
            notes.append(f"solved with {name} instead")
        return replace(outcome, solver=name, notes=tuple(notes))
    raise SolverFailed("no integer-programming solver works", where="; ".join(notes), fix="pip install highspy")


class CuttingPlanes:
    """The least height of the upper envelope of linear functions on a simplex, to which functions are added (Kelley
    1960): minimise C subject to C >= each function of y, sum y = 1, y >= least."""

    def __init__(self, least: NDArray[np.float64]) -> None:
        """Raises ImportError if HiGHS is missing."""
        size = len(least)
        self.highs = _new_highs()
        _set(self.highs, _SETTINGS)
        self.highs.addVar(-math.inf, math.inf)
        for low in least.tolist():
            self.highs.addVar(low, 1.0)
        self.highs.changeColCost(0, 1.0)
        self.highs.addRow(1.0, 1.0, size, np.arange(1, size + 1, dtype=np.int32), np.ones(size))

    def add(self, slopes: NDArray[np.float64]) -> None:
        """Add the function slopes · y."""
        used = np.flatnonzero(slopes)
        columns = np.concatenate([[0], used + 1]).astype(np.int32)
        self.highs.addRow(0.0, math.inf, len(columns), columns, np.concatenate([[1.0], -slopes[used]]))

    def solve(self) -> tuple[float, NDArray[np.float64], list[float]]:
        """Return the least height, the y of it, and the weight of each function in the average that is nowhere lower.

        The weights are exact only up to the solver's tolerance: bounds come from the average itself."""
        self.highs.run()
        found = self.highs.getSolution()
        return found.col_value[0], np.array(found.col_value[1:]), [max(0.0, w) for w in found.row_dual[1:]]


def _rounded(program: IntegerProgram, values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(round(v)) if whole else float(v) for v, whole in zip(values, program.whole, strict=True))


def _optimal(program: IntegerProgram, found: Sequence[float]) -> Outcome:
    values = _rounded(program, found)
    cost = program.cost_of(values)
    return Outcome("optimal", values, cost, cost, "")


def _is_whole(program: IntegerProgram, values: Sequence[float]) -> bool:
    return all(abs(v - round(v)) <= WHOLE for v, whole in zip(values, program.whole, strict=True) if whole)


@lru_cache(maxsize=8)
def _highs_of(thread: int) -> Any:
    """Return the solver of a thread, to be cleared before use: a new one takes as long as a small program."""
    return _new_highs()


def _new_highs() -> Any:
    """Return a solver. HiGHS 1.16 prints a banner to the standard output of C when one is made, whatever its options:
    it would precede the JSON of a plan."""
    import highspy

    if sys.stdout is not None:  # as of a process without a terminal
        sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        return highspy.Highs()
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            return highspy.Highs()
        finally:
            with suppress(OSError, TypeError):  # of systems that have no such library
                ctypes.CDLL(None).fflush(None)  # what C has buffered
            os.dup2(kept, 1)
            os.close(kept)


def _solve_highs(program: IntegerProgram, time_limit_s: float) -> Outcome:
    """Solve the relaxation and then, on the same HiGHS model, branch and bound."""
    import highspy

    highs, scale = _highs_of(threading.get_ident()), program.scale
    highs.clear()
    end_s = highs.getRunTime() + time_limit_s  # the clock goes on from earlier programs; branch and bound has its own
    _set(highs, {**_SETTINGS, "time_limit": end_s})
    highs.passModel(program.arrays())
    if program.basis is not None:
        highs.setBasis(program.basis)
    highs.run()
    states = highspy.HighsModelStatus
    bound = -math.inf
    match highs.getModelStatus():
        case states.kInfeasible | states.kUnboundedOrInfeasible:
            _, exists, ray = highs.getDualRay() if not any(program.whole) else (None, False, ())
            return Outcome("infeasible", (), math.inf, math.inf, "", prices=tuple(ray) if exists else ())
        case states.kOptimal:
            found = highs.getSolution()
            values, program.basis = list(found.col_value), highs.getBasis()
            bound = highs.getObjectiveValue() / scale
            if not any(program.whole):
                return replace(_optimal(program, values), prices=tuple(np.array(found.row_dual) / scale))
            if _is_whole(program, values):
                return _optimal(program, values)
        case states.kTimeLimit:
            pass
        case other:
            raise pulp.PulpError(f"HiGHS ended with {other}")
    for index, whole in enumerate(program.whole):
        if whole:
            highs.changeColIntegrality(index, highspy.HighsVarType.kInteger)
    settings: dict[str, object] = {
        "mip_feasibility_tolerance": TOLERANCE,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": TOLERANCE,
        "time_limit": max(0.05, end_s - highs.getRunTime()),
        "presolve": "choose",
    }
    _set(highs, settings)
    highs.run()
    return _read_highs(program, highs, states, bound, scale)


def _set(highs: Any, settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        highs.setOptionValue(name, value)


def _read_highs(program: IntegerProgram, highs: Any, states: Any, bound: float, scale: float) -> Outcome:
    status, info = highs.getModelStatus(), highs.getInfo()
    if status in (states.kInfeasible, states.kUnboundedOrInfeasible):
        return Outcome("infeasible", (), math.inf, math.inf, "")
    if status not in (states.kOptimal, states.kTimeLimit):
        raise pulp.PulpError(f"HiGHS ended with {status}")
    bound = max(bound, info.mip_dual_bound / scale)
    if not math.isfinite(info.objective_function_value):
        return Outcome("unknown", (), math.inf, bound, "")
    found = list(highs.getSolution().col_value)
    if status == states.kOptimal:
        return _optimal(program, found)
    values = _rounded(program, found)
    objective = program.cost_of(values)
    return Outcome("feasible", values, objective, min(bound, objective), "")


def _solve_cbc(program: IntegerProgram, time_limit_s: float) -> Outcome:
    """Solve the relaxation, then branch and bound; CBC reports no bound, so the relaxation's is used."""
    command = getattr(pulp, "PULP_CBC_CMD", None) or pulp.COIN_CMD
    (problem, variables), bound = _in_pulp(program), -math.inf
    for mip in (False, True):
        solver = command(mip=mip, msg=False, threads=1, timeLimit=time_limit_s, options=["randomSeed 1"], gapRel=0.0)
        if not solver.available():
            raise pulp.PulpError("not installed")
        problem.solve(solver)
        if problem.status == pulp.LpStatusInfeasible:
            return Outcome("infeasible", (), math.inf, math.inf, "")
        found = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        values = [variable.varValue or 0.0 for variable in variables]
        proved = problem.sol_status == pulp.LpSolutionOptimal
        if proved and _is_whole(program, values):
            return _optimal(program, values)
        if proved and not mip:
            bound = program.cost_of(values)
    if not found or not _is_whole(program, values):
        return Outcome("unknown", (), math.inf, bound, "")
    return Outcome("feasible", _rounded(program, values), program.cost_of(values), bound, "")


def _in_pulp(program: IntegerProgram) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """Return the program in PuLP, with its variables in order; rows are named by their equation, as in `(5)_17`."""
    problem, variables = pulp.LpProblem("program", pulp.LpMinimize), []
    for i, (whole, (lower, upper)) in enumerate(zip(program.whole, program.bounds, strict=True)):
        kind = pulp.LpInteger if whole else pulp.LpContinuous  # PuLP orders variables by name, hence the zeros
        variables.append(problem.add_variable(f"v{i:07d}", lower, None if upper == math.inf else upper, kind))
    problem.setObjective(pulp.LpAffineExpression(zip(variables, program.scaled, strict=True)))
    for i, row in enumerate(program.rows, 1):
        sum_of = pulp.LpAffineExpression((variables[v], c) for v, c in row.terms.items())
        if row.low == row.high:
            problem.addConstraint(sum_of == row.low, f"({row.number})_{i}")
            continue
        if row.low > -math.inf:
            problem.addConstraint(sum_of >= row.low, f"({row.number})_{i}")
        if row.high < math.inf:
            problem.addConstraint(sum_of <= row.high, f"({row.number})_{i}" + "_high" * (row.low > -math.inf))
    return problem, variables


_SOLVERS: dict[str, Callable[[IntegerProgram, float], Outcome]] = {"HiGHS": _solve_highs, "CBC": _solve_cbc}
