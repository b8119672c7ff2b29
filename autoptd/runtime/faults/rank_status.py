"""Where a rank is: the action it carries out and whom it waits for, in the words that errors and reports use.

    B3 of stage 1, blocks.4 … blocks.7, receiving from rank 0

The executor enters each action, every communication between processes is a `PendingComm`. What failed is left standing,
so that whoever reports it finds where it happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch

from autoptd.errors import CheckpointError

BETWEEN = "between steps"


@dataclass(frozen=True)
class Snapshot:
    """A place as another rank may read it. `peers`: ranks that it waits for; `for_s`: how long it has been there."""

    action: str = ""  # B3; empty outside of actions
    stage: int | None = None
    microbatch: int | None = None
    module: str = ""
    doing: str = BETWEEN  # outside of actions
    talk: str = ""
    peers: tuple[int, ...] = ()
    for_s: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.action} of stage {self.stage}" if self.action else self.doing]
        parts += [self.module] if self.module else []
        parts += [f"{self.talk} {ranks(self.peers)}"] if self.talk else []
        return ", ".join(parts)


@dataclass
class RankStatus:
    """Of one rank, written by its main thread and read by others; `count` grows with everything it does."""

    count: int = 0
    here: Snapshot = field(default_factory=Snapshot)
    talk: PendingComm | None = None
    since: float = field(default_factory=time.monotonic)
    failing: Callable[[], None] | None = None  # asked before each action: may raise what another rank told

    def enter(self, action: str, stage: int, microbatch: int | None, module: str) -> None:
        """An action of the list begins."""
        if self.failing is not None:
            self.failing()
        self._move(Snapshot(action, stage, microbatch, module))

    @contextmanager
    def of_modules(self, stage: torch.nn.Module) -> Iterator[None]:
        """What fails within is said to be of the innermost of the stage's modules that it came through."""
        try:
            yield
        except BaseException as error:
            if module := _module_of(error.__traceback__, stage):
                self.here = replace(self.here, module=module)
            raise

    def leave(self, doing: str = BETWEEN) -> None:
        """The list has ended."""
        self._move(Snapshot(doing=doing))

    def _move(self, here: Snapshot) -> None:
        self.here, self.since, self.talk = here, time.monotonic(), None
        self.count += 1

    def talking(self, talk: PendingComm | None) -> None:
        """A communication begins, or ends."""
        self.talk, self.since = talk, time.monotonic()
        self.count += talk is not None

    def seen(self) -> Snapshot:
        """As it is now."""
        here, talk, since = self.here, self.talk, self.since
        found = replace(here, for_s=round(time.monotonic() - since, 1))
        return found if talk is None else replace(found, talk=talk.what, peers=talk.peers)


@dataclass(frozen=True)
class PendingComm:
    """A communication: `with talk:` around whatever may wait for others. An error leaves it standing."""

    place: RankStatus
    what: str  # "all-reduce with"
    peers: tuple[int, ...]  # global ranks; (): all, for as long as it takes

    def __enter__(self) -> None:
        self.place.talking(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, CheckpointError):  # which all ranks have agreed on
            self.place.talking(None)


class Unwatched:
    """A rank on its own, or one whose fellows are threads of the same process: errors go their usual way."""

    def __init__(self) -> None:
        self.place = RankStatus()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def ranks(numbers: tuple[int, ...]) -> str:
    """`rank 3`, `ranks 0, 2, 3`; of no numbers, `all ranks`."""
    if not numbers:
        return "all ranks"
    shown = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) != 1)} {shown}"


def _module_of(trace: TracebackType | None, stage: torch.nn.Module) -> str:
    """The innermost module of a stage that an exception came through; empty where it came through none."""
    names = {id(module): name for name, module in stage.named_modules()}
    found = ""
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), "") or found
        trace = trace.tb_next
    return found
