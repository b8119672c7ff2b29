"""Ways to hold the activations of a block, and the cheapest choice for all blocks of a rank that fits.

    none             what autograd saves stays
    selective, ops   some of it is worked out again in the backward pass    (passes/analysis/activations.py)
    full             the block's input stays, all else is worked out again

With `alive` microbatches of each of its chunks in flight, a rank holds

    kept  = Σ over chunks of alive × Σ kept                    of all its blocks, by the ways chosen
    extra = max over chunks of (fullest moment - Σ kept)       beyond that; `passes.liveness.stage_peak`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoptd.passes.analysis.liveness import Peak, stage_peak
from autoptd.schedule import Alive

EXACT = 100_000  # choices for one rank that are looked at; beyond, those that grow by the most bytes per second


@dataclass(frozen=True)
class RecomputeOption:
    """A policy of recomputation for one block: seconds that it adds to a backward pass, and bytes."""

    policy: str
    recompute_s: float
    peak: Peak


RecomputeOptions = tuple[
    RecomputeOption, ...
]  # quickest first; each later one keeps less, or needs less at its fullest moment


@dataclass(frozen=True)
class RecomputeChoice:
    """`ways`: of each block of each chunk. `exact`: whether no quicker choice fits."""

    chosen: tuple[tuple[RecomputeOption, ...], ...]
    recompute_s: float
    kept: int
    extra: int
    exact: bool


def undominated(chosen: Sequence[RecomputeOption]) -> RecomputeOptions:
    """Without ways that another one is no worse than in every respect."""
    found: list[RecomputeOption] = []
    for option in sorted(chosen, key=lambda w: (w.recompute_s, w.peak.kept, _fullest(w))):
        if not any(w.peak.kept <= option.peak.kept and _fullest(w) <= _fullest(option) for w in found):
            found.append(option)
    return tuple(found)


def _fullest(option: RecomputeOption) -> int:
    return max(option.peak.forward, option.peak.backward)


def bytes_of(chosen: Sequence[Sequence[RecomputeOption]], alive: Alive) -> tuple[int, int]:
    """(kept, extra) of a rank whose chunks hold blocks in these ways; the chunk in work is taken to be the fullest."""
    kept = [sum(option.peak.kept for option in chunk) for chunk in chosen]
    extra = max(
        stage_peak([option.peak for option in chunk], 1) - whole for chunk, whole in zip(chosen, kept, strict=True)
    )
    return alive.kept(kept), extra


def leanest(chunks: Sequence[Sequence[RecomputeOptions]]) -> tuple[tuple[RecomputeOption, ...], ...]:
    """The ways that keep least."""
    return tuple(
        tuple(min(options, key=lambda w: (w.peak.kept, w.recompute_s)) for options in chunk) for chunk in chunks
    )


def choose(
    chunks: Sequence[Sequence[RecomputeOptions]], alive: Alive, fits: Callable[[int, int], bool]
) -> RecomputeChoice | None:
    """The least seconds for which `fits(kept, extra)`; None where nothing does. `fits` may only get worse with bytes.

    Blocks with one menu on one chunk are alike, so that only their numbers per way are chosen; those that keep less
    stand first, where least of the others is alive at their fullest moment.
    """
    quickest = _choice(chunks, [tuple(options[0] for options in chunk) for chunk in chunks], alive, exact=True)
    if fits(quickest.kept, quickest.extra):
        return quickest
    groups = _groups(chunks)
    sizes = [math.comb(len(where) + len(options) - 1, len(where)) for options, where in groups]
    exact = math.prod(sizes) <= EXACT
    for counts in _in_order(groups, alive, fits) if exact else _by_price(groups, alive):
        found = _choice(chunks, _spread(chunks, groups, counts), alive, exact=exact)
        if fits(found.kept, found.extra):
            return found
    return None


def decreasing_memory(chunks: Sequence[Sequence[RecomputeOptions]], alive: Alive) -> Iterator[RecomputeChoice]:
    """The quickest ways, and then one block after another in a way that keeps less, by the most bytes per second."""
    groups = _groups(chunks)
    yield _choice(chunks, [tuple(options[0] for options in chunk) for chunk in chunks], alive, exact=True)
    for counts in _by_price(groups, alive):
        yield _choice(chunks, _spread(chunks, groups, counts), alive, exact=False)


Group = tuple[RecomputeOptions, list[tuple[int, int]]]  # a menu, and the (chunk, position) of the blocks that have it
Counts = tuple[tuple[int, ...], ...]  # of each group, how many blocks go each way


def _groups(chunks: Sequence[Sequence[RecomputeOptions]]) -> list[Group]:
    found: dict[tuple[int, RecomputeOptions], list[tuple[int, int]]] = {}
    for c, chunk in enumerate(chunks):
        for i, options in enumerate(chunk):
            found.setdefault((c, options), []).append((c, i))
    return [(options, where) for (_, options), where in found.items()]


def _in_order(groups: Sequence[Group], alive: Alive, fits: Callable[[int, int], bool]) -> Iterator[Counts]:
    """All numbers per way whose kept bytes alone fit, the quickest first."""
    tables = [_compositions(len(where), len(options)) for options, where in groups]
    seconds, each = np.zeros(1), [np.zeros(1) for _ in alive.rows]
    for (options, where), table in zip(groups, tables, strict=True):
        seconds = np.add.outer(seconds, table @ np.array([w.recompute_s for w in options])).ravel()
        mine = table @ np.array([w.peak.kept for w in options], dtype=float)
        pairs = zip(each, alive.rows, strict=True)
        each = [np.add.outer(before, row[where[0][0]] / alive.parts * mine).ravel() for before, row in pairs]
    kept, shape = np.maximum.reduce(each), [len(table) for table in tables]
    for index in np.lexsort((kept, seconds)):
        if fits(int(kept[index]), 0):
            at = np.unravel_index(index, shape)
            yield tuple(tuple(map(int, table[i])) for table, i in zip(tables, at, strict=True))


@lru_cache(maxsize=512)
def _compositions(total: int, parts: int) -> NDArray[np.int64]:
    """All ways to write `total` as a sum of so many counts, [ways, parts]."""
    bars = itertools.combinations(range(total + parts - 1), parts - 1)
    rows = [np.diff((-1, *bar, total + parts - 1)) - 1 for bar in bars]
    return np.array(rows, dtype=np.int64).reshape(-1, parts)


def _by_price(groups: Sequence[Group], alive: Alive) -> Iterator[Counts]:
    """Numbers per way that change one block at a time, by the most bytes per second."""
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


def _spread(
    chunks: Sequence[Sequence[RecomputeOptions]], groups: Sequence[Group], counts: Counts
) -> list[tuple[RecomputeOption, ...]]:
    """The way of every block."""
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
