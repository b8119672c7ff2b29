"""Checkpoints hold the buffers that forward updates, and training goes on from them under any plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.checkpoint.session import Session
from autoptd.compile.traced import TracedModel
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.testing.parity import differences, train_alone
from autoptd.testing.process_pool import ProcessPool
from tests.checkpoint.saved import OPTIONS, Made, trainer_of
from tests.parity.parity_check import TOLERANCE
from tests.parity.parity_models import Case
from tests.parity.updating_models import UPDATING

pytestmark = pytest.mark.ranks
FIX: dict[str, Any] = {"dp": 2, "tp": 2, "pp": 2, "micro": 2, "zero": 3, "recompute": "full", "schedule": "1f1b"}


@cache
def case() -> Case:
    return UPDATING["updating_tables"]()


@cache
def source() -> TracedModel:
    return autoptd.trace(case().model, inputs={n: x[:2] for n, x in case().batch.items()}, precision="fp64")


def batch(step: int) -> dict[str, Tensor]:
    return {n: x.roll(step, 0) for n, x in case().batch.items()}


def alone_on(micro: int) -> autoptd.Parallel:
    return autoptd.parallelize(
        source(), world=1, batch=16, cluster="dgx-h100", optimizer_options=OPTIONS, fix={"micro": micro}
    )


def third_step(c: Communicators, job: Made, given: dict[str, Tensor], root: str, out: str) -> dict[str, Tensor]:
    """Load the second step, take another and save."""
    trainer = trainer_of(c, job)
    tensors = {n: list(s.shape) for n, s in {**job.layout.parameters, **job.layout.buffers}.items()}
    updated = frozenset(job.plan.updates)
    session = Session(trainer, job.plan, updated, {"tensors": tensors, "aliases": {}, "buffers": sorted(updated)})
    assert session.load(Path(root), {}, optimizer=True) == 2
    trainer.train_step({n: x.tensor_split(c.mesh.dp)[c.dp.rank] for n, x in given.items()})
    session.save(Path(out), 3, {}, None)
    session.wait()
    return trainer.state_dict()


@pytest.mark.fault("updated buffers forgotten")
def test_training_goes_on_under_other_plans(pool: ProcessPool, tmp_path: Path) -> None:
    model = case().model
    whole = train_alone(model, [batch(step) for step in range(4)], optimizer="adamw", optimizer_options=OPTIONS)
    three = train_alone(model, [batch(step) for step in range(3)], optimizer="adamw", optimizer_options=OPTIONS)
    first = alone_on(2)
    for step in range(2):
        first.train_step(batch(step))
    first.save(tmp_path / "one")
    parallel = autoptd.parallelize(source(), world=8, batch=16, cluster="dgx-h100", fix=FIX)
    job = Made(parallel.plan, parallel.layout, parallel.program, parallel.initial_values())  # type: ignore[arg-type]
    results = pool.run(job.layout.mesh, third_step, job, batch(2), str(tmp_path / "one"), str(tmp_path / "eight"))
    assert max(differences(results[0], {n: three.state[n] for n in results[0]}).values()) <= TOLERANCE
    last = alone_on(4)
    assert last.load(tmp_path / "eight") == 3
    assert torch.equal(last.state_dict()["load"], results[0]["load"])
    last.train_step(batch(3))
    assert max(differences(last.state_dict(), whole.state).values()) <= TOLERANCE
