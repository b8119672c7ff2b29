"""Cut a sequence of segments into pipeline stages, and say which of them recompute (stage level).

Stages are contiguous runs of segments, none empty. Stage k that holds the segments i..j and recomputes R of them takes

    T_k = sum_{i..j} (forward + backward) + sum_R recompute + send(j)                (no send from the last stage)
    M_k = sum_{i..j} parameters
        + in_flight_k * (sum_{not R} activation + sum_R recompute_activation)
        + max( max_{i..j} temporary,  max_R (temporary + activation - recompute_activation) )

(a recomputed segment has its activations back while its own backward runs) and a step of m microbatches takes at least

    bound = (m - 1) * max_k T_k + sum_k T_k,          to be minimised under  M_k <= budget_k.

Given its ends a stage picks R for itself: bound grows with every T_k. So with T_k(i, j) the least time within memory
(a covering knapsack over kinds of equal segments, solved by branch and bound), what is left is a partition of a line:

1. the least bottleneck of all partitions                                                  a minimax recurrence;
2. for a bottleneck M, the partition of least sum with T_k <= M                            a shortest path;
3. the best M: on an interval [lo, hi] nothing is better than (m - 1) * lo + sum(hi), which closes most intervals at
   once; the others are halved at a value that some T_k takes.

Windows (i, j) that are too long for any partition worth having are never looked at: `_Search` starts with the shortest
ones, and stops when the bound it found proves that no longer one can matter. That is exact, and fast enough to be
called for every mesh. `autoptd.search.cuts_ilp` finds the same optimum by an integer program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from autoptd.errors import DoesNotFit, PlanError
from autoptd.search.windows import Floats, Ints, Lines, Partition, Windows, partition

Recompute = Literal["none", "full", "auto"]
Cuts = tuple[tuple[int, int], ...]  # first and last segment per stage
FIRST_CAP = 1.03  # stages up to this times the least conceivable bottleneck are looked at first
RELATIVE = 1e-12  # gains smaller than this are rounding


@dataclass(frozen=True)
class SegmentCost:
    """One cuttable piece, per microbatch and rank; seconds and bytes."""

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float  # kept per microbatch in flight
    recompute_activation_bytes: float  # kept instead when recomputed: its inputs
    recompute_s: float  # added to the backward pass when recomputed
    parameter_bytes: float  # parameters, gradients and optimizer state: all that is there whatever is in flight
    temporary_bytes: float = 0.0  # peak workspace while it runs
    send_bytes_s: float = 0.0  # seconds to send what is live behind it, where a cut follows it


@dataclass(frozen=True)
class Unit:
    """`count` copies of a block of one or more segments, one after another."""

    name: str
    segments: tuple[SegmentCost, ...]
    count: int = 1


@dataclass(frozen=True)
class StageProblem:
    """`budget_bytes` and `in_flight` (microbatches whose activations are alive at the peak) are given per stage."""

    units: tuple[Unit, ...]
    stages: int
    microbatches: int
    budget_bytes: tuple[float, ...]
    in_flight: tuple[int, ...]
    recompute: Recompute = "auto"

    @cached_property
    def segments(self) -> tuple[SegmentCost, ...]:
        """All segments in program order."""
        return tuple(segment for unit in self.units for _ in range(unit.count) for segment in unit.segments)

    def bound_s(self, times: Sequence[float]) -> float:
        return (self.microbatches - 1) * max(times) + math.fsum(times)


@dataclass(frozen=True)
class StageSolution:
    """Per stage: first and last segment (inclusive), recomputed segments, seconds and bytes.

    `gap`: how much lower the bound may get, relative to it; 0 when it is the proved optimum.
    """

    boundaries: tuple[tuple[int, int], ...]
    recompute: tuple[tuple[int, ...], ...]
    times_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    bottleneck_s: float
    bound_s: float
    gap: float = 0.0


class InfeasibleStages(DoesNotFit):
    """No cut fits. Of the cut whose fullest stage is the least over its budget: `boundaries`, and `missing_bytes` per
    stage (0 where it fits). `budget_bytes` would do per device; `recompute_fits`: recomputing would do."""

    def __init__(
        self,
        boundaries: tuple[tuple[int, int], ...],
        missing_bytes: tuple[float, ...],
        budget_bytes: float,
        recompute_fits: bool,
        names: tuple[str, ...],
    ) -> None:
        self.boundaries, self.missing_bytes = boundaries, missing_bytes
        self.budget_bytes, self.recompute_fits = budget_bytes, recompute_fits
        over = [
            f"stage {k} ({names[first]} … {names[last]}): {missing / 2**30:.2f} GiB missing"
            for k, ((first, last), missing) in enumerate(zip(boundaries, missing_bytes, strict=True))
            if missing > 0
        ]
        shown = over if len(over) <= 8 else [*over[:7], f"and {len(over) - 7} more"]
        remedies = ["recompute (recompute='auto')"] if recompute_fits else []
        remedies += [f"{budget_bytes / 2**30:.2f} GiB per device", "more stages, a larger tp, or smaller microbatches"]
        super().__init__(
            f"{len(over)} of {len(boundaries)} stages do not fit, however the model is cut",
            where="\n".join(shown),
            fix=", or ".join(remedies),
        )


def solve_stages(problem: StageProblem) -> StageSolution:
    """The cut and the recomputation of the least bound.

    Raises `InfeasibleStages`, and `PlanError` for more stages than segments.
    """
    check(problem)
    lines = lines_of(problem)
    found = _Search(problem, lines).run()
    if found is None:
        raise explain(problem)
    cuts, gap = found
    recomputed = tuple(_recomputed(problem, lines, k, first, last) for k, (first, last) in enumerate(cuts))
    return replace(evaluate(problem, cuts, recomputed), gap=gap)


def check(problem: StageProblem) -> None:
    """Raise `PlanError` where there are more stages than segments."""
    assert len(problem.budget_bytes) == len(problem.in_flight) == problem.stages >= 1
    if problem.stages > len(problem.segments):
        raise PlanError(
            f"{problem.stages} pipeline stages need as many segments; the model has {len(problem.segments)}",
            fix=f"use pp <= {len(problem.segments)}",
        )


def evaluate(
    problem: StageProblem, boundaries: Sequence[tuple[int, int]], recompute: Sequence[Sequence[int]]
) -> StageSolution:
    """Times and memory of given stages, straight from the definition."""
    pairs = list(enumerate(zip(boundaries, recompute, strict=True)))
    times = tuple(_time_s(problem, k, first, last, set(chosen)) for k, ((first, last), chosen) in pairs)
    memory = tuple(_memory_bytes(problem, k, first, last, set(chosen)) for k, ((first, last), chosen) in pairs)
    return StageSolution(
        boundaries=tuple(boundaries),
        recompute=tuple(tuple(sorted(chosen)) for chosen in recompute),
        times_s=times,
        memory_bytes=memory,
        bottleneck_s=max(times),
        bound_s=problem.bound_s(times),
    )


def _time_s(problem: StageProblem, stage: int, first: int, last: int, chosen: set[int]) -> float:
    parts = problem.segments[first : last + 1]
    times = [part.forward_s + part.backward_s for part in parts]
    times += [problem.segments[index].recompute_s for index in chosen]
    send = parts[-1].send_bytes_s if stage < problem.stages - 1 else 0.0
    return math.fsum([*times, send])


def _memory_bytes(problem: StageProblem, stage: int, first: int, last: int, chosen: set[int]) -> float:
    indexed = [(index, problem.segments[index]) for index in range(first, last + 1)]
    kept = math.fsum(s.recompute_activation_bytes if i in chosen else s.activation_bytes for i, s in indexed)
    temporary = max(s.temporary_bytes + (restored_bytes(s) if i in chosen else 0.0) for i, s in indexed)
    return math.fsum(s.parameter_bytes for _, s in indexed) + problem.in_flight[stage] * kept + temporary


def restored_bytes(segment: SegmentCost) -> float:
    """What recomputing saves per microbatch in flight, and brings back while the segment's backward runs."""
    return segment.activation_bytes - segment.recompute_activation_bytes


def lines_of(problem: StageProblem) -> Lines:
    """The segments as columns of numbers; equal segments are of one kind."""
    parts = problem.segments
    kinds: dict[SegmentCost, int] = {}
    kind = [kinds.setdefault(replace(part, name=""), len(kinds)) for part in parts]
    return Lines(
        kind=np.array(kind, dtype=np.int64),
        base_s=np.array([part.forward_s + part.backward_s for part in parts], dtype=float),
        recompute_s=np.array([part.recompute_s for part in parts], dtype=float),
        send_s=np.array([part.send_bytes_s for part in parts[:-1]] + [0.0], dtype=float),
        parameter=np.array([part.parameter_bytes for part in parts], dtype=float),
        activation=np.array([part.activation_bytes for part in parts], dtype=float),
        restored=np.array([restored_bytes(part) for part in parts], dtype=float),
        temporary=np.array([part.temporary_bytes for part in parts], dtype=float),
    )


def _recomputed(problem: StageProblem, lines: Lines, stage: int, first: int, last: int) -> tuple[int, ...]:
    """The segments that a stage recomputes: of each kind the first ones."""
    match problem.recompute:
        case "none":
            return ()
        case "full":
            return tuple(range(first, last + 1))
        case "auto":
            cover = lines.cover(first, last, problem.in_flight[stage], problem.budget_bytes[stage])
            left = dict(cover.counts)
            chosen = []
            for index in range(first, last + 1):
                kind = int(lines.kind[index])
                if left.get(kind, 0) > 0:
                    left[kind] -= 1
                    chosen.append(index)
            return tuple(chosen)


class _Search:
    """Steps 1 to 3 over windows that grow until they are proved to be enough."""

    def __init__(self, problem: StageProblem, lines: Lines) -> None:
        self.problem, self.lines = problem, lines
        # Of equal sums (m = 1) the better balanced one is taken.
        self.ramp = max(problem.microbatches - 1, 1e-9)

    def run(self) -> tuple[Cuts, float] | None:
        """First and last segment per stage, and the gap; None when nothing fits."""
        total = float(self.lines.base_s.sum())
        sends = self.lines.send_s[:-1]
        least = total + (self.problem.stages - 1) * float(sends.min() if len(sends) else 0.0)
        width = 2.0 * max(total / self.problem.stages, float(self.lines.base_s.max()))
        while True:
            found = self._within(self._windows(width))
            if found is None and _leanest(self.problem, self.lines, self.problem.recompute)[0].value > 0:
                return None
            # Outside these windows a bottleneck is above `width`.
            if found is not None and found[0] <= self.ramp * width + least:
                return found[1:]
            if width >= total:
                assert found is not None, "what fits was not found"
                return found[1:]
            width *= 2.0

    def _windows(self, width: float) -> Windows:
        problem = self.problem
        return Windows(
            self.lines, problem.in_flight, problem.budget_bytes, problem.recompute, self.lines.longest_within(width)
        )

    def _within(self, windows: Windows) -> tuple[float, Cuts, float] | None:
        """The best bound of partitions into these windows, its cuts and its gap."""
        fastest = partition(windows.lower_s, windows.starts, minimax=True)
        shortest = partition(windows.lower_s, windows.starts)
        if fastest is None or shortest is None:
            return None
        slowest = float(windows.lower_s[np.isfinite(windows.lower_s)].max())
        cap = fastest.value * FIRST_CAP
        while True:
            best = best_partition(windows.times_s(cap), windows.starts, self.ramp)
            # A better partition has no slower stage than this.
            needed = slowest if best is None else (best[0] - shortest.value) / self.ramp
            if cap >= min(needed, slowest):
                return None if best is None else (*best, self._gap(best[0], windows, cap))
            cap = cap * 1.3 if best is None else needed

    def _gap(self, bound: float, windows: Windows, cap: float) -> float:
        """0, but where a knapsack was given up: then from the best partition of lower bounds."""
        if windows.exact:
            return 0.0
        proved = best_partition(windows.times_s(cap, proved=True), windows.starts, self.ramp)
        return 0.0 if proved is None else max(0.0, 1.0 - proved[0] / bound)


def best_partition(times: Floats, starts: Ints, ramp: float) -> tuple[float, Cuts] | None:
    """The partition of least ramp * max + sum of `times` [stage, last segment, segments - 1], and that value."""
    fastest = partition(times, starts, minimax=True)
    shortest = partition(times, starts)
    if fastest is None or shortest is None:
        return None
    bottlenecks = _Bottlenecks(times, starts, ramp)
    bottlenecks.offer(shortest)
    bottlenecks.at(fastest.value)
    hopeful = (bottlenecks.best - shortest.value) / ramp
    values = np.unique(times[(times > fastest.value) & (times < hopeful)])
    bottlenecks.explore(values, shortest.value)
    assert bottlenecks.cuts is not None
    return bottlenecks.best, bottlenecks.cuts


class _Bottlenecks:
    """Step 3: the best bottleneck, by halving."""

    def __init__(self, times: Floats, starts: Ints, ramp: float) -> None:
        self.times, self.starts, self.ramp = times, starts, ramp
        self.best = math.inf
        self.cuts: Cuts | None = None

    def offer(self, found: Partition) -> float:
        """Keep it if it is better; its bottleneck."""
        slowest = max(float(self.times[k, last, last - first]) for k, (first, last) in enumerate(found.cuts))
        bound = self.ramp * slowest + found.value
        if bound < self.best * (1 - RELATIVE):
            self.best, self.cuts = bound, found.cuts
        return slowest

    def at(self, bottleneck: float) -> tuple[float, float]:
        """Sum and true bottleneck of the shortest partition without slower stages."""
        found = partition(np.where(self.times <= bottleneck, self.times, np.inf), self.starts)
        assert found is not None
        return found.value, self.offer(found)

    def explore(self, values: Floats, sum_above: float) -> None:
        """Find the best bottleneck among sorted `values`; with larger ones no sum is less than `sum_above`."""
        if not len(values) or self.ramp * values[0] + sum_above >= self.best * (1 - RELATIVE):
            return
        middle = len(values) // 2
        least, slowest = self.at(float(values[middle]))
        self.explore(values[values < slowest], least)
        self.explore(values[middle + 1 :], sum_above)


def _leanest(problem: StageProblem, lines: Lines, recompute: Recompute) -> tuple[Partition, tuple[float, ...]]:
    """The cut whose worst stage is the least over its budget (below 0: it fits), and by how much each stage is.

    Memory grows with the window, so windows of one length more than those looked at cannot be better than the best of
    the longest ones."""
    longest = 2 * math.ceil(len(lines) / problem.stages)
    while True:
        windows = Windows(lines, problem.in_flight, problem.budget_bytes, recompute, longest)
        excess = windows.least_excess()
        found = partition(excess, windows.starts, minimax=True)
        full = windows.longest < longest or windows.longest == len(lines) - problem.stages + 1
        if found is not None and (full or found.value <= excess[:, :, -1].min()):
            return found, tuple(float(excess[k, last, last - first]) for k, (first, last) in enumerate(found.cuts))
        longest *= 2


def explain(problem: StageProblem) -> InfeasibleStages:
    """Of a problem that has no solution: the leanest attempt, and what would mend it."""
    lines = lines_of(problem)
    found, excess = _leanest(problem, lines, problem.recompute)
    return InfeasibleStages(
        boundaries=found.cuts,
        missing_bytes=tuple(max(0.0, over) for over in excess),
        budget_bytes=max(problem.budget_bytes) + max(excess),
        recompute_fits=problem.recompute != "auto" and _leanest(problem, lines, "auto")[0].value <= 0,
        names=tuple(segment.name for segment in problem.segments),
    )
