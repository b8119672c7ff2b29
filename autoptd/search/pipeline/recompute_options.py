"""Recompute options of a block, and the fastest choice for all blocks of a rank that fits in memory.

    none             all tensors that autograd saves are kept
    selective, ops   some of them are recomputed in backward                (passes/analysis/activations.py)
    full             the block's input is kept, everything else is recomputed

With `alive` in-flight microbatches of each of its chunks, a rank holds

    kept  = Σ over chunks of alive × Σ kept                    of the chosen options of all its blocks
    extra = max over chunks of (peak - Σ kept)                 beyond that; `passes.liveness.stage_peak`
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoptd.passes.analysis.liveness import Peak, stage_peak
from autoptd.schedule import Alive

EXACT = 100_000  # most choices per rank that are enumerated; beyond, a greedy order by bytes saved per second


@dataclass(frozen=True)
class RecomputeOption:
    """A recompute policy for one block: the seconds that it adds to a backward pass, and its memory."""

    policy: str
    recompute_s: float
    peak: Peak


RecomputeOptions = tuple[RecomputeOption, ...]  # fastest first; each later one keeps less or has a lower peak


@dataclass(frozen=True)
class RecomputeChoice:
    """The `chosen` option of each block of each chunk. `exact`: no faster choice fits."""

    chosen: tuple[tuple[RecomputeOption, ...], ...]
    recompute_s: float
    kept: int
    extra: int
    exact: bool


def undominated(chosen: Sequence[RecomputeOption]) -> RecomputeOptions:
    """Drop dominated options."""
    found: list[RecomputeOption] = []
    for option in sorted(chosen, key=lambda w: (w.recompute_s, w.peak.kept, _fullest(w))):
        if not any(w.peak.kept <= option.peak.kept and _fullest(w) <= _fullest(option) for w in found):
            found.append(option)
    return tuple(found)


def _fullest(option: RecomputeOption) -> int:
    return max(option.peak.forward, option.peak.backward)


def bytes_of(chosen: Sequence[Sequence[RecomputeOption]], alive: Alive) -> tuple[int, int]:
    """Return (kept, extra) of a rank for chosen options per chunk; the chunk being computed has the largest peak."""
    kept = [sum(option.peak.kept for option in chunk) for chunk in chosen]
    extra = max(
        stage_peak([option.peak for option in chunk], 1) - whole for chunk, whole in zip(chosen, kept, strict=True)
    )
    return alive.kept(kept), extra


def most_saving(chunks: Sequence[Sequence[RecomputeOptions]]) -> tuple[tuple[RecomputeOption, ...], ...]:
    """Return the options that keep least."""
    return tuple(
        tuple(min(options, key=lambda w: (w.peak.kept, w.recompute_s)) for options in chunk) for chunk in chunks
    )


def choose(
    chunks: Sequence[Sequence[RecomputeOptions]], alive: Alive, fits: Callable[[int, int], bool]
) -> RecomputeChoice | None:
    """Return the fastest choice with `fits(kept, extra)`; None if there is none. `fits` is monotone in the bytes.

    Blocks of a chunk with equal options are interchangeable: only the number of blocks per option is chosen. Blocks
    that keep less come first in the chunk, so that least of the others is in memory at their peak.
    """
    quickest = _choice(chunks, [tuple(options[0] for options in chunk) for chunk in chunks], alive, exact=True)
    if fits(quickest.kept, quickest.extra):
        return quickest
    groups = _groups(chunks)
    sizes = [math.comb(len(where) + len(options) - 1, len(where)) for options, where in groups]
    exact = math.prod(sizes) <= EXACT
    for counts in _by_seconds(groups, alive, fits) if exact else _greedy(groups, alive):
        found = _choice(chunks, _assigned(chunks, groups, counts), alive, exact=exact)
        if fits(found.kept, found.extra):
            return found
    return None


def decreasing_memory(chunks: Sequence[Sequence[RecomputeOptions]], alive: Alive) -> Iterator[RecomputeChoice]:
    """Yield the fastest choice, then switch one block at a time to an option that keeps less, by bytes per second."""
    groups = _groups(chunks)
    yield _choice(chunks, [tuple(options[0] for options in chunk) for chunk in chunks], alive, exact=True)
    for counts in _greedy(groups, alive):
        yield _choice(chunks, _assigned(chunks, groups, counts), alive, exact=False)


Group = tuple[RecomputeOptions, list[tuple[int, int]]]  # options, and (chunk, position) of the blocks that have them
Counts = tuple[tuple[int, ...], ...]  # number of blocks per group and option


def _groups(chunks: Sequence[Sequence[RecomputeOptions]]) -> list[Group]:
    found: dict[tuple[int, RecomputeOptions], list[tuple[int, int]]] = {}
    for c, chunk in enumerate(chunks):
        for i, options in enumerate(chunk):
            found.setdefault((c, options), []).append((c, i))
    return [(options, where) for (_, options), where in found.items()]


def _by_seconds(groups: Sequence[Group], alive: Alive, fits: Callable[[int, int], bool]) -> Iterator[Counts]:
    """Yield all counts whose kept bytes alone fit, fastest first."""
    tables = [_compositions(len(where), len(options)) for options, where in groups]
    seconds, each = np.zeros(1), [np.zeros(1) for _ in alive.rows]
    for (options, where), table in zip(groups, tables, strict=True):
        seconds = np.add.outer(seconds, table @ np.array([w.recompute_s for w in options])).ravel()
        mine = table @ np.array([w.peak.kept for w in options], dtype=float)
        pairs = zip(each, alive.rows, strict=True)
        each = [np.add.outer(before, row[where[0][0]] / alive.parts * mine).ravel() for before, row in pairs]
    kept, shape = np.maximum.reduce(each), [len(table) for table in tables]
    sizes = np.unique(kept)
    fitting = bisect_left(sizes, True, key=lambda size: not fits(int(size), 0))
    possible = np.flatnonzero(kept <= sizes[fitting - 1]) if fitting else np.array([], dtype=int)
    for index in possible[np.lexsort((kept[possible], seconds[possible]))]:
        at = np.unravel_index(index, shape)
        yield tuple(tuple(map(int, table[i])) for table, i in zip(tables, at, strict=True))


@lru_cache(maxsize=512)
def _compositions(total: int, parts: int) -> NDArray[np.int64]:
    """Return all ways to write `total` as a sum of `parts` counts, [ways, parts]."""
    bars = itertools.combinations(range(total + parts - 1), parts - 1)
    rows = [np.diff((-1, *bar, total + parts - 1)) - 1 for bar in bars]
    return np.array(rows, dtype=np.int64).reshape(-1, parts)


def _greedy(groups: Sequence[Group], alive: Alive) -> Iterator[Counts]:
    """Yield counts that switch one block at a time, by the most bytes saved per second."""
    held = [max(row[where[0][0]] for row in alive.rows) for _, where in groups]
    counts = [[len(where), *[0] * (len(options) - 1)] for options, where in groups]
    while True:
        best: tuple[float, int, int, int] | None = None
        for g, (options, _) in enumerate(groups):
            for old, new in itertools.combinations(range(len(options)), 2):
                saved = (options[old].peak.kept - options[new].peak.kept) * held[g]
                if counts[g][old] and saved > 0:
                    price = (options[new].recompute_s - options[old].recompute_s) / saved
                    best = min(best or (math.inf, 0, 0, 0), (price, g, old, new))
        if best is None:
            return
        _, g, old, new = best
        counts[g][old] -= 1
        counts[g][new] += 1
        yield tuple(map(tuple, counts))


def _assigned(
    chunks: Sequence[Sequence[RecomputeOptions]], groups: Sequence[Group], counts: Counts
) -> list[tuple[RecomputeOption, ...]]:
    """Return the option of every block, given the counts."""
    found: list[list[RecomputeOption]] = [[options[0] for options in chunk] for chunk in chunks]
    for (options, where), numbers in zip(groups, counts, strict=True):
        order = sorted(range(len(options)), key=lambda w: options[w].peak.kept)
        chosen = [options[w] for w in order for _ in range(numbers[w])]
        for (c, i), option in zip(where, chosen, strict=True):
            found[c][i] = option
    return [tuple(chunk) for chunk in found]


def _choice(
    chunks: Sequence[Sequence[RecomputeOptions]],
    chosen: Sequence[tuple[RecomputeOption, ...]],
    alive: Alive,
    *,
    exact: bool,
) -> RecomputeChoice:
    kept, extra = bytes_of(chosen, alive)
    return RecomputeChoice(
        tuple(chosen), math.fsum(w.recompute_s for chunk in chosen for w in chunk), kept, extra, exact
    )
