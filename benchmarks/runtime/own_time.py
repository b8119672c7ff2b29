"""Python of the runtime per action: seconds of a rank's thread outside stages, autograd, optimizer and communication.

A clock of each thread counts the processor's seconds, so neither waiting nor other load is in them. It stops in the
functions of `_OPS`, and runs again in those that torch calls back (`_OWN`): hooks of gradients and of gathered blocks.
Ops of the runtime itself, such as the accumulation of a gradient, count, so the model is tiny. What the clock counts of
itself at each turn is measured before, and taken off.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from autoptd.runtime.comm import process_group
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import LockstepChannel, LockstepGroup, _ThreadHandle
from autoptd.runtime.faults.rank_status import RankStatus, Snapshot
from autoptd.runtime.zero.grad_reduce import Reduction
from autoptd.runtime.zero.param_gather import Gathering
from benchmarks.runtime.by_turns import Task, batch_of, trainer_of

OUTSIDE = "step"  # of what a step does outside actions
_COLLECTIVES = (
    "all_reduce", "all_reduce_later", "all_gather", "all_gather_later", "reduce_scatter", "reduce_scatter_later",
    "all_to_all", "exchange", "shift_later", "broadcast",
)  # fmt: skip
_OPS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch.autograd, ("backward",)),
    (LockstepGroup, _COLLECTIVES),
    (LockstepChannel, ("send", "receive")),
    (_ThreadHandle, ("wait",)),
    (dist, ("all_reduce", "all_to_all_single", "batch_isend_irecv", "broadcast")),
    (process_group, ("_all_gather", "_reduce_scatter")),
    (dist.Work, ("wait",)),
)
_OWN: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (Reduction, ("take",)),
    (Gathering, ("_enter", "_leave", "_return_to", "hold", "release")),
)


_TURNS = ((False, False), (False, True), (True, False), (True, True))  # whether a call stops the clock, was stopped
_RUNS, _CALLS = 20, 100


class _Clock(threading.local):
    """Seconds of this thread by action. `stopped`: in an op. `own`: seconds of the clock in a call of `_timed`'s."""

    def __init__(self) -> None:
        self.seconds, self.action, self.stopped, self.at = Counter[str](), OUTSIDE, True, 0.0
        self.entered = Counter[str]()
        self.own = dict.fromkeys(_TURNS, 0.0)

    def turn(self, *, stopped: bool) -> bool:
        """Stop the clock or let it run; return whether it was stopped."""
        now = time.thread_time()
        if not self.stopped:
            self.seconds[self.action] += now - self.at
        before, self.stopped = self.stopped, stopped
        self.at = time.thread_time()
        return before

    def enter(self, action: str) -> None:
        self.turn(stopped=self.stopped)
        self.action = action
        self.entered[action] += 1

    def reset(self) -> None:
        self.seconds, self.entered, self.action = Counter(), Counter(), OUTSIDE

    def calibrate(self) -> None:
        """Measure the seconds that the clock counts of its own, by call of a timed function; the least of many runs."""
        self.own = dict.fromkeys(_TURNS, 0.0)
        found = {turn: min(self._counted(*turn) for _ in range(_RUNS)) for turn in _TURNS}
        self.own = found

    def _counted(self, stopped: bool, before: bool) -> float:
        nothing = _timed(lambda: None, stopped=stopped)
        self.reset()
        self.turn(stopped=before)
        for _ in range(_CALLS):
            nothing()
        self.turn(stopped=True)
        return self.seconds[OUTSIDE] / _CALLS


_clock = _Clock()


def _timed(function: Callable[..., Any], *, stopped: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _clock.turn(stopped=stopped)
        try:
            return function(*args, **kwargs)
        finally:
            _clock.turn(stopped=before)
            _clock.seconds[_clock.action] -= _clock.own[stopped, before]

    return call


@contextmanager
def clocks() -> Iterator[None]:
    """Let the clocks of all threads of this process follow the runtime."""
    moved = RankStatus._move

    def move(self: RankStatus, here: Snapshot) -> None:
        moved(self, here)
        _clock.enter(here.action.rstrip("0123456789.") or OUTSIDE)

    patches = [patch.object(RankStatus, "_move", move)]
    for stopped, functions in ((True, _OPS), (False, _OWN)):
        for holder, names in functions:
            patches += [patch.object(holder, n, _timed(getattr(holder, n), stopped=stopped)) for n in names]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()


def own_time(c: Communicators, task: Task, steps: int) -> dict[str, tuple[int, float]]:
    """Return, by kind of action, how many a step has and the median seconds of one on this rank. A collective.

    Called within `clocks`.
    """
    _clock.calibrate()
    trainer = trainer_of(c, task)
    for stage in trainer.stages:
        stage.forward = _timed(stage.forward, stopped=True)
    trainer.optimizer.step = _timed(trainer.optimizer.step, stopped=True)  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(2 + steps):
        batch = batch_of(c, task, generator)
        _clock.reset()
        _clock.turn(stopped=False)
        trainer.train_step(batch)
        _clock.turn(stopped=True)
        for kind, seconds in _clock.seconds.items() if number > 1 else ():
            found[kind].append(seconds / _count(kind))
    return {kind: (_count(kind), statistics.median(each)) for kind, each in found.items()}


def _count(kind: str) -> int:
    return 1 if kind == OUTSIDE else _clock.entered[kind]


def own_time_of_process(c: Communicators, task: Task, steps: int) -> dict[str, tuple[int, float]]:
    with clocks():
        return own_time(c, task, steps)


def shown(by_rank: list[Mapping[str, tuple[int, float]]]) -> str:
    """Return `F 31 B 80 … STEP 160 µs; all 55`: of each kind the slowest rank's, and the mean over all actions."""
    kinds = dict.fromkeys(kind for each in by_rank for kind in each)
    slowest = {kind: max(each[kind][1] for each in by_rank if kind in each) for kind in kinds}
    total = sum(n * s for each in by_rank for n, s in each.values())
    actions = sum(n for each in by_rank for kind, (n, _) in each.items() if kind != OUTSIDE)
    order = ("F", "B", "W", "RF", "SF", "RB", "SB", "REDUCE", "STEP", "GATHER", OUTSIDE)
    each_kind = "  ".join(f"{kind} {slowest[kind] * 1e6:.0f}" for kind in order if kind in slowest)
    return f"{total / actions * 1e6:5.0f}   {each_kind}"
