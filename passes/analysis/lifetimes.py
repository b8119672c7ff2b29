"""The moments of a pass in which each storage is alive.

A pass is a sequence of moments, one for each step. `LifetimeWriter` writes down when storages are held and released;
`Lifetimes` keeps the spans, whose bytes add up to those of every moment:

    bytes of moment i = sum of the bytes of the spans (storage, begin, end) with begin <= i < end
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoptd.passes.analysis.dataflow import Storage

Moment = tuple[str, frozenset[Storage]]  # the step, and the storages alive


@dataclass(frozen=True)
class Lifetimes:
    """The names of a pass's moments, and for each span its storage, first moment and the moment after its last."""

    names: tuple[str, ...]
    spans: tuple[tuple[Storage, int, int], ...]

    def then(self, later: Lifetimes) -> Lifetimes:
        """Return these moments followed by those of a later pass."""
        n = len(self.names)
        spans = tuple((storage, n + begin, n + end) for storage, begin, end in later.spans)
        return Lifetimes((*self.names, *later.names), (*self.spans, *spans))

    def moments(self) -> tuple[Moment, ...]:
        """Return each moment with the storages alive then."""
        alive: list[set[Storage]] = [set() for _ in self.names]
        for storage, begin, end in self.spans:
            for moment in alive[begin:end]:
                moment.add(storage)
        return tuple((name, frozenset(found)) for name, found in zip(self.names, alive, strict=True))

    def placed(self, at: Mapping[Storage, int]) -> NDArray[np.int64]:
        """Return [(index of the storage, begin, end) of each span], given the indices."""
        found = [(at[storage], begin, end) for storage, begin, end in self.spans]
        return np.array(found, dtype=np.int64).reshape(-1, 3)


def most_bytes(spans: NDArray[np.int64], sizes: NDArray[np.int64]) -> int:
    """Return the bytes of the fullest moment, given `placed` spans and the bytes of each storage; 0 without spans."""
    if not len(spans):
        return 0
    which, begin, end = spans.T
    change = np.zeros(int(end.max()) + 1, dtype=np.int64)
    np.add.at(change, begin, sizes[which])
    np.subtract.at(change, end, sizes[which])
    return max(0, int(change.cumsum().max()))


class LifetimeWriter:
    """Writes down lifetimes, moment by moment.

    A storage may be held for several reasons at once, and is alive until it is released for each of them."""

    def __init__(self, always: Iterable[Storage] = ()) -> None:
        """`always`: alive in every moment."""
        self._names: list[str] = []
        self._held: dict[Storage, list[int]] = {}  # number of reasons, and the first moment
        self._spans: list[tuple[Storage, int, int]] = []
        self.hold(always)

    def hold(self, storages: Iterable[Storage]) -> None:
        for storage in storages:
            self._held.setdefault(storage, [0, len(self._names)])[0] += 1

    def release(self, storages: Iterable[Storage]) -> None:
        for storage in storages:
            held = self._held[storage]
            held[0] -= 1
            if not held[0]:
                self._end(storage, held[1])
                del self._held[storage]

    def moment(self, name: str, briefly: Sequence[Storage] = ()) -> None:
        """Add a moment, in which `briefly` are alive besides what is held."""
        self.hold(briefly)
        self._names.append(name)
        self.release(briefly)

    def _end(self, storage: Storage, begin: int) -> None:
        if begin < len(self._names):
            self._spans.append((storage, begin, len(self._names)))

    def finish(self) -> Lifetimes:
        """Return what was recorded; whatever is still held is alive up to the last moment."""
        for storage, (_, begin) in self._held.items():
            self._end(storage, begin)
        return Lifetimes(tuple(self._names), tuple(self._spans))
