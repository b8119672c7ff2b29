"""What ranks tell each other besides training: heartbeats, and the first cause of a job's end. All of it JSON."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, RuntimeFault, nearest
from autoptd.runtime.faults.rank_status import Snapshot, ranks


@dataclass(frozen=True)
class Timeouts:
    """Seconds. `silent_s`: a rank without a heartbeat for so long has failed. `slow_s`: one that keeps others waiting
    is reported; `stuck_s`: it ends the job. `grace_s`: what a process has to end by itself once the job has a cause.
    """

    tick_s: float = 1.0  # between heartbeats
    silent_s: float = 8.0
    slow_s: float = 30.0
    stuck_s: float = 600.0
    grace_s: float = 4.0

    @staticmethod
    def of(given: Mapping[str, float]) -> Timeouts:
        """Raises PlanError for unknown names and for what is no positive number."""
        known = [each.name for each in fields(Timeouts)]
        for name, value in given.items():
            if name not in known:
                raise PlanError(f"unknown limit {name!r}", where="watch", fix=nearest(name, known))
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise PlanError(f"{value!r} is no number of seconds", where=f"watch.{name}", fix="a positive number")
        return replace(Timeouts(), **given)

    @property
    def silent_ticks(self) -> int:
        return max(2, round(self.silent_s / self.tick_s))


@dataclass(frozen=True)
class Process:
    """Which process a rank is; `started`: the kernel's start time, by which a number that is used again is told."""

    node: str
    pid: int
    started: str

    @staticmethod
    def mine() -> Process:
        return Process(socket.gethostname(), os.getpid(), _stat(os.getpid())[1])

    def state(self) -> str:
        """`gone`, `stopped` or `runs`; empty on another node, or where there is no /proc."""
        if self.node != socket.gethostname() or not self.started:
            return ""
        letter, started = _stat(self.pid)
        if started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter == "T" else "runs"  # t: in a debugger


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; of one that is none: X and nothing."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", ""
    words = text.rpartition(")")[2].split()
    return words[0], words[19]


@dataclass(frozen=True)
class Beat:
    """One rank's heartbeat. `done`: it has ended as it should; `told`: it knows why the job ends."""

    rank: int
    number: int
    count: int
    seen: Snapshot
    process: Process
    done: bool = False
    told: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: bytes | str) -> Beat:
        data = json.loads(text)
        return Beat(**{**data, "seen": _seen(data["seen"]), "process": Process(**data["process"])})


@dataclass(frozen=True)
class Cause:
    """Why a job ends. `what`: in a sentence or two, without the rank; `where`: what that rank was doing."""

    rank: int
    what: str
    where: Snapshot
    by: int  # the rank that told it
    fix: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: bytes | str) -> Cause:
        data = json.loads(text)
        return Cause(**{**data, "where": _seen(data["where"])})

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}"

    def lines(self) -> str:
        """Rank, stage, action, microbatch, module and peers, as far as there are any."""
        at = self.where
        parts = [f"rank {self.rank}"]
        parts += [f"stage {at.stage}", f"action {at.action}"] if at.action else [at.doing]
        parts += [f"microbatch {at.microbatch}"] if at.microbatch is not None else []
        parts += [f"module {at.module}"] if at.module else []
        parts += [f"{at.talk} {ranks(at.peers)}"] if at.talk else []
        return ", ".join(parts)

    def fault(self, rank: int, here: Snapshot) -> RuntimeFault:
        """As another rank tells it, which was `here`."""
        where = [self.lines()]
        where += [f"rank {rank} meanwhile: {here} for {here.for_s:g} s"] if rank != self.rank else []
        return RuntimeFault(str(self), where="\n".join(where), fix=self.fix)


def _seen(data: Mapping[str, Any]) -> Snapshot:
    return Snapshot(**{**data, "peers": tuple(data["peers"])})
