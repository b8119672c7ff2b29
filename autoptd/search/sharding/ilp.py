"""State and solve the splits ILP: one strategy for every op of a graph (tensor level).

Nodes that are fixed to a choice lose their others beforehand, and so do choices that cannot be met or are dominated.

Nodes n have choices k. A choice needs tensors in placements, gives tensors in placements, takes time and saves tensors
for backward. A tensor t has one producer. Where the producer gives placement q and some node wants p, the conversion
q -> p takes c[t,q,p] seconds, once, however many nodes want p.

    x[n,k]    1 if node n takes choice k                                                    (whole)
    X[t,q]  = sum of x[n,k] over the choices k of t's producer n that give t in q           (shorthand)
    W[n,t,p]= sum of x[n,k] over the choices k of node n that need t in p                   (shorthand)
    y[t,p]    1 if some node wants t in p
    z[t,c,p]  1 if t is converted into p at the price c: one for all placements q that cost the same
    s[t,p]    1 if t is saved in p for backward
    f[n,t,q,p] how much of W[n,t,p] comes from X[t,q]

    minimise  sum seconds[n,k] x[n,k] + sum c z[t,c,p] + price * (sum bytes[t,p] s[t,p] + sum bytes[n,k] x[n,k])

    (1)  sum_k x[n,k] = 1                                          one choice per node
    (2)  y[t,p] >= W[n,t,p]                                        for every node n; paid once by all of them
    (3)  sum_c z[t,c,p] + sum_{q free to p} X[t,q] >= y[t,p]       what is wanted comes from somewhere
    (4)  z[t,c,p] <= sum_{q: c[t,q,p] = c} X[t,q]                  a conversion starts from what there is
    (5)  sum_q f[n,t,q,p] = W[n,t,p]   and                         implied by (1)-(4) for whole x; makes the
         sum_p f[n,t,q,p] = X[t,q],   f[n,t,q,p] <= z or free      linear relaxation whole much more often
    (6)  s[t,p] >= sum of x[n,k] over the k of n that save (t,p)   saved once, however many ops save it
    (7)  x[a,k] = x[b,k]  for every label k                        tied nodes take choices of one label

(3) and (4) say what z[t,q,p] >= X[t,q] + y[t,p] - 1 says for whole x, and more for fractions. (5) is the transport form
of one edge (the local marginal polytope); it is written for nodes that want t exactly once whatever they choose. Where
such a node is the only one that wants t, f itself pays c[t,q,p]: (5) then implies (2) to (4), which are left out with y
and z. Without them, the relaxation of a model of state-space layers has half the rows and is solved in a third of the
time. Given whole x, all other variables take whole values. Ties between equally good solutions go to earlier choices,
by cost differences that add up to at most 1e-9 of the cost.

Constraints depend on the `Structure` of a problem alone: which choices there are, and which conversions cost the same.
The search solves many problems of few structures, so that `SplitPrograms` states each structure once; costs are set for
every problem (`SplitProgram.costs`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autoptd.errors import AutoptdError
from autoptd.layout.placements import Placement
from autoptd.search.infeasible import conflict
from autoptd.search.sharding.problem import Choice, Pair, SplitProblem, SplitSolution, evaluate, pruned, with_fixed
from autoptd.search.solver import IntegerProgram, Outcome, minimise

Sums = dict[Placement, list[int]]  # variables that are added up
TIE_BREAK = 1e-9  # of the optimum, at most
_KEPT = 16  # programs of a few megabytes


class Option(NamedTuple):
    """A choice without its cost."""

    label: str
    needs: tuple[Pair, ...]
    gives: tuple[Pair, ...]
    saved: tuple[Pair, ...]


class Vertex(NamedTuple):
    """A node without its costs."""

    name: str
    options: tuple[Option, ...]


class Supply(NamedTuple):
    """Placements that a tensor is converted from at one price, which may be 0."""

    sources: tuple[Placement, ...]
    free: bool


class Structure(NamedTuple):
    """The part of a problem that determines its variables and constraints.

    `supplies`: for every tensor and wanted placement; `saved`: tensors whose memory has a price.
    """

    nodes: tuple[Vertex, ...]
    supplies: tuple[tuple[Pair, tuple[Supply, ...]], ...]
    saved: tuple[Pair, ...]
    ties: tuple[tuple[str, str], ...]


def structure_of(problem: SplitProblem) -> Structure:
    """Return the part of a problem that does not depend on prices."""
    pairs = dict.fromkeys(pair for node in problem.nodes for choice in node.choices for pair in choice.saved)
    saved = tuple(pair for pair in pairs if problem.second_per_byte * problem.saved_bytes[pair] != 0)
    nodes = tuple(
        Vertex(node.name, tuple(Option(c.label, c.needs, c.gives, c.saved) for c in node.choices))
        for node in problem.nodes
    )
    return Structure(nodes, tuple(_supplies(problem)), saved, problem.ties)


def _supplies(problem: SplitProblem) -> list[tuple[Pair, tuple[Supply, ...]]]:
    wanted: dict[str, dict[Placement, None]] = defaultdict(dict)
    given: dict[str, dict[Placement, None]] = defaultdict(dict)
    for node in problem.nodes:
        for choice in node.choices:
            for tensor, placement in choice.needs:
                wanted[tensor][placement] = None
            for tensor, placement in choice.gives:
                given[tensor][placement] = None
    found, conversion_s = [], problem.conversion_s
    for tensor, targets in wanted.items():
        for target in sorted(targets, key=str):
            prices: dict[float, list[Placement]] = defaultdict(list)
            for source in given[tensor]:
                if source == target:
                    prices[0.0].append(source)
                elif (edge := (tensor, source, target)) in conversion_s:
                    prices[conversion_s[edge]].append(source)
            supplies = (Supply(tuple(sources), c == 0) for c, sources in prices.items() if c < math.inf)
            found.append(((tensor, target), tuple(supplies)))
    return found


class SplitProgram:
    """The program of one structure: x, z (by tensor, first source of that price, target) and s of the docstring.

    `z` also has the f of a tensor's only consumer, by tensor, source and target, where they are not free.
    """

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.program = IntegerProgram()
        self.x: dict[tuple[str, str], int] = {}
        self.z: dict[tuple[str, Placement, Placement], int] = {}
        self.s: dict[Pair, int] = {}
        _add_choices(self)
        _add_tensors(self)
        _add_saved(self)
        _add_ties(self)

    def costs(self, problem: SplitProblem) -> dict[int, float]:
        """Return the cost of each variable in a problem of this structure."""
        price = problem.second_per_byte
        own = [[choice.seconds + price * choice.bytes for choice in node.choices] for node in problem.nodes]
        step = TIE_BREAK * math.fsum(map(min, own)) / sum(map(len, own))
        found = {}
        for node, costs in zip(problem.nodes, own, strict=True):
            for place, (choice, cost) in enumerate(zip(node.choices, costs, strict=True)):
                found[self.x[node.name, choice.label]] = cost + step * place / len(costs)
        found.update({z: problem.conversion_s[edge] for edge, z in self.z.items()})
        found.update({s: price * problem.saved_bytes[pair] for pair, s in self.s.items()})
        return found

    def taken(self, problem: SplitProblem, outcome: Outcome) -> dict[str, Choice]:
        """Return the choice of each node."""
        return {
            node.name: next(c for c in node.choices if outcome.values[self.x[node.name, c.label]] > 0.5)
            for node in problem.nodes
        }


class SplitPrograms:
    """Programs, the most recently used last. They are few and large: to compare structures is quicker than hashing."""

    def __init__(self) -> None:
        self._stated: list[SplitProgram] = []

    def of(self, structure: Structure) -> SplitProgram:
        found = next((program for program in reversed(self._stated) if program.structure == structure), None)
        program = found or SplitProgram(structure)
        others = (other for other in self._stated if other is not program)
        self._stated = [*others, program][-_KEPT:]
        return program


# ---- solving ----


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


# ---- variables and constraints ----


def _add_choices(model: SplitProgram) -> None:
    for node in model.structure.nodes:
        own = {option.label: model.program.variable(whole=True) for option in node.options}
        assert len(own) == len(node.options), f"two choices of one label in {node.name}"
        model.x.update({(node.name, label): x for label, x in own.items()})
        model.program.demand(1, dict.fromkeys(own.values(), 1.0), 1, 1)


def _add_tensors(model: SplitProgram) -> None:
    producer: dict[str, Sums] = {}  # X[t,q]
    consumers: dict[str, dict[str, Sums]] = defaultdict(dict)  # W[n,t,p]
    once: dict[str, list[str]] = defaultdict(list)  # nodes that want a tensor exactly once whatever they choose
    for node in model.structure.nodes:
        producer.update(_sums(model, node, [option.gives for option in node.options]))
        for tensor, places in _sums(model, node, [option.needs for option in node.options]).items():
            consumers[tensor][node.name] = places
            if all(sum(t == tensor for t, _ in option.needs) == 1 for option in node.options):
                once[tensor].append(node.name)
    supplies: dict[str, dict[Placement, tuple[Supply, ...]]] = defaultdict(dict)
    for (tensor, target), ways in model.structure.supplies:
        supplies[tensor][target] = ways
    for tensor, wants in consumers.items():
        _add_tensor(model, tensor, producer[tensor], wants, once[tensor], supplies[tensor])


def _sums(model: SplitProgram, node: Vertex, pairs: Sequence[Sequence[Pair]]) -> dict[str, Sums]:
    """Return, by tensor and placement, the sum of x over the options that have it among their `pairs`."""
    found: dict[str, dict[Placement, dict[int, None]]] = defaultdict(lambda: defaultdict(dict))
    for option, own in zip(node.options, pairs, strict=True):
        for tensor, placement in own:
            found[tensor][placement][model.x[node.name, option.label]] = None
    return {tensor: {place: list(xs) for place, xs in places.items()} for tensor, places in found.items()}


def _less(more: Sequence[int], less: Sequence[int]) -> dict[int, float]:
    """Return the terms of one sum of variables less another."""
    found = {**dict.fromkeys(more, 1.0), **dict.fromkeys(less, -1.0)}
    assert len(found) == len(more) + len(less), "a variable twice"
    return found


def _add_tensor(
    model: SplitProgram,
    tensor: str,
    given: Sums,
    wants: Mapping[str, Sums],
    once: Sequence[str],
    supplies: Mapping[Placement, tuple[Supply, ...]],
) -> None:
    """Constraints (2) to (5) of one tensor, or (5) alone for its only consumer."""
    if len(wants) == len(once) == 1:
        _add_flows(model, given, wants[once[0]], _single_flows(model, tensor, supplies))
        return
    paid: dict[tuple[Placement, Placement], int | None] = {}  # (q, p) -> what f[n,t,q,p] may not exceed
    for target, ways in supplies.items():
        _add_target(model, tensor, target, given, [own[target] for own in wants.values() if target in own], ways, paid)
    for name in once:
        _add_transport(model, given, wants[name], paid)


def _add_target(
    model: SplitProgram,
    tensor: str,
    target: Placement,
    given: Sums,
    wants: Sequence[Sequence[int]],
    ways: Sequence[Supply],
    paid: dict[tuple[Placement, Placement], int | None],
) -> None:
    program = model.program
    wanted = wants[0]  # y[t,p] = W[n,t,p]
    if len(wants) > 1:
        wanted = [program.variable()]
        for want in wants:
            program.demand(2, _less(wanted, want), 0)
    met: list[int] = []
    for sources, free in ways:
        available = [x for source in sources for x in given[source]]
        if free:
            met += available
            paid.update({(source, target): None for source in sources})
            continue
        z = model.z[tensor, sources[0], target] = program.variable()
        met.append(z)
        program.demand(4, _less(available, [z]), 0)
        paid.update({(source, target): z for source in sources})
    program.demand(3, _less(met, wanted), 0)


def _single_flows(
    model: SplitProgram, tensor: str, supplies: Mapping[Placement, tuple[Supply, ...]]
) -> dict[tuple[Placement, Placement], int]:
    """Add and return f[n,t,q,p] of the only consumer of a tensor, which pay for its conversions."""
    flows = {}
    for target, ways in supplies.items():
        for sources, free in ways:
            for source in sources:
                flows[source, target] = model.program.variable()
                if not free:
                    model.z[tensor, source, target] = flows[source, target]
    return flows


def _add_transport(
    model: SplitProgram,
    given: Sums,
    wants: Sums,
    paid: Mapping[tuple[Placement, Placement], int | None],
) -> None:
    """(5) for one consumer of several."""
    bought: dict[int, list[int]] = defaultdict(list)
    flows = {(source, target): model.program.variable() for source, target in paid if target in wants}
    for edge, flow in flows.items():
        z = paid[edge]
        if z is not None:
            bought[z].append(flow)
    for z, own in bought.items():
        model.program.demand(5, _less([z], own), 0)
    _add_flows(model, given, wants, flows)


def _add_flows(model: SplitProgram, given: Sums, wants: Sums, flows: Mapping[tuple[Placement, Placement], int]) -> None:
    """The sums of (5) for one consumer."""
    taken: dict[Placement, list[int]] = {target: [] for target in wants}
    sent: dict[Placement, list[int]] = {source: [] for source in given}
    for (source, target), flow in flows.items():
        taken[target].append(flow)
        sent[source].append(flow)
    for target, want in wants.items():
        model.program.demand(5, _less(taken[target], want), 0, 0)
    for source, available in given.items():
        model.program.demand(5, _less(sent[source], available), 0, 0)


def _add_saved(model: SplitProgram) -> None:
    keepers: dict[Pair, dict[str, dict[int, None]]] = {pair: defaultdict(dict) for pair in model.structure.saved}
    for node in model.structure.nodes:
        for option in node.options:
            for pair in option.saved:
                if pair in keepers:
                    keepers[pair][node.name][model.x[node.name, option.label]] = None
    for pair, by_node in keepers.items():
        s = model.s[pair] = model.program.variable()
        for own in by_node.values():
            model.program.demand(6, _less([s], list(own)), 0)


def _add_ties(model: SplitProgram) -> None:
    labels = {node.name: [option.label for option in node.options] for node in model.structure.nodes}
    for a, b in model.structure.ties:
        for label in labels[a]:
            model.program.demand(7, _less([model.x[a, label]], [model.x[b, label]]), 0, 0)
