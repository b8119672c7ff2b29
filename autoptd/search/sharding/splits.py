"""Choose one strategy for every op of a graph: solve the splits ILP, or say which demands are in conflict.

`search/sharding/ilp.py` states the ILP. Nodes that are fixed to a choice lose their others beforehand. Choices that
cannot be met, or that another choice of the node is never worse than, are dropped as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autoptd.errors import AutoptdError
from autoptd.search.sharding.ilp import SplitPrograms, structure_of
from autoptd.search.sharding.problem import (
    Choice,
    Node,
    Pair,
    SplitProblem,
    SplitSolution,
    evaluate,
    pruned,
    with_fixed,
)
from autoptd.search.solver import Outcome, minimise

__all__ = ["Choice", "InfeasibleSplit", "Node", "Pair", "SplitProblem", "SplitSolution", "evaluate", "solve_splits"]


class InfeasibleSplit(AutoptdError):
    """No choice of strategies meets all demands.

    `nodes`: a set of nodes (fixed ones, where what is fixed is to blame) that cannot all be met; without any one of
    them the rest can. `missing_bytes`: how far the leanest answer is over the budget, where the budget takes part.
    """

    def __init__(self, what: str, *, nodes: tuple[str, ...], missing_bytes: float = 0.0, fix: str = "") -> None:
        self.nodes, self.missing_bytes = nodes, missing_bytes
        super().__init__(what, where=", ".join(nodes), fix=fix)


def solve_splits(
    problem: SplitProblem, time_limit_s: float = 30.0, programs: SplitPrograms | None = None
) -> SplitSolution:
    """The cheapest assignment of choices to nodes. `programs`: those stated before, for problems of one structure.

    Raises `InfeasibleSplit`; `PlanError` where `fixed` names a node or label that is not there; `SolverFailed`.
    """
    programs = programs or SplitPrograms()
    outcome, taken = _solve(problem, time_limit_s, programs)
    if outcome.status == "infeasible":
        raise _explained(problem, time_limit_s, programs)
    if outcome.status == "unknown":
        raise AutoptdError(f"no strategies found within {time_limit_s:g} s", fix="allow more time, or fix some of them")
    return replace(evaluate(problem, taken), gap=outcome.gap, notes=outcome.notes)


def _solve(
    problem: SplitProblem, time_limit_s: float, programs: SplitPrograms, *, bytes_only: bool = False
) -> tuple[Outcome, dict[str, Choice]]:
    """The outcome, and the choice of each node where there is one; `bytes_only` minimises bytes alone."""
    lean, price = pruned(with_fixed(problem)), problem.second_per_byte
    if any(not node.choices for node in lean.nodes):
        return Outcome("infeasible", (), math.inf, math.inf, "none"), {}

    def objective(seconds: float, nbytes: float) -> float:
        return nbytes if bytes_only else seconds + price * nbytes

    model = programs.of(structure_of(lean, objective))
    outcome = minimise(model.program, model.costs(lean, objective), time_limit_s)
    return outcome, model.taken(lean, outcome) if outcome.values else {}


# ---- why there is no answer ----


def _explained(problem: SplitProblem, time_limit_s: float, programs: SplitPrograms) -> InfeasibleSplit:
    """Find which demands are in conflict, by leaving them out."""

    def possible(nodes: Sequence[str], fixed: Sequence[str], budget: bool) -> bool:
        part = _restricted(problem, set(nodes), set(fixed), budget)
        return _solve(part, time_limit_s, programs)[0].status != "infeasible"

    names, pins = [node.name for node in problem.nodes], list(problem.fixed)
    if not possible(names, (), False):
        nodes = _smallest(names, lambda kept: possible(kept, (), False))
        return InfeasibleSplit(
            "no strategies of these ops go together", nodes=nodes, fix="add a strategy or conversion"
        )
    if not possible(names, pins, False):
        nodes = _smallest(pins, lambda kept: possible(names, kept, False))
        wish = ", ".join(f"{name}={problem.fixed[name]}" for name in nodes)
        return InfeasibleSplit(f"what is fixed cannot all be had: {wish}", nodes=nodes, fix="leave one of them free")
    nodes = () if not possible(names, (), True) else _smallest(pins, lambda kept: possible(names, kept, True))
    return _over_budget(problem, nodes, time_limit_s, programs)


def _over_budget(
    problem: SplitProblem, nodes: tuple[str, ...], time_limit_s: float, programs: SplitPrograms
) -> InfeasibleSplit:
    part = _restricted(problem, {node.name for node in problem.nodes}, set(nodes), budget=False)
    leanest = evaluate(part, _solve(part, time_limit_s, programs, bytes_only=True)[1])
    nbytes, budget = leanest.saved_bytes + leanest.static_bytes, problem.budget_bytes or 0.0
    missing = nbytes - budget
    what = f"the leanest strategies take {nbytes:,.0f} bytes: {missing:,.0f} over the budget of {budget:,.0f}"
    fix = "leave one of these free" if nodes else "split over more devices, recompute, or use smaller microbatches"
    return InfeasibleSplit(what, nodes=nodes, missing_bytes=missing, fix=fix)


def _restricted(problem: SplitProblem, nodes: set[str], fixed: set[str], budget: bool) -> SplitProblem:
    """The problem without the other nodes (what they give is to be had anyhow), pins, and perhaps the budget."""
    kept = {t for t, name in problem.producer.items() if name in nodes}
    return replace(
        problem,
        nodes=tuple(
            replace(n, choices=tuple(replace(c, needs=tuple(p for p in c.needs if p[0] in kept)) for c in n.choices))
            for n in problem.nodes
            if n.name in nodes
        ),
        ties=tuple(pair for pair in problem.ties if set(pair) <= nodes),
        fixed={name: label for name, label in problem.fixed.items() if name in fixed},
        budget_bytes=problem.budget_bytes if budget else None,
    )


def _smallest(items: Sequence[str], possible: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """A subset of `items` that is impossible while each of its own parts is possible (Junker 2004, QuickXplain)."""

    def conflict(base: list[str], changed: bool, rest: list[str]) -> list[str]:
        if changed and not possible(base):
            return []
        if len(rest) == 1:
            return rest
        half = len(rest) // 2
        first, second = rest[:half], rest[half:]
        of_second = conflict(base + first, True, second)
        of_first = conflict(base + of_second, bool(of_second), first)
        return of_first + of_second

    found = set(conflict([], False, list(items)))
    return tuple(item for item in items if item in found)
