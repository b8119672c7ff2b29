"""Streams of a GPU in name: which stream wrote or read each byte last, and what every stream has waited for.

A stream runs what is queued on it in order. Two streams are ordered only where one waits for an event of the other. So
every access is compared with the earlier ones to the same bytes, by a vector clock per stream, as race detectors of
threads do. Memory goes back to the stream that it was allocated on, the current one of all ranks, as soon as no tensor
has it; another stream that works on it must have been waited for before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

CURRENT = "the current stream"
Event = dict[str, int]  # by stream, how many of its accesses have ended


class DeviceFault(AssertionError):
    """An action that a GPU would refuse, wait for, or get wrong."""


class StreamRace(DeviceFault):
    """A stream reads or writes memory without having waited for another stream's access to it."""


class EarlyReuse(DeviceFault):
    """Memory goes back to the allocator while a stream that no other waited for works on it."""


class _Access(NamedTuple):
    stream: str
    time: int
    start: int
    stop: int
    writes: bool
    what: str


class Streams:
    """The streams of one rank's device."""

    def __init__(self) -> None:
        self._seen: dict[str, Event] = {CURRENT: {}}
        self._accesses: dict[int, tuple[StorageWeakRef, list[_Access]]] = {}
        self._open: list[tuple[StorageWeakRef, _Access]] = []  # of other streams than the current one
        self.current = CURRENT

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Let what follows be queued on a stream."""
        before, self.current = self.current, stream
        self._seen.setdefault(stream, {})
        try:
            yield
        finally:
            self.current = before

    def event(self, stream: str) -> Event:
        """Record an event on a stream."""
        return dict(self._seen.setdefault(stream, {}))

    def wait(self, stream: str, event: Event) -> None:
        """Let a stream wait for an event."""
        seen = self._seen.setdefault(stream, {})
        for other, time in event.items():
            seen[other] = max(time, seen.get(other, 0))

    def access(self, x: Tensor, writes: bool, what: str) -> None:
        """Queue an access to a tensor on the current stream. Raises StreamRace."""
        if not x.numel():
            return
        storage, stream = x.untyped_storage(), self.current
        seen = self._seen[stream]
        start, stop = bytes_of(x)
        kept = []
        reference, found = self._accesses.get(storage._cdata) or (StorageWeakRef(storage), [])
        for old in found:
            meets = start < old.stop and old.start < stop
            if meets and old.stream != stream and (writes or old.writes) and seen.get(old.stream, 0) < old.time:
                raise StreamRace(
                    f"{what} on {stream} {'writes' if writes else 'reads'} what {old.what} on {old.stream} "
                    f"{'writes' if old.writes else 'reads'}, without a wait for it"
                )
            within = start <= old.start and old.stop <= stop
            if not (within and (writes or (old.stream == stream and not old.writes))):
                kept.append(old)
        time = seen[stream] = seen.get(stream, 0) + 1
        kept.append(_Access(stream, time, start, stop, writes, what))
        self._accesses[storage._cdata] = reference, kept
        if stream != CURRENT:
            self._open.append((reference, kept[-1]))
        if len(self._accesses) > _MANY:
            self._accesses = {key: each for key, each in self._accesses.items() if not each[0].expired()}

    def check_freed(self, resized: torch.UntypedStorage | None = None) -> None:
        """Raise EarlyReuse for memory without a tensor, or resized, with work of a stream that no other waited for."""
        if not self._open:
            return
        seen = self._seen[CURRENT]
        self._open = [(ref, old) for ref, old in self._open if seen.get(old.stream, 0) < old.time]
        for reference, old in self._open:
            if reference.expired() or (resized is not None and reference.cdata == resized._weak_ref()):
                raise EarlyReuse(f"memory that {old.what} on {old.stream} still needs is free for the current stream")


_MANY = 20_000  # storages, until those without a tensor are dropped


def bytes_of(x: Tensor) -> tuple[int, int]:
    """Return the range from a tensor's first to its last element in its storage."""
    start = int(x.storage_offset()) * x.itemsize
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return start, start + span * x.itemsize
