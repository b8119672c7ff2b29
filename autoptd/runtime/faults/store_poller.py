"""The thread of a rank that talks to the store: it may block there for ever, and nobody waits for it without a limit.

    beat/<rank>   heartbeat of a rank, each tick
    first         the first cause of the job's end: whoever sets it first, for good
    closed        the store's process is about to end as it should

A heartbeat is read by the rank before it, round the ring, so that a store serves a few short messages per rank and
tick, however many ranks there are. Between two ticks a rank that has gone on to another action sends its heartbeat
again, so that what it did last is known if it dies, and reads that of the store's process, which takes the store along.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from autoptd.runtime.faults.heartbeat import Beat, Cause

_KEYS = "autoptd/watch/"
_FRESH_S, _STORE_S = 0.05, 0.001  # between heartbeats within a tick: at least, and for each rank that the store serves


class Messenger:
    """Exchanges messages every `tick_s`. What it has found may be read at any time: `beats`, `quiet` (ticks since a
    beat last changed), `first`, `closed`; `error`: of a store that is gone; `busy_since`: of an exchange under way.
    """

    def __init__(
        self,
        store: dist.Store,
        tick_s: float,
        beat: Callable[[int], Beat],
        wanted: Callable[[], set[int]],
        host: int | None,
        world: int,
    ) -> None:
        """`host`: the rank whose process holds the store, if one does."""
        self.beats: dict[int, Beat] = {}
        self.quiet: dict[int, int] = {}
        self._counted: dict[int, int] = {}  # the number of each rank's heartbeat when quiet was counted
        self.first: Cause | None = None
        self.closed = False
        self.error: str = ""
        self.busy_since: float | None = None
        self.known = threading.Event()  # why the job ends
        self._store, self._tick_s, self._beat, self._wanted = store, tick_s, beat, wanted
        self._host, self._fresh_s = host, max(_FRESH_S, world * _STORE_S)
        self._count = -1  # of the last heartbeat's actions
        self._telling: Cause | None = None
        self._closing = False
        self._wake, self._ended = threading.Event(), threading.Event()
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="autoptd messenger", daemon=True)
        self._done, self._finished = threading.Condition(), 0

    def start(self) -> None:
        self._thread.start()

    def tell(self, cause: Cause) -> None:
        """Propose a first cause; soon `first` is there."""
        self._telling = self._telling or cause
        self._wake.set()

    def close_store(self) -> None:
        """Tell everybody that the store is about to go."""
        self._closing = True
        self._wake.set()

    def exchange(self, timeout_s: float) -> bool:
        """Wait for an exchange that begins from now on; whether there was one in time."""
        wanted = self._number + 1
        with self._done:
            self._wake.set()
            return self._done.wait_for(lambda: self._finished >= wanted or bool(self.error), timeout_s)

    def stop(self) -> None:
        self._ended.set()
        self._wake.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.clear()
            if not self._answered(self._exchange):
                return
            with self._done:
                self._finished = self._number
                self._done.notify_all()
            met = self._wanted() <= self.beats.keys()  # at first others may not have begun
            until = time.monotonic() + (self._tick_s if met else self._tick_s / 10)
            while not self._ended.is_set() and (left := until - time.monotonic()) > 0:
                if self._wake.wait(min(left, self._fresh_s)):
                    break
                if not self._answered(self._refresh):
                    return

    def _answered(self, ask: Callable[[], None]) -> bool:
        """Talk to the store; whether it is there."""
        self.busy_since = time.monotonic()
        try:
            ask()
        except RuntimeError as error:  # torch's errors of stores
            self.error = str(error).splitlines()[0] if str(error) else type(error).__name__
            with self._done:
                self._done.notify_all()
            return False
        self.busy_since = None
        return True

    def _send(self) -> None:
        self._number += 1
        mine = self._beat(self._number)
        self._store.set(f"{_KEYS}beat/{mine.rank}", mine.to_json())
        self._count = mine.count

    def _refresh(self) -> None:
        """Between two exchanges: which action this rank carries out now, and the store's process."""
        if self._beat(self._number).count != self._count:
            self._send()
        if self._host is not None and self._host in self.beats:
            self._look(self._host)

    def _exchange(self) -> None:
        store = self._store
        self._send()
        if self._closing:
            store.set(f"{_KEYS}closed", "1")
        if self._telling is not None and self.first is None:
            self._found(store.compare_set(f"{_KEYS}first", "", self._telling.to_json()))
        elif self.first is None and store.check([f"{_KEYS}first"]):
            self._found(store.get(f"{_KEYS}first"))
        self.closed = self.closed or store.check([f"{_KEYS}closed"])
        for rank in sorted(self._wanted()):
            self._read(rank)

    def _found(self, text: bytes) -> None:
        self.first = Cause.of(text)
        self.known.set()
        self._wake.set()  # so that a beat says that it is known here

    def _read(self, rank: int) -> None:
        """Count the ticks for which a heartbeat has not changed."""
        before = self._counted.get(rank)
        beat = self._look(rank)
        if beat is None or beat.number == before:
            self.quiet[rank] = self.quiet.get(rank, 0) + 1
            return
        self._counted[rank], self.quiet[rank] = beat.number, 0

    def _look(self, rank: int) -> Beat | None:
        key = f"{_KEYS}beat/{rank}"
        if self._store.check([key]):
            self.beats[rank] = Beat.of(self._store.get(key))
        return self.beats.get(rank)
