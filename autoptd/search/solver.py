"""Solve a small mixed-integer program; the only place that knows HiGHS and PuLP.

    minimise  sum_j cost_j v_j   subject to   low_i <= sum_j a_ij v_j <= high_i,   lower_j <= v_j <= upper_j,
              v_j a whole number for some j

A `Program` is data: variables and rows are numbered in the order in which they were added, so that the same calls give
the same program, and (one thread, one seed) the same optimum. `minimise` solves the linear relaxation first: where that
is whole already, it is the answer. Otherwise branch and bound goes on from it. HiGHS takes the program as arrays; where
it is missing or fails, PuLP writes it down for CBC, which the outcome's `notes` say.

Programs here have some thousand variables, and many are solved: the relaxation is not presolved, which takes longer
than the simplex it would save (25 of 30 ms on the 1,500 variables of a GPT layer).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pulp

from autoptd.errors import AutoptdError

WHOLE = 1e-7  # a value this near to a whole number is one
# Costs are scaled so that the largest has this size. Solvers stop at an absolute tolerance of 1e-9 (set below), which
# is then 1e-13 of the largest cost: ties that a program breaks with relative differences of 1e-9 stay visible.
COST_SCALE = 1e4
TOLERANCE = 1e-9


class SolverFailed(AutoptdError, RuntimeError):
    """No solver is there, or every one failed."""


@dataclass
class Program:
    """A mixed-integer program under construction. Variables and rows are known by their index."""

    costs: list[float] = field(default_factory=list)
    bounds: list[tuple[float, float | None]] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float | None, float | None]] = field(default_factory=list)

    def add_variable(
        self, cost: float = 0.0, *, lower: float = 0.0, upper: float | None = 1.0, whole: bool = False
    ) -> int:
        """The index of a new variable; `upper=None` is unbounded."""
        self.costs.append(cost)
        self.bounds.append((lower, upper))
        self.whole.append(whole)
        return len(self.costs) - 1

    def add_row(self, terms: dict[int, float], *, low: float | None = None, high: float | None = None) -> None:
        """Demand low <= sum of coefficient * variable <= high."""
        assert low is not None or high is not None, "a row that demands nothing"
        self.rows.append((terms, low, high))

    def cost_of(self, values: Sequence[float]) -> float:
        return math.fsum(c * v for c, v in zip(self.costs, values, strict=True))


@dataclass(frozen=True)
class Outcome:
    """What the solver found.

    `status`: "optimal"; "feasible" (the time limit came first: `bound` says how good it may get); "infeasible"; or
    "unknown" (the time limit came before any solution). `values` is empty where there is no solution.
    """

    status: str
    values: tuple[float, ...]
    objective: float
    bound: float  # no solution costs less
    solver: str
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How far the optimum may lie below `objective`, relative to it; 0 when proved optimal."""
        if self.status == "optimal":
            return 0.0
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-300)


def minimise(program: Program, time_limit_s: float = 60.0) -> Outcome:
    """Solve `program` within about `time_limit_s` seconds.

    Raises `SolverFailed` when neither HiGHS nor CBC gives an answer.
    """
    if any(not _holds(low, high) for terms, low, high in program.rows if not terms):
        return Outcome("infeasible", (), math.inf, math.inf, "none")
    if not program.costs:
        return Outcome("optimal", (), 0.0, 0.0, "none")
    notes: list[str] = []
    for name, solve in _SOLVERS.items():
        try:
            outcome = solve(program, time_limit_s)
        except (pulp.PulpError, ImportError, OSError) as error:
            notes.append(f"solver {name} failed ({error or type(error).__name__})")
            continue
        if notes:
            notes.append(f"solved with {name} instead")
        return Outcome(outcome.status, outcome.values, outcome.objective, outcome.bound, name, tuple(notes))
    raise SolverFailed("no integer-programming solver works here", where="; ".join(notes), fix="pip install highspy")


def _holds(low: float | None, high: float | None) -> bool:
    """Whether a row without terms is met."""
    return (low is None or low <= 0) and (high is None or high >= 0)


def _scale(program: Program) -> float:
    largest = max(abs(cost) for cost in program.costs)
    return COST_SCALE / largest if largest > 0 else 1.0


def _as_pulp(program: Program, scale: float) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    problem = pulp.LpProblem("program", pulp.LpMinimize)
    # Names that sort as the indices do: PuLP orders variables by name.
    width = len(str(len(program.costs)))
    variables = [
        problem.add_variable(f"v{index:0{width}d}", lower, upper, pulp.LpInteger if whole else pulp.LpContinuous)
        for index, ((lower, upper), whole) in enumerate(zip(program.bounds, program.whole, strict=True))
    ]
    problem += pulp.LpAffineExpression(
        [(v, cost * scale) for v, cost in zip(variables, program.costs, strict=True)], constant=0.0
    )
    for terms, low, high in program.rows:
        if not terms:
            continue
        expression = [(variables[index], coefficient) for index, coefficient in terms.items()]
        if low is not None and low == high:
            problem += pulp.LpConstraint(pulp.LpAffineExpression(expression), pulp.LpConstraintEQ, rhs=low)
            continue
        if low is not None:
            problem += pulp.LpConstraint(pulp.LpAffineExpression(expression), pulp.LpConstraintGE, rhs=low)
        if high is not None:
            problem += pulp.LpConstraint(pulp.LpAffineExpression(expression), pulp.LpConstraintLE, rhs=high)
    return problem, variables


def _rounded(program: Program, values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(round(v)) if whole else float(v) for v, whole in zip(values, program.whole, strict=True))


def _optimal(program: Program, found: Sequence[float]) -> Outcome:
    values = _rounded(program, found)
    return Outcome("optimal", values, program.cost_of(values), program.cost_of(values), "")


def _is_whole(program: Program, values: Sequence[float]) -> bool:
    return all(abs(v - round(v)) <= WHOLE for v, whole in zip(values, program.whole, strict=True) if whole)


def _solve_highs(program: Program, time_limit_s: float) -> Outcome:
    """The relaxation; then, on the same HiGHS model, branch and bound."""
    import highspy

    started, scale = time.monotonic(), _scale(program)
    highs = highspy.Highs()
    settings: dict[str, object] = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "dual_feasibility_tolerance": TOLERANCE,
        "primal_feasibility_tolerance": TOLERANCE,
        "time_limit": time_limit_s,
        "presolve": "off",
    }
    _set(highs, settings)
    highs.passModel(_as_arrays(program, scale))
    highs.run()
    states = highspy.HighsModelStatus
    bound = -math.inf
    match highs.getModelStatus():
        case states.kInfeasible | states.kUnboundedOrInfeasible:
            return Outcome("infeasible", (), math.inf, math.inf, "")
        case states.kOptimal:
            values = list(highs.getSolution().col_value)
            bound = highs.getObjectiveValue() / scale
            if _is_whole(program, values):
                return _optimal(program, values)
        case states.kTimeLimit:
            pass
        case other:
            raise pulp.PulpError(f"HiGHS ended with {other}")
    for index, whole in enumerate(program.whole):
        if whole:
            highs.changeColIntegrality(index, highspy.HighsVarType.kInteger)
    spent = time.monotonic() - started
    settings = {
        "mip_feasibility_tolerance": TOLERANCE,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": TOLERANCE,
        "time_limit": spent + max(0.05, time_limit_s - spent),  # HiGHS counts what the relaxation took
        "presolve": "choose",
    }
    _set(highs, settings)
    highs.run()
    return _read_highs(program, highs, states, bound, scale)


def _set(highs: Any, settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        highs.setOptionValue(name, value)


def _as_arrays(program: Program, scale: float) -> Any:
    """The program by rows, as HiGHS takes it."""
    import highspy

    rows = [(terms, low, high) for terms, low, high in program.rows if terms]
    columns = [index for terms, _, _ in rows for index in terms]
    found = highspy.HighsLp()
    found.num_col_, found.num_row_ = len(program.costs), len(rows)
    found.col_cost_ = np.array(program.costs) * scale
    found.col_lower_ = np.array([lower for lower, _ in program.bounds])
    found.col_upper_ = np.array([math.inf if upper is None else upper for _, upper in program.bounds])
    found.row_lower_ = np.array([-math.inf if low is None else low for _, low, _ in rows])
    found.row_upper_ = np.array([math.inf if high is None else high for _, _, high in rows])
    found.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    found.a_matrix_.start_ = np.cumsum([0, *(len(terms) for terms, _, _ in rows)], dtype=np.int32)
    found.a_matrix_.index_ = np.array(columns, dtype=np.int32)
    found.a_matrix_.value_ = np.array([value for terms, _, _ in rows for value in terms.values()])
    return found


def _read_highs(program: Program, highs: Any, states: Any, bound: float, scale: float) -> Outcome:
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


def _solve_cbc(program: Program, time_limit_s: float) -> Outcome:
    """The relaxation, then branch and bound; CBC tells no bound, so the relaxation's stands."""
    command = getattr(pulp, "PULP_CBC_CMD", None) or pulp.COIN_CMD
    problem, variables = _as_pulp(program, _scale(program))
    bound = -math.inf
    for mip in (False, True):
        solver = command(mip=mip, msg=False, threads=1, timeLimit=time_limit_s, options=["randomSeed 1"], gapRel=0.0)
        if not solver.available():
            raise pulp.PulpError("not installed")
        problem.solve(solver)
        if problem.status == pulp.LpStatusInfeasible:
            return Outcome("infeasible", (), math.inf, math.inf, "")
        found = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        values = [v.varValue or 0.0 for v in variables]
        proved = problem.sol_status == pulp.LpSolutionOptimal
        if proved and _is_whole(program, values):
            return _optimal(program, values)
        if proved and not mip:
            bound = program.cost_of(values)
    if not found or not _is_whole(program, values):
        return Outcome("unknown", (), math.inf, bound, "")
    return Outcome("feasible", _rounded(program, values), program.cost_of(values), bound, "")


_SOLVERS: dict[str, Callable[[Program, float], Outcome]] = {"HiGHS": _solve_highs, "CBC": _solve_cbc}
