"""All runs of consecutive segments that a pipeline stage may hold, as arrays: time, memory, least recomputation.

Array axes: [stage k, last segment e, number of segments - 1]; `starts[e, l] = e - l`. What cannot be is infinite.
`partition` picks one window per stage, end to end. `Lines.cover` says which segments of one window to recompute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoptd.search.knapsack import Cover, Item, cheapest_cover

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SLACK = 1 + 1e-9  # on limits of time that only say where to look


@dataclass(frozen=True)
class Lines:
    """The segments in program order, one number each; segments of one `kind` are equal in all of them."""

    kind: Ints
    base_s: Floats  # forward + backward
    recompute_s: Floats
    send_s: Floats
    parameter: Floats
    activation: Floats
    restored: Floats  # activation bytes that recomputing saves
    temporary: Floats

    def __len__(self) -> int:
        return len(self.kind)

    def longest_within(self, width_s: float) -> int:
        """How many segments a window of so much work has at the most."""
        before = np.concatenate([[0.0], np.cumsum(self.base_s)])
        first = np.searchsorted(before, before[1:] - width_s * SLACK)
        return int((np.arange(1, len(self) + 1) - first).max())

    def cover(self, first: int, last: int, in_flight: int, budget: float) -> Cover:
        """The cheapest recomputation with which segments first..last fit; see `autoptd.search.cuts` for M_k.

        The workspace is a maximum, so one knapsack is solved for each value it can take.
        """
        part = slice(first, last + 1)
        bare = float(self.parameter[part].sum() + in_flight * self.activation[part].sum()) - budget
        workspace = float(self.temporary[part].max())
        counts = Counter(self.kind[part].tolist())
        items = [self._item(kind, count, in_flight) for kind, count in sorted(counts.items())]
        items = [item for item in items if item.gain > 0]
        best = Cover.IMPOSSIBLE
        for peak in sorted({workspace} | {item.peak for item in items if item.peak > workspace}):
            best = cheapest_cover([item for item in items if item.peak <= peak], bare + peak, best)
        return best

    @cached_property
    def _of_kind(self) -> dict[int, int]:
        return {int(kind): index for index, kind in reversed(list(enumerate(self.kind)))}

    def _item(self, kind: int, count: int, in_flight: int) -> Item:
        index = self._of_kind[kind]
        restored = float(self.restored[index])
        return Item(
            kind, count, in_flight * restored, float(self.recompute_s[index]), float(self.temporary[index]) + restored
        )


class Windows:
    """Windows of at most `longest` segments."""

    def __init__(
        self,
        lines: Lines,
        in_flight: Sequence[int],
        budgets: Sequence[float],
        recompute: str,
        longest: int,
    ) -> None:
        self.lines, self.in_flight, self.budgets, self.recompute = lines, in_flight, budgets, recompute
        n, stages = len(lines), len(in_flight)
        self.longest = min(longest, n - stages + 1)
        self.starts = np.arange(n)[:, None] - np.arange(self.longest)[None, :]
        self.possible = self.starts >= 0
        self.exact = True
        self._covers: dict[tuple[int, int], Cover] = {}

    def sums(self, values: Floats) -> Floats:
        """Sum over each window."""
        before = np.concatenate([[0.0], np.cumsum(values)])
        return before[1:, None] - before[np.maximum(self.starts, 0)]

    def maxima(self, values: Floats) -> Floats:
        """Largest in each window."""
        return np.maximum.accumulate(values[np.maximum(self.starts, 0)], axis=1)

    @cached_property
    def work_s(self) -> Floats:
        """Without recomputation, [k, e, l]."""
        work = self.sums(self.lines.base_s)
        if self.recompute == "full":
            work = work + self.sums(self.lines.recompute_s)
        sent = work + self.lines.send_s[:, None]  # the last segment of all sends nothing
        return np.where(self.possible, np.broadcast_to(sent, (len(self.in_flight), *sent.shape)), np.inf)

    def memory(self, activation: Floats, temporary: Floats) -> Floats:
        """Bytes over the budget, [k, e, l], where each segment keeps and uses so much."""
        flying = np.asarray(self.in_flight, dtype=float)[:, None, None] * self.sums(activation)
        fixed = self.sums(self.lines.parameter) + self.maxima(temporary)
        over = flying + fixed - np.asarray(self.budgets, dtype=float)[:, None, None]
        return np.where(self.possible, over, np.inf)

    @cached_property
    def excess(self) -> Floats:
        """Bytes over the budget without recomputation, or with all of it where that is asked for."""
        lines = self.lines
        if self.recompute == "full":
            return self.memory(lines.activation - lines.restored, lines.temporary + lines.restored)
        return self.memory(lines.activation, lines.temporary)

    def least_excess(self) -> Floats:
        """Bytes over the budget at the least, with whatever recomputation the mode allows."""
        least = self.excess
        if self.recompute != "auto":
            return least
        lines = self.lines
        peaks = lines.temporary + lines.restored
        for peak in np.unique(peaks[lines.restored > 0]):
            chosen = (peaks <= peak) & (lines.restored > 0)
            saved = np.where(chosen, lines.restored, 0.0)
            least = np.minimum(least, self.memory(lines.activation - saved, np.where(chosen, peaks, lines.temporary)))
        return least

    @cached_property
    def lower_s(self) -> Floats:
        """No stage that holds the window takes less: exact where no knapsack is needed."""
        fits = self.excess <= 0
        if self.recompute != "auto":
            return np.where(fits, self.work_s, np.inf)
        lines = self.lines
        useful = lines.restored > 0
        if not useful.any():
            return np.where(fits, self.work_s, np.inf)
        rate = float((lines.recompute_s[useful] / lines.restored[useful]).min())
        flying = np.asarray(self.in_flight, dtype=float)[:, None, None]
        hopeless = self.excess > flying * self.sums(np.where(useful, lines.restored, 0.0))
        added = np.where(fits | hopeless, 0.0, self.excess) / flying * rate
        return np.where(hopeless, np.inf, self.work_s + added)

    def times_s(self, cap_s: float, *, proved: bool = False) -> Floats:
        """Least times of the windows that some partition with no time above `cap_s` uses; infinite for the others.

        `proved` gives lower bounds where a knapsack was given up."""
        lower = self.lower_s
        usable = (lower <= cap_s * SLACK) & self.possible
        self._drop_unreachable(usable)
        times = np.where(usable, lower, np.inf)
        if self.recompute != "auto":
            return times
        for stage, end, length in zip(*np.nonzero(usable & (self.excess > 0)), strict=True):
            cover = self._cover(int(stage), int(end), int(length))
            self.exact &= cover.exact
            times[stage, end, length] = self.work_s[stage, end, length] + (cover.least_s if proved else cover.seconds)
        return times

    def _cover(self, stage: int, end: int, length: int) -> Cover:
        key = (stage, int(self._signature[end, length]))
        if key not in self._covers:
            self._covers[key] = self.lines.cover(end - length, end, self.in_flight[stage], self.budgets[stage])
        return self._covers[key]

    @cached_property
    def _signature(self) -> Ints:
        """Equal for windows with equally many segments of every kind: the counts as digits of one number."""
        kinds, base = int(self.lines.kind.max()) + 1, self.longest + 1
        if kinds * math.log2(base) > 62:
            return np.arange(self.starts.size).reshape(self.starts.shape)
        digits = np.array([base**kind for kind in range(kinds)], dtype=np.int64)[self.lines.kind]
        before = np.concatenate([[0], np.cumsum(digits)])  # wraps around alike on both sides of the difference
        return before[1:, None] - before[np.maximum(self.starts, 0)]

    def _drop_unreachable(self, usable: NDArray[np.bool_]) -> None:
        """Leave windows that begin where an earlier stage can end and end where a later one can begin."""
        stages, n, _ = usable.shape
        starts = np.maximum(self.starts, 0)
        here = np.zeros(n + 1, dtype=bool)
        here[0] = True
        for stage in range(stages):
            usable[stage] &= here[starts]
            here = np.concatenate([[False], usable[stage].any(axis=1)])
        here = np.zeros(n + 1, dtype=bool)
        here[n] = True
        for stage in reversed(range(stages)):
            usable[stage] &= here[1:, None]
            here = np.zeros(n + 1, dtype=bool)
            here[starts[usable[stage]]] = True


@dataclass(frozen=True)
class Partition:
    value: float  # sum, or maximum, of the windows' values
    cuts: tuple[tuple[int, int], ...]  # first and last segment per stage


def partition(values: Floats, starts: Ints, *, minimax: bool = False) -> Partition | None:
    """One window per stage, end to end over all segments, of least sum (or maximum); None where all are infinite.

    reach_k[e] = min over l of reach_{k-1}[start] (+ or max) values[k, e, l]; among equals the shortest window.
    """
    stages, n, _ = values.shape
    safe = np.maximum(starts, 0)
    reach = np.full(n + 1, np.inf)
    reach[0] = -np.inf if minimax else 0.0
    chosen = np.empty((stages, n), dtype=np.int64)
    for stage in range(stages):
        candidates = np.maximum(reach[safe], values[stage]) if minimax else reach[safe] + values[stage]
        chosen[stage] = candidates.argmin(axis=1)
        reach = np.concatenate([[np.inf], np.take_along_axis(candidates, chosen[stage][:, None], axis=1)[:, 0]])
    if not math.isfinite(reach[n]):
        return None
    cuts, end = [], n - 1
    for stage in reversed(range(stages)):
        first = end - int(chosen[stage, end])
        cuts.append((first, end))
        end = first - 1
    return Partition(float(reach[n]), tuple(reversed(cuts)))
