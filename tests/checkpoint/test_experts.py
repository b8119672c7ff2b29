"""Experts on ranks of their own are saved whole, with their optimizer state, and read back under any plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd.checkpoint.entries import model_entries, optimizer_entries
from autoptd.compile.traced import TracedModel
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.testing.process_pool import ProcessPool
from tests.checkpoint.saved import Made, differing, session_of, trainer_of, whole_of
from tests.parity.parity_models import mixtral

pytestmark = pytest.mark.ranks

PLANS: dict[str, dict[str, Any]] = {
    "ep 4": {"dp": 4, "tp": 2, "pp": 1, "ep": 4, "zero": 1, "micro": 2},
    "ep 2, ZeRO 3": {"dp": 4, "tp": 1, "pp": 2, "ep": 2, "zero": 3, "micro": 2},
    "without ep": {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "micro": 4},
}


@cache
def source() -> TracedModel:
    case = mixtral()
    return autoptd.trace(case.model, inputs={n: x[:2] for n, x in case.batch.items()}, precision="fp64")


@cache
def made(name: str) -> Made:
    parallel = autoptd.parallelize(source(), world=8, batch=16, cluster="dgx-h100", fix=PLANS[name])
    return Made(parallel.plan, parallel.layout, parallel.program, parallel.initial_values())  # type: ignore[arg-type]


def write(c: Communicators, job: Made, batch: dict[str, torch.Tensor], root: str) -> None:
    trainer = trainer_of(c, job)
    for _ in range(2):
        trainer.train_step({n: x.tensor_split(c.mesh.dp)[c.dp.rank] for n, x in batch.items()})
    session = session_of(trainer, job.plan)
    session.save(Path(root), 2, {}, None)
    session.wait()


def read(c: Communicators, job: Made, roots: dict[str, str]) -> list[str]:
    """Load each checkpoint and return this rank's tensors that differ from the whole tensors in it."""
    trainer, wrong = trainer_of(c, job), []
    session = session_of(trainer, job.plan)
    for name, root in roots.items():
        trainer.load_parameters({n: torch.zeros_like(x) for n, x in job.values.items()})
        session.load(Path(root), {}, optimizer=True)
        entries = [*model_entries(trainer, ()), *optimizer_entries(trainer)]
        wrong += [f"{name}: {key}" for key in differing(entries, whole_of(root))]
        found = trainer.state_dict()
        wrong += [f"{name}: {n}" for n, x in found.items() if not torch.equal(x, whole_of(root)[f"model.{n}"])]
    return wrong


@pytest.mark.fault("experts missing in a checkpoint")
def test_experts_of_any_plan_are_read_by_any_other(pool: ProcessPool, tmp_path: Path) -> None:
    roots = {name: str(tmp_path / str(i)) for i, name in enumerate(PLANS)}
    for name, root in roots.items():
        pool.run(made(name).layout.mesh, write, made(name), mixtral().batch, root)
    wholes = [whole_of(root) for root in roots.values()]
    for name, x in wholes[0].items():
        assert all((other[name] - x).norm() <= 1e-9 * max(1.0, float(x.norm())) for other in wholes[1:]), name
    assert any(name.startswith("optimizer.") and "experts" in name for name in wholes[0])
    for name in PLANS:
        wrong = pool.run(made(name).layout.mesh, read, made(name), roots)
        assert not any(wrong), wrong
