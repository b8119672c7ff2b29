"""All ranks of a plan in one process, and the tensors of each after every step.

Nothing is collected over the ranks: each returns its own tensors, so the first wrong rank can be identified.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from autoptd.api import Parallel
from autoptd.runtime.batch import share_of
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.verification.locate.recorder import Recorder, record_here

T = TypeVar("T")
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class UpdatedElements:
    """Elements of a rank's flattened local parameter that its optimizer updates, from `start`, and their gradient."""

    name: str
    start: int
    size: int
    gradient: Tensor  # empty before the first backward pass
    counts: bool  # towards the global norm


@dataclass(frozen=True)
class RankStep:
    """One step of one rank."""

    loss: float
    norm: float
    parts: tuple[UpdatedElements, ...]
    state: dict[str, Tensor]  # local parameters and buffers after the step


@dataclass(frozen=True)
class RankRun:
    """One rank's steps, and the elements that it owns before the first one."""

    owned: tuple[UpdatedElements, ...]
    steps: tuple[RankStep, ...]


def run_ranks(parallel: Parallel, batches: Sequence[Batch], *, timeout_s: float = 600.0) -> list[RankRun]:
    """Train on all ranks; return their runs by rank. Raises RuntimeFault naming the failed rank, or the deadlock."""

    def body(mine: Parallel) -> RankRun:
        return RankRun(_parts(mine), tuple(_step(mine, batch) for batch in batches))

    return _on_every_rank(parallel, body, timeout_s)


def record_ranks(parallel: Parallel, batch: Batch, *, timeout_s: float = 600.0) -> list[Recorder]:
    """Run one step of an instrumented program on all ranks; return their recorders by rank."""

    def body(mine: Parallel) -> Recorder:
        held = parallel.layout.mesh.stages_of(parallel.layout.mesh.coordinates(mine.rank)[0])
        stages = {id(stage): number for stage, number in zip(mine._running.stages, held, strict=True)}
        recorder = Recorder(stages)
        record_here(recorder)
        mine.train_step(_share(mine, batch))
        recorder.open = False
        return recorder

    return _on_every_rank(parallel, body, timeout_s)


def _on_every_rank(parallel: Parallel, body: Callable[[Parallel], T], timeout_s: float) -> list[T]:
    layout = parallel.layout
    values = parallel.initial_values()

    def start(communicators: Communicators) -> T:
        mine = copy.copy(parallel)
        mine.start(communicators, values)
        return body(mine)

    return run_lockstep(layout.mesh, start, timeout_s=timeout_s, in_turn=True)


def _share(mine: Parallel, batch: Batch) -> Batch:
    return share_of(batch, mine.layout.specs, mine.dp_rank, mine.dp_size)


def _step(mine: Parallel, batch: Batch) -> RankStep:
    loss = float(mine.train_step(_share(mine, batch)))
    assert mine.grad_norm is not None
    state = {name: x.detach().clone() for name, x in mine.local_tensors().items()}
    return RankStep(loss, float(mine.grad_norm), _parts(mine), state)


@torch.no_grad()
def _parts(mine: Parallel) -> tuple[UpdatedElements, ...]:
    pieces = mine._running.pieces
    return tuple(
        UpdatedElements(p.name, p.start, p.param.numel(), p.grad.detach().reshape(-1).clone(), p.counts) for p in pieces
    )
