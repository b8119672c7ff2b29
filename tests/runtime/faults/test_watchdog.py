"""Faults of real processes, one of each kind; and the messages between ranks, in one process."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from autoptd.errors import CheckpointError, InputsError, PlanError, RuntimeFault
from autoptd.layout.rank_tree import children
from autoptd.runtime.comm.process_group import default_store
from autoptd.runtime.comm.restart_store import attempt_store
from autoptd.runtime.faults.calls import Calls
from autoptd.runtime.faults.heartbeat import Beat, Cause, Process, Timeouts
from autoptd.runtime.faults.rank_status import PendingComm, RankStatus, Snapshot, Unwatched
from autoptd.runtime.faults.watchdog import Watchdog, _last_snapshot

ROOT = Path(__file__).parents[3]
QUICK = Timeouts(tick_s=0.05, silent_s=0.5, slow_s=0.5, stuck_s=60, grace_s=30)


@pytest.mark.ranks
def test_a_communication_within_another_leaves_that_one_recorded() -> None:
    """A save compares its arguments, by an all-reduce, before it waits for its files."""
    status = RankStatus()
    with PendingComm(status, "with", ()):
        with PendingComm(status, "all-reduce with", (1,)):
            assert status.snapshot().comm == "all-reduce with"
        assert status.snapshot().comm == "with"
    assert not status.snapshot().comm


def test_one_fault_of_each_kind_is_met() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--each", "--limits"]
    command.append('{"tick_s": 0.5, "silent_s": 4, "grace_s": 2}')
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.fixture
def watches() -> Iterator[Callable[..., Watchdog]]:
    """Factory of a watchdog per rank on one store; each has the pid of this process."""
    store, made = dist.HashStore(), list[Watchdog]()

    def make(rank: int, world: int = 2, limits: Timeouts = QUICK) -> Watchdog:
        made.append(Watchdog(store, rank, world, limits, host=None))
        made[-1]._poller.start()
        made[-1]._monitor.start()
        return made[-1]

    yield make
    for each in made:
        each._stop.set()
        each._poller.stop()


def soon(condition: Callable[[], object]) -> bool:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(condition())


def test_an_exception_within_an_action_is_every_rank_s(
    watches: Callable[..., Watchdog], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = watches(0), watches(1)
    with pytest.raises(ValueError, match="out of luck"), second:
        second.status.enter("B3", 1, 3, "blocks.4 … blocks.7")
        raise ValueError("out of luck")
    assert soon(lambda: first.cause)
    told_of = r"(?s)rank 1 raised ValueError: out of luck \(test_watchdog.py:\d+\)"
    with pytest.raises(RuntimeFault, match=told_of) as told:
        first.status.enter("F0", 0, 0, "")
    assert "rank 1, stage 1, action B3, microbatch 3, module blocks.4 … blocks.7" in str(told.value)
    assert "rank 0 meanwhile: between steps" in str(told.value)
    assert "rank 1, stage 1, action B3" in capsys.readouterr().err


def test_without_a_watchdog_a_rank_that_failed_takes_no_further_step() -> None:
    apart, alone = Unwatched(world=2), Unwatched()
    for watch in (apart, alone):
        with pytest.raises(InputsError), watch:  # no action yet: all ranks raise it
            raise InputsError("no batch")
        with pytest.raises(IndexError), watch:
            watch.status.enter("F0", 0, 0, "")
            raise IndexError("label 100")
    with pytest.raises(RuntimeFault, match=r"an earlier step failed on this rank.*IndexError: label 100"), apart:
        pass
    with alone:
        pass


@pytest.mark.parametrize("error", [CheckpointError("disk full"), PlanError("no such key")], ids=repr)
def test_errors_that_need_not_end_the_job_do_not(watches: Callable[..., Watchdog], error: Exception) -> None:
    watch = watches(0)
    with pytest.raises(type(error)), watch:
        raise error
    assert watch.cause is None


def test_a_broken_connection_is_no_cause(watches: Callable[..., Watchdog]) -> None:
    first, second = watches(0), watches(1)
    with pytest.raises(RuntimeFault, match="rank 1 raised ValueError") as told, first:
        first.status.enter("RB0", 0, 0, "")
        threading.Timer(0.2, lambda: second._propose(second._cause_of(ValueError("first"), Snapshot()))).start()
        with PendingComm(first.status, "receive from", (1,)):
            raise RuntimeError("Connection closed by peer")
    assert "Connection closed" not in str(told.value)
    assert "RB0 of stage 0, receive from rank 1" in str(told.value)


def test_a_silent_rank_is_reported_by_the_previous_rank(watches: Callable[..., Watchdog]) -> None:
    first, second = watches(0), watches(1)
    assert soon(lambda: 1 in first._poller.beats)
    second._stop.set()
    second._poller.stop()
    assert soon(lambda: first.cause)
    assert "rank 1 is silent" in str(first.cause)


def test_the_last_action_is_known_within_a_tick(watches: Callable[..., Watchdog]) -> None:
    """A heartbeat is sent on every change, so that even with a tick of an hour a rank's last action is known."""
    first, second = watches(0, 2, Timeouts(tick_s=0.02)), watches(1, 2, Timeouts(tick_s=3600))
    assert soon(lambda: 1 in first._poller.beats and 0 in second._poller.beats)
    second.status.enter("B3", 1, 3, "blocks.4")
    assert soon(lambda: first._poller.beats[1].snapshot.action == "B3")
    second.status.set_comm(PendingComm(second.status, "receive from", (0,)))
    assert soon(lambda: first._poller.beats[1].snapshot.comm)
    assert str(_last_snapshot(first._poller.beats[1])) == "B3 of stage 1, blocks.4, receive from rank 0"


def test_the_last_action_of_the_store_s_process_is_known_before_the_store_is_gone() -> None:
    """The process dies with its store, which cannot be read afterwards: its status is read at every change."""
    store, hour = dist.HashStore(), Timeouts(tick_s=3600)
    host, other = (Watchdog(store, rank, 2, hour, host=0) for rank in (0, 1))
    host._poller.start()
    assert soon(lambda: store.check(["autoptd/watch/beat/0"]))
    other._poller.start()
    assert soon(lambda: 0 in other._poller.beats)
    host.status.enter("F1", 0, 1, "blocks.0")
    assert soon(lambda: other._poller.beats[0].snapshot.action == "F1")
    for each in (host, other):
        each._poller.stop()


def test_a_rank_that_is_done_is_not_silent(watches: Callable[..., Watchdog]) -> None:
    first, second = watches(0), watches(1)
    second.close()
    assert soon(lambda: 1 in first._poller.beats and first._poller.beats[1].done)
    time.sleep(3 * QUICK.silent_s)
    assert first.cause is None


@pytest.mark.parametrize("ends", [False, True])
def test_a_slow_rank_is_named_and_ends_nothing_until_the_limit(
    watches: Callable[..., Watchdog], capsys: pytest.CaptureFixture[str], ends: bool
) -> None:
    limits = Timeouts(tick_s=0.05, silent_s=5, slow_s=0.3, stuck_s=0.8 if ends else 60, grace_s=30)
    first, second = watches(0, 2, limits), watches(1, 2, limits)
    second.status.enter("F2", 1, 2, "blocks.1")
    first.status.enter("RB0", 0, 0, "")
    first.status.set_comm(PendingComm(first.status, "receive from", (1,)))
    said = list[str]()
    assert soon(lambda: said.append(capsys.readouterr().err) or "keeps rank 0 waiting" in "".join(said))
    assert "rank 1 keeps rank 0 waiting" in "".join(said)
    assert "where  rank 1, stage 1, action F2, microbatch 2, module blocks.1" in "".join(said)
    assert soon(lambda: first.cause) if ends else first.cause is None


def test_a_store_that_is_gone_is_a_cause() -> None:
    class Gone(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe")

    watch = Watchdog(Gone(), 1, 2, QUICK, host=0)
    watch._poller.start()
    watch._monitor.start()
    assert soon(lambda: watch.cause)
    assert "rank 0 is silent" in str(watch.cause) and "its store is gone: Broken pipe" in str(watch.cause)
    watch._stop.set()


def test_ranks_in_different_methods_are_told_so(watches: Callable[..., Watchdog]) -> None:
    """`if par.rank == 0: par.evaluate(…)` waits for something else than what the others send in a step."""
    first, second = watches(0), watches(1)
    for each, methods in ((first, ["train_step()", "eval_step()"]), (second, ["train_step()"] * 2)):
        each.status.calls = Calls()
        for method in methods:
            with each.status.within(method), PendingComm(each.status, "all-reduce with", (0, 1)):
                pass
    assert soon(lambda: first.cause)
    assert str(first.cause) in (
        "rank 1 called train_step(), where rank 0 called eval_step()",
        "rank 0 called eval_step(), where rank 1 called train_step()",
    )
    with pytest.raises(RuntimeFault, match="in the same order"), second:
        pass


def test_what_a_broken_message_does_to_a_rank_is_explained(watches: Callable[..., Watchdog]) -> None:
    first, second = watches(0), watches(1)
    first.status.calls, second.status.calls = Calls(), Calls()
    with second.status.within("train_step()"), PendingComm(second.status, "all-reduce with", (0, 1)):
        pass
    with pytest.raises(RuntimeFault, match=r"called evaluate\(\)"):  # noqa: SIM117
        with first, first.status.within("evaluate()"):
            with PendingComm(first.status, "all-gather with", (0, 1)):
                pass
            raise RuntimeError("Storage size calculation overflowed")


def test_many_announcements_make_no_rank_silent() -> None:
    """Ranks that alternate between two methods announce each call; silence is counted in ticks."""
    watch, other = (Watchdog(dist.HashStore(), rank, 2, Timeouts(tick_s=3600), None) for rank in (0, 1))
    watch._poller.start()
    other._poller.number = 1
    watch._poller._store.set("autoptd/watch/beat/1", other._beat(1).to_json())
    for _ in range(40):
        for method in ("train_step()", "eval_step()"):
            with watch.status.within(method), PendingComm(watch.status, "all-reduce with", (1,)):
                assert watch._poller.number > 0
    assert watch._poller.number > 40
    assert watch._poller.missed_ticks.get(1, 0) <= 1
    watch._poller.stop()


def test_a_call_counts_once_it_communicates() -> None:
    """The sum that a step began may be waited for by one rank alone, as in its `state_dict()`."""
    status = RankStatus()
    begun = PendingComm(status, "all-gather with", (1,))
    with status.within("train_step()"), begun:
        pass
    with status.within("state_dict()"), begun:
        pass
    assert [call.method for call in status.calls.made] == ["", "train_step()"]


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_report_that_cannot_be_printed_ends_no_watch(
    watches: Callable[..., Watchdog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    first, second = watches(0, 2, Timeouts(tick_s=0.05, silent_s=5, slow_s=0.2, stuck_s=0.8, grace_s=30)), watches(1)
    second.status.enter("F2", 1, 2, "blocks.1")
    first.status.set_comm(PendingComm(first.status, "receive from", (1,)))
    assert soon(lambda: first.cause)


@pytest.mark.parametrize("closed", [False, True])
def test_a_stuck_process_ends_though_its_output_cannot_be_written(closed: bool) -> None:
    """The reader of the pipe has ended, or the script has closed its streams."""
    closing = "for stream in (sys.stdout, sys.stderr): stream.close()" if closed else ""
    goes_to = "os.devnull" if closed else "1"
    script = f"""
import os, sys, threading, torch.distributed as dist
from autoptd.runtime.faults.heartbeat import Cause, Timeouts
from autoptd.runtime.faults.rank_status import Snapshot
from autoptd.runtime.faults.watchdog import Watchdog
watch = Watchdog(dist.HashStore(), 0, 2, Timeouts(tick_s=0.05, grace_s=0.2), host=None)
watch.start()
sys.stdout = open({goes_to}, "w", buffering=1000)
print("a line that is kept until the end")
{closing}
watch._propose(Cause(1, "ended", Snapshot(), 0))
threading.Event().wait(20)
"""
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=writes, stderr=writes, check=False)
    os.close(writes)
    assert done.returncode == 1


def test_an_error_in_a_fork_is_not_this_rank_s(
    watches: Callable[..., Watchdog], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch, hooked = watches(0), list[BaseException]()
    watch._hook = lambda kind, error, trace: hooked.append(error)
    monkeypatch.setattr(os, "getpid", lambda: watch._process.pid + 1)
    watch._uncaught(ValueError, ValueError("of a child"), None)
    assert len(hooked) == 1 and watch.cause is None and not capsys.readouterr().err


def test_reports_read_back() -> None:
    snapshot = Snapshot("B3", 1, 3, "blocks.4", comm="receive from", peers=(0, 2), for_s=1.5)
    cause = Cause(2, "raised ValueError: no", snapshot, 1, "change it")
    beat = Beat(2, 7, 99, snapshot, Process.mine(), knows_cause=True)
    assert Cause.of(cause.to_json()) == cause and Beat.of(beat.to_json()) == beat


def test_the_module_of_an_error_is_the_innermost_it_came_through() -> None:
    class Bad(nn.Module):
        def forward(self) -> None:
            raise KeyError("x")

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Bad(), Bad()])

        def forward(self) -> None:
            self.blocks[1]()

    status, whole = RankStatus(), Whole()
    status.enter("F0", 0, 0, "blocks.0 … blocks.1")
    with pytest.raises(KeyError) as caught:
        whole()
    status.attribute(caught.value, whole)
    assert status.here.module == "blocks.1"


@pytest.mark.parametrize(
    ("given", "match"),
    [({"silnet_s": 1}, r"unknown limit 'silnet_s'(?s:.)*did you mean 'silent_s'"), ({"slow_s": 0}, "watch.slow_s")],
)
def test_limits_are_checked(given: dict[str, float], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        Timeouts.of(given)


def attempt(store: dist.Store, world: int) -> list[dist.Store]:
    """Return each rank's store, the ranks being threads that start last rank first."""
    made: dict[int, dist.Store] = {}
    ranks = [
        threading.Thread(target=lambda r=r: made.update({r: attempt_store(store, r, world, timedelta(seconds=20))}))
        for r in reversed(range(world))
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return [made[r] for r in range(world)]


def test_an_attempt_reads_nothing_of_the_one_before() -> None:
    store = dist.HashStore()
    store.set("autoptd/attempt/hello/1", "of a rank that is dead")
    for _ in range(2):
        zero, one, two = attempt(store, 3)
        assert not two.check(["address"])
        zero.set("address", "here")
        assert one.get("address") == two.get("address") == b"here"


def test_ranks_get_their_attempt_from_their_parent() -> None:
    stores = attempt(dist.HashStore(), 36)
    stores[0].set("address", "here")
    assert all(store.check(["address"]) for store in stores)


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(RuntimeFault, match=r"2 ranks did not connect.*1, 2"):
        attempt_store(dist.HashStore(), 0, 3, timedelta(seconds=0.1))


def test_no_rank_answers_more_than_some() -> None:
    world = 16_384
    found = [children(rank, world) for rank in range(world)]
    assert max(map(len, found)) <= 32
    assert sorted(rank for each in found for rank in each) == list(range(1, world)), "each has one parent"
    assert all(rank > parent for parent, each in enumerate(found) for rank in each)


def test_a_heartbeat_is_short_in_any_world() -> None:
    snapshot = Snapshot(comm="all-reduce with", peers=tuple(range(16_384)))
    sent = Beat(0, 1, 1, snapshot, Process.mine())
    assert len(sent.to_json()) < 1000
    assert str(Beat.of(sent.to_json()).snapshot) == str(snapshot), "which names some of them"


def test_the_private_function_of_torch_is_there() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = default_store()
    store.set("a", "1")
    assert store.get("a") == b"1", "seen in torch 2.13"
