"""The thread of a rank that talks to the store: it may block there for ever, and nobody waits for it without a limit.

    beat/<rank>   heartbeat of a rank, each tick
    first         the first cause of the job's end: whoever sets it first, for good
    closed        the store's process is about to end as it should

A heartbeat is read by the rank before it, round the ring, so that a store serves a few short messages per rank and
tick, however many ranks there are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from autoptd.runtime.beat import Beat, Cause

_KEYS = "autoptd/watch/"


class Messenger:
    """Exchanges messages every `tick_s`. What it has found may be read at any time: `beats`, `quiet` (ticks since a
    beat last changed), `first`, `closed`; `error`: of a store that is gone; `busy_since`: of an exchange under way.
    """

    def __init__(self, store: dist.Store, tick_s: float, beat: Callable[[int], Beat], wanted: Callable[[], set[int]]):
        self.beats: dict[int, Beat] = {}
        self.quiet: dict[int, int] = {}
        self.first: Cause | None = None
        self.closed = False
        self.error: str = ""
        self.busy_since: float | None = None
        self.known = threading.Event()  # why the job ends
        self._store, self._tick_s, self._beat, self._wanted = store, tick_s, beat, wanted
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
            self.busy_since = time.monotonic()
            try:
                self._exchange()
            except RuntimeError as error:  # torch's errors of stores
                self.error = str(error).splitlines()[0] if str(error) else type(error).__name__
                with self._done:
                    self._done.notify_all()
                return
            self.busy_since = None
            with self._done:
                self._finished = self._number
                self._done.notify_all()
            if not self._ended.is_set():
                met = self._wanted() <= self.beats.keys()  # at first others may not have begun
                self._wake.wait(self._tick_s if met else self._tick_s / 10)

    def _exchange(self) -> None:
        store = self._store
        self._number += 1
        mine = self._beat(self._number)
        store.set(f"{_KEYS}beat/{mine.rank}", mine.to_json())
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
        key = f"{_KEYS}beat/{rank}"
        beat = Beat.of(self._store.get(key)) if self._store.check([key]) else None
        if beat is None or (rank in self.beats and self.beats[rank].number == beat.number):
            self.quiet[rank] = self.quiet.get(rank, 0) + 1
            return
        self.beats[rank], self.quiet[rank] = beat, 0
