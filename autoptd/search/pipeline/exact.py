"""All cuts of one candidate that may be better than a given time, by their bound: what makes a search exact.

Cuts are built stage by stage; a prefix is dropped as soon as `bounds.cut_bound_s` of any way to go on is no less than
the time to beat. Those that are left are simulated, the most promising first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoptd.errors import DoesNotFit
from autoptd.schedule import row_of
from autoptd.search.pipeline.evaluate import Staged, simulated
from autoptd.search.pipeline.lower_bounds import beside_s, cut_bound_s, warm_up
from autoptd.search.pipeline.partition import Cuts
from autoptd.search.pipeline.stages import Stages

_CUTS = 20  # that there may be for every one that may be simulated


@dataclass
class Effort:
    """Cuts that may still be simulated; None is as many as there are."""

    left: int | None

    def __bool__(self) -> bool:
        return self.left is None or self.left > 0

    def spend(self) -> None:
        if self.left is not None:
            self.left -= 1


def refine(stages: Stages, best_s: float, effort: Effort) -> tuple[Staged | None, bool]:
    """The best cut that takes less than `best_s`, if any; and whether there can be no other."""
    count = math.comb(len(stages.problem.names) - 1, stages.count - 1)
    if effort.left is not None and count > _CUTS * effort.left:
        return None, False
    leaves = sorted(_Walk(stages, best_s).leaves())
    found: Staged | None = None
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
        if tried.seconds < best_s:
            found, best_s = tried, tried.seconds
    return found, True


class _Walk:
    """Depth first through all cuts, with what bounds them."""

    def __init__(self, stages: Stages, best_s: float) -> None:
        self.stages, self.best_s = stages, best_s
        self.before = np.concatenate([[0.0], np.cumsum(stages.problem.least_s)]).tolist()

    def leaves(self) -> Iterator[tuple[float, Cuts]]:
        yield from self._from((), [], [], [])

    def _from(
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
            x = [*sends, float(self.stages.problem.send_s[k, end]) / 2]
            bound = self._bound_s(f, b, x, self.before[n] - self.before[end + 1])
            if bound >= self.best_s:
                continue
            if last:
                yield bound, chosen
            else:
                yield from self._from(chosen, f, b, x)

    def _bound_s(self, forward: list[float], backward: list[float], sends: list[float], rest_s: float) -> float:
        """Of all cuts that begin with these stages and have so much work left. `sends`: of a message behind each."""
        c, method = self.stages.candidate, self.stages.method
        left = self.stages.count - len(forward)
        if not left:
            return cut_bound_s(forward, backward, method.schedule, c.pp, c.microbatches, sends)
        m, total = c.microbatches, [f + b for f, b in zip(forward, backward, strict=True)]
        whole = sum(total) + rest_s
        busy = [m * sum(c.route.of(total, rank)) for rank in range(min(c.pp, len(total)))]
        if row_of(method.schedule).halves:
            return max(m * whole / c.pp, *(x + sum(forward[:k]) + sum(sends[:k]) for k, x in enumerate(busy)))
        found = max(m * whole / c.pp, *(x + sum(total[:k]) + 2 * sum(sends[:k]) for k, x in enumerate(busy)))
        if method.virtual > 1:
            return found
        passes = zip(total, forward, backward, strict=True)
        messages = [*sends, *self.stages.least_sends_s[len(sends) :]]
        there_and_back = whole + 2 * sum(messages)
        paths = [
            there_and_back + (m - 1) * t - (warm_up(method.schedule, k, c.pp, m) - 1) * min(f, b)
            for k, (t, f, b) in enumerate(passes)
        ]
        share = rest_s / left
        most = warm_up(method.schedule, len(forward), c.pp, m) - 1
        first = m * share + sum(total) + 2 * sum(sends)
        found = max(found, whole + beside_s(messages, method.schedule, m))
        return max(found, *paths, first, there_and_back + (m - 1 - most / 2) * share)
