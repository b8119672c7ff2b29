"""Choose one strategy for every op of a graph: the splits ILP (tensor level).

Nodes n have choices k. A choice needs tensors in placements, gives tensors in placements, takes time and keeps tensors
for the backward pass. A tensor t has one producer; where the producer gives placement q and somebody wants p, the
conversion q -> p takes c[t,q,p] seconds, once, however many want p.

    x[n,k]    1 if node n takes choice k                                                    (whole)
    X[t,q]  = sum of x[n,k] over the choices k of t's producer n that give t in q           (shorthand)
    W[n,t,p]= sum of x[n,k] over the choices k of node n that need t in p                   (shorthand)
    y[t,p]    1 if t is wanted in p by anyone
    z[t,c,p]  1 if t is converted into p at the price c: one for all placements q that cost the same
    s[t,p]    1 if t is kept in p for the backward pass
    f[n,t,q,p] how much of W[n,t,p] comes from X[t,q]

    minimise  sum seconds[n,k] x[n,k] + sum c z[t,c,p] + price * (sum bytes[t,p] s[t,p] + sum bytes[n,k] x[n,k])

    (1)  sum_k x[n,k] = 1                                          one choice per node
    (2)  y[t,p] >= W[n,t,p]                                        for every node n; paid once by all of them
    (3)  sum_c z[t,c,p] + sum_{q free to p} X[t,q] >= y[t,p]       what is wanted comes from somewhere
    (4)  z[t,c,p] <= sum_{q: c[t,q,p] = c} X[t,q]                  a conversion starts from what there is
    (5)  sum_q f[n,t,q,p] = W[n,t,p]   and                         implied by (1)-(4) for whole x; makes the
         sum_p f[n,t,q,p] = X[t,q],   f[n,t,q,p] <= z or free      linear relaxation whole much more often
    (6)  s[t,p] >= sum of x[n,k] over the k of n that keep (t,p)   kept once, however many ops keep it
    (7)  sum bytes[t,p] s[t,p] + sum bytes[n,k] x[n,k] <= budget
    (8)  x[a,k] = x[b,k']  where the labels are equal              tied nodes take choices of one label
    (9)  x[n,k] = 1  where n is fixed to k                         (the other choices are dropped beforehand)

(3) and (4) say what z[t,q,p] >= X[t,q] + y[t,p] - 1 says for whole x, and more for fractions. (5) is the transport form
of one edge (the local marginal polytope); it is written for nodes that want t exactly once whatever they choose. Given
whole x all other variables are whole of themselves. Ties between equally good answers go to earlier choices, through
cost differences that sum up to at most 1e-9 of the cost. Choices that cannot be met, or that another choice of the node
is never worse than, are dropped before anything is built.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoptd.errors import AutoptdError
from autoptd.passes.placements import Placement
from autoptd.search.solver import Outcome, Program, minimise
from autoptd.search.split_problem import (
    Choice,
    Node,
    Pair,
    SplitProblem,
    SplitSolution,
    evaluate,
    labels,
    pruned,
    with_fixed,
)

__all__ = ["Choice", "InfeasibleSplit", "Node", "Pair", "SplitProblem", "SplitSolution", "evaluate", "solve_splits"]

Terms = dict[int, float]  # variable -> coefficient
TIE_BREAK = 1e-9  # of the optimum, at most


class InfeasibleSplit(AutoptdError):
    """No choice of strategies meets all demands.

    `nodes`: a set of nodes (fixed ones, where what is fixed is to blame) that cannot all be met; without any one of
    them the rest can. `missing_bytes`: how far the leanest answer is over the budget, where the budget takes part.
    """

    def __init__(self, what: str, *, nodes: tuple[str, ...], missing_bytes: float = 0.0, fix: str = "") -> None:
        self.nodes, self.missing_bytes = nodes, missing_bytes
        super().__init__(what, where=", ".join(nodes), fix=fix)


def solve_splits(problem: SplitProblem, time_limit_s: float = 30.0) -> SplitSolution:
    """The cheapest assignment of choices to nodes.

    Raises `InfeasibleSplit`; `PlanError` where `fixed` names a node or label that is not there; `SolverFailed`.
    """
    lean = pruned(with_fixed(problem))  # (9)
    outcome, model = _solve(lean, time_limit_s)
    if outcome.status == "infeasible":
        raise _explained(problem, time_limit_s)
    if outcome.status == "unknown":
        raise AutoptdError(f"no strategies found within {time_limit_s:g} s", fix="allow more time, or fix some of them")
    return replace(evaluate(problem, model.taken(outcome)), gap=outcome.gap, notes=outcome.notes)


# ---- the program ----


@dataclass
class _Model:
    """The program of one problem, and which variable says what."""

    problem: SplitProblem
    objective: Callable[[float, float], float]  # of seconds and bytes
    program: Program = field(default_factory=Program)
    x: dict[tuple[str, str], int] = field(default_factory=dict)
    budget: Terms = field(default_factory=dict)

    def variable(self, seconds: float, nbytes: float, *, whole: bool = False) -> int:
        index = self.program.add_variable(self.objective(seconds, nbytes), whole=whole)
        if nbytes:
            self.budget[index] = nbytes
        return index

    def taken(self, outcome: Outcome) -> dict[str, Choice]:
        """The choice of each node."""
        return {
            node.name: next(c for c in node.choices if outcome.values[self.x[node.name, c.label]] > 0.5)
            for node in self.problem.nodes
        }

    def sum_of(self, choices: Iterable[tuple[str, Choice]]) -> Terms:
        return {self.x[name, choice.label]: 1.0 for name, choice in choices}


def _solve(problem: SplitProblem, time_limit_s: float, *, bytes_only: bool = False) -> tuple[Outcome, _Model]:
    """Build and solve; `bytes_only` minimises bytes instead of the objective."""
    price = problem.second_per_byte
    model = _Model(problem, (lambda _, b: b) if bytes_only else (lambda s, b: s + price * b))
    if any(not node.choices for node in problem.nodes):
        return Outcome("infeasible", (), math.inf, math.inf, "none"), model
    _build(model)
    return minimise(model.program, time_limit_s), model


def _build(model: _Model) -> None:
    problem, program = model.problem, model.program
    _add_choices(model)
    by_name = {node.name: node for node in problem.nodes}
    consumers: dict[str, list[Node]] = defaultdict(list)
    for node in problem.nodes:
        for tensor in dict.fromkeys(t for c in node.choices for t, _ in c.needs):
            consumers[tensor].append(node)
    for tensor, users in consumers.items():
        _add_tensor(model, tensor, by_name[problem.producer[tensor]], users)
    _add_saved(model)
    if (budget := problem.budget_bytes) is not None:
        unit = max(abs(budget), 1.0)  # the row in budgets instead of bytes: tolerances are absolute
        program.add_row({index: b / unit for index, b in model.budget.items()}, high=budget / unit)  # (7)
    for a, b in problem.ties:
        for label in labels(by_name[a]):
            program.add_row({model.x[a, label]: 1.0, model.x[b, label]: -1.0}, low=0.0, high=0.0)  # (8)


def _add_choices(model: _Model) -> None:
    keepers: dict[Pair, set[str]] = defaultdict(set)
    for node in model.problem.nodes:
        for choice in node.choices:
            for pair in choice.saved:
                keepers[pair].add(node.name)
    costs = [[model.objective(c.seconds, c.bytes) for c in node.choices] for node in model.problem.nodes]
    least = math.fsum(min(costs_n) for costs_n in costs)
    step = TIE_BREAK * least / sum(map(len, costs))
    for node in model.problem.nodes:
        assert len(set(labels(node))) == len(node.choices), f"two choices of one label in {node.name}"
        for place, choice in enumerate(node.choices):
            index = model.variable(choice.seconds, choice.bytes, whole=True)
            model.program.costs[index] += step * place / len(node.choices)
            model.x[node.name, choice.label] = index
        model.program.add_row(model.sum_of((node.name, c) for c in node.choices), low=1.0, high=1.0)  # (1)


def _add_tensor(model: _Model, tensor: str, source: Node, users: Sequence[Node]) -> None:
    """Constraints (2) to (5) of one tensor."""
    given: dict[Placement, Terms] = defaultdict(dict)  # X[t,q]
    for choice in source.choices:
        given[dict(choice.gives)[tensor]].update(model.sum_of([(source.name, choice)]))
    wants = {user.name: _wants(model, tensor, user) for user in users}  # W[n,t,p]
    supply: dict[tuple[Placement, Placement], Terms] = {}  # (q, p) -> what f[n,t,q,p] may not exceed
    for target in sorted({p for places in wants.values() for p in places}, key=str):
        _add_target(
            model, tensor, target, given, [places[target] for places in wants.values() if target in places], supply
        )
    for user in users:
        if all(sum(t == tensor for t, _ in c.needs) == 1 for c in user.choices):
            _add_transport(model, given, wants[user.name], supply)


def _wants(model: _Model, tensor: str, user: Node) -> dict[Placement, Terms]:
    places: dict[Placement, Terms] = defaultdict(dict)
    for choice in user.choices:
        for t, p in choice.needs:
            if t == tensor:
                places[p][model.x[user.name, choice.label]] = 1.0
    return places


def _add_target(
    model: _Model,
    tensor: str,
    target: Placement,
    given: Mapping[Placement, Terms],
    wants: Sequence[Terms],
    supply: dict[tuple[Placement, Placement], Terms],
) -> None:
    program = model.program
    if len(wants) == 1:
        wanted = wants[0]  # y[t,p] = W[n,t,p]
    else:
        wanted = {model.variable(0.0, 0.0): 1.0}
        for want in wants:
            program.add_row({**wanted, **_negated(want)}, low=0.0)  # (2)
    prices: dict[float, list[Placement]] = defaultdict(list)
    for source in given:
        prices[model.problem.conversion(tensor, source, target)].append(source)
    met = _negated(wanted)
    for price, sources in prices.items():
        if price == math.inf:
            continue
        available = {index: one for source in sources for index, one in given[source].items()}
        if price == 0:
            met.update(available)
            supply.update({(source, target): {} for source in sources})
            continue
        z = model.variable(price, 0.0)
        met[z] = 1.0
        program.add_row({z: -1.0, **available}, low=0.0)  # (4)
        supply.update({(source, target): {z: 1.0} for source in sources})
    program.add_row(met, low=0.0)  # (3)


def _add_transport(
    model: _Model,
    given: Mapping[Placement, Terms],
    wants: Mapping[Placement, Terms],
    supply: Mapping[tuple[Placement, Placement], Terms],
) -> None:
    """(5) for one consumer."""
    program = model.program
    flow = {edge: program.add_variable() for edge in supply if edge[1] in wants}
    paid: dict[int, Terms] = defaultdict(dict)
    for edge, f in flow.items():
        for z in supply[edge]:
            paid[z][f] = -1.0
    for z, flows in paid.items():
        program.add_row({z: 1.0, **flows}, low=0.0)
    for target, want in wants.items():
        program.add_row({**_negated(want), **{f: 1.0 for (_, p), f in flow.items() if p == target}}, low=0.0, high=0.0)
    for source, terms in given.items():
        program.add_row({**_negated(terms), **{f: 1.0 for (q, _), f in flow.items() if q == source}}, low=0.0, high=0.0)


def _negated(terms: Terms) -> Terms:
    return {index: -coefficient for index, coefficient in terms.items()}


def _add_saved(model: _Model) -> None:
    keepers: dict[Pair, dict[str, Terms]] = defaultdict(lambda: defaultdict(dict))
    for node in model.problem.nodes:
        for choice in node.choices:
            for pair in choice.saved:
                keepers[pair][node.name].update(model.sum_of([(node.name, choice)]))
    for pair, by_node in keepers.items():
        nbytes = model.problem.saved_bytes[pair]
        if model.objective(0.0, nbytes) == 0 and model.problem.budget_bytes is None:
            continue
        s = model.variable(0.0, nbytes)
        for terms in by_node.values():
            model.program.add_row({s: 1.0, **_negated(terms)}, low=0.0)  # (6)


# ---- why there is no answer ----


def _explained(problem: SplitProblem, time_limit_s: float) -> InfeasibleSplit:
    """Find which demands are in conflict, by leaving them out."""

    def possible(nodes: Sequence[str], fixed: Sequence[str], budget: bool) -> bool:
        part = _restricted(problem, set(nodes), set(fixed), budget)
        return _solve(pruned(with_fixed(part)), time_limit_s)[0].status != "infeasible"

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
    return _over_budget(problem, nodes, time_limit_s)


def _over_budget(problem: SplitProblem, nodes: tuple[str, ...], time_limit_s: float) -> InfeasibleSplit:
    part = _restricted(problem, {node.name for node in problem.nodes}, set(nodes), budget=False)
    outcome, model = _solve(pruned(with_fixed(part)), time_limit_s, bytes_only=True)
    leanest = evaluate(part, model.taken(outcome))
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
