"""Recompute options of a block, and the fastest choice for all blocks of a rank that fits in memory.

    none             all tensors that autograd saves are kept
    selective, ops   some of them are recomputed in backward                (passes/analysis/activations.py)
    full             the block's input is kept, everything else is recomputed
    offload          what `none` keeps is in host memory; both passes wait for the copies

With `alive` in-flight microbatches of each of its chunks, a rank holds

    kept  = Σ over chunks of alive × Σ kept + waiting × Σ w    of the chosen options of all its blocks
    extra = max over chunks of (peak - Σ kept)                 beyond that; `passes.liveness.stage_peak`

where w are the gradients that a microbatch holds while it is one of the `waiting`, between its B and its W.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoptd.passes.analysis.liveness import Peak, stage_peak
from autoptd.schedule import Alive

EXACT = 10_000  # most choices per rank that are enumerated; beyond, a greedy order by bytes saved per second
_NONE = np.zeros(1)
_COMPARED = 200  # choices of a chunk that are compared at a time, to leave out those that others beat


class RecomputeOption(NamedTuple):
    """A recompute policy for one block: the seconds that it adds to both passes, its memory, and what it keeps in host
    memory per microbatch, in bytes."""

    policy: str
    recompute_s: float
    peak: Peak
    host: int = 0


Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
RecomputeOptions = tuple[RecomputeOption, ...]  # fastest first; each later one keeps less or has a lower peak
Group = tuple[RecomputeOptions, list[tuple[int, int]]]  # options, and (chunk, position) of the blocks that have them


@dataclass(frozen=True)
class RecomputeChoice:
    """The `chosen` option of each block of each chunk. `exact`: no faster choice fits."""

    chosen: tuple[tuple[RecomputeOption, ...], ...]
    recompute_s: float
    kept: int
    extra: int
    exact: bool


@lru_cache(maxsize=4096)
def without_waiting(options: RecomputeOptions) -> RecomputeOptions:
    """Return the options in a stage whose backward passes are whole."""
    return tuple(option._replace(peak=option.peak._replace(waiting=0)) for option in options)


def undominated(
    chosen: Sequence[RecomputeOption], *, counts_host: bool = False, counts_waiting: bool = False
) -> RecomputeOptions:
    """Drop dominated options; with `counts_host`, only those that take no less host memory, and with `counts_waiting`,
    only those that hold no less until W."""
    found: list[RecomputeOption] = []
    for option in sorted(chosen, key=lambda w: (w.recompute_s, w.peak.kept, _fullest(w), w.host)):
        smaller = [w for w in found if _no_larger(w, option) and (w.host <= option.host or not counts_host)]
        if not any(w.peak.waiting <= option.peak.waiting or not counts_waiting for w in smaller):
            found.append(option)
    return tuple(found)


def _no_larger(a: RecomputeOption, b: RecomputeOption) -> bool:
    return a.peak.kept <= b.peak.kept and _fullest(a) <= _fullest(b)


def _fullest(option: RecomputeOption) -> int:
    return max(option.peak.forward, option.peak.backward)


def bytes_of(chosen: Sequence[Sequence[RecomputeOption]], alive: Alive) -> tuple[int, int]:
    """Return (kept, extra) of a rank for chosen options per chunk; the chunk being computed has the largest peak."""
    kept = [sum(option.peak.kept for option in chunk) for chunk in chosen]
    extra = max(
        stage_peak([option.peak for option in chunk], 1) - whole for chunk, whole in zip(chosen, kept, strict=True)
    )
    return alive.kept(kept, [sum(option.peak.waiting for option in chunk) for chunk in chosen]), extra


def host_bytes_of(chosen: Sequence[Sequence[RecomputeOption]], alive: Alive) -> int:
    """Return the host's bytes for chosen options per chunk. `alive`: microbatches whose buffers are not yet free."""
    return alive.kept([sum(option.host for option in chunk) for chunk in chosen])


def most_saving(chunks: Sequence[Sequence[RecomputeOptions]]) -> tuple[tuple[RecomputeOption, ...], ...]:
    """Return the options that keep least."""
    return tuple(
        tuple(min(options, key=lambda w: (w.peak.kept, w.recompute_s)) for options in chunk) for chunk in chunks
    )


class RecomputeFront:
    """The choices for the blocks of a rank that no other beats in both seconds and bytes, fastest first.

    Blocks of a chunk with equal options are interchangeable: only the number of blocks per option is chosen. Blocks
    that keep less come first in the chunk, so that least of the others is in memory at their peak. The choices depend
    on no budget, so that ranks of many candidates share them. `counts_host`: host memory counts too, in `within_both`.
    """

    def __init__(
        self, chunks: Sequence[Sequence[RecomputeOptions]], alive: Alive, *, counts_host: bool = False
    ) -> None:
        self.chunks, self.alive, self._counts_host = chunks, alive, counts_host

    def within(self, budget_bytes: float) -> RecomputeChoice | None:
        """Return the fastest choice whose `kept` and `extra` bytes are within a budget; None if there is none."""
        if self._quickest.kept + self._quickest.extra <= budget_bytes:
            return self._quickest
        if self._least_kept > budget_bytes:
            return None
        nbytes, counts = self._points
        at = int(np.searchsorted(-nbytes, -budget_bytes))
        if at == len(nbytes):
            return None
        return self._chosen([tuple(map(int, table[at])) for table in counts])

    def within_both(self, budget_bytes: float, on_host: Alive, host_bytes: float) -> RecomputeChoice | None:
        """Return the fastest choice within a budget that takes at most `host_bytes` for microbatches `on_host`."""
        seconds, nbytes, tables = self._every
        each = [np.zeros(len(seconds)) for _ in self.chunks]
        for (options, where), table in zip(self._groups, tables, strict=True):
            each[where[0][0]] += table @ np.array([option.host for option in options])
        moved = np.max(np.array(on_host.rows) @ np.stack(each), axis=0) / on_host.parts
        fits = np.flatnonzero((nbytes <= budget_bytes) & (moved <= host_bytes))
        if not len(fits):
            return None
        at = fits[np.lexsort((nbytes[fits], seconds[fits]))[0]]
        return self._chosen([tuple(map(int, table[at])) for table in tables])

    @cached_property
    def _every(self) -> tuple[Floats, Floats, list[Counts]]:
        """The seconds, the bytes and the counts of all choices."""
        seconds, nbytes, counts = self._all() if self._chunks else self._some()
        return seconds, nbytes, counts(np.arange(len(seconds)))

    def _chosen(self, counts: Sequence[Sequence[int]]) -> RecomputeChoice:
        return _choice(_assigned(self.chunks, self._groups, counts), self.alive, exact=bool(self._chunks))

    @cached_property
    def _quickest(self) -> RecomputeChoice:
        return _choice([tuple(options[0] for options in chunk) for chunk in self.chunks], self.alive)

    @cached_property
    def _least_kept(self) -> int:
        """The bytes that every choice keeps: a bound that takes less time than the choices."""
        return self.alive.kept([sum(min(w.peak.kept for w in options) for options in chunk) for chunk in self.chunks])

    @cached_property
    def _groups(self) -> list[Group]:
        return _groups(self.chunks)

    @cached_property
    def _chunks(self) -> list[ChunkChoices]:
        """The choices of each chunk; none if there are too many to try all."""
        counted = (*["host"] * self._counts_host, *["waiting"] * bool(self.alive.waiting))
        found = [_choices_of(tuple(chunk), counted) for chunk in self.chunks]
        possible = [choices for choices in found if choices is not None]
        few = len(possible) == len(found) and math.prod(len(choices.seconds) for choices in possible) <= EXACT
        return possible if few else []

    @cached_property
    def _points(self) -> tuple[Floats, list[Counts]]:
        """The bytes of each choice, and for each group the number of its blocks per option, [choice, option]."""
        seconds, nbytes, counts = self._all() if self._chunks else self._some()
        order = np.lexsort((nbytes, seconds))
        least = np.minimum.accumulate(nbytes[order])
        front = order[np.concatenate([[True], least[1:] < least[:-1]])]
        return nbytes[front], counts(front)

    def _all(self) -> tuple[Floats, Floats, Callable[[Counts], list[Counts]]]:
        """Return the seconds and bytes of all choices, and what gives the counts of some of them."""
        seconds, extra, kept = np.zeros(1), np.zeros(1), [np.zeros(1) for _ in self.alive.rows]
        for c, own in enumerate(self._chunks):
            seconds = np.add.outer(seconds, own.seconds).ravel()
            extra = np.maximum.outer(extra, own.extra).ravel()
            rows = zip(kept, self._held(c, own.kept, own.waiting), strict=True)
            kept = [np.add.outer(before, held).ravel() for before, held in rows]
        shape = [len(own.seconds) for own in self._chunks]

        def counts(some: Counts) -> list[Counts]:
            chosen = zip(self._chunks, np.unravel_index(some, shape), strict=True)
            return [table[at] for own, at in chosen for table in own.counts]

        return seconds, np.rint(np.maximum.reduce(kept) / self.alive.parts) + extra, counts

    def _held(self, chunk: int, kept: Floats, waiting: Floats) -> list[Floats]:
        """Return what the microbatches of a chunk hold at each candidate memory peak."""
        each = zip(self.alive.rows, self.alive.waiting or [()] * len(self.alive.rows), strict=True)
        return [row[chunk] * kept + (later[chunk] * waiting if later else 0.0) for row, later in each]

    def _some(self) -> tuple[Floats, Floats, Callable[[Counts], list[Counts]]]:
        """Return the same of the choices in order of bytes saved per second."""
        tables = [np.array(rows) for rows in zip(*_greedy(self._groups, self.alive), strict=True)]
        every = [(options, where, table) for (options, where), table in zip(self._groups, tables, strict=True)]
        seconds, extra = np.zeros(len(tables[0])), np.zeros(len(tables[0]))
        kept = [seconds for _ in self.alive.rows]
        for options, _, table in every:
            seconds = seconds + table @ np.array([w.recompute_s for w in options])
        for c, chunk in enumerate(self.chunks):
            own = [group for group in every if group[1][0][0] == c]
            held, beyond = _bytes_of_chunk(own, len(chunk), outer=False)
            extra = np.maximum(extra, beyond)
            waits = sum((table @ _VALUES["waiting"](options) for options, _, table in own), np.zeros(1))
            kept = [before + more for before, more in zip(kept, self._held(c, held, waits), strict=True)]
        nbytes = np.rint(np.maximum.reduce(kept) / self.alive.parts) + extra
        return seconds, nbytes, lambda some: [table[some] for table in tables]


class ChunkChoices(NamedTuple):
    """Choices for the blocks of a chunk: seconds, bytes kept of a microbatch, bytes of the peak beyond them, bytes held
    until W if they are counted, and the number of blocks per option of each group of equal blocks, [choice, option]."""

    seconds: Floats
    kept: Floats
    extra: Floats
    waiting: Floats
    counts: list[Counts]


_VALUES: Mapping[str, Callable[[RecomputeOptions], Floats]] = {  # of options, in addition to those of all choices
    "host": lambda options: np.array([float(option.host) for option in options]),
    "waiting": lambda options: np.array([float(option.peak.waiting) for option in options]),
}


@lru_cache(maxsize=4096)
def _choices_of(chunk: tuple[RecomputeOptions, ...], counted: tuple[str, ...]) -> ChunkChoices | None:
    """Return the choices for a chunk that no other is as good as in every way, those of `counted` included; None if
    there are too many to try."""
    groups = _groups([chunk])
    shape = [math.comb(len(where) + len(options) - 1, len(where)) for options, where in groups]
    if math.prod(shape) > EXACT:
        return None
    tables, seconds = [_compositions(len(where), len(options)) for options, where in groups], _NONE
    more = dict.fromkeys(counted, _NONE)
    for (options, _), table in zip(groups, tables, strict=True):
        seconds = np.add.outer(seconds, table @ np.array([w.recompute_s for w in options])).ravel()
        more = {name: np.add.outer(n, table @ _VALUES[name](options)).ravel() for name, n in more.items()}
    kept, extra = _bytes_of_chunk([(*group, table) for group, table in zip(groups, tables, strict=True)], len(chunk))
    order = _unbeaten(np.lexsort((*more.values(), extra, kept, seconds)), (kept, extra, *more.values()))
    counts = [table[at] for table, at in zip(tables, np.unravel_index(order, shape), strict=True)]
    waiting = more.get("waiting", np.zeros_like(seconds))
    return ChunkChoices(seconds[order], kept[order], extra[order], waiting[order], counts)


def _unbeaten(order: Counts, kinds: Sequence[Floats]) -> Counts:
    """Return the choices, fast ones first, without those that an earlier one equals or beats in all kinds of bytes."""
    found = order[:0]
    for some in np.array_split(order, max(1, len(order) // _COMPARED)):
        beaten = np.logical_and.reduce([n[found, None] <= n[some] for n in kinds])  # [earlier, later]
        some = some[~beaten.any(axis=0)]
        within = np.logical_and.reduce([n[some, None] <= n[some] for n in kinds])
        found = np.concatenate((found, some[~np.triu(within, 1).any(axis=0)]))
    return found


def _bytes_of_chunk(
    groups: Sequence[tuple[RecomputeOptions, list[tuple[int, int]], Counts]], length: int, *, outer: bool = True
) -> tuple[Floats, Floats]:
    """Return, for counts of a chunk's groups, what its `length` blocks keep and the peak above it, flat.

    `outer`: for all combinations of the groups' counts; otherwise for those in one row of every table. Within
    consecutive blocks of one option the last has the highest peak, for what is kept before it grows.
    """
    shape = [len(table) for _, _, table in groups] if outer else [len(groups[0][2])]
    at = {i: (g, j) for g, (_, where, _) in enumerate(groups) for j, (_, i) in enumerate(where)}
    orders = [sorted(range(len(options)), key=lambda w: options[w].peak.kept) for options, _, _ in groups]
    ends = [np.cumsum(table[:, order], axis=1) for (_, _, table), order in zip(groups, orders, strict=True)]
    before, fullest = np.zeros(shape), np.zeros(shape)
    runs = itertools.groupby(range(length), key=lambda i: (at[i][0], i - at[i][1]))  # neighbours of one group
    for (g, _), blocks in runs:
        inside = [at[i][1] for i in blocks]
        held = np.clip(ends[g], inside[0], inside[-1] + 1) - inside[0]  # blocks of this run up to each option's last
        numbers = np.diff(held, axis=1, prepend=0)
        view = [1] * g + [-1] + [1] * (len(groups) - g - 1) if outer else [-1]
        for place, w in enumerate(orders[g]):
            option, n = groups[g][0][w], numbers[:, place].reshape(view)
            peak = before + ((n - 1) * option.peak.kept + _fullest(option))
            fullest = np.where(n > 0, np.maximum(fullest, peak), fullest)
            before = before + n * option.peak.kept
    return before.ravel(), (np.maximum(fullest, before) - before).ravel()


def decreasing_memory(chunks: Sequence[Sequence[RecomputeOptions]], alive: Alive) -> Iterator[RecomputeChoice]:
    """Yield the fastest choice, then switch one block at a time to an option that keeps less, by bytes per second."""
    groups = _groups(chunks)
    for counts in _greedy(groups, alive):
        yield _choice(_assigned(chunks, groups, counts), alive, exact=False)


def _groups(chunks: Sequence[Sequence[RecomputeOptions]]) -> list[Group]:
    found: dict[tuple[int, RecomputeOptions], list[tuple[int, int]]] = {}
    for c, chunk in enumerate(chunks):
        for i, options in enumerate(chunk):
            found.setdefault((c, options), []).append((c, i))
    return [(options, where) for (_, options), where in found.items()]


@lru_cache(maxsize=512)
def _compositions(total: int, parts: int) -> Counts:
    """Return all ways to write `total` as a sum of `parts` counts, [ways, parts]."""
    bars = list(itertools.combinations(range(total + parts - 1), parts - 1))
    edges = np.array(bars, dtype=np.int64).reshape(len(bars), parts - 1)
    return np.diff(edges, axis=1, prepend=-1, append=total + parts - 1) - 1


def _greedy(groups: Sequence[Group], alive: Alive) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the number of blocks per group and option: of the fastest choice, and then with one block at a time
    switched, by the most bytes saved per second."""
    held = [max(row[where[0][0]] for row in alive.rows) for _, where in groups]
    moves = sorted(
        ((options[new].recompute_s - options[old].recompute_s) / saved, g, old, new)
        for g, (options, _) in enumerate(groups)
        for old, new in itertools.combinations(range(len(options)), 2)
        if (saved := (options[old].peak.kept - options[new].peak.kept) * held[g]) > 0
    )
    counts = [[len(where), *[0] * (len(options) - 1)] for options, where in groups]
    yield tuple(map(tuple, counts))
    while (move := next((move for move in moves if counts[move[1]][move[2]]), None)) is not None:
        _, g, old, new = move
        counts[g][old] -= 1
        counts[g][new] += 1
        yield tuple(map(tuple, counts))


def _assigned(
    chunks: Sequence[Sequence[RecomputeOptions]], groups: Sequence[Group], counts: Sequence[Sequence[int]]
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
    chosen: Sequence[tuple[RecomputeOption, ...]],
    alive: Alive,
    *,
    exact: bool = True,
) -> RecomputeChoice:
    kept, extra = bytes_of(chosen, alive)
    return RecomputeChoice(
        tuple(chosen), math.fsum(w.recompute_s for chunk in chosen for w in chunk), kept, extra, exact
    )
