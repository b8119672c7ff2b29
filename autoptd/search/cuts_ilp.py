"""The cuts of `autoptd.search.cuts` as an integer program whose size does not grow with depth.

Units u of n_u equal copies, each of segments s = 0..q_u - 1. Stage k is described by where it ends, and by counts.

    w[k,u,s]  1 if stage k ends behind a segment (u,s), of some copy                                   (whole)
    g[k,u]    complete copies of u before that copy; 0 in other units                                  (whole)
    C[k,u,s] = g[k,u] + sum_{s' >= s} w[k,u,s'] + n_u * sum_{u' > u} w[k,u',.]                          (shorthand)
    c[k,u,s] = C[k,u,s] - C[k-1,u,s]          segments (u,s) in stage k                                (shorthand)
    a[k,u,s]  1 if stage k holds any segment (u,s)                                                     (whole)
    r[k,u,s]  how many of them are recomputed                                                          (whole)
    d[k,u,s]  1 if any of them is                                                                      (whole)
    W[k]      workspace; T[k] time; M slowest stage

    minimise  (m - 1) M + sum_k T[k]

    (1)  sum_{u,s} w[k,u,s] = 1;  the last stage ends behind the last segment
    (2)  g[k,u] <= (n_u - 1) * sum_s w[k,u,s]                        copies are counted in the unit it ends in
    (3)  c[k,u,s] >= 0                                               stages follow one another
    (4)  sum_{u,s} c[k,u,s] >= 1                                     none is empty
    (5)  c[k,u,s] <= n_u a[k,u,s],  W[k] >= temporary a[k,u,s]
    (6)  r[k,u,s] <= c[k,u,s],  r[k,u,s] <= n_u d[k,u,s],  W[k] >= (temporary + restored) d[k,u,s]
    (7)  sum parameters c + in_flight_k (sum activation c - sum restored r) + W[k] <= budget_k
    (8)  T[k] = sum (forward + backward) c + sum recompute r + sum send w  (no send from the last stage)
    (9)  M >= T[k]
    (10) r = 0 where nothing may be recomputed, r = c where everything is

A prefix that (1) and (2) describe is a point between two segments, so (3) alone makes the stages contiguous. The
program takes further constraints easily; without any, `cuts.solve_stages` finds the same optimum much faster (202
segments on 16 stages, some recomputed, one core: 0.01 s there, 4.5 s here).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from autoptd.errors import AutoptdError
from autoptd.search.cuts import StageProblem, StageSolution, check, evaluate, explain, restored_bytes
from autoptd.search.solver import Program, minimise

Key = tuple[int, int, int]  # stage, unit, segment of the unit
Terms = dict[int, float]


@dataclass
class _Model:
    problem: StageProblem
    program: Program = field(default_factory=Program)
    w: dict[Key, int] = field(default_factory=dict)
    g: dict[tuple[int, int], int] = field(default_factory=dict)
    r: dict[Key, int] = field(default_factory=dict)

    def segments(self, stage: int) -> list[Key]:
        return [(stage, u, s) for u, unit in enumerate(self.problem.units) for s in range(len(unit.segments))]

    def prefix(self, key: Key) -> Terms:
        """C[k,u,s]; nothing before the first stage."""
        stage, u, s = key
        if stage < 0:
            return {}
        units = self.problem.units
        terms = {self.g[stage, u]: 1.0}
        terms |= {self.w[stage, u, later]: 1.0 for later in range(s, len(units[u].segments))}
        terms |= {
            self.w[stage, v, any_s]: float(units[u].count)
            for v in range(u + 1, len(units))
            for any_s in range(len(units[v].segments))
        }
        return terms

    def count(self, key: Key) -> Terms:
        """c[k,u,s]."""
        stage, u, s = key
        return _sum((1.0, self.prefix(key)), (-1.0, self.prefix((stage - 1, u, s))))


def solve_stages_ilp(problem: StageProblem, time_limit_s: float = 60.0) -> StageSolution:
    """The same answer as `cuts.solve_stages`, or the best found with its gap. Raises alike."""
    check(problem)
    model = _Model(problem)
    _add_ends(model)
    slowest = model.program.add_variable(problem.microbatches - 1.0, upper=None)
    for stage in range(problem.stages):
        _add_stage(model, stage, slowest)
    outcome = minimise(model.program, time_limit_s)
    if outcome.status == "infeasible":
        raise explain(problem)
    if not outcome.values:
        raise AutoptdError(f"no cut found within {time_limit_s:g} s", fix="allow more time")
    cuts, chosen = _read(model, [round(value) for value in outcome.values])
    found = evaluate(problem, cuts, chosen)
    gap = 0.0 if outcome.status == "optimal" else max(0.0, 1.0 - outcome.bound / found.bound_s)
    return replace(found, gap=gap)


def _sum(*parts: tuple[float, Terms]) -> Terms:
    total: Terms = defaultdict(float)
    for factor, terms in parts:
        for index, coefficient in terms.items():
            total[index] += factor * coefficient
    return dict(total)


def _add_ends(model: _Model) -> None:
    problem, program = model.problem, model.program
    units = problem.units
    for k in range(problem.stages):
        last = k == problem.stages - 1
        end = (len(units) - 1, len(units[-1].segments) - 1)
        for key in model.segments(k):
            model.w[key] = program.add_variable(lower=float(last and key[1:] == end), whole=True)
        program.add_row({model.w[key]: 1.0 for key in model.segments(k)}, low=1.0, high=1.0)  # (1)
        for u, unit in enumerate(units):
            most = unit.count - 1.0
            least = most if last and u == end[0] else 0.0
            model.g[k, u] = program.add_variable(lower=least, upper=most, whole=True)
            here = {model.w[k, u, s]: -most for s in range(len(unit.segments))}
            program.add_row({model.g[k, u]: 1.0, **here}, high=0.0)  # (2)


def _add_stage(model: _Model, stage: int, slowest: int) -> None:
    problem, program = model.problem, model.program
    keys = model.segments(stage)
    counts = {key: model.count(key) for key in keys}
    program.add_row(_sum(*((1.0, terms) for terms in counts.values())), low=1.0)  # (4)
    seconds = program.add_variable(1.0, upper=None)
    budget = problem.budget_bytes[stage]
    # Bytes are counted in budgets: the solver's tolerances are absolute.
    byte = 1 / max(abs(budget), 1.0)
    workspace = program.add_variable(upper=None)
    memory: list[tuple[float, Terms]] = [(1.0, {workspace: 1.0})]
    time: list[tuple[float, Terms]] = [(-1.0, {seconds: 1.0})]
    for key in keys:
        unit = problem.units[key[1]]
        part, here = unit.segments[key[2]], counts[key]
        program.add_row(here, low=0.0)  # (3)
        _add_peak(program, here, unit.count, workspace, part.temporary_bytes * byte)  # (5)
        r = model.r[key] = program.add_variable(upper=0.0 if problem.recompute == "none" else unit.count, whole=True)
        again = {r: 1.0}
        equal = 0.0 if problem.recompute == "full" else None  # (10)
        program.add_row(_sum((1.0, here), (-1.0, again)), low=0.0, high=equal)  # (6)
        _add_peak(program, again, unit.count, workspace, (part.temporary_bytes + restored_bytes(part)) * byte)
        flying = problem.in_flight[stage] * byte
        memory += [(part.parameter_bytes * byte + flying * part.activation_bytes, here)]
        memory += [(-flying * restored_bytes(part), again)]
        time += [(part.forward_s + part.backward_s, here), (part.recompute_s, again)]
        if stage < problem.stages - 1:
            time += [(part.send_bytes_s, {model.w[key]: 1.0})]
    program.add_row(_sum(*memory), high=budget * byte)  # (7)
    program.add_row(_sum(*time), low=0.0, high=0.0)  # (8)
    program.add_row({slowest: 1.0, seconds: -1.0}, low=0.0)  # (9)


def _add_peak(program: Program, some: Terms, most: int, workspace: int, peak: float) -> None:
    """Where any of `some` is there, the workspace is at least `peak`."""
    if peak <= 0:
        return
    any_of = program.add_variable(whole=True)
    program.add_row({**_sum((-1.0, some)), any_of: float(most)}, low=0.0)
    program.add_row({workspace: 1.0, any_of: -peak}, low=0.0)


def _read(model: _Model, values: list[int]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """First and last segment per stage, and of each kind the first segments to recompute."""
    problem = model.problem
    place = [
        (u, s) for u, unit in enumerate(problem.units) for _ in range(unit.count) for s in range(len(unit.segments))
    ]
    cuts, chosen, first = [], [], 0
    for k in range(problem.stages):
        size = sum(
            round(sum(coefficient * values[index] for index, coefficient in model.count(key).items()))
            for key in model.segments(k)
        )
        left = {key[1:]: values[model.r[key]] for key in model.segments(k)}
        picked = []
        for index in range(first, first + size):
            if left[place[index]] > 0:
                left[place[index]] -= 1
                picked.append(index)
        cuts.append((first, first + size - 1))
        chosen.append(picked)
        first += size
    return cuts, chosen
