"""The methods in which a rank has waited for other ranks, in order: all ranks call the same ones.

    if par.rank == 0:
        par.evaluate(batches, metrics)   # the others are in train_step, whose messages it would take for its own

A call counts once it communicates, so that what is asked of one rank alone may be. A heartbeat has the last call and a
digest of all before, which another rank compares with its own call of that number.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

_KEPT = 64  # calls; ranks differ by a few at most


@dataclass(frozen=True)
class Call:
    """A call of a collective method. `number`: from 1; 0 before the first. `digest`: of all methods up to this one."""

    number: int = 0
    method: str = ""
    digest: int = 0


@dataclass
class Calls:
    """The last calls of a process: of all that it trains, which share their ranks."""

    made: deque[Call] = field(default_factory=lambda: deque([Call()], _KEPT))

    @property
    def last(self) -> Call:
        return self.made[-1]

    def add(self, method: str) -> bool:
        """Record a call; return whether it is of another method than the one before."""
        before = self.last
        self.made.append(Call(before.number + 1, method, zlib.crc32(method.encode(), before.digest)))
        return method != before.method

    def instead_of(self, other: Call) -> Call | None:
        """Return this process's call of the same number as another rank's; None if they agree, or it is not known."""
        own = next((call for call in tuple(self.made) if call.number == other.number), None)
        return own if own is not None and own.digest != other.digest else None

    def only_here(self, other: Call) -> str:
        """Return the first method after another rank's last known call that is not known of it; "" if there is none.

        A rank says so before it begins another method than before: what it called since is that method again.
        """
        later = (call.method for call in tuple(self.made) if call.number > other.number and call.method != other.method)
        return next(later, "") if other.number else ""
