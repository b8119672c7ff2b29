"""All windows (runs of consecutive segments) that a pipeline stage may hold, as arrays, and the best partition.

Array axes: [stage k, last segment e, number of segments - 1]; `starts[e, l] = e - l`. Impossible windows are infinite.
`partition` picks one window per stage, end to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Cuts = tuple[tuple[int, int], ...]  # first and last segment per stage
# Seconds (forward, backward) of a stage without sending, given (stage, first segment, last segment); None: impossible
Measure = Callable[[int, int, int], tuple[float, float] | None]
SLACK = 1 + 1e-9  # tolerance on time limits that prune windows
_ROUNDING = 1e-12  # of bytes added up
_IMPOSSIBLE = (math.inf, math.inf)
_BASE, _ODD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # hash multipliers: large odd numbers without pattern


@dataclass(frozen=True)
class PartitionProblem:
    """A sequence of segments to cut into `stages` stages.

    `names`: equal for segments that cost the same anywhere; `base_s`: least seconds of each segment, by device type;
    `send_s`: added to a stage that ends there, [stage, segment], 0 for the last of either. For each stage, `alive`:
    in-flight microbatches (chunks); `pools`: its device type; `alike`: the first stage on which any segments cost the
    same, by default one with the same two.

    Memory: a stage holds the `state` of its segments and, per in-flight microbatch, their `kept` bytes, which
    recomputation reduces to no less than `least_kept` at `recompute_s` seconds per byte (by device type). A stage that
    begins no later than the segment `whole_from[e]` and ends with e works with `temporary[e]` bytes more. What is kept
    and worked with takes `waste` times its size besides. The sum is at most `budget_bytes` (by device type).

    `forward_share`: upper bound on min(f, b) / (f + b) of any stage. No stage may begin with a segment in `uncut`.
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
    temporary: Floats = field(default_factory=lambda: np.zeros(1))
    whole_from: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    alike: tuple[int, ...] = ()
    waste: float = 0.0
    forward_share: float = 0.5
    uncut: frozenset[int] = frozenset()

    @property
    def stages(self) -> int:
        return len(self.alive)

    @property
    def pieces(self) -> int:
        """The most stages that the segments can be cut into."""
        return len(self.names) - len(self.uncut)

    @cached_property
    def least_sends_s(self) -> Floats:
        """Least of `send_s` for each stage, over all places where it may end."""
        ends = self.send_s[:, :-1]
        return ends.min(axis=1) if ends.size else np.zeros(self.stages)

    @property
    def least_s(self) -> Floats:
        """Seconds of each segment on the device type that is fastest for it."""
        return np.minimum.reduce(self.base_s)

    def of_stages(self, values: Sequence[float]) -> Floats:
        """Return the value for each stage, [k, 1, 1], of values by device type; [1, 1, 1] if there is one type."""
        of = [0] if len(values) == 1 else list(self.pools)
        return np.array(values, dtype=float)[of][:, None, None]

    def is_full(self, stage: int, first: int, last: int) -> bool:
        """Return whether a stage of these segments lacks memory without recomputation."""
        state, kept = (float(values[first : last + 1].sum()) for values in (self.state, self.kept))
        at = min(last, len(self.temporary) - 1)
        temporary = self.temporary[at] if first <= self.whole_from[at] else 0.0
        work = (1 + self.waste) * (self.alive[stage] * kept + temporary)
        return bool(state + work > self.budget_bytes[self.pools[stage]])

    def windows(self, width_s: float) -> Windows:
        """Return the windows of at most `width_s` seconds of work."""
        return Windows(self, longest_within(self.least_s, width_s))


def longest_within(base_s: Floats, width_s: float) -> int:
    """Return the most segments of a window of `width_s` seconds of work."""
    before = np.concatenate([[0.0], np.cumsum(base_s)])
    first = np.searchsorted(before, before[1:] - width_s * SLACK)
    return int((np.arange(1, len(base_s) + 1) - first).max())


class Windows:
    """Windows of at most `longest` segments."""

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
        """Lower bound on the seconds of a stage that holds the window, [k, e, l]."""
        problem = self.problem
        base = np.stack([self._sums(base) for base in problem.base_s])
        base = base if len(base) == 1 else base[list(problem.pools)]
        sent = np.where(self.possible, base + problem.send_s[:, :, None], np.inf)
        return sent if min(problem.budget_bytes) == math.inf else sent + self._again_s

    @property
    def _again_s(self) -> Floats:
        """Least seconds of the recomputation that memory takes, [k, e, l]; infinite if none makes it fit."""
        problem, alive = self.problem, np.array(self.problem.alive, dtype=float)[:, None, None]
        kept = self._sums(problem.kept)
        most = kept - self._sums(problem.least_kept)
        over = kept - self._room / alive  # bytes too many per in-flight microbatch
        with np.errstate(invalid="ignore"):
            again_s = np.where(over > most + _ROUNDING * kept, np.inf, over * problem.of_stages(problem.recompute_s))
        return np.where(over > 0, again_s, 0.0)

    @cached_property
    def least_excess(self) -> Floats:
        """Least bytes over the budget, negative if a window fits, [k, e, l]."""
        problem, alive = self.problem, np.array(self.problem.alive, dtype=float)[:, None, None]
        held = self._sums(problem.state) + (1 + problem.waste) * alive * self._sums(problem.least_kept)
        return np.where(self.possible, held - problem.of_stages(problem.budget_bytes), np.inf)

    @property
    def _room(self) -> Floats:
        """Bytes that are left for what a stage keeps, [k, e, l]."""
        problem = self.problem
        left = (problem.of_stages(problem.budget_bytes) - self._sums(problem.state)) / (1 + problem.waste)
        return left - np.where(self.starts <= problem.whole_from[:, None], problem.temporary[:, None], 0.0)

    def _sums(self, values: Floats) -> Floats:
        """Return the sum of `values` over each window, [e, l]."""
        before = np.concatenate([[0.0], np.cumsum(values)])
        return before[1:, None] - before[np.maximum(self.starts, 0)]

    def measured(self, wanted: NDArray[np.bool_], measure: Measure) -> tuple[Floats, Floats]:
        """Return the seconds (forward, backward) of the wanted windows that are in any full partition; else infinite.

        Equal contents are measured once for equal stages."""
        at = np.nonzero(self._usable(wanted))
        stages = list(zip(self.problem.alive, self.problem.pools, strict=True))
        alike = np.array(self.problem.alike or [stages.index(stage) for stage in stages], dtype=np.uint64)
        contents = self._contents[at[1], at[2]] ^ ((alike + np.uint64(1)) * np.uint64(_ODD))[at[0]]
        _, first, which = np.unique(contents, return_index=True, return_inverse=True)
        runs = zip(*(axis[first].tolist() for axis in at), strict=True)
        values = [measure(k, e - n, e) or _IMPOSSIBLE for k, e, n in runs]
        table = np.array(values, dtype=float).reshape(-1, 2)
        forward, backward = np.full(self._shape, np.inf), np.full(self._shape, np.inf)
        forward[at], backward[at] = table[which, 0], table[which, 1]
        return forward, backward

    def runs(self, wanted: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
        """Yield (stage, first, last segment) of the wanted windows that are in any full partition."""
        for k, last, more in np.argwhere(self._usable(wanted)).tolist():
            yield k, last - more, last

    def _usable(self, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the wanted windows that are part of a full partition into wanted windows."""
        usable: NDArray[np.bool_] = wanted & self.possible
        self._drop_unreachable(usable)
        return usable

    @cached_property
    def _contents(self) -> NDArray[np.uint64]:
        """Hash of each window's names and of whether it starts at segment 0, [e, l]: a polynomial rolling hash."""
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
        """Clear windows that do not begin where the previous stage can end, or end where the next can begin."""
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
    """Return one window per stage, end to end over all segments, of least sum (or maximum); None if all are infinite.

    reach_k[e] = min over l of reach_{k-1}[start] (+ or max) values[k, e, l]; ties take the shortest window.
    """
    stages, n, longest = values.shape
    safe, join = np.maximum(starts, 0), np.maximum if minimax else np.add
    reach = np.full((stages + 1, n + 1), np.inf)
    reach[0, 0] = -np.inf if minimax else 0.0
    by_length = np.ascontiguousarray(values.transpose(0, 2, 1))  # long rows, over which minima are fast
    padded = np.full(longest + n, np.inf)  # windows that start before the first segment are impossible
    begun, joined = sliding_window_view(padded, n)[longest - 1 :: -1], np.empty((longest, n))  # reach of e - l, [l, e]
    for stage in range(stages):
        padded[longest - 1 :] = reach[stage]
        join(begun, by_length[stage], out=joined).min(axis=0, out=reach[stage + 1, 1:])
    if reach[stages, n] == math.inf:
        return None
    cuts, end = [], n - 1
    for stage in reversed(range(stages)):
        first = end - int(join(reach[stage, safe[end]], values[stage, end]).argmin())
        cuts.append((first, end))
        end = first - 1
    return Partition(float(reach[stages, n]), tuple(reversed(cuts)))
