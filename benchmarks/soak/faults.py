"""Random faults: their kinds, how each is planted in a rank, and the error that must be reported."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoptd.checkpoint import dcp, folder
from autoptd.checkpoint.saver import Saver
from autoptd.runtime.faults.rank_status import RankStatus
from autoptd.runtime.trainer import Trainer

SAVE_EVERY = 2  # steps
HEARD_S = 0.3  # wait before a kill or stop within an action, until a heartbeat has reported the action
ACTIONS = {
    "kill in forward": "F",
    "kill in backward": "B",
    "kill in reduce": "REDUCE",
    "kill in step": "STEP",
    "SIGSTOP": "FB",
    "exception": "FB",
    "NaN": "F",
}
PHASES: dict[str, tuple[int | None, Any, str]] = {  # rank (None: any), owner and name of the function replaced
    "kill in a save, while tensors are written": (None, dcp._CheckpointWriter, "resolve_data"),
    "kill in a save, before files are sealed": (None, Saver, "_finish"),
    "kill in a save, before it is committed": (0, folder, "commit"),
    "kill in a save, before latest is replaced": (0, Path, "replace"),
    "full disk, tensors": (None, dcp._CheckpointWriter, "resolve_data"),
    "full disk, small files": (0, folder, "write_durably"),
}
FILES = ("flipped byte", "missing shard")
KINDS = (*ACTIONS, *PHASES, *FILES, "port taken")


@dataclass(frozen=True)
class Fault:
    """A fault. `after`: steps since the job resumed. `action`: as named in the plan's action lists, "" if not used."""

    kind: str
    rank: int
    after: int
    action: str

    def __str__(self) -> str:
        at = f" at {self.action}" if self.action else ""
        return self.kind if self.kind in (*FILES, "port taken") else f"{self.kind}, rank {self.rank}{at}"

    @property
    def cause_pattern(self) -> str:
        """Pattern that the output of every rank that can still write must match: the first cause."""
        rank, action = self.rank, f"action {self.action}"
        where = rf"rank {rank}, stage \d, {action}"
        match self.kind.partition(" ")[0], self.kind:
            case "kill", _ if self.action:
                return rf"(?s)rank {rank} was killed, or crashed.*{where}"
            case "kill", _:
                return rf"(?s)rank {rank} was killed, or crashed.*where  rank {rank}, "
            case "SIGSTOP", _:
                return rf"(?s)rank {rank} is stopped.*{where}"
            case "exception", _:
                return rf"(?s)rank {rank} raised ValueError: out of luck.*{where}"
            case "NaN", _:
                return "is not finite: loss nan"
            case "full", _:
                return rf"(?s)cannot be written: .*No space left on device.*rank {rank}"
            case "port", _:
                return r"port \d+ of 127.0.0.1 is taken"
        return ""


def draw(kind: str, rng: random.Random, world: int, microbatches: int) -> Fault:
    """Draw a fault of a kind: its rank, step and action."""
    rank, after, action = rng.randrange(world), rng.randrange(2, 5), ""
    if kind in ACTIONS:
        letter = rng.choice(ACTIONS[kind]) if len(ACTIONS[kind]) < 3 else ACTIONS[kind]
        action = letter if len(letter) > 1 else f"{letter}{rng.randrange(microbatches)}"
    elif kind in PHASES:
        required = PHASES[kind][0]
        rank = rank if required is None else required
    return Fault(kind, rank, after, action)


def plant(fault: Fault, rank: int, steps_done: Callable[[], int], stamp: Callable[[], None]) -> None:
    """Install a fault in the process of its rank; `stamp` is called when it occurs."""
    if rank != fault.rank:
        return
    if fault.kind in ACTIONS:
        _plant_at_action(fault, steps_done, stamp)
    elif fault.kind in PHASES:
        _, owner, name = PHASES[fault.kind]
        _plant_in_save(fault, owner, name, steps_done, stamp)


def _plant_at_action(fault: Fault, steps_done: Callable[[], int], stamp: Callable[[], None]) -> None:
    enter = RankStatus.enter

    def enter_with_fault(status: RankStatus, action: str, *rest: Any) -> None:
        enter(status, action, *rest)
        if steps_done() == fault.after and action == fault.action:
            stamp()
            match fault.kind:
                case "SIGSTOP":
                    time.sleep(HEARD_S)
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "exception":
                    raise ValueError("out of luck")
                case "NaN":
                    fill_parameter_with_nan()
                case _:
                    time.sleep(HEARD_S)
                    os.kill(os.getpid(), signal.SIGKILL)

    def fill_parameter_with_nan() -> None:
        with torch.no_grad():
            next(iter(trainers[0].stage.parameters())).fill_(float("nan"))

    trainers: list[Trainer] = []
    train_step = Trainer.train_step

    def remember(trainer: Trainer, batch: Any) -> Any:
        trainers[:] = [trainer]
        return train_step(trainer, batch)

    Trainer.train_step = remember  # type: ignore[method-assign]
    RankStatus.enter = enter_with_fault  # type: ignore[method-assign]


def _plant_in_save(
    fault: Fault, owner: Any, name: str, steps_done: Callable[[], int], stamp: Callable[[], None]
) -> None:
    original = getattr(owner, name)

    def fail(*given: Any, **named: Any) -> Any:
        if steps_done() < fault.after:
            return original(*given, **named)
        stamp()
        if fault.kind.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    setattr(owner, name, fail)


def damage(fault: Fault, root: Path, rng: random.Random) -> str:
    """Flip a bit of one file of the newest checkpoint, or remove a rank's shard; return the file's name."""
    newest = folder.newest_first(root)[0]
    if fault.kind == "missing shard":
        lost = rng.choice(sorted(newest.glob("__*")))
        lost.unlink()
        return lost.name
    path = rng.choice(sorted(newest.iterdir()))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path.name
