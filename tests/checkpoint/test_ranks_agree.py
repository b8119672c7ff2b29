"""All ranks save after the same step, and read the same checkpoint: a folder that differs between ranks is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoptd.checkpoint.entries import model_entries
from autoptd.errors import CheckpointError
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.testing.process_pool import ProcessPool
from tests.checkpoint.saved import Made, batch, made, session_of, still, trainer_of

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcessPool]:
    """Pool of two processes."""
    with ProcessPool(2, timeout_s=60) as pool:
        yield pool


def load_another(c: Communicators, job: Made, root: str) -> tuple[str, bool]:
    """Save two checkpoints, and load another one on each rank. Return the error, and whether nothing changed."""
    trainer = trainer_of(c, job)
    session = session_of(trainer, job.plan)
    for step in (1, 2):
        trainer.train_step(batch(step, c))
        session.save(Path(root), step, {}, None)
    session.wait()
    before = [entry.flat.clone() for entry in model_entries(trainer, still(trainer))]
    said = ""
    try:
        session.load(Path(root) / f"step-{2 - c.rank:08d}", {}, optimizer=True)
    except CheckpointError as error:
        said = str(error)
    now = [entry.flat for entry in model_entries(trainer, still(trainer))]
    return said, all(bool((x == y).all()) for x, y in zip(before, now, strict=True))


@pytest.mark.fault("another checkpoint on one rank")
def test_ranks_that_see_different_checkpoints(pair: ProcessPool, tmp_path: Path) -> None:
    for said, unchanged in pair.run(made("dp 2").layout.mesh, load_another, made("dp 2"), str(tmp_path)):
        assert "rank 0: step-00000002, whose" in said and "rank 1: step-00000001, whose" in said and unchanged


class Nothing:
    """A state of nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def load_more(c: Communicators, job: Made, root: str, optimizer: bool) -> list[str]:
    """Save and load with a state on rank 0 alone, or with the optimizer's state there alone; return the errors."""
    session = session_of(trainer_of(c, job), job.plan)
    others = {} if optimizer or c.rank else {"rates": Nothing()}
    said = []
    try:
        session.save(Path(root), 1, others, None)
        session.wait()
    except CheckpointError as error:
        said.append(str(error))
        session.save(Path(root), 1, {"rates": Nothing()}, None)
    try:
        session.load(Path(root), others, optimizer=c.rank == 0 or not optimizer)
    except CheckpointError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("optimizer", [False, True])
def test_arguments_that_one_rank_alone_gives(pair: ProcessPool, tmp_path: Path, optimizer: bool) -> None:
    """Ranks waited for each other, or one rank did not get what the others restored."""
    job = made("dp 2")
    for said in pair.run(job.layout.mesh, load_more, job, str(tmp_path), optimizer):
        assert "do not load the same" in said[-1] and len(said) == (1 if optimizer else 2)
        assert ("rank 1: step-00000001, whose" if optimizer else ", others rates") in said[-1]
        assert not optimizer or "optimizer=False" in said[-1]


def save_another(c: Communicators, job: Made, root: str, step: int, name: str) -> str:
    """Save on all ranks, `step` later and under another name on rank 1; return the error."""
    session = session_of(trainer_of(c, job), job.plan)
    try:
        session.save(Path(root, name * c.rank), step * c.rank, {}, None)
        session.wait()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("step", "name"), [(1, ""), (0, "other")])
def test_ranks_that_save_something_else(pair: ProcessPool, tmp_path: Path, step: int, name: str) -> None:
    """Such as a folder named by the time of day; nothing is written."""
    job = made("dp 2")
    for said in pair.run(job.layout.mesh, save_another, job, str(tmp_path), step, name):
        assert "do not save the same checkpoint" in said and f"rank 1: step {step}, {tmp_path / name}" in said
    assert not list(tmp_path.iterdir())
