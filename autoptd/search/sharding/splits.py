"""Choose one strategy for every op of a graph: solve the splits ILP.

`search/sharding/ilp.py` states the ILP. Nodes that are fixed to a choice lose their others beforehand. Choices that
cannot be met, or that another choice of the node is never worse than, are dropped as well.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autoptd.errors import AutoptdError
from autoptd.search.infeasible import conflict
from autoptd.search.sharding.ilp import SplitPrograms, structure_of
from autoptd.search.sharding.problem import Choice, SplitProblem, SplitSolution, evaluate, pruned, with_fixed
from autoptd.search.solver import Outcome, minimise


def solve_splits(
    problem: SplitProblem, time_limit_s: float = 30.0, programs: SplitPrograms | None = None
) -> SplitSolution:
    """Return the cheapest assignment of choices to nodes. `programs`: those stated before, by structure.

    Raises `InfeasibleSplit`; `PlanError` where `fixed` names a node or label that is not there; `SolverFailed`.
    """
    programs = programs or SplitPrograms()
    outcome, taken = _solve(problem, time_limit_s, programs)
    if outcome.status == "infeasible":
        raise conflict(problem, lambda part: _solve(part, time_limit_s, programs)[0].status != "infeasible")
    if outcome.status == "unknown":
        raise AutoptdError(f"no strategies found within {time_limit_s:g} s", fix="allow more time, or fix some of them")
    return replace(evaluate(problem, taken), gap=outcome.gap, notes=outcome.notes)


def _solve(problem: SplitProblem, time_limit_s: float, programs: SplitPrograms) -> tuple[Outcome, dict[str, Choice]]:
    """Return the outcome, and the choice of each node where there is one."""
    possible = pruned(with_fixed(problem))
    if any(not node.choices for node in possible.nodes):
        return Outcome("infeasible", (), math.inf, math.inf, "none"), {}
    model = programs.of(structure_of(possible))
    outcome = minimise(model.program, model.costs(possible), time_limit_s)
    return outcome, model.taken(possible, outcome) if outcome.values else {}
