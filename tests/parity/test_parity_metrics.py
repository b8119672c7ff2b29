"""Metrics of a model's outputs are those of one process, under every plan: each sample counts once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.api import Parallel
from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from tests.parity.parity_check import MESHES, Variant, batches, case, parallel, planned

SAMPLES, BATCH = 13, 5  # batches of 5, 4 and 4: not equal, and with dp 8 some ranks have no sample


def logits(out: Any) -> Tensor:
    return out.logits if hasattr(out, "logits") else out


def energy(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return logits(out).square().flatten(1).mean(1)


def best(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return logits(out).argmax(-1).flatten(1)[:, :2] if logits(out).ndim > 2 else logits(out).argmax(-1)


def right(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    found = logits(out).argmax(-1) == batch["labels"]
    return found.double().mean(-1) if found.ndim > 1 else found


METRICS = {"energy": energy, "best": best, "right": right}


def data(name: str) -> dict[str, Tensor]:
    """Return `SAMPLES` samples of a case, no two alike."""
    return {n: torch.cat([x, x.roll(1, -1)])[:SAMPLES] for n, x in case(name).batch.items()}


@cache
def alone(name: str) -> dict[str, Tensor]:
    given = data(name)
    with torch.no_grad():
        out = case(name).model(**given)
    return {n: metric(out, given) for n, metric in METRICS.items()}


def shares(parallel: Parallel, name: str, batch: int = BATCH) -> list[dict[str, Tensor]]:
    given = data(name)
    return [{n: x[rows] for n, x in given.items()} for rows in parallel.eval_sampler(SAMPLES, batch)]


def evaluated(made: Parallel, name: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return means and values of each rank, by batches of another size."""
    values = made.initial_values()
    made.layout  # noqa: B018  before the ranks are threads

    def body(c: Communicators) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mine = copy.copy(made)
        mine.start(c, values)
        found = mine.predict(shares(mine, name), METRICS)
        return mine.evaluate(shares(mine, name, 4), METRICS), found

    return run_lockstep(made.layout.mesh, body)


def wrong(found: list[tuple[dict[str, Tensor], dict[str, Tensor]]], name: str) -> list[str]:
    expected, faults = alone(name), []
    for rank, (means, values) in enumerate(found):
        for metric, x in expected.items():
            if values[metric].dtype != x.dtype or not values[metric].shape == x.shape:
                faults.append(f"rank {rank}: {metric} is {values[metric].dtype} {list(values[metric].shape)}")
            elif not torch.allclose(values[metric].double(), x.double(), rtol=1e-10, atol=0):
                faults.append(f"rank {rank}: {metric} is {values[metric].tolist()} instead of {x.tolist()}")
            if not torch.allclose(means[metric], x.double().mean(0), rtol=1e-10, atol=0):
                faults.append(f"rank {rank}: mean of {metric} is {means[metric]} instead of {x.double().mean(0)}")
    return faults


@pytest.mark.parametrize("name", ["gpt2", "vit"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_over_every_mesh(name: str, mesh: Mesh) -> None:
    zero = (1, 3, 0, 2)[MESHES.index(mesh) % 4] if mesh.dp > 1 else 1
    made = parallel(name, planned(name, mesh, Variant(bulk=True, micro=1, zero=zero)), "sgd")
    assert not wrong(evaluated(made, name), name)
