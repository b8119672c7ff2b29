"""State the stage cut as an integer program: the segments of each pipeline stage and their recomputation (stage level).

Stage k of p holds a run i..j of the n segments, with one of the recompute options r for that run on that stage:
`StageOption`s, each with its seconds of a microbatch T[k,i,j,r] (sending included) and its share M[k,i,j,r] of the
memory of its device. Options slower than one that fits are left out.

    w[k,i,j,r]  1 if stage k holds the segments i..j with option r                           (whole)
    t[k]        seconds of a microbatch on stage k
    C           seconds of a microbatch on the slowest stage

    minimise  rounds C + sum_k t[k]                  steady state, and pipeline fill and drain: with m microbatches,
                                                   rounds is m - 1 (Narayanan et al. 2021)

    (1)  sum_{j,r} w[0,0,j,r] = 1                                       the first stage begins with the first segment
    (2)  sum_{i,r} w[k,i,j,r] = sum_{l,r} w[k+1,j+1,l,r]   for each j   a stage begins where the one before it ends
    (3)  sum_{i,r} w[p-1,i,n-1,r] = 1                                   the last stage ends with the last segment
    (4)  sum_{i,j,r} M[k,i,j,r] w[k,i,j,r] <= 1                         memory of each stage
    (5)  t[k] = sum_{i,j,r} T[k,i,j,r] w[k,i,j,r]                       time of a stage
    (6)  C >= t[k]                                                      the slowest stage

The dynamic program of `search/pipeline/partition.py` minimises the same objective over the same runs, each with its
fastest option that fits, and is far faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoptd.errors import AutoptdError
from autoptd.search.pipeline.windows import Cuts
from autoptd.search.solver import IntegerProgram, Outcome, minimise

TIME_LIMIT_S = 600.0
Run = tuple[int, int, int]  # stage, first segment, last segment


class StageOption(NamedTuple):
    """A recompute option of a stage: seconds of a microbatch, and the share of its device's memory that it takes."""

    seconds: float
    share: float


def integer_cut(runs: Mapping[Run, Sequence[StageOption]], segments: int, rounds: float) -> tuple[float, Cuts] | None:
    """Return the least rounds * slowest stage + sum of stages over cuts into these runs, and its cut; None if no cut.

    Raises `AutoptdError` if the solver does not finish.
    """
    if not any(runs.values()):
        return None
    model = CutProgram(runs, segments)
    outcome = minimise(model.program, model.costs(rounds), TIME_LIMIT_S)
    if outcome.status == "infeasible":
        return None
    if outcome.status != "optimal":
        raise AutoptdError(
            f"the best cut into stages was not found within {TIME_LIMIT_S:g} s",
            where="fix['cut_solver']",
            fix="leave cut_solver out: the dynamic program takes milliseconds",
        )
    return outcome.objective * model.unit_s, model.cuts(outcome)


class CutProgram:
    """The integer program of the module's docstring (w, t, C), with times in units of the longest."""

    def __init__(self, runs: Mapping[Run, Sequence[StageOption]], segments: int) -> None:
        self.stages, self.segments = 1 + max(k for k, _, _ in runs), segments
        self.unit_s = max(option.seconds for options in runs.values() for option in options) or 1.0
        self.program = IntegerProgram()
        self.w = {
            (*run, r): self.program.variable(whole=True) for run, options in runs.items() for r in range(len(options))
        }
        self.t = [self.program.variable(upper=math.inf) for _ in range(self.stages)]
        self.slowest = self.program.variable(upper=math.inf)
        _chain(self)
        for k in range(self.stages):
            own = {w: runs[k, i, j][r] for (stage, i, j, r), w in self.w.items() if stage == k}
            seconds = {w: -option.seconds / self.unit_s for w, option in own.items()}
            self.program.demand(4, {w: option.share for w, option in own.items()}, high=1)
            self.program.demand(5, {self.t[k]: 1.0, **seconds}, 0, 0)
            self.program.demand(6, {self.slowest: 1.0, self.t[k]: -1.0}, 0)

    def costs(self, rounds: float) -> dict[int, float]:
        return {self.slowest: rounds, **dict.fromkeys(self.t, 1.0)}

    def cuts(self, outcome: Outcome) -> Cuts:
        """Return the first and last segment of each stage in a solution."""
        taken = {k: (i, j) for (k, i, j, _), w in self.w.items() if outcome.values[w] > 0.5}
        return tuple(taken[k] for k in range(self.stages))


def _chain(model: CutProgram) -> None:
    """Add constraints (1) to (3)."""
    begins: dict[tuple[int, int], list[int]] = defaultdict(list)  # by stage and first segment
    ends: dict[tuple[int, int], list[int]] = defaultdict(list)  # by stage, and the segment after the last
    for (k, i, j, _), w in model.w.items():
        begins[k, i].append(w)
        ends[k, j + 1].append(w)
    model.program.demand(1, dict.fromkeys(begins[0, 0], 1.0), 1, 1)
    for k in range(model.stages - 1):
        for place in range(1, model.segments):
            here, behind = ends[k, place], begins[k + 1, place]
            if here or behind:
                model.program.demand(2, {**dict.fromkeys(here, 1.0), **dict.fromkeys(behind, -1.0)}, 0, 0)
    model.program.demand(3, dict.fromkeys(ends[model.stages - 1, model.segments], 1.0), 1, 1)
