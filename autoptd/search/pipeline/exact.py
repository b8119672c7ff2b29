"""Branch and bound over all cuts of one candidate: simulates every cut that may be faster than a given time.

Cuts are built stage by stage; a prefix is dropped as soon as its lower bound over all continuations reaches the time to
beat. The remaining cuts are simulated in the order of their bounds (`lower_bounds.cut_bound_s`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add

import numpy as np

from autoptd.errors import DoesNotFit
from autoptd.schedule import row_of
from autoptd.search.pipeline.evaluate import Staged, simulated
from autoptd.search.pipeline.lower_bounds import (
    chain_s,
    cut_bound_s,
    interleaved_rounds,
    message_path_s,
    passed_over,
)
from autoptd.search.pipeline.partition import Cuts
from autoptd.search.pipeline.stages import Stages

_CUTS = 20  # most cuts that are enumerated per cut that may be simulated


@dataclass
class Effort:
    """The number of cuts that may still be simulated; None: all."""

    left: int | None

    def __bool__(self) -> bool:
        return self.left is None or self.left > 0

    def spend(self) -> None:
        if self.left is not None:
            self.left -= 1


def sums_by_chunk(stages: Stages) -> bool:
    """Return whether sums over dp begin where a chunk of a rank ends, so that it matters which chunk recomputes."""
    c = stages.candidate
    return c.virtual > 1 and c.zero < 2 and c.dp * c.cp > 1 and "dp" in stages.method.overlap


def refine(stages: Stages, best_s: float, effort: Effort) -> tuple[Staged | None, bool]:
    """Return the best cut found that takes less than `best_s`, if any, and whether it is proved to be the best.

    It is not where sums over dp begin at the end of a chunk and ranks recompute: each cut has one choice of it."""
    count = math.comb(len(stages.problem.names) - 1, stages.count - 1)
    if effort.left is not None and count > _CUTS * effort.left:
        return None, False
    leaves = sorted(_CutTree(stages, best_s).leaves())
    found: Staged | None = None
    is_proved = True
    for bound, cuts in leaves:
        if bound >= best_s:
            break
        if not effort:
            return found, False
        effort.spend()
        try:
            tried = simulated(stages.finish(cuts))
        except DoesNotFit:
            continue
        is_proved = is_proved and not (sums_by_chunk(stages) and any(tried.solution.policies))
        if tried.seconds < best_s:
            found, best_s = tried, tried.seconds
    return found, is_proved


class _CutTree:
    """Depth-first enumeration of all cuts whose lower bound is less than `best_s`."""

    def __init__(self, stages: Stages, best_s: float) -> None:
        self.stages, self.best_s = stages, best_s
        self.before = np.concatenate([[0.0], np.cumsum(stages.problem.least_s)]).tolist()

    def leaves(self) -> Iterator[tuple[float, Cuts]]:
        yield from self._extended((), [], [], [])

    def _extended(
        self, cuts: Cuts, forward: list[float], backward: list[float], sends: list[float]
    ) -> Iterator[tuple[float, Cuts]]:
        at, k, n = (cuts[-1][1] + 1 if cuts else 0), len(cuts), len(self.stages.problem.names)
        last = k == self.stages.count - 1
        for end in (n - 1,) if last else range(at, n - (self.stages.count - 1 - k)):
            passes = self.stages.passes(k, at, end)
            if passes is None:
                continue
            chosen = (*cuts, (at, end))
            f, b = [*forward, passes[0]], [*backward, passes[1]]
            x = [*sends, self.stages.chunks.messages.send_s(k, end + 1)]
            bound = self._bound_s(f, b, x, self.before[n] - self.before[end + 1])
            if bound >= self.best_s:
                continue
            if last:
                yield bound, chosen
            else:
                yield from self._extended(chosen, f, b, x)

    def _bound_s(self, forward: list[float], backward: list[float], sends: list[float], rest_s: float) -> float:
        """Return a lower bound over all cuts that begin with these stages and have `rest_s` seconds of work left.

        `sends`: least seconds of a message after each stage."""
        c, method = self.stages.candidate, self.stages.method
        left = self.stages.count - len(forward)
        if not left:
            return cut_bound_s(forward, backward, method.schedule, c.pp, c.microbatches, sends)
        m, total = c.microbatches, [f + b for f, b in zip(forward, backward, strict=True)]
        whole = sum(total) + rest_s
        busy = [m * sum(c.route.of(total, rank)) for rank in range(min(c.pp, len(total)))]
        if row_of(method.schedule).splits_backward:
            return max(m * whole / c.pp, *(x + sum(forward[:k]) + sum(sends[:k]) for k, x in enumerate(busy)))
        if method.virtual > 1:
            chains = (sum(chain_s(each, sends, c.pp, k) for each in (forward, backward)) for k in range(c.pp))
            return max(interleaved_rounds(c.pp, m, method.virtual) * whole, *map(add, busy, chains))
        found = max(m * whole / c.pp, *(x + sum(total[:k]) + 2 * sum(sends[:k]) for k, x in enumerate(busy)))
        passes = zip(total, forward, backward, strict=True)
        messages = [*sends, *self.stages.least_sends_s[len(sends) :]]
        round_trip_s = whole + 2 * sum(messages)
        paths = [
            round_trip_s + (m - 1) * t - passed_over(method.schedule, k, c.pp, m) * min(f, b)
            for k, (t, f, b) in enumerate(passes)
        ]
        share = rest_s / left
        most = passed_over(method.schedule, len(forward), c.pp, m)
        first = m * share + sum(total) + 2 * sum(sends)
        found = max(found, whole + message_path_s(messages, method.schedule, m))
        return max(found, *paths, first, round_trip_s + (m - 1 - most / 2) * share)
