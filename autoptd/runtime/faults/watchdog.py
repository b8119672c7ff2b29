"""The watchdog: a fault of one rank ends the job on all ranks within seconds, and every rank reports the first cause.

    main thread    runs actions; if one fails, it reports the cause before the error propagates
    store poller   exchanges heartbeats and the first cause through the store (`store_poller.py`)
    monitor        checks once a tick: is there a cause, is the next rank silent, is the store gone, who is slow: what
                   rank 0's heartbeat says of all ranks (`waits.py`)

The first cause reported is final. A rank whose connection breaks has not failed itself: it waits until the failed rank
is known and raises that cause. Once there is a cause, every rank raises it at its next action. A rank that is stuck in
a collective that can no longer complete is ended by its monitor after `grace_s`.

Silence is counted in ticks of the observer, not in seconds, so that a machine which was suspended accuses no rank.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from autoptd.errors import AutoptdError, CheckpointError, OutOfMemory, RuntimeFault
from autoptd.layout.rank_tree import children
from autoptd.outputs import exit_now, to_stderr
from autoptd.runtime.faults.calls import Calls
from autoptd.runtime.faults.heartbeat import Beat, Cause, Process, Timeouts
from autoptd.runtime.faults.rank_status import RankStatus, Snapshot, ranks
from autoptd.runtime.faults.store_poller import StorePoller
from autoptd.runtime.faults.waits import Waits

_LINGER_S = 5.0  # the longest that the store's process waits at exit for the other ranks
_LOOKED_AT = 32  # ranks whose processes it looks at in an exchange meanwhile
_CALLS = Calls()  # of this process


class Watchdog:
    """The watchdog of one process among several: wrap `with watch:` around a step.

    `host`: the rank whose process holds the store, None if no rank does.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, limits: Timeouts, host: int | None) -> None:
        self.status = RankStatus(failing=self._raise_cause, calls=_CALLS, announce=self._announce)
        self.limits = limits
        self._rank, self._world, self._host = rank, world, host
        self._process = Process.mine()
        self._next = (rank + 1) % world
        self._below = children(rank, world)
        self._mixed: Cause | None = None  # that another rank calls another method
        self._lost: tuple[int, ...] = ()  # ranks to which a connection is broken
        self._asks = False  # rank 0 who keeps others waiting
        self._cause: Cause | None = None
        self._stopped: Beat | None = None  # last heartbeat of the rank that this one reported as failed
        self._reports = 0
        self._done, self._stop = False, threading.Event()
        self._poller = StorePoller(store, limits.tick_s, self._beat, self._ranks_to_read, host, world)
        self._monitor = threading.Thread(target=self._run, name="autoptd monitor", daemon=True)

    def start(self) -> None:
        """Start two daemon threads, and report uncaught exceptions and the end of the process."""
        self._poller.start()
        self._monitor.start()
        self._hook, sys.excepthook = sys.excepthook, self._uncaught
        atexit.register(self.close)

    # ---- main thread ----

    def __enter__(self) -> None:
        self._raise_cause()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the job for an error within an action or a communication; other errors are left to the caller."""
        here = self.status.snapshot()
        if error is None or isinstance(error, CheckpointError):
            return
        if isinstance(error, Exception) and not isinstance(error, AutoptdError):
            self._check_calls(0 if here.action else 2 * self.limits.tick_s)
            if self._mixed is not None:
                raise (self.cause or self._mixed).fault(self._rank, here) from None
        if here.comm and isinstance(error, RuntimeError):
            raise self._consequence(error, here) from None
        if self.cause is None and (here.action or here.comm):
            self._report_own(error, here)

    def _consequence(self, error: RuntimeError, here: Snapshot) -> RuntimeFault:
        """Return the fault of the failed rank behind a broken connection."""
        self._lost = here.peers
        self._poller.known.wait(self.limits.silent_s + 4 * self.limits.tick_s)
        cause = self.cause
        if cause is None:
            ended = next((r for r in here.peers if (b := self._poller.beats.get(r)) and b.done), None)
            if ended is not None:
                beat = self._poller.beats[ended]
                cause = Cause(ended, "ended while other ranks wait for it", beat.snapshot, self._rank)
            else:
                what = f"lost its connection to {ranks(here.peers)}: {_first_line(error)}"
                cause = Cause(self._rank, what, here, self._rank)
            self._propose(cause)
        return (self.cause or cause).fault(self._rank, here)

    def _cause_of(self, error: BaseException, here: Snapshot) -> Cause:
        if isinstance(error, OutOfMemory):
            return Cause(self._rank, f"ran {error.what}", here, self._rank, error.fix)
        root = error.__cause__ if isinstance(error, RuntimeFault) and error.__cause__ is not None else error
        frames = traceback.extract_tb(root.__traceback__)
        has_where = isinstance(root, AutoptdError) or not frames  # our own errors name the place
        line = "" if has_where else f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        fix = getattr(error, "fix", "")
        return Cause(self._rank, f"raised {type(root).__name__}: {_first_line(root)}{line}", here, self._rank, fix)

    def _report_own(self, error: BaseException, here: Snapshot) -> None:
        cause = self._cause_of(error, here)
        self._propose(cause)
        if self.cause == cause:  # the error itself may not name the action
            to_stderr(f"the job ends: {cause}\n  where  {cause.lines()}")

    def _propose(self, cause: Cause) -> None:
        self._poller.propose(cause)
        self._poller.known.wait(3 * self.limits.tick_s)

    def _raise_cause(self) -> None:
        if (cause := self.cause) is not None and threading.current_thread() is threading.main_thread():
            raise cause.fault(self._rank, self.status.snapshot())

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.cause is None and self._process.pid == os.getpid():  # not in a fork of it
            self._report_own(error, self.status.snapshot())
        self._hook(kind, error, trace)

    def close(self) -> None:
        """End the watchdog at a normal exit; the process with the store first waits until all other ranks know."""
        if self._done or self._process.pid != os.getpid():
            return
        self.status.leave("exiting")
        self._done = True
        self._poller.exchange(self.limits.grace_s)
        if self._host == self._rank:
            if self.cause is None:
                self._poller.close_store()
            until = time.monotonic() + _LINGER_S
            while not self._all_know() and time.monotonic() < until:
                self._poller.update(self.limits.tick_s)
                time.sleep(self.limits.tick_s / 10)
        self._stop.set()
        self._poller.stop()

    def _all_know(self) -> bool:
        beats = [beat for beat in dict(self._poller.beats).values() if not (beat.done or beat.knows_cause)]
        gone = sum(beat.rank != self._rank and beat.process.state() == "gone" for beat in beats)
        return self._poller.ended + gone >= self._world

    # ---- called by the store poller ----

    def _beat(self, number: int) -> Beat:
        known, status = self.cause is not None or self._poller.closed, self.status
        here, process = status.snapshot(), self._process
        return Beat(
            self._rank, number, status.count, here, process, self._done, known, self._waits(here), status.calls.last
        )

    def _waits(self, here: Snapshot) -> Waits:
        """Return who waits, of this rank and those below it; of those below a rank that has ended, nothing is known."""
        least_s, now, poller = self.limits.slow_s / 2, time.monotonic(), self._poller
        found = [Waits.of(self._rank, here, least_s)]
        for rank in self._below:
            beat = poller.beats.get(rank)
            if beat is not None and beat.done:
                found.append(Waits.of(rank, beat.snapshot, least_s))
            elif beat is not None and poller.missed_ticks.get(rank, 0) <= 1:
                found.append(beat.waits.after(now - poller.changed_at.get(rank, now)))
        return Waits.merged(found)

    def _ranks_to_read(self) -> set[int]:
        """Return the ranks whose heartbeats are read: the store's host once, to know its process."""
        beats = self._poller.beats
        wanted = {self._next, *self._below, *self._lost, *((0,) if self._asks else ())}
        if self._host is not None and self._host not in beats:
            wanted.add(self._host)
        if self._done and self._host == self._rank:
            first = self._poller.number * _LOOKED_AT
            wanted |= {rank % self._world for rank in range(first, first + _LOOKED_AT)}
        return {rank for rank in wanted - {self._rank} if rank not in beats or not beats[rank].done}

    # ---- monitor ----

    @property
    def cause(self) -> Cause | None:
        """The reason why the job ends, None while it runs."""
        return self._poller.first or self._cause

    def _run(self) -> None:
        grace = 0.0
        while not self._stop.wait(self.limits.tick_s):
            if self.cause is not None:
                grace += self.limits.tick_s
                if grace >= 2 * self.limits.tick_s:  # by then all ranks have seen that it is stopped
                    _kill_stopped(self._stopped)
                if grace > self.limits.grace_s:
                    self._end()
            elif self._poller.closed or self._done:
                continue
            else:
                self._check_store()
                self._check_calls()
                self._check_neighbour()
                self._check_waiting()

    def _end(self) -> None:
        """Exit the process: its main thread is stuck or ignores the cause."""
        assert self.cause is not None
        fault = self.cause.fault(self._rank, self.status.snapshot())
        to_stderr(f"rank {self._rank} ends: {fault}")
        exit_now(1)

    def _check_store(self) -> None:
        since, broken = self._poller.busy_since, self._poller.error
        late = since is not None and time.monotonic() - since > self.limits.silent_s
        if not (broken or late) or self._poller.closed:
            return
        reason = broken or f"no answer for {self.limits.silent_s:g} s"
        if self._host is None:
            self._cause = Cause(self._rank, f"lost the launcher's store: {reason}", self.status.snapshot(), self._rank)
        elif self._host == self._rank:
            self._cause = Cause(self._rank, f"lost its own store: {reason}", self.status.snapshot(), self._rank)
        else:
            beat = self._poller.beats.get(self._host)
            what = f"{_state(beat)}; its store is gone: {reason}"
            self._cause = Cause(self._host, what, _last_snapshot(beat), self._rank)
            self._stopped = beat
        self._poller.known.set()

    def _check_neighbour(self) -> None:
        for rank in {self._next, *self._lost}:
            beat, missed_ticks = self._poller.beats.get(rank), self._poller.missed_ticks.get(rank, 0)
            if beat is None or beat.done:
                continue
            gone = missed_ticks >= 2 and beat.process.state() == "gone"
            if gone or missed_ticks >= self.limits.silent_ticks:
                self._propose(Cause(rank, _state(beat), _last_snapshot(beat), self._rank, self._suspected(beat, gone)))
                self._stopped = beat
                return

    def _announce(self) -> None:
        self._poller.update(self.limits.tick_s)

    def _check_calls(self, for_s: float = 0.0) -> None:
        """Report a rank that has called another method than this one, where either waits for the other.

        for_s: after an error that may be a consequence, the time until the other's heartbeat says so.
        """
        until = time.monotonic() + for_s
        while self.cause is None:
            for rank, beat in sorted(dict(self._poller.beats).items()):
                own = self.status.calls.instead_of(beat.call)
                if own is not None and rank != self._rank:
                    self._mixed = self._not_the_same(beat, own.method)
                    self._propose(self._mixed)
                    return
            if time.monotonic() >= until:
                return
            self._poller.known.wait(self.limits.tick_s / 10)

    def _not_the_same(self, beat: Beat, own: str) -> Cause:
        theirs = beat.call.method
        what = f"called {theirs}, where rank {self._rank} called {own}"
        if theirs == own:
            what = f"called other methods before {own} than rank {self._rank}"
        fix = "call the same methods on all ranks, in the same order"
        return Cause(beat.rank, what, beat.snapshot, self._rank, fix)

    def _suspected(self, beat: Beat, gone: bool) -> str:
        """Return what to do if a process crashed by messages of another method, as gloo ends it for other sizes."""
        own = self.status.calls.only_here(beat.call) if gone else ""
        return own and (
            f"if nothing killed it: rank {self._rank} called {own}, and rank {beat.rank} perhaps did not; call the "
            "same methods on all ranks, in the same order"
        )

    def _check_waiting(self) -> None:
        """Report or end the job for the rank that keeps others waiting; the lowest waiting rank prints the report."""
        comm, waited = self.status.comm, time.monotonic() - self.status.since
        if comm is None or not comm.peers or waited < self.limits.slow_s:
            self._asks, self._reports = False, 0
            return
        due = min(self.limits.stuck_s, self.limits.slow_s * 2**self._reports)
        self._asks = waited >= due
        beats, missed_ticks = dict(self._poller.beats), dict(self._poller.missed_ticks)
        if any(n > 1 and not (r in beats and beats[r].done) for r, n in missed_ticks.items()):
            return  # a silent rank is handled first
        if self._poller.busy_since is not None or waited < due + 3 * self.limits.tick_s:
            return
        self._reports += 1
        here = self.status.snapshot()
        root = beats.get(0)
        found = self._waits(here) if self._rank == 0 or root is None or root.done else root.waits
        busy = found.busy if found.where.for_s > waited / 2 else -1
        waiting = sorted({self._rank, *found.waiting} - {busy})
        rank, where = (busy, found.where) if busy >= 0 else (self._rank, here)
        what = f"keeps {ranks(tuple(waiting))} waiting for {waited:.0f} s"
        if busy < 0:
            others = "and so does every other rank" if found.ranks == self._world else "and no rank is seen to be busy"
            what = f"waits for {ranks(comm.peers)}, {others}, for {waited:.0f} s"
        cause = Cause(rank, what, where, self._rank, "raise the limit: watch={'stuck_s': …}")
        if waited >= self.limits.stuck_s:
            self._propose(cause)
        elif waiting[0] == self._rank:
            to_stderr(f"{cause}\n  where  {cause.lines()}")


def _state(beat: Beat | None) -> str:
    match beat.process.state() if beat is not None else "":
        case "gone":
            return "was killed, or crashed: its process is gone"
        case "stopped":
            return "is stopped (SIGSTOP): its process does nothing"
        case _:
            return "is silent: killed, stopped, or its node is cut off"


def _last_snapshot(beat: Beat | None) -> Snapshot:
    """Return the status in a rank's last heartbeat."""
    return Snapshot(doing="its last action is unknown") if beat is None else beat.snapshot


def _kill_stopped(beat: Beat | None) -> None:
    """Kill a stopped process of this node: it cannot end itself."""
    if beat is not None and beat.process.state() == "stopped":
        with suppress(OSError):
            os.kill(beat.process.pid, signal.SIGKILL)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
