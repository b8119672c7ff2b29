"""The cheapest way to free some bytes by recomputing segments: a covering knapsack with bounded counts.

    minimise  sum_i seconds_i n_i    subject to   sum_i gain_i n_i >= need,   0 <= n_i <= count_i, whole

Branch and bound over items in order of seconds per byte; the bound lets the next item be taken in part (Dantzig 1957).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

NODE_LIMIT = 20_000  # some 50 ms; reached only with dozens of kinds in one stage, and then told by `Cover.exact`


@dataclass(frozen=True)
class Item:
    """`count` equal segments; each frees `gain` bytes for `seconds`, and needs a workspace of `peak` bytes."""

    kind: int
    count: int
    gain: float
    seconds: float
    peak: float


@dataclass(frozen=True)
class Cover:
    """How many of each kind to recompute. `least_s`: no cover takes less; equal to `seconds` when `exact`."""

    seconds: float
    least_s: float
    counts: tuple[tuple[int, int], ...]
    exact: bool = True

    IMPOSSIBLE: ClassVar[Cover]


Cover.IMPOSSIBLE = Cover(math.inf, math.inf, ())


def cheapest_cover(items: Sequence[Item], need: float, best: Cover) -> Cover:
    """The cheapest cover of `need`, or `best` where none is cheaper."""
    if need <= 0:
        return Cover(0.0, 0.0, ())
    search = _Search(sorted(items, key=lambda item: (item.seconds / item.gain, item.kind)), best.seconds)
    bound = search.bound(0, need)
    if bound < best.seconds:
        search.visit(0, need, 0.0)
    if search.found is None and search.nodes <= NODE_LIMIT:
        return best
    exact = best.exact and search.nodes <= NODE_LIMIT
    least = min(best.least_s, search.limit if search.nodes <= NODE_LIMIT else bound)
    return Cover(search.limit, least, best.counts if search.found is None else search.found, exact)


class _Search:
    def __init__(self, items: Sequence[Item], limit: float) -> None:
        self.items, self.limit = items, limit
        self.found: tuple[tuple[int, int], ...] | None = None
        self.counts: list[int] = []
        self.nodes = 0

    def bound(self, index: int, need: float) -> float:
        """Seconds at the least, to cover `need` with the items from `index` on."""
        seconds = 0.0
        for item in self.items[index:]:
            whole = item.gain * item.count
            if whole >= need:
                return seconds + item.seconds * (need / item.gain)
            seconds += item.seconds * item.count
            need -= whole
        return math.inf

    def visit(self, index: int, need: float, spent: float) -> None:
        """Try counts of item `index`, most first: the bound grows as there are fewer."""
        self.nodes += 1
        if need <= 0:
            self.limit = spent
            self.found = tuple((i.kind, n) for i, n in zip(self.items, self.counts, strict=False) if n)
            return
        if index == len(self.items):
            return
        item = self.items[index]
        for count in range(min(item.count, math.ceil(need / item.gain)), -1, -1):
            left, cost = need - count * item.gain, spent + count * item.seconds
            floor = cost if left <= 0 else cost + self.bound(index + 1, left)
            if floor >= self.limit:
                if left > 0:
                    break
                continue
            if self.nodes > NODE_LIMIT:
                return
            self.counts.append(count)
            self.visit(index + 1, left, cost)
            self.counts.pop()
