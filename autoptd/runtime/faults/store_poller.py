"""The thread of a rank that accesses the store. It may block there forever; other threads wait for it with a timeout.

    beat/<rank>   heartbeat of a rank, written each tick
    first         the first cause of the job's end, set once by compare-and-set
    closed        the process that holds the store is about to exit normally
    news          there is one of these two
    ended         how many ranks have ended normally, or know the cause

Each heartbeat is read by the preceding rank of the ring, on the same node if possible, and by the rank above it in a
tree (`waits.py`). So the store serves four short messages per rank and tick, whatever the number of ranks. Between
ticks, a rank that has entered another action updates its heartbeat, so that its last action is known if it dies. It
then also reads the heartbeat of the store's process, whose death ends the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from autoptd.runtime.faults.heartbeat import Beat, Cause

_KEYS = "autoptd/watch/"
_FRESH_S, _STORE_S = 0.05, 0.001  # minimum between heartbeats within a tick: in all, and per rank of the store


class StorePoller:
    """Exchanges messages with the store every `tick_s`. Other threads may read `beats`, `missed_ticks` (since a rank's
    heartbeat last changed), `changed_at`, `first`, `closed`, `error` (of a store that is gone), `busy_since` (start of
    an exchange), `ended` (ranks; read once this rank, whose process holds the store, has ended).
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
        """Prepare the thread. `host`: the rank whose process holds the store, None if no rank does."""
        self.beats: dict[int, Beat] = {}
        self.missed_ticks: dict[int, int] = {}
        self.changed_at: dict[int, float] = {}  # by this process's clock
        self.ended = 0
        self._counted: dict[int, int] = {}  # the number of each rank's heartbeat at the last tick
        self.first: Cause | None = None
        self.closed = False
        self.error: str = ""
        self.busy_since: float | None = None
        self.known = threading.Event()  # set once the cause is known
        self._store, self._tick_s, self._beat, self._ranks_to_read = store, tick_s, beat, wanted
        self._host, self._fresh_s = host, max(_FRESH_S, world * _STORE_S)
        self._count = -1  # `RankStatus.count` of the last heartbeat
        self._rank_ended = False
        self._proposal: Cause | None = None
        self._closing = False
        self._updating = False
        self._wake, self._ended = threading.Event(), threading.Event()
        self.number = 0
        self._thread = threading.Thread(target=self._run, name="autoptd store poller", daemon=True)
        self._done, self._finished = threading.Condition(), 0

    def start(self) -> None:
        self._thread.start()

    def propose(self, cause: Cause) -> None:
        """Propose a first cause; `first` is set by the next exchange."""
        self._proposal = self._proposal or cause
        self._wake.set()

    def close_store(self) -> None:
        """Announce to all ranks that the store is about to close."""
        self._closing = True
        self._wake.set()

    def exchange(self, timeout_s: float) -> bool:
        """Wait for an exchange that begins after this call; return whether it finished in time."""
        wanted = self.number + 1
        with self._done:
            self._wake.set()
            return self._done.wait_for(lambda: self._finished >= wanted or bool(self.error), timeout_s)

    def update(self, timeout_s: float) -> None:
        """Write this rank's heartbeat now, and wait until it is written; no tick of others is counted."""
        with self._done:
            wanted, self._updating = self.number + 1, True
            self._wake.set()
            self._done.wait_for(lambda: self.number >= wanted or bool(self.error), timeout_s)

    def stop(self) -> None:
        self._ended.set()
        self._wake.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.clear()
            if not self._reach_store(self._exchange):
                return
            with self._done:
                self._finished = self.number
                self._done.notify_all()
            met = self._ranks_to_read() <= self.beats.keys()  # other ranks may not have started yet
            until = time.monotonic() + (self._tick_s if met else self._tick_s / 10)
            while not self._ended.is_set() and (left := until - time.monotonic()) > 0:
                woken = self._wake.wait(min(left, self._fresh_s))
                if woken and not self._updating:
                    break
                if woken:
                    self._updating = False
                    self._wake.clear()
                if not self._reach_store(self._send if woken else self._refresh):
                    return
                if woken:
                    with self._done:
                        self._done.notify_all()
                if self._proposal is not None and self.first is None:
                    break  # which may have been proposed meanwhile

    def _reach_store(self, ask: Callable[[], None]) -> bool:
        """Run an access to the store; return whether the store answered."""
        self.busy_since = time.monotonic()
        try:
            ask()
        except RuntimeError as error:  # raised by torch's stores
            self.error = str(error).splitlines()[0] if str(error) else type(error).__name__
            with self._done:
                self._done.notify_all()
            return False
        self.busy_since = None
        return True

    def _send(self) -> None:
        self.number += 1
        mine = self._beat(self.number)
        self._store.set(f"{_KEYS}beat/{mine.rank}", mine.to_json())
        self._count = mine.count
        if (mine.done or mine.knows_cause) and not self._rank_ended:
            self._store.add(f"{_KEYS}ended", 1)
            self._rank_ended = True
        if mine.done and mine.rank == self._host:
            self.ended = self._store.add(f"{_KEYS}ended", 0)

    def _refresh(self) -> None:
        """Update this rank's heartbeat if its action changed, and read that of the store's process."""
        if self._beat(self.number).count != self._count:
            self._send()
        if self._host is not None and self._host in self.beats:
            self._fetch(self._host)

    def _exchange(self) -> None:
        store = self._store
        self._send()
        if self._closing:
            store.set(f"{_KEYS}closed", "1")
            store.set(f"{_KEYS}news", "1")
        if self._proposal is not None and self.first is None:
            self._learn(store.compare_set(f"{_KEYS}first", "", self._proposal.to_json()))
            store.set(f"{_KEYS}news", "1")
        elif store.check([f"{_KEYS}news"]):
            if self.first is None and store.check([f"{_KEYS}first"]):
                self._learn(store.get(f"{_KEYS}first"))
            self.closed = self.closed or store.check([f"{_KEYS}closed"])
        for rank in sorted(self._ranks_to_read()):
            self._read(rank)

    def _learn(self, text: bytes) -> None:
        self.first = Cause.of(text)
        self.known.set()
        self._wake.set()  # so that the next heartbeat says that the cause is known

    def _read(self, rank: int) -> None:
        """Read a rank's heartbeat and count the ticks for which it has not changed."""
        before = self._counted.get(rank)
        beat = self._fetch(rank)
        if beat is None or beat.number == before:
            self.missed_ticks[rank] = self.missed_ticks.get(rank, 0) + 1
            return
        self._counted[rank], self.missed_ticks[rank], self.changed_at[rank] = beat.number, 0, time.monotonic()

    def _fetch(self, rank: int) -> Beat | None:
        key = f"{_KEYS}beat/{rank}"
        if rank in self.beats or self._store.check([key]):
            self.beats[rank] = Beat.of(self._store.get(key))
        return self.beats.get(rank)
