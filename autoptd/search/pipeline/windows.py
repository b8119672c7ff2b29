"""All runs of consecutive segments that a pipeline stage may hold, as arrays, and the best way to line them up.

Array axes: [stage k, last segment e, number of segments - 1]; `starts[e, l] = e - l`. What cannot be is infinite.
`partition` picks one window per stage, end to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Cuts = tuple[tuple[int, int], ...]  # first and last segment per stage
Measure = Callable[[int, int, int], float]  # of (stage, first segment, last segment)
SLACK = 1 + 1e-9  # on limits of time that only say where to look
_BASE, _ODD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # large odd numbers without pattern


@dataclass(frozen=True)
class PartitionProblem:
    """What is to be cut into so many stages.

    `names`: equal for segments that are alike wherever they are; `base_s`: what each takes at the least, by type of
    device; `send_s`: added to a stage that ends there, [stage, segment], 0 for the last of either. Of each stage,
    `alive`: microbatches (chunks) in flight; `pools`: its type of device.

    What memory adds: a stage holds at the least the `state` of its segments, and `kept` per microbatch in flight less
    what recomputation saves, which takes `again_s` for every byte and leaves `lean`. Of all that, `room` bytes may be
    there. No stage may begin with a segment that is `uncut`.
    """

    names: tuple[int, ...]
    base_s: tuple[Floats, ...]
    send_s: Floats
    alive: tuple[int, ...]
    pools: tuple[int, ...]
    state: Floats
    kept: Floats
    least_kept: Floats
    recompute_s: tuple[float, ...]
    budget_bytes: tuple[float, ...]
    uncut: frozenset[int] = frozenset()

    @property
    def stages(self) -> int:
        return len(self.alive)

    @cached_property
    def least_sends_s(self) -> Floats:
        """Of each stage: what it adds to it wherever it ends."""
        ends = self.send_s[:, :-1]
        return ends.min(axis=1) if ends.size else np.zeros(self.stages)

    @property
    def least_s(self) -> Floats:
        """What each segment takes on whatever device is the fastest for it."""
        return np.minimum.reduce(self.base_s)

    def of_stages(self, values: Sequence[float]) -> Floats:
        """Of each stage, what holds for its type of device, [k, 1, 1]."""
        return np.array(values, dtype=float)[list(self.pools)][:, None, None]

    def windows(self, width_s: float) -> Windows:
        """Those of no more than so much work."""
        return Windows(self, longest_within(self.least_s, width_s))


def longest_within(base_s: Floats, width_s: float) -> int:
    """How many segments a window of so much work has at the most."""
    before = np.concatenate([[0.0], np.cumsum(base_s)])
    first = np.searchsorted(before, before[1:] - width_s * SLACK)
    return int((np.arange(1, len(base_s) + 1) - first).max())


class Windows:
    """Windows of at most `longest` segments of a line."""

    def __init__(self, problem: PartitionProblem, longest: int) -> None:
        self.problem = problem
        n = len(problem.names)
        self.longest = min(longest, n - problem.stages + 1)
        self.starts = np.arange(n)[:, None] - np.arange(self.longest)[None, :]
        begin = np.ones(n + 1, dtype=bool)
        begin[list(problem.uncut)] = False
        self.possible = (self.starts >= 0) & begin[np.maximum(self.starts, 0)] & begin[1:, None]

    @cached_property
    def lower_s(self) -> Floats:
        """No stage that holds the window takes less, [k, e, l]."""
        problem, alive = self.problem, np.array(self.problem.alive, dtype=float)[:, None, None]
        kept = self._sums(problem.kept)
        over = (
            self._sums(problem.state) / alive + kept - problem.of_stages(problem.budget_bytes) / alive
        )  # per microbatch in flight
        with np.errstate(invalid="ignore"):
            again = np.where(
                over > 0, np.where(over > kept, np.inf, over * problem.of_stages(problem.recompute_s)), 0.0
            )
        base = np.stack([self._sums(base) for base in problem.base_s])[list(problem.pools)]
        return np.where(self.possible, base + problem.send_s[:, :, None] + again, np.inf)

    @cached_property
    def least_over(self) -> Floats:
        """Bytes over the room at the least, [k, e, l]."""
        alive = np.array(self.problem.alive, dtype=float)[:, None, None]
        held = self._sums(self.problem.state) + alive * self._sums(self.problem.least_kept)
        return np.where(self.possible, held - self.problem.of_stages(self.problem.budget_bytes), np.inf)

    def _sums(self, values: Floats) -> Floats:
        """Over each window, [e, l]."""
        before = np.concatenate([[0.0], np.cumsum(values)])
        return before[1:, None] - before[np.maximum(self.starts, 0)]

    def times_s(self, cap_s: float, seconds: Measure) -> Floats:
        """Seconds of the windows that some partition with no time above `cap_s` uses; infinite for the others."""
        return self.measured(self.lower_s <= cap_s * SLACK, seconds) + self.problem.send_s[:, :, None]

    def measured(self, wanted: NDArray[np.bool_], measure: Measure) -> Floats:
        """A measure of the wanted windows, as far as they line up: once for each content, on stages that are alike."""
        usable = self._usable(wanted)
        found = np.full(self._shape, np.inf)
        at = np.nonzero(usable)
        alive = (np.array(self.problem.alive, dtype=np.uint64) << np.uint64(8)) + np.array(
            self.problem.pools, dtype=np.uint64
        )
        alive *= np.uint64(_ODD)
        contents = self._contents[at[1], at[2]] ^ alive[at[0]]
        _, first, which = np.unique(contents, return_index=True, return_inverse=True)
        stages, ends, lengths = (axis[first].tolist() for axis in at)
        values = [measure(k, e - n, e) for k, e, n in zip(stages, ends, lengths, strict=True)]
        found[at] = np.array(values, dtype=float)[which]
        return found

    def runs(self, cap_s: float) -> Iterator[tuple[int, int, int]]:
        """(stage, first, last segment) of the windows that some partition with no time above `cap_s` uses."""
        for k, last, more in np.argwhere(self._usable(self.lower_s <= cap_s * SLACK)).tolist():
            yield k, last - more, last

    def _usable(self, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Of the wanted windows, those that line up with others."""
        usable: NDArray[np.bool_] = wanted & self.possible
        self._drop_unreachable(usable)
        return usable

    @cached_property
    def _contents(self) -> NDArray[np.uint64]:
        """A number for what is in each window and whether it begins the line, [e, l]: a polynomial in its names."""
        names = np.array(self.problem.names, dtype=np.uint64) * np.uint64(_ODD) + np.uint64(_ODD >> 7)
        powers = np.ones(len(names) + 1, dtype=np.uint64)
        before = np.zeros(len(names) + 1, dtype=np.uint64)
        with np.errstate(over="ignore"):
            for i, name in enumerate(names):
                powers[i + 1] = powers[i] * np.uint64(_BASE)
                before[i + 1] = before[i] * np.uint64(_BASE) + name
            starts = np.maximum(self.starts, 0)
            lengths = np.arange(1, self.longest + 1)
            inside = before[1:, None] - before[starts] * powers[lengths][None, :]
            return np.where(self.starts == 0, inside * np.uint64(_ODD), inside)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return (self.problem.stages, *self.starts.shape)

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
    cuts: Cuts


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
    if reach[n] == math.inf:
        return None
    cuts, end = [], n - 1
    for stage in reversed(range(stages)):
        first = end - int(chosen[stage, end])
        cuts.append((first, end))
        end = first - 1
    return Partition(float(reach[n]), tuple(reversed(cuts)))
