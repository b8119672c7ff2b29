"""The status of a rank: its current action and pending communication, as errors and reports print them.

    B3 of stage 1, blocks.4 … blocks.7, receive from rank 0

The executor records each action; every communication between processes is a `PendingComm`. After an error the status
is left unchanged, so that the report shows where it happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch

from autoptd.errors import CheckpointError, RuntimeFault
from autoptd.runtime.faults.calls import Calls

BETWEEN = "between steps"
SHOWN = 8  # ranks that a text lists


@dataclass(frozen=True)
class Snapshot:
    """A copy of a rank's status for other ranks. `peers`: ranks that it waits for; `for_s`: seconds in this state."""

    action: str = ""  # such as B3; empty outside actions
    stage: int | None = None
    microbatch: int | None = None
    module: str = ""
    doing: str = BETWEEN  # outside actions
    comm: str = ""
    peers: tuple[int, ...] = ()
    for_s: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.action} of stage {self.stage}" if self.action else self.doing]
        parts += [self.module] if self.module else []
        parts += [f"{self.comm} {ranks(self.peers)}"] if self.comm else []
        return ", ".join(parts)


@dataclass
class RankStatus:
    """One rank's status, written by its main thread and read by others. `count`: actions and communications so far."""

    count: int = 0
    here: Snapshot = field(default_factory=Snapshot)
    comm: PendingComm | None = None
    since: float = field(default_factory=time.monotonic)
    failing: Callable[[], None] | None = None  # called before each action; may raise another rank's fault
    calls: Calls = field(default_factory=Calls)
    announce: Callable[[], object] | None = None  # called when another method than before begins to communicate
    _called: str = ""  # a collective method, until it communicates

    def enter(self, action: str, stage: int, microbatch: int | None, module: str) -> None:
        """Record the start of an action. Raises RuntimeFault if the job has ended."""
        if self.failing is not None:
            self.failing()
        self._move(Snapshot(action, stage, microbatch, module))

    def attribute(self, error: BaseException, stage: torch.nn.Module) -> None:
        """Attribute an error to the innermost of the stage's modules that it passed through."""
        if module := _module_of(error.__traceback__, stage):
            self.here = replace(self.here, module=module)

    @contextmanager
    def calling(self, method: str) -> Iterator[None]:
        """Say that this rank is in a method that waits for all ranks."""
        self.leave(f"in {method}(), which every rank has to call")
        yield
        self.leave()

    @contextmanager
    def within(self, method: str) -> Iterator[None]:
        """Record a call of a collective method once it communicates."""
        self._called = method
        try:
            yield
        finally:
            self._called = ""

    def communicates(self) -> None:
        """Record that this rank sends or receives for the first time in the method that it is in."""
        method, self._called = self._called, ""
        if method and self.calls.add(method):
            self.count += 1
            if self.announce is not None:
                self.announce()

    def leave(self, doing: str = BETWEEN) -> None:
        """Record that no action is running."""
        self._move(Snapshot(doing=doing))

    def _move(self, here: Snapshot) -> None:
        self.here, self.since, self.comm = here, time.monotonic(), None
        self.count += 1

    def set_comm(self, comm: PendingComm | None) -> None:
        """Record which communication this rank is in now, None for none."""
        self.comm, self.since = comm, time.monotonic()
        self.count += comm is not None

    def snapshot(self) -> Snapshot:
        """Return a copy of the current status."""
        here, comm, since = self.here, self.comm, self.since
        found = replace(here, for_s=round(time.monotonic() - since, 1))
        return found if comm is None else replace(found, comm=comm.what, peers=comm.peers)


@dataclass
class PendingComm:
    """A communication: wrap `with` around whatever may wait for other ranks. An error leaves it recorded.

    After one that is part of another, this rank is in the other again."""

    status: RankStatus
    what: str  # "all-reduce with"
    peers: tuple[int, ...]  # global ranks; (): all ranks, without a limit of time
    _outer: PendingComm | None = field(default=None, init=False, repr=False, compare=False)
    _begun: bool = field(default=False, init=False, repr=False, compare=False)

    def __enter__(self) -> None:
        if not self._begun:  # else it was begun in an earlier call, and this one waits for it
            self._begun = True
            self.status.communicates()
        self._outer = self.status.comm
        self.status.set_comm(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, CheckpointError):  # all ranks have agreed on a CheckpointError
            self.status.set_comm(self._outer)


class Unwatched:
    """A watcher for one of `world` ranks that only ends its own part in the job: after an error within an action, its
    next step would meet the last one of the others. Ranks that are threads of one process count as one."""

    def __init__(self, world: int = 1) -> None:
        self.status = RankStatus()
        self._world, self._failed = world, ""

    def __enter__(self) -> None:
        if self._failed:
            raise RuntimeFault(
                f"an earlier step failed on this rank, which is no longer at the step of the others: {self._failed}",
                fix="start again from the last checkpoint",
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        here = self.status.snapshot()
        if error is not None and not isinstance(error, CheckpointError) and (here.action or here.comm):
            self._failed = f"{type(error).__name__}: {error}" if self._world > 1 else ""


def ranks(numbers: tuple[int, ...]) -> str:
    """Return `rank 3` or `ranks 0, 2, 3`; `all ranks` for no numbers."""
    if not numbers:
        return "all ranks"
    shown = ", ".join(map(str, numbers[:SHOWN])) + (" …" if len(numbers) > SHOWN else "")
    return f"rank{'s' * (len(numbers) != 1)} {shown}"


def _module_of(trace: TracebackType | None, stage: torch.nn.Module) -> str:
    """Return the innermost module of a stage that an exception passed through, empty if there is none."""
    names = {id(module): name for name, module in stage.named_modules()}
    found = ""
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), "") or found
        trace = trace.tb_next
    return found
