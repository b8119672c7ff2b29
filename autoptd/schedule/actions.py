"""The actions of a schedule and their text form; see `autoptd.schedule`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from operator import le
from typing import NamedTuple, TypeAlias

SENDS = ("SF", "SB")
RECEIVES = ("RF", "RB")
STEP_END = ("REDUCE", "STEP", "GATHER")
EARLY = ("SUM", "GATHER")  # communication over dp that may start while passes run


class Action(NamedTuple):
    """One action of a rank; `microbatch` is None for SUM and the actions at the end of a step.

    A tuple, since schedules have up to hundreds of thousands of actions.
    """

    kind: str
    microbatch: int | None = None
    chunk: int = 0

    def __str__(self) -> str:
        name = self.kind if self.microbatch is None else f"{self.kind}{self.microbatch}"
        return f"{name}.{self.chunk}" if self.chunk else name


Actions: TypeAlias = tuple[Action, ...]
Schedule: TypeAlias = tuple[Actions, ...]  # one entry per rank


def parse_action(text: str) -> Action:
    """Parse the output of `str(action)`. Raises ValueError naming the text."""
    if text in STEP_END:
        return Action(text)
    if match := re.fullmatch(r"(F|B|W|SF|RF|SB|RB)(\d+)(?:\.([1-9]\d*))?", text):
        return Action(match[1], int(match[2]), int(match[3] or 0))
    if match := re.fullmatch(r"SUM(?:\.([1-9]\d*))?", text):
        return Action("SUM", None, int(match[1] or 0))
    raise ValueError(
        f"{text!r} is not an action; write F0, B0, W0, F0.1, SF0, RF0, SB0, RB0, SUM, REDUCE, STEP or GATHER"
    )


def text(schedule: Schedule) -> list[str]:
    """Return one line per rank, with actions separated by blanks."""
    return [" ".join(map(str, actions)) for actions in schedule]


def parse(lines: Iterable[str]) -> Schedule:
    """Parse the output of `text`: `parse(text(schedule)) == schedule`."""
    return tuple(tuple(parse_action(word) for word in line.split()) for line in lines)


def chunks_of(schedule: Schedule) -> int:
    """Return the number of chunks per rank: one more than the highest chunk of any action."""
    return 1 + max((action.chunk for actions in schedule for action in actions), default=0)


class Alive(NamedTuple):
    """Number of in-flight microbatches of a rank, per chunk, at each candidate memory peak.

    `rows` has one row per candidate. Numbers are in units of 1 / `parts` microbatch: if chunks are assumed to be of
    equal size, every column of a row holds the sum over the chunks, and `parts` is their number. `waiting` has for each
    row those of them whose W is still to come while their B has begun; it is empty where backward passes are whole.
    """

    rows: tuple[tuple[int, ...], ...]
    parts: int = 1
    waiting: tuple[tuple[int, ...], ...] = ()

    @property
    def chunks(self) -> int:
        """The largest number of in-flight microbatches, summed over chunks of any size."""
        return max(map(sum, self.rows)) // self.parts

    @property
    def least(self) -> int:
        """A lower bound on the chunks' activations at the peak, whatever the sizes of the chunks."""
        return max(min(row) * len(row) for row in self.rows) // self.parts

    def kept(self, chunk_bytes: Sequence[int], waiting_bytes: Sequence[int] = ()) -> int:
        """Return the activation bytes at the peak, from the bytes of one microbatch on each chunk. `waiting_bytes`:
        those that it holds besides while it waits for its W; by default none."""
        held = [_product(row, chunk_bytes) for row in self.rows]
        if self.waiting and waiting_bytes:
            held = [n + _product(row, waiting_bytes) for n, row in zip(held, self.waiting, strict=True)]
        return round(max(held) / self.parts)

    @property
    def alike(self) -> Alive:
        """These numbers of chunks that are all of one size, as those of a single chunk."""
        rows, waiting = (tuple((sum(row) // self.parts,) for row in table) for table in (self.rows, self.waiting))
        return Alive(rows, waiting=waiting)

    def ahead(self, microbatches: int) -> Alive:
        """Return these numbers with one more microbatch of any one chunk, of `microbatches` in a step at most, without
        those that wait."""
        if self.parts > 1:
            most = microbatches * self.parts
            return Alive(tuple(tuple(min(most, n + 1) for n in row) for row in self.rows), self.parts)
        each = [(row, chunk) for row in self.rows for chunk in range(len(row))]
        more = (tuple(min(microbatches, n + (i == chunk)) for i, n in enumerate(row)) for row, chunk in each)
        return Alive(tuple(dict.fromkeys(more)))

    def covers(self, alive: Sequence[int], waiting: Sequence[int] = ()) -> bool:
        """Return whether these in-flight microbatches per chunk, and these that wait, are within what is counted."""
        if self.parts > 1:
            return sum(alive) <= self.chunks and not any(waiting)
        found, wide = (*alive, *waiting), len(waiting)
        tables = zip(self.rows, self.waiting or [(0,) * wide] * len(self.rows), strict=True)
        return any(all(map(le, found, (*row, *waits[:wide]))) for row, waits in tables)


def in_flight(actions: Sequence[Action], chunk_bytes: Sequence[float] = ()) -> tuple[int, ...]:
    """Return a rank's in-flight microbatches per chunk at its memory peak.

    Activations live from F to B, or to W if the rank has W (an upper bound: W needs only part of them). `chunk_bytes`:
    the activation bytes of one microbatch on each chunk; empty: equal.
    """
    fullest, most = (0,) * chunks_of((tuple(actions),)), 0.0
    for alive, _ in moments(actions):
        if (now := sum(n * weight for n, weight in zip(alive, chunk_bytes or [1] * len(alive), strict=True))) > most:
            fullest, most = alive, now
    return fullest


def moments(actions: Sequence[Action]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield a rank's in-flight microbatches per chunk during each pass, and those of them that wait for their W."""
    splits = any(action.kind == "W" for action in actions)
    alive, waiting = ([0] * chunks_of((tuple(actions),)) for _ in range(2))
    for action in actions:
        if action.kind == "F":
            alive[action.chunk] += 1
        elif action.kind == "B" and splits:
            waiting[action.chunk] += 1
        if action.kind in ("F", "B"):
            yield tuple(alive), tuple(waiting)
        if action.kind == ("W" if splits else "B"):
            alive[action.chunk] -= 1
            waiting[action.chunk] -= splits


def _product(numbers: Sequence[int], each: Sequence[int]) -> int:
    return sum(n * one for n, one in zip(numbers, each, strict=True))
