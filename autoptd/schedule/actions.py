"""What a rank does, one thing at a time, and its text form; see `autoptd.schedule`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

SENDS = ("SF", "SB")
RECEIVES = ("RF", "RB")
STEP_END = ("REDUCE", "STEP", "GATHER")


class Action(NamedTuple):
    """One thing that a rank does; `microbatch` is None for the actions at the end of a step.

    A tuple, since schedules of a hundred thousand actions are made, proved and simulated.
    """

    kind: str
    microbatch: int | None = None
    chunk: int = 0

    def __str__(self) -> str:
        if self.microbatch is None:
            return self.kind
        return f"{self.kind}{self.microbatch}.{self.chunk}" if self.chunk else f"{self.kind}{self.microbatch}"


Actions: TypeAlias = tuple[Action, ...]
Schedule: TypeAlias = tuple[Actions, ...]  # one entry per rank


def parse_action(text: str) -> Action:
    """Read back what `str` wrote. Raises ValueError naming the text."""
    if text in STEP_END:
        return Action(text)
    if match := re.fullmatch(r"(F|B|W|SF|RF|SB|RB)(\d+)(?:\.([1-9]\d*))?", text):
        return Action(match[1], int(match[2]), int(match[3] or 0))
    raise ValueError(f"{text!r} is not an action; write F0, B0, W0, F0.1, SF0, RF0, SB0, RB0, REDUCE, STEP or GATHER")


def text(schedule: Schedule) -> list[str]:
    """One line per rank, actions separated by blanks."""
    return [" ".join(map(str, actions)) for actions in schedule]


def parse(lines: Iterable[str]) -> Schedule:
    """`parse(text(schedule)) == schedule`."""
    return tuple(tuple(parse_action(word) for word in line.split()) for line in lines)


def chunks_of(schedule: Schedule) -> int:
    """Chunks per rank: one more than the highest that is named."""
    return 1 + max((action.chunk for actions in schedule for action in actions), default=0)


class Alive(NamedTuple):
    """Of how many microbatches a rank holds activations at the moments of which one is the fullest.

    A row for each such moment, with a number for each chunk; they weigh 1 / `parts` (where chunks are taken to be of
    average size, each row holds their sum everywhere).
    """

    rows: tuple[tuple[int, ...], ...]
    parts: int = 1

    @property
    def chunks(self) -> int:
        """In flight at the most, of whatever size."""
        return max(map(sum, self.rows)) // self.parts

    @property
    def least(self) -> int:
        """So many chunks of any size, at the least, are what the rank holds."""
        return max(min(row) * len(row) for row in self.rows) // self.parts

    def kept(self, chunk_bytes: Sequence[int]) -> int:
        """Bytes at the fullest moment, of one microbatch's on each chunk."""
        most = max(sum(n * each for n, each in zip(row, chunk_bytes, strict=True)) for row in self.rows)
        return round(most / self.parts)

    def covers(self, alive: Sequence[int]) -> bool:
        """Whether that many are counted."""
        if self.parts > 1:
            return sum(alive) <= self.chunks
        return any(all(n <= most for n, most in zip(alive, row, strict=True)) for row in self.rows)


def in_flight(actions: Sequence[Action], chunk_bytes: Sequence[float] = ()) -> tuple[int, ...]:
    """By chunk, of how many microbatches a rank holds activations when it holds most.

    Activations live from F to B, or to W where the rank has W (an upper bound: W needs but part of them). `chunk_bytes`
    weighs the chunks, by one microbatch's activations on each; all alike without.
    """
    fullest, most = (0,) * chunks_of((tuple(actions),)), 0.0
    for alive in moments(actions):
        if (now := sum(n * weight for n, weight in zip(alive, chunk_bytes or [1] * len(alive), strict=True))) > most:
            fullest, most = alive, now
    return fullest


def moments(actions: Sequence[Action]) -> Iterator[tuple[int, ...]]:
    """By chunk, of how many microbatches a rank holds activations after each forward pass."""
    freeing = "W" if any(action.kind == "W" for action in actions) else "B"
    alive = [0] * chunks_of((tuple(actions),))
    for action in actions:
        if action.kind == "F":
            alive[action.chunk] += 1
            yield tuple(alive)
        elif action.kind == freeing:
            alive[action.chunk] -= 1
