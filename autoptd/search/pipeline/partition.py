"""Cut a sequence of segments into pipeline stages (stage level).

Stages are contiguous runs of segments, none empty. A stage k that holds the segments i..j takes T = f + b seconds,
infinite if it does not fit; its recomputation is already chosen (`search/pipeline/recompute_options.py`). Its messages
take x each way. An `CutObjective` is of the form

    max_k P_k + Σ_k (T_k + 2 x_k),      P_k = rounds (T_k + 2 x_k) - waits_k min(f_k, b_k)

where 2 x_k may be left out of P_k, and the sum altogether. With rounds = m - 1 and no waits it is about the time of a
step of m microbatches (Narayanan et al. 2021); with the waits of path (2) of `search/pipeline/lower_bounds.py`, it is a
lower bound. This leaves a partition of a sequence:

1. the least max P of all partitions                                                       a minimax recurrence;
2. for a limit M, the partition of least sum with P_k <= M                                 a shortest path;
3. the best M: on an interval [lo, hi] no partition is below lo + sum(hi), which prunes most intervals at once; the
   others are bisected at a value of some P_k.

Windows (i, j) too long for any optimal partition are never measured: `_Search` starts with short windows and stops when
the best partition so far proves that longer ones cannot improve it. This is exact, and fast enough to run for every
mesh. Instead of 1. to 3., `search/pipeline/cut_ilp.py` states the same partition as an integer program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoptd.errors import PlanError
from autoptd.passes.fold import Folded
from autoptd.search.pipeline.cut_ilp import StageOption, integer_cut
from autoptd.search.pipeline.windows import (
    SLACK,
    Cuts,
    Floats,
    Ints,
    Measure,
    Partition,
    PartitionProblem,
    Windows,
    partition,
)

Options = Callable[[int, int, int], Sequence[StageOption]]  # of (stage, first segment, last segment)
FIRST_CAP = 1.03  # first limit on peaks, as a multiple of the lower bound on the highest
TIE_BREAK = 1e-10  # least `rounds`
RELATIVE = 1e-12  # smaller relative gains are rounding errors


@dataclass(frozen=True)
class CutObjective:
    """The seconds that a cut minimises; see the docstring of this file. `waits`: one for each stage, or for all."""

    rounds: float
    waits: tuple[int, ...] = (0,)
    messages: bool = True  # whether they count in P
    fill: bool = True  # whether the sum counts

    def peaks(self, forward_s: Floats, backward_s: Floats, send_s: Floats) -> Floats:
        """Return P of windows [k, e, l]."""
        seconds = forward_s + backward_s + (send_s if self.messages else 0.0)
        finite = np.isfinite(seconds)
        waited = self._waits * np.where(finite, np.minimum(forward_s, backward_s), 0.0)
        return np.where(finite, self._rounds * np.where(finite, seconds, 0.0) - waited, np.inf)

    def least_peaks(self, lower_s: Floats, send_s: Floats, forward_share: float) -> Floats:
        """Return lower bounds of P, given those of the seconds with messages."""
        seconds, rates = lower_s if self.messages else lower_s - send_s, self._rates(forward_share)
        if rates.min() > 0:
            return rates * seconds
        finite = np.isfinite(lower_s)
        return np.where(finite, rates * np.where(finite, seconds, 0.0), np.inf)

    def sums(self, seconds: Floats) -> Floats:
        return seconds if self.fill else np.where(np.isfinite(seconds), 0.0, np.inf)

    def least_rate(self, forward_share: float) -> float:
        """Return a lower bound of P per second of any stage."""
        return float(self._rates(forward_share).min())

    @property
    def _waits(self) -> Floats:
        return np.array(self.waits, dtype=float)[:, None, None]

    @property
    def _rounds(self) -> float:
        return max(self.rounds, TIE_BREAK)  # positive, so that equal sums (m = 1) are decided by balance

    def _rates(self, forward_share: float) -> Floats:
        return self._rounds - self._waits * forward_share


def solve_cuts(
    problem: PartitionProblem, objective: CutObjective, measure: Measure, options: Options | None = None
) -> Cuts | None:
    """Return the cut that minimises `objective`; None if no cut fits.

    `options`: recompute options of each stage; if given, the integer program chooses among them, and `measure` is not
    used. Raises `PlanError` for more stages than segments.
    """
    if problem.stages > problem.pieces:
        raise PlanError(
            f"{problem.stages} pipeline stages need at least as many segments; the model has {problem.pieces}",
            fix=f"use pp <= {problem.pieces}",
        )
    found = _Search(problem, objective, measure, options).run()
    return None if found is None else found.cuts


def least_value(problem: PartitionProblem, objective: CutObjective, measure: Measure | None = None) -> Partition | None:
    """Return the cut that minimises `objective`, and its value; None if no cut fits.

    Without a `measure` the value is a lower bound, from the least seconds of each window."""
    return _Search(problem, objective, measure).run() if problem.stages <= problem.pieces else None


class _Search:
    """Steps 1 to 3, or the integer program, over windows that grow until longer ones are proved useless."""

    def __init__(
        self,
        problem: PartitionProblem,
        objective: CutObjective,
        measure: Measure | None,
        options: Options | None = None,
    ) -> None:
        self.problem, self.objective, self.measure, self.options = problem, objective, measure, options

    def run(self) -> Partition | None:
        problem, objective = self.problem, self.objective
        base = problem.least_s
        total = float(base.sum())
        least = total + float(problem.least_sends_s.sum()) if objective.fill else 0.0
        rate = objective.least_rate(problem.forward_share)
        width = 2.0 * max(total / problem.stages, float(base.max()))
        while True:
            found = self._within(problem.windows(width))
            if found is None and smallest_cut(problem).value > 0:
                return None
            # Any other partition has a stage of more than `width` seconds.
            if found is not None and found.value <= rate * width + least:
                return found
            if width >= total:
                return found
            width *= 2.0

    def _within(self, windows: Windows) -> Partition | None:
        """Return the best partition into these windows."""
        objective, send_s = self.objective, self.problem.send_s[:, :, None]
        least_peaks = objective.least_peaks(windows.lower_s, send_s, self.problem.forward_share)
        sums = objective.sums(windows.lower_s)
        fastest = partition(least_peaks, windows.starts, minimax=True)
        shortest = partition(sums, windows.starts)
        if fastest is None or shortest is None:
            return None
        if self.measure is None:
            return Partition(fastest.value + shortest.value, fastest.cuts)
        highest = float(least_peaks[np.isfinite(least_peaks)].max())
        cap = fastest.value * FIRST_CAP
        while True:
            best = self._best(windows, least_peaks <= cap * SLACK)
            # No stage of a better partition has a higher peak than this.
            needed = highest if best is None else best.value - shortest.value
            if cap >= min(needed, highest):
                return best
            cap = cap * 1.3 if best is None else needed

    def _best(self, windows: Windows, wanted: NDArray[np.bool_]) -> Partition | None:
        """Return the best partition into the wanted windows."""
        send_s = self.problem.send_s
        if self.options is None:
            assert self.measure is not None
            forward_s, backward_s = windows.measured(wanted, self.measure)
            peaks = self.objective.peaks(forward_s, backward_s, send_s[:, :, None])
            sums = self.objective.sums(forward_s + backward_s + send_s[:, :, None])
            return best_partition(sums, peaks, windows.starts)
        runs = {}
        for k, first, last in windows.runs(wanted):
            options = self.options(k, first, last)
            runs[k, first, last] = [StageOption(seconds + float(send_s[k, last]), share) for seconds, share in options]
        found = integer_cut(runs, len(self.problem.names), max(self.objective.rounds, TIE_BREAK))
        return None if found is None else Partition(*found)


def best_partition(sums: Floats, peaks: Floats, starts: Ints) -> Partition | None:
    """Return the partition of least max of `peaks` + sum of `sums`, both [stage, last segment, segments - 1]."""
    fastest = partition(peaks, starts, minimax=True)
    shortest = partition(sums, starts)
    if fastest is None or shortest is None:
        return None
    limits = _Limits(sums, peaks, starts)
    limits.offer(shortest)
    limits.at(fastest.value)
    assert limits.best is not None
    values = np.unique(peaks[(peaks > fastest.value) & (peaks < limits.best.value - shortest.value)])
    limits.explore(values, shortest.value)
    return limits.best


class _Limits:
    """Step 3: the search for the best limit of the peaks, by bisection."""

    def __init__(self, sums: Floats, peaks: Floats, starts: Ints) -> None:
        self.sums, self.peaks, self.starts = sums, peaks, starts
        self.best: Partition | None = None

    def offer(self, found: Partition) -> float:
        """Record `found` if it is better than the best so far, and return its highest peak."""
        highest = max(float(self.peaks[k, last, last - first]) for k, (first, last) in enumerate(found.cuts))
        if highest + found.value < self._to_beat:
            self.best = Partition(highest + found.value, found.cuts)
        return highest

    def at(self, limit: float) -> tuple[float, float]:
        """Return the sum and highest peak of the shortest partition without peaks above `limit`."""
        found = partition(np.where(self.peaks <= limit, self.sums, np.inf), self.starts)
        assert found is not None
        return found.value, self.offer(found)

    def explore(self, values: Floats, sum_above: float) -> None:
        """Search the best limit among sorted `values`; `sum_above`: lower bound on the sum for any of them."""
        if not len(values) or values[0] + sum_above >= self._to_beat:
            return
        middle = len(values) // 2
        least, highest = self.at(float(values[middle]))
        self.explore(values[values < highest], least)
        self.explore(values[middle + 1 :], sum_above)

    @property
    def _to_beat(self) -> float:
        return math.inf if self.best is None else self.best.value - RELATIVE * abs(self.best.value)


def smallest_cut(problem: PartitionProblem) -> Partition:
    """Return the cut that minimises the largest excess of a stage over its memory budget (negative: it may fit).

    Memory grows with the window, so no window longer than those examined has a smaller excess than the best of the
    longest of these."""
    longest = 2 * math.ceil(len(problem.names) / problem.stages)
    while True:
        windows = Windows(problem, longest)
        found = partition(windows.least_excess, windows.starts, minimax=True)
        full = windows.longest < longest or windows.longest == len(problem.names) - problem.stages + 1
        if found is not None and (full or found.value <= windows.least_excess[:, :, -1].min()):
            return found
        longest *= 2


def balanced(cuts: Cuts, ranks: Sequence[int], seconds: Floats, uncut: Collection[int]) -> Cuts:
    """Move single segments over the ends of stages while the ranks' seconds become more even: the sum of their squares
    falls with each move.

    `ranks`: the rank of each stage; `seconds`: of each segment; `uncut`: segments that no stage may begin with.
    """
    lasts, busy_s = [last for _, last in cuts], np.zeros(max(ranks) + 1)
    for rank, (first, last) in zip(ranks, cuts, strict=True):
        busy_s[rank] += seconds[first : last + 1].sum()
    while True:
        moves = []
        for k, (rank, following) in enumerate(pairwise(ranks)):
            before = lasts[k - 1] if k else -1
            for taker, giver, end in ((rank, following, lasts[k] + 1), (following, rank, lasts[k] - 1)):
                moved_s = seconds[max(end, lasts[k])]
                gain_s = busy_s[giver] - busy_s[taker] - moved_s
                if before < end < lasts[k + 1] and end + 1 not in uncut and gain_s > RELATIVE * busy_s[giver]:
                    moves.append((moved_s * gain_s, k, end, taker, giver, moved_s))
        if not moves:
            return tuple((first + 1, last) for first, last in pairwise((-1, *lasts)))
        _, k, lasts[k], taker, giver, moved_s = max(moves)
        busy_s[taker] += moved_s
        busy_s[giver] -= moved_s


def rounded(work_s: Sequence[float], seconds: Floats, uncut: Collection[int]) -> Cuts | None:
    """Return the cut whose stages have about these shares of the work; None if none is given, a stage would be empty or
    begin with a segment of `uncut`. `seconds`: of each segment."""
    if not work_s:
        return None
    ends, wanted, count = np.cumsum(seconds), np.cumsum(work_s), len(seconds)
    lasts = [int(np.abs(ends - at * ends[-1] / wanted[-1]).argmin()) for at in wanted[:-1]]
    for stage in range(len(lasts)):  # no stage is empty
        lasts[stage] = max(lasts[stage], lasts[stage - 1] + 1 if stage else 0)
    for stage in reversed(range(len(lasts))):
        lasts[stage] = min(lasts[stage], (lasts[stage + 1] if stage + 1 < len(lasts) else count - 1) - 1)
    if any(last + 1 in uncut for last in lasts) or min(lasts, default=0) < 0:
        return None
    return tuple((first + 1, last) for first, last in pairwise((-1, *lasts, count - 1)))


def even_cuts(folded: Folded, stages: int) -> tuple[tuple[int, int], ...]:
    """Return the first and last segment of each stage of an even cut. Raises PlanError for fewer blocks than stages."""
    unit = max(folded.units, key=lambda u: (u.count, u.length))
    counts = even_counts(unit.count, stages)
    if min(counts) < 1 and len(folded.segments) > unit.count * unit.length:
        counts = [max(0, n) for n in counts]
    ends = []
    at = unit.first
    for n in counts:
        at += n * unit.length
        ends.append(at - 1)
    ends[-1] = len(folded.segments) - 1
    starts = [0] + [end + 1 for end in ends[:-1]]
    if any(end < start for start, end in zip(starts, ends, strict=True)):
        raise PlanError(
            f"{unit.count} blocks cannot be shared evenly by {stages} stages",
            where="fix['stages']",
            fix=f"use at most {unit.count} stages (pp × virtual), or leave 'stages' out",
        )
    return tuple(zip(starts, ends, strict=True))


def even_counts(blocks: int, stages: int) -> list[int]:
    """Return the blocks of each stage: equal numbers, or one fewer on the first and the last if that divides evenly."""
    if blocks % stages and (blocks + 2) % stages == 0 and stages > 1:
        share = (blocks + 2) // stages
        return [share - 1, *[share] * (stages - 2), share - 1]
    return [blocks // stages + (i < blocks % stages) for i in range(stages)]
