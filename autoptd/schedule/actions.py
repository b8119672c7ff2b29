"""The actions of a schedule and their text form; see `autoptd.schedule`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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
    equal size, every column of a row holds the sum over the chunks, and `parts` is their number.
    """

    rows: tuple[tuple[int, ...], ...]
    parts: int = 1

    @property
    def chunks(self) -> int:
        """The largest number of in-flight microbatches, summed over chunks of any size."""
        return max(map(sum, self.rows)) // self.parts

    @property
    def least(self) -> int:
        """A lower bound on the chunks' activations at the peak, whatever the sizes of the chunks."""
        return max(min(row) * len(row) for row in self.rows) // self.parts

    def kept(self, chunk_bytes: Sequence[int]) -> int:
        """Return the activation bytes at the peak, from the bytes of one microbatch on each chunk."""
        most = max(sum(n * each for n, each in zip(row, chunk_bytes, strict=True)) for row in self.rows)
        return round(most / self.parts)

    def ahead(self, microbatches: int) -> Alive:
        """Return these numbers with one more microbatch of any one chunk, of `microbatches` in a step at most."""
        if self.parts > 1:
            most = microbatches * self.parts
            return Alive(tuple(tuple(min(most, n + 1) for n in row) for row in self.rows), self.parts)
        each = [(row, chunk) for row in self.rows for chunk in range(len(row))]
        more = (tuple(min(microbatches, n + (i == chunk)) for i, n in enumerate(row)) for row, chunk in each)
        return Alive(tuple(dict.fromkeys(more)))

    def covers(self, alive: Sequence[int]) -> bool:
        """Return whether these in-flight microbatches per chunk are within what is counted."""
        if self.parts > 1:
            return sum(alive) <= self.chunks
        return any(all(n <= most for n, most in zip(alive, row, strict=True)) for row in self.rows)


def in_flight(actions: Sequence[Action], chunk_bytes: Sequence[float] = ()) -> tuple[int, ...]:
    """Return a rank's in-flight microbatches per chunk at its memory peak.

    Activations live from F to B, or to W if the rank has W (an upper bound: W needs only part of them). `chunk_bytes`:
    the activation bytes of one microbatch on each chunk; empty: equal.
    """
    fullest, most = (0,) * chunks_of((tuple(actions),)), 0.0
    for alive in moments(actions):
        if (now := sum(n * weight for n, weight in zip(alive, chunk_bytes or [1] * len(alive), strict=True))) > most:
            fullest, most = alive, now
    return fullest


def moments(actions: Sequence[Action]) -> Iterator[tuple[int, ...]]:
    """Yield a rank's in-flight microbatches per chunk after each forward pass."""
    freeing = "W" if any(action.kind == "W" for action in actions) else "B"
    alive = [0] * chunks_of((tuple(actions),))
    for action in actions:
        if action.kind == "F":
            alive[action.chunk] += 1
            yield tuple(alive)
        elif action.kind == freeing:
            alive[action.chunk] -= 1
