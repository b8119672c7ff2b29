"""Cut a sequence of segments into pipeline stages (stage level).

Stages are contiguous runs of segments, none empty. A stage k that holds the segments i..j takes T_k(i, j), infinite if
it does not fit; its recomputation is already chosen (`search/pipeline/recompute_options.py`). A step of m microbatches
takes about

    bound = (m - 1) * max_k T_k + sum_k T_k                     (Narayanan et al. 2021; in general rounds * max + sum)

This leaves a partition of a sequence:

1. the least bottleneck of all partitions                                                  a minimax recurrence;
2. for a bottleneck M, the partition of least sum with T_k <= M                            a shortest path;
3. the best M: on an interval [lo, hi] no bound is below rounds * lo + sum(hi), which prunes most intervals at once;
   the others are bisected at a value of some T_k.

Windows (i, j) too long for any optimal partition are never measured: `_Search` starts with short windows and stops when
the best bound so far proves that longer ones cannot improve it. This is exact, and fast enough to run for every mesh.
Instead of 1. to 3., `search/pipeline/cut_ilp.py` states the same partition as an integer program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autoptd.errors import PlanError
from autoptd.passes.fold import Folded
from autoptd.search.pipeline.cut_ilp import StageOption, integer_cut
from autoptd.search.pipeline.windows import Cuts, Floats, Ints, Measure, Partition, PartitionProblem, Windows, partition

Options = Callable[[int, int, int], Sequence[StageOption]]  # of (stage, first segment, last segment)
FIRST_CAP = 1.03  # first limit on stage times, as a multiple of the lower bound on the bottleneck
RELATIVE = 1e-12  # smaller relative gains are rounding errors


def solve_cuts(
    problem: PartitionProblem, rounds: float, seconds: Measure, options: Options | None = None
) -> Cuts | None:
    """Return the cut of least rounds * max + sum of stage times, with sending; None if no cut fits.

    `seconds`: of a stage without sending. `options`: recompute options of each stage; if given, the integer program
    chooses among them, and `seconds` is not used. Raises `PlanError` for more stages than segments.
    """
    pieces = len(problem.names) - len(problem.uncut)
    if problem.stages > pieces:
        raise PlanError(
            f"{problem.stages} pipeline stages need at least as many segments; the model has {pieces}",
            fix=f"use pp <= {pieces}",
        )
    return _Search(problem, rounds, seconds, options).run()


class _Search:
    """Steps 1 to 3, or the integer program, over windows that grow until longer ones are proved useless."""

    def __init__(self, problem: PartitionProblem, rounds: float, seconds: Measure, options: Options | None) -> None:
        self.problem, self.seconds, self.options = problem, seconds, options
        self.rounds = max(rounds, 1e-9)  # positive, so that equal sums (m = 1) are decided by balance

    def run(self) -> Cuts | None:
        problem = self.problem
        base = problem.least_s
        total = float(base.sum())
        least = total + float(problem.least_sends_s.sum())
        width = 2.0 * max(total / problem.stages, float(base.max()))
        if smallest_cut(problem).value > 0:
            return None
        while True:
            found = self._within(problem.windows(width))
            # Any other partition has a bottleneck above `width`.
            if found is not None and found[0] <= self.rounds * width + least:
                return found[1]
            if width >= total:
                return None if found is None else found[1]
            width *= 2.0

    def _within(self, windows: Windows) -> tuple[float, Cuts] | None:
        """Return the least bound of partitions into these windows, and its cuts."""
        fastest = partition(windows.lower_s, windows.starts, minimax=True)
        shortest = partition(windows.lower_s, windows.starts)
        if fastest is None or shortest is None:
            return None
        slowest = float(windows.lower_s[np.isfinite(windows.lower_s)].max())
        cap = fastest.value * FIRST_CAP
        while True:
            best = self._best(windows, cap)
            # No stage of a better partition is slower than this.
            needed = slowest if best is None else (best[0] - shortest.value) / self.rounds
            if cap >= min(needed, slowest):
                return best
            cap = cap * 1.3 if best is None else needed

    def _best(self, windows: Windows, cap: float) -> tuple[float, Cuts] | None:
        """Return the least bound of partitions into windows of at most `cap` seconds, and its cuts."""
        if self.options is None:
            return best_partition(windows.times_s(cap, self.seconds), windows.starts, self.rounds)
        send_s, runs = self.problem.send_s, {}
        for k, first, last in windows.runs(cap):
            options = self.options(k, first, last)
            runs[k, first, last] = [StageOption(seconds + float(send_s[k, last]), share) for seconds, share in options]
        return integer_cut(runs, len(self.problem.names), self.rounds)


def best_partition(times: Floats, starts: Ints, rounds: float) -> tuple[float, Cuts] | None:
    """Return the least rounds * max + sum of `times` [stage, last segment, segments - 1], and its partition."""
    fastest = partition(times, starts, minimax=True)
    shortest = partition(times, starts)
    if fastest is None or shortest is None:
        return None
    bottlenecks = _Bottlenecks(times, starts, rounds)
    bottlenecks.offer(shortest)
    bottlenecks.at(fastest.value)
    limit = (bottlenecks.best - shortest.value) / rounds
    values = np.unique(times[(times > fastest.value) & (times < limit)])
    bottlenecks.explore(values, shortest.value)
    assert bottlenecks.cuts is not None
    return bottlenecks.best, bottlenecks.cuts


class _Bottlenecks:
    """Step 3: the search for the best bottleneck by bisection."""

    def __init__(self, times: Floats, starts: Ints, rounds: float) -> None:
        self.times, self.starts, self.rounds = times, starts, rounds
        self.best = math.inf
        self.cuts: Cuts | None = None

    def offer(self, found: Partition) -> float:
        """Record `found` if it is better than the best so far, and return its bottleneck."""
        slowest = max(float(self.times[k, last, last - first]) for k, (first, last) in enumerate(found.cuts))
        bound = self.rounds * slowest + found.value
        if bound < self.best * (1 - RELATIVE):
            self.best, self.cuts = bound, found.cuts
        return slowest

    def at(self, bottleneck: float) -> tuple[float, float]:
        """Return the sum and bottleneck of the shortest partition without stages slower than `bottleneck`."""
        found = partition(np.where(self.times <= bottleneck, self.times, np.inf), self.starts)
        assert found is not None
        return found.value, self.offer(found)

    def explore(self, values: Floats, sum_above: float) -> None:
        """Search the best bottleneck among sorted `values`; `sum_above`: lower bound on the sum for any of them."""
        if not len(values) or self.rounds * values[0] + sum_above >= self.best * (1 - RELATIVE):
            return
        middle = len(values) // 2
        least, slowest = self.at(float(values[middle]))
        self.explore(values[values < slowest], least)
        self.explore(values[middle + 1 :], sum_above)


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
