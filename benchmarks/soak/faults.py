"""The faults that are drawn: which there are, how each is done to a rank, and what must then be told."""

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
HEARD_S = 0.3  # into an action a process is killed or stopped: by then its heartbeat has told the action
ACTIONS = {
    "kill in forward": "F",
    "kill in backward": "B",
    "kill in reduce": "REDUCE",
    "kill in step": "STEP",
    "SIGSTOP": "FB",
    "exception": "FB",
    "NaN": "F",
}
PHASES: dict[str, tuple[int | None, Any, str]] = {  # the rank, where it is a certain one; what is replaced
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
    """`after`: steps done since the job began. `action`: as the plan's lists name it; of some kinds alone."""

    kind: str
    rank: int
    after: int
    action: str

    def __str__(self) -> str:
        at = f" at {self.action}" if self.action else ""
        return self.kind if self.kind in (*FILES, "port taken") else f"{self.kind}, rank {self.rank}{at}"

    @property
    def told(self) -> str:
        """A pattern that the first cause must match, on every rank that can still speak."""
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
    """One of a kind."""
    rank, after, action = rng.randrange(world), rng.randrange(2, 5), ""
    if kind in ACTIONS:
        letter = rng.choice(ACTIONS[kind]) if len(ACTIONS[kind]) < 3 else ACTIONS[kind]
        action = letter if len(letter) > 1 else f"{letter}{rng.randrange(microbatches)}"
    elif kind in PHASES:
        certain = PHASES[kind][0]
        rank = rank if certain is None else certain
    return Fault(kind, rank, after, action)


def plant(fault: Fault, rank: int, steps_done: Callable[[], int], stamp: Callable[[], None]) -> None:
    """In the process of a rank: have the fault happen there. `stamp` is called when it does."""
    if rank != fault.rank:
        return
    if fault.kind in ACTIONS:
        _plant_at_action(fault, steps_done, stamp)
    elif fault.kind in PHASES:
        _, owner, name = PHASES[fault.kind]
        _plant_in_save(fault, owner, name, steps_done, stamp)


def _plant_at_action(fault: Fault, steps_done: Callable[[], int], stamp: Callable[[], None]) -> None:
    enter = RankStatus.enter

    def enter_with_fault(place: RankStatus, action: str, *rest: Any) -> None:
        enter(place, action, *rest)
        if steps_done() == fault.after and action == fault.action:
            stamp()
            match fault.kind:
                case "SIGSTOP":
                    time.sleep(HEARD_S)
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "exception":
                    raise ValueError("out of luck")
                case "NaN":
                    spoil()
                case _:
                    time.sleep(HEARD_S)
                    os.kill(os.getpid(), signal.SIGKILL)

    def spoil() -> None:
        with torch.no_grad():
            next(iter(held[0].stage.parameters())).fill_(float("nan"))

    held: list[Trainer] = []
    train_step = Trainer.train_step

    def remember(trainer: Trainer, batch: Any) -> Any:
        held[:] = [trainer]
        return train_step(trainer, batch)

    Trainer.train_step = remember  # type: ignore[method-assign]
    RankStatus.enter = enter_with_fault  # type: ignore[method-assign]


def _plant_in_save(
    fault: Fault, owner: Any, name: str, steps_done: Callable[[], int], stamp: Callable[[], None]
) -> None:
    kept = getattr(owner, name)

    def fail(*given: Any, **named: Any) -> Any:
        if steps_done() < fault.after:
            return kept(*given, **named)
        stamp()
        if fault.kind.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    setattr(owner, name, fail)


def damage(fault: Fault, root: Path, rng: random.Random) -> str:
    """Of the newest checkpoint: flip one bit of a file, or remove one of a rank's. The file's name."""
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
