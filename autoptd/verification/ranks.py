"""All ranks of a plan in one process, and what each of them holds after every step.

Nothing is collected over the ranks: each hands out its own tensors, so that the first rank that is wrong is known.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoptd.api import Parallel
from autoptd.runtime.comm import Communicators
from autoptd.runtime.lockstep import run_lockstep

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """Elements of a rank's local parameter that its optimizer updates, from `start` on, flat, and their gradient."""

    name: str
    start: int
    size: int
    gradient: Tensor  # empty where none has come yet
    counts: bool  # towards the global norm


@dataclass(frozen=True)
class RankStep:
    """One step of one rank."""

    loss: float
    norm: float
    parts: tuple[Part, ...]
    state: dict[str, Tensor]  # local parameters and buffers after the step


@dataclass(frozen=True)
class RankRun:
    """What a rank owns before the first step, and its steps."""

    owned: tuple[Part, ...]
    steps: tuple[RankStep, ...]


def run_ranks(parallel: Parallel, batches: Sequence[Batch], *, timeout_s: float = 600.0) -> list[RankRun]:
    """Steps of every rank, by rank. Raises RuntimeFault naming the rank that failed, or what all wait for."""
    layout = parallel.layout
    values = parallel.initial_values()
    for stage in range(layout.mesh.stages):  # imported here: threads would race for it
        parallel.stage_module(layout.mesh.rank(layout.mesh.holder(stage), 0, 0), _chunk(parallel, stage))

    def body(communicators: Communicators) -> RankRun:
        mine = copy.copy(parallel)
        mine.start(communicators, values)
        return RankRun(_parts(mine), tuple(_step(mine, batch) for batch in batches))

    return run_lockstep(layout.mesh, body, timeout_s=timeout_s, in_turn=True)


def _chunk(parallel: Parallel, stage: int) -> int:
    mesh = parallel.layout.mesh
    return mesh.stages_of(mesh.holder(stage)).index(stage)


def _step(mine: Parallel, batch: Batch) -> RankStep:
    share = {name: x.tensor_split(mine.dp_size)[mine.dp_rank] for name, x in batch.items()}
    loss = float(mine.train_step(share))
    assert mine.grad_norm is not None
    state = {name: x.detach().clone() for name, x in mine.local_tensors().items()}
    return RankStep(loss, float(mine.grad_norm), _parts(mine), state)


@torch.no_grad()
def _parts(mine: Parallel) -> tuple[Part, ...]:
    pieces = mine._running.pieces
    return tuple(Part(p.name, p.start, p.param.numel(), p.grad.detach().reshape(-1).clone(), p.counts) for p in pieces)
