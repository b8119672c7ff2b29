"""Messages of the watchdog, all JSON: heartbeats, and the first cause of a job's end."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, RuntimeFault, nearest
from autoptd.runtime.faults.calls import Call
from autoptd.runtime.faults.rank_status import SHOWN, Snapshot, ranks
from autoptd.runtime.faults.waits import Waits


@dataclass(frozen=True)
class Timeouts:
    """Limits of the watchdog, in seconds. `silent_s`: a rank without a heartbeat for this long has failed. `slow_s`: a
    rank that keeps others waiting for this long is reported; `stuck_s`: it ends the job. `grace_s`: time that a process
    has to exit once the job has a cause."""

    tick_s: float = 1.0  # between heartbeats
    silent_s: float = 8.0
    slow_s: float = 30.0
    stuck_s: float = 600.0
    grace_s: float = 4.0

    @staticmethod
    def of(given: Mapping[str, float]) -> Timeouts:
        """Return the defaults updated by `given`. Raises PlanError for unknown names and non-positive values."""
        known = [each.name for each in fields(Timeouts)]
        for name, value in given.items():
            if name not in known:
                raise PlanError(f"unknown limit {name!r}", where="watch", fix=nearest(name, known))
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                what = f"{value!r} is not a positive number of seconds"
                raise PlanError(what, where=f"watch.{name}", fix="give a positive number")
        return replace(Timeouts(), **given)

    @property
    def silent_ticks(self) -> int:
        return max(2, round(self.silent_s / self.tick_s))


@dataclass(frozen=True)
class Process:
    """The process of a rank. `started`: the kernel's start time, which detects a reused pid."""

    node: str
    pid: int
    started: str

    @staticmethod
    def mine() -> Process:
        return Process(socket.gethostname(), os.getpid(), _stat(os.getpid())[1])

    def state(self) -> str:
        """Return `gone`, `stopped` or `runs`; empty on another node or without /proc."""
        if self.node != socket.gethostname() or not self.started:
            return ""
        letter, started = _stat(self.pid)
        if started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter == "T" else "runs"  # t: stopped by a debugger


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's state letter and start time; `X` and an empty string if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", ""
    words = text.rpartition(")")[2].split()
    return words[0], words[19]


@dataclass(frozen=True)
class Beat:
    """One rank's heartbeat. `done`: it has ended normally; `knows_cause`: it knows why the job ends; `waits`: of this
    rank and all below it in the tree; `call`: its last one of a collective method."""

    rank: int
    number: int
    count: int
    snapshot: Snapshot
    process: Process
    done: bool = False
    knows_cause: bool = False
    waits: Waits = field(default_factory=Waits)
    call: Call = field(default_factory=Call)

    def to_json(self) -> str:
        parts = {"process": vars(self.process), "waits": self.waits.to_json(), "call": vars(self.call)}
        return json.dumps({**_fields(self), **parts})

    @staticmethod
    def of(text: bytes | str) -> Beat:
        data = json.loads(text)
        parts = {
            "snapshot": _snapshot(data["snapshot"]),
            "process": Process(**data["process"]),
            "call": Call(**data["call"]),
        }
        return Beat(**{**data, **parts, "waits": Waits.from_json(data["waits"])})


@dataclass(frozen=True)
class Cause:
    """The reason why a job ends. `what`: one or two sentences without the rank; `where`: what that rank was doing."""

    rank: int
    what: str
    where: Snapshot
    by: int  # the rank that reported it
    fix: str = ""

    def to_json(self) -> str:
        return json.dumps(_fields(self))

    @staticmethod
    def of(text: bytes | str) -> Cause:
        data = json.loads(text)
        return Cause(**{**data, "where": _snapshot(data["where"])})

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}"

    def lines(self) -> str:
        """Return rank, stage, action, microbatch, module and peers, as far as they are known."""
        at = self.where
        parts = [f"rank {self.rank}"]
        parts += [f"stage {at.stage}", f"action {at.action}"] if at.action else [at.doing]
        parts += [f"microbatch {at.microbatch}"] if at.microbatch is not None else []
        parts += [f"module {at.module}"] if at.module else []
        parts += [f"{at.comm} {ranks(at.peers)}"] if at.comm else []
        return ", ".join(parts)

    def fault(self, rank: int, here: Snapshot) -> RuntimeFault:
        """Return the error that `rank` raises for this cause; `here`: what `rank` was doing."""
        where = [self.lines()]
        where += [f"rank {rank} meanwhile: {here} for {here.for_s:g} s"] if rank != self.rank else []
        return RuntimeFault(str(self), where="\n".join(where), fix=self.fix)


def _snapshot(data: Mapping[str, Any]) -> Snapshot:
    return Snapshot(**{**data, "peers": tuple(data["peers"])})


def _fields(message: Beat | Cause) -> dict[str, Any]:
    """Return a message's fields, with the peers that reports show: of a world, all of them are a long message."""
    found = dict(vars(message))
    for each in ("snapshot", "where"):
        if each in found:
            found[each] = {**vars(found[each]), "peers": found[each].peers[: SHOWN + 1]}
    return found
