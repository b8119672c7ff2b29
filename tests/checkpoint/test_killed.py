"""Real processes, killed with no warning in the middle of a save: the last checkpoint is whole, and training goes on
from it to the bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoptd.checkpoint import dcp, folder
from autoptd.checkpoint.saver import Saver
from autoptd.errors import RuntimeFault
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.testing.process_pool import ProcessPool
from tests.checkpoint.saved import batch, made, session_of, trainer_of

pytestmark = pytest.mark.ranks

NAME = "dp 2"
PHASES = {  # where rank 0 or 1 dies
    "while tensors are written": (1, dcp._CheckpointWriter, "resolve_data"),
    "before the files are sealed": (0, Saver, "_finish"),
    "before it is committed": (0, folder, "commit"),
    "before latest is replaced": (0, Path, "replace"),
}


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(c: Communicators, job: Any, root: str, phase: str | None) -> list[float]:
    """Two steps, a save, two steps, and in the second save somebody dies; or all that is left of four steps."""
    trainer = trainer_of(c, job)
    session, first = session_of(trainer, job.plan), 0
    if phase is None and Path(root).exists():
        first = session.load(Path(root), {}, optimizer=True)
    losses = []
    for step in range(first, 4):
        losses.append(float(trainer.train_step(batch(step, c))))
        if phase is not None and step in (1, 3):
            if step == 3:
                rank, owner, name = PHASES[phase]
                if c.rank == rank:
                    setattr(owner, name, die)
            session.save(Path(root), step + 1, {}, None)
            session.wait()
    return losses


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcessPool]:
    """Two processes; after a failed job two others."""
    with ProcessPool(2, timeout_s=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def whole(pair: ProcessPool) -> list[float]:
    """Losses of a run that nobody interrupts."""
    return pair.run(made(NAME).layout.mesh, train, made(NAME), "nowhere", None)[0]


@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_a_save(phase: str, tmp_path: Path, pair: ProcessPool, whole: list[float]) -> None:
    job = made(NAME)
    root = str(tmp_path / "checkpoints")
    with pytest.raises(RuntimeFault, match=r"the process ended|failed"):
        pair.run(job.layout.mesh, train, job, root, phase)
    assert folder.find(Path(root)).name == "step-00000002"
    again = pair.run(job.layout.mesh, train, job, root, None)[0]
    assert again == whole[2:]
