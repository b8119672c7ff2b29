"""A job with a fault ends everywhere within seconds, and every rank says what came first.

    main thread   carries out actions; where one fails, it tells the cause before the error goes on
    messenger     heartbeats and the first cause, through the store (`messenger.py`)
    judge         once a tick: is there a cause? is the next rank silent? is the store gone? who keeps others waiting?

What is told first is the cause, and stays it. A rank whose connection breaks did not fail: it waits until somebody
knows who did, and raises that. Once there is a cause, every rank raises it at its next action; one that is stuck, in a
collective that nobody will complete, is ended by its judge after `grace_s`.

Silence is counted in the observer's own ticks, not seconds, so that a machine which stood still accuses nobody.
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
from autoptd.printable import printable
from autoptd.runtime.faults.heartbeat import Beat, Cause, Process, Timeouts
from autoptd.runtime.faults.rank_status import RankStatus, Snapshot, ranks
from autoptd.runtime.faults.store_poller import Messenger

_LINGER_S = 5.0  # of a store's process, until all know what they have to


class Watchdog:
    """Of one process among several: `with watch:` around a step. `host`: the rank that holds the store, if one does."""

    def __init__(self, store: dist.Store, rank: int, world: int, limits: Timeouts, host: int | None) -> None:
        self.place = RankStatus(failing=self._raise_cause)
        self.limits = limits
        self._rank, self._world, self._host = rank, world, host
        self._process = Process.mine()
        self._next = (rank + 1) % world
        self._lost: tuple[int, ...] = ()  # ranks to which a connection broke
        self._asked: tuple[int, ...] = ()  # ranks that may keep others waiting
        self._cause: Cause | None = None
        self._stopped: Beat | None = None  # of the rank that this one has told to be silent
        self._reports = 0
        self._done, self._stop = False, threading.Event()
        self._messenger = Messenger(store, limits.tick_s, self._beat, self._wanted, host, world)
        self._judge = threading.Thread(target=self._run, name="autoptd judge", daemon=True)

    def start(self) -> None:
        """Two daemon threads; uncaught exceptions are told, and the process's end is."""
        self._messenger.start()
        self._judge.start()
        self._hook, sys.excepthook = sys.excepthook, self._uncaught
        atexit.register(self.close)

    # ---- main thread ----

    def __enter__(self) -> None:
        self._raise_cause()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What fails within an action, or while others are waited for, ends the job; other errors are the caller's."""
        here = self.place.seen()
        if error is None or isinstance(error, CheckpointError):
            return
        if here.talk and isinstance(error, RuntimeError):
            raise self._consequence(error, here) from None
        if self.cause is None and (here.action or here.talk):
            self._tell_own(error, here)

    def _consequence(self, error: RuntimeError, here: Snapshot) -> RuntimeFault:
        """A connection broke: who failed?"""
        self._lost = here.peers
        self._messenger.known.wait(self.limits.silent_s + 4 * self.limits.tick_s)
        cause = self.cause
        if cause is None:
            ended = next((r for r in here.peers if (b := self._messenger.beats.get(r)) and b.done), None)
            if ended is not None:
                beat = self._messenger.beats[ended]
                cause = Cause(ended, "ended while others wait for it", beat.seen, self._rank)
            else:
                what = f"lost its connection to {ranks(here.peers)}: {_first_line(error)}"
                cause = Cause(self._rank, what, here, self._rank)
            self._tell(cause)
        return (self.cause or cause).fault(self._rank, here)

    def _of(self, error: BaseException, here: Snapshot) -> Cause:
        if isinstance(error, OutOfMemory):
            return Cause(self._rank, f"ran {error.what}", here, self._rank, error.fix)
        root = error.__cause__ if isinstance(error, RuntimeFault) and error.__cause__ is not None else error
        frames = traceback.extract_tb(root.__traceback__)
        told = isinstance(root, AutoptdError) or not frames  # ours say where
        line = "" if told else f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        fix = getattr(error, "fix", "")
        return Cause(self._rank, f"raised {type(root).__name__}: {_first_line(root)}{line}", here, self._rank, fix)

    def _tell_own(self, error: BaseException, here: Snapshot) -> None:
        cause = self._of(error, here)
        self._tell(cause)
        if self.cause == cause:  # the error itself need not know where it happened
            _say(f"the job ends: {cause}\n  where  {cause.lines()}")

    def _tell(self, cause: Cause) -> None:
        self._messenger.tell(cause)
        self._messenger.known.wait(3 * self.limits.tick_s)

    def _raise_cause(self) -> None:
        if (cause := self.cause) is not None and threading.current_thread() is threading.main_thread():
            raise cause.fault(self._rank, self.place.seen())

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.cause is None:
            self._tell_own(error, self.place.seen())
        self._hook(kind, error, trace)

    def close(self) -> None:
        """The process ends as it should. Who holds the store stays until all others know."""
        if self._done or self._process.pid != os.getpid():
            return
        self.place.leave("at its end")
        self._done = True
        self._messenger.exchange(self.limits.grace_s)
        if self._host == self._rank:
            if self.cause is None:
                self._messenger.close_store()
            until = time.monotonic() + _LINGER_S
            while not self._all_know() and time.monotonic() < until:
                self._messenger.exchange(self.limits.tick_s)
                time.sleep(self.limits.tick_s / 10)
        self._stop.set()
        self._messenger.stop()

    def _all_know(self) -> bool:
        beats = self._messenger.beats
        return all(
            r == self._rank or ((b := beats.get(r)) is not None and (b.done or b.told or b.process.state() == "gone"))
            for r in range(self._world)
        )

    # ---- messenger ----

    def _beat(self, number: int) -> Beat:
        told = self.cause is not None or self._messenger.closed
        return Beat(self._rank, number, self.place.count, self.place.seen(), self._process, self._done, told)

    def _wanted(self) -> set[int]:
        """Whose heartbeats are read. The store's host once, to know its process."""
        wanted = {self._next, *self._lost, *self._asked}
        if self._host is not None and self._host not in self._messenger.beats:
            wanted.add(self._host)
        if self._done and self._host == self._rank:
            wanted |= set(range(self._world))
        return wanted - {self._rank}

    # ---- judge ----

    @property
    def cause(self) -> Cause | None:
        """Why the job ends, if it does."""
        return self._messenger.first or self._cause

    def _run(self) -> None:
        grace = 0.0
        while not self._stop.wait(self.limits.tick_s):
            if self.cause is not None:
                grace += self.limits.tick_s
                if grace >= 2 * self.limits.tick_s:  # by then all have seen that it is stopped
                    _put_down(self._stopped)
                if grace > self.limits.grace_s:
                    self._end()
            elif self._messenger.closed or self._done:
                continue
            else:
                self._judge_store()
                self._judge_next()
                self._judge_waiting()

    def _end(self) -> None:
        """The main thread is stuck, or does not look."""
        assert self.cause is not None
        fault = self.cause.fault(self._rank, self.place.seen())
        sys.stdout.flush()
        _say(f"rank {self._rank} ends: {fault}")
        os._exit(1)

    def _judge_store(self) -> None:
        since, broken = self._messenger.busy_since, self._messenger.error
        late = since is not None and time.monotonic() - since > self.limits.silent_s
        if not (broken or late) or self._messenger.closed:
            return
        told = broken or f"no answer for {self.limits.silent_s:g} s"
        if self._host is None:
            self._cause = Cause(self._rank, f"lost the launcher's store: {told}", self.place.seen(), self._rank)
        elif self._host == self._rank:
            self._cause = Cause(self._rank, f"lost its own store: {told}", self.place.seen(), self._rank)
        else:
            beat = self._messenger.beats.get(self._host)
            self._cause = Cause(self._host, f"{_state(beat)}; its store is gone: {told}", _last(beat), self._rank)
            self._stopped = beat
        self._messenger.known.set()

    def _judge_next(self) -> None:
        for rank in {self._next, *self._lost}:
            beat, quiet = self._messenger.beats.get(rank), self._messenger.quiet.get(rank, 0)
            if beat is None or beat.done:
                continue
            gone = quiet >= 2 and beat.process.state() == "gone"
            if gone or quiet >= self.limits.silent_ticks:
                self._tell(Cause(rank, _state(beat), _last(beat), self._rank))
                self._stopped = beat
                return

    def _judge_waiting(self) -> None:
        """Where this rank waits too long: who keeps all others waiting? The first of those who wait says it."""
        talk, waited = self.place.talk, time.monotonic() - self.place.since
        if talk is None or not talk.peers or waited < self.limits.slow_s:
            self._asked, self._reports = (), 0
            return
        self._asked = tuple(range(self._world))
        beats, quiet = dict(self._messenger.beats), self._messenger.quiet
        if max(quiet.values(), default=0) > 1 or self._messenger.busy_since is not None:
            return  # somebody is silent, or the store: that comes first
        if waited < min(self.limits.stuck_s, self.limits.slow_s * 2**self._reports) + 3 * self.limits.tick_s:
            return
        self._reports += 1
        busy = sorted(
            (r for r, b in beats.items() if not b.seen.talk and b.seen.for_s > waited / 2),
            key=lambda r: -beats[r].seen.for_s,
        )
        waiting = sorted([self._rank, *(r for r, b in beats.items() if b.seen.talk)])
        rank, where = (busy[0], beats[busy[0]].seen) if busy else (self._rank, self.place.seen())
        what = f"keeps {ranks(tuple(r for r in waiting if r != rank))} waiting for {waited:.0f} s"
        if not busy:
            what = f"waits for {ranks(talk.peers)}, and so does every other rank, for {waited:.0f} s"
        cause = Cause(rank, what, where, self._rank, "a longer limit: watch={'stuck_s': …}")
        if waited >= self.limits.stuck_s:
            self._tell(cause)
        elif waiting[0] == self._rank:
            _say(f"{cause}\n  where  {cause.lines()}")


def _state(beat: Beat | None) -> str:
    match beat.process.state() if beat is not None else "":
        case "gone":
            return "was killed, or crashed: its process is gone"
        case "stopped":
            return "is stopped (SIGSTOP): its process does nothing"
        case _:
            return "is silent: killed, stopped, or its node is cut off"


def _last(beat: Beat | None) -> Snapshot:
    """The action of a rank's last heartbeat."""
    return Snapshot(doing="doing nobody knows what") if beat is None else beat.seen


def _put_down(beat: Beat | None) -> None:
    """End a process of this node that is stopped: nobody else would."""
    if beat is not None and beat.process.state() == "stopped":
        with suppress(OSError):
            os.kill(beat.process.pid, signal.SIGKILL)


def _say(text: str) -> None:
    sys.stderr.write(f"autoptd: {printable(text)}\n")
    sys.stderr.flush()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
