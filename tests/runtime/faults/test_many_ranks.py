"""Heartbeats of 16,384 ranks, simulated in one process with a clock of its own: who is named, and how often the store
is asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autoptd.layout.rank_tree import children
from autoptd.runtime.faults import rank_status, store_poller, watchdog
from autoptd.runtime.faults.heartbeat import Process, Timeouts
from autoptd.runtime.faults.rank_status import PendingComm, Snapshot
from autoptd.runtime.faults.waits import Waits
from autoptd.runtime.faults.watchdog import Watchdog

MANY = 16_384
LIMITS = Timeouts(tick_s=1, slow_s=12, stuck_s=600)
BUSY, REPORT = 12_345, "keeps ranks 0, 1, 2, 3, 4, 5, 6, 7 … waiting"


class CountingStore:
    """A store that counts requests, of all ranks and of each key."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.requests = 0

    def set(self, key: str, value: str) -> None:
        self.requests += 1
        self.data[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.data[key]

    def check(self, keys: Sequence[str]) -> bool:
        self.requests += 1
        return all(key in self.data for key in keys)

    def add(self, key: str, more: int) -> int:
        self.requests += 1
        self.data[key] = str(int(self.data.get(key, b"0")) + more).encode()
        return int(self.data[key])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.requests += 1
        return self.data.setdefault(key, value.encode())


class Job:
    """All ranks of a job, one tick after the other."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch, host: int | None = None) -> None:
        self.now, self.store = 1000.0, CountingStore()
        for module in (rank_status, store_poller, watchdog):
            clock = SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep)
            monkeypatch.setattr(module, "time", clock)
        mine = Process.mine()
        monkeypatch.setattr(Process, "mine", staticmethod(lambda: mine))
        monkeypatch.setattr(Watchdog, "_propose", lambda self, cause: self._poller.propose(cause))
        store: Any = self.store
        self.watches = [Watchdog(store, rank, world, LIMITS, host) for rank in range(world)]

    def tick(self) -> int:
        """Run one tick of every rank; return the store's requests."""
        before = self.store.requests
        for watch in reversed(self.watches):
            watch._poller._exchange()
        for watch in self.watches:
            if watch.cause is None:
                watch._check_neighbour()
                watch._check_waiting()
        self.now += LIMITS.tick_s
        return self.store.requests - before

    def wait_for(self, busy: int) -> None:
        """Put all ranks into an all-reduce but for one, which computes."""
        everyone = tuple(range(len(self.watches)))
        for rank, watch in enumerate(self.watches):
            watch.status.enter("F1", 0, 1, "blocks.1")
            if rank != busy:
                watch.status.set_comm(PendingComm(watch.status, "all-reduce with", everyone))


def test_a_slow_rank_of_many_is_named_with_few_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(MANY, monkeypatch)
    assert job.tick() <= 6 * MANY, "each heartbeat is looked for, then read"
    job.wait_for(BUSY)
    job.now += LIMITS.slow_s - 3
    found = [job.tick() for _ in range(7)]  # waiting for 9 to 15 s
    assert max(found[:4]) <= 4 * MANY, "in a step as between steps"
    assert max(found) <= 6 * MANY, "while all ask who is slow; rank 0's heartbeat is looked for once"
    said = capsys.readouterr().err
    assert said.count("keeps") == 1 and f"rank {BUSY} {REPORT}" in said, said
    assert f"where  rank {BUSY}, stage 0, action F1, microbatch 1, module blocks.1" in said


def merged_along_the_tree(own: Sequence[Waits]) -> Waits:
    merged: dict[int, Waits] = {}
    for rank in reversed(range(len(own))):
        merged[rank] = Waits.merged([own[rank], *(merged[child] for child in children(rank, len(own)))])
    return merged[0]


def test_merging_loses_nothing_that_is_shown() -> None:
    own = [
        Waits(1, (rank,)) if rank % 7 else Waits.of(rank, Snapshot("F1", 0, for_s=float(rank * 31 % 1009)), 500.0)
        for rank in range(3000)
    ]
    all_at_once = Waits.merged(own)
    assert merged_along_the_tree(own) == all_at_once
    assert all_at_once.ranks == 3000 and all_at_once.waiting == (1, 2, 3, 4, 5, 6, 8, 9, 10, 11)
    longest = max((rank for rank in range(3000) if rank % 7 == 0), key=lambda rank: (rank * 31 % 1009, -rank))
    assert all_at_once.busy == longest


@pytest.mark.parametrize("busy", [0, 1, 40, 1200])
def test_a_slow_rank_anywhere_in_the_tree_ends_the_job_in_time(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1201, monkeypatch)
    job.tick()
    job.tick()
    job.wait_for(busy)
    for _ in range(8):
        job.tick()
    job.now += LIMITS.stuck_s - 10
    for _ in range(8):
        job.tick()
    cause = job.watches[3].cause
    assert cause is not None and cause.rank == busy and "waiting for 600 s" in cause.what, cause


def test_without_a_busy_rank_all_are_said_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(100, monkeypatch)
    job.tick()
    job.wait_for(-1)
    for _ in range(8):
        job.tick()
    job.now += LIMITS.stuck_s - 6
    for _ in range(6):
        job.tick()
    cause = job.watches[0].cause
    assert cause is not None and "and so does every other rank" in cause.what, cause


def test_a_rank_that_has_ended_does_not_keep_a_job_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeat does not change any more, which is no silence; rank 0 is the one that sums up."""
    job = Job(100, monkeypatch)
    job.tick()
    job.wait_for(-1)
    for rank in (0, 2):
        job.watches[rank].status.leave("exiting")
        job.watches[rank]._done = True
    job.tick()
    for rank in (0, 2):
        monkeypatch.setattr(job.watches[rank]._poller, "_exchange", lambda: None)
        monkeypatch.setattr(job.watches[rank], "_check_waiting", lambda: None)
    for _ in range(20):
        job.tick()
    job.now += LIMITS.stuck_s - 30
    for _ in range(15):
        job.tick()
    cause = job.watches[5].cause
    assert cause is not None and "waits for ranks 0, 1" in cause.what and "every other" not in cause.what, cause


def test_the_store_s_process_learns_from_few_requests_that_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2000, monkeypatch, host=0)
    job.tick()
    host, others = job.watches[0], job.watches[1:]
    host._done = True
    for each in others:
        assert not host._all_know()
        each._done = True
        each._poller._exchange()
    before = job.store.requests
    host._poller._exchange()
    assert host._all_know() and job.store.requests - before <= 2 * (32 + 32) + 8


def test_the_store_s_process_does_not_wait_for_ranks_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(200, monkeypatch, host=0)
    job.tick()
    monkeypatch.setattr(Process, "state", lambda self: "gone")
    for watch in job.watches[:-5]:
        watch._done = True
        watch._poller._exchange()
    for _ in range(200 // 32 + 2):
        job.watches[0]._poller._exchange()
    assert job.watches[0]._all_know()
    monkeypatch.setattr(Process, "state", lambda self: "runs")
    assert not job.watches[0]._all_know()
