"""All ranks of a plan, in turn, on one GPU in name: steps under the rules of `device.py`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from autoptd import evaluating
from autoptd.api import Parallel
from autoptd.evaluating import Metric
from autoptd.layout.mesh import Mesh
from autoptd.ops import offload
from autoptd.runtime.batch import share_of
from autoptd.runtime.comm import process_group, processes, threaded
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import LockstepBackend
from autoptd.runtime.trainer import Trainer
from autoptd.schedule import Queued
from tests.runtime.fake_device.allowed import EVALUATED, FIRST, LATER, allowed
from tests.runtime.fake_device.device import CUDA, CudaTensor, Device, Place, labelled
from tests.runtime.fake_device.nccl import Nccl


@contextmanager
def gpu(device: Device, nccl: Nccl) -> Iterator[None]:
    """Replace what torch refuses without CUDA, for all threads, and torch.distributed by NCCL in name."""
    stream = SimpleNamespace(synchronize=device.synchronise)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        device.resize(storage)
        return resize(storage, size)

    with ExitStack() as patches:
        for name, by in {
            "current_stream": lambda *_: stream,
            "synchronize": lambda *_: device.synchronise(),
            "get_device_capability": lambda *_: (9, 0),
        }.items():
            patches.enter_context(patch.object(torch.cuda, name, by))
        patches.enter_context(patch.object(offload, "Tensor", CudaTensor))  # subclasses would stay on the device
        patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        patches.enter_context(patch.object(threaded, "connect", _within(device, nccl, threaded.connect)))
        patches.enter_context(patch.object(processes, "group_of_members", nccl.group_of_members))
        for module in (processes, process_group):
            patches.enter_context(patch.object(module, "dist", nccl))
        patches.enter_context(patch.object(process_group, "_all_gather", nccl.all_gather))
        patches.enter_context(patch.object(process_group, "_reduce_scatter", nccl.reduce_scatter))
        yield


def _within(device: Device, nccl: Nccl, connect: Callable[..., Communicators]) -> Callable[..., Communicators]:
    def within(mesh: Mesh, backend: LockstepBackend) -> Communicators:
        with device:
            return connect(mesh, nccl.backend(backend, mesh.world))

    return within


def key_of(metrics: Mapping[str, Metric]) -> Any:
    """Return the key of the program that `Parallel.evaluate` makes for some metrics."""
    return tuple((name, evaluating._identity(f)) for name, f in metrics.items())


def evaluation_of(parallel: Parallel, metrics: Mapping[str, Metric]) -> Any:
    found = evaluating.Metrics.of(parallel._source.objective, metrics)
    return evaluating.make_evaluation(parallel._source, parallel.plan, found)


@dataclass(frozen=True)
class Ran:
    """Results of the steps of all ranks of a plan."""

    losses: tuple[float, ...]  # one per step, then that of the evaluation, then the metrics
    waits: tuple[tuple[Counter[Place], ...], ...]  # by rank and step: where the host waited or copied
    ops: int  # of the device, of all ranks and steps
    queued: Mapping[int, Sequence[Queued]]  # by rank


def steps(
    parallel: Parallel,
    batches: Sequence[Mapping[str, Any]],
    *,
    evaluates: bool = False,
    metrics: Mapping[str, Metric] | None = None,
) -> Ran:
    """Train one step per global batch on all ranks: the first is given in pinned memory, later ones on the device.

    `evaluates`: the last batch is evaluated after its step; `metrics`: of it too. Raises DeviceFault, and
    StuckCommunicators for ops of communicators in an order that could block on some GPU.
    """
    layout, device = parallel.layout, Device(allowed)
    nccl = Nccl(device)
    values = parallel.initial_values()
    if metrics:  # traced before the device is there
        parallel._programs.of(key_of(metrics), lambda: evaluation_of(parallel, metrics))

    def body(communicators: Communicators) -> tuple[list[float], tuple[Counter[Place], ...]]:
        losses, met = [], []
        with device:
            mine = copy.copy(parallel)
            mine.start(communicators, values)
            for number, batch in enumerate(batches):
                flat = layout.nest.flat(batch)
                share = share_of(flat, layout.specs, mine.dp_rank, mine.dp_size)
                share = {name: labelled(x) if number else device.pin(x.clone()) for name, x in share.items()}
                device.begin(LATER if number else FIRST)
                loss = mine.train_step(share)
                met.append(device.end())
                losses.append(float(loss))
            if evaluates:
                device.begin(EVALUATED)
                losses.append(float(mine.eval_step(share)))
                met.append(device.end())
            if metrics:
                mine._evaluator(metrics)
                device.begin(EVALUATED)
                here = {name: labelled(x) for name, x in share.items()}
                losses += [float(mean) for mean in mine.evaluate([here], metrics).values()]
                met.append(device.end())
            assert not (found := strays(mine._running)), f"on the host: {found}"
        return losses, tuple(met)

    with gpu(device, nccl):
        try:
            results = threaded.run_lockstep(layout.mesh, body, in_turn=True, device=CUDA)
        except Exception as error:  # noqa: BLE001  the ranks wrap what they raise
            raise _root(error) from None
    nccl.prove()
    return Ran(tuple(results[0][0]), tuple(met for _, met in results), device.ops, nccl.queued)


def _root(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _root(error.__cause__)


def strays(trainer: Trainer) -> list[str]:
    """Return the names of a rank's tensors that are not where the plan has them."""
    found = [name for name, x in trainer.tensors.items() if not isinstance(x, CudaTensor)]
    for piece in trainer.pieces:
        hosted = piece.host_grad is not None
        state = {k: x for k, x in trainer.optimizer.state.get(piece.param, {}).items() if x.ndim}
        for what, x in {"main copy": piece.param, **state}.items():
            if isinstance(x, CudaTensor) == hosted:
                found.append(f"{what} of {piece.name}")
        if not isinstance(piece.grad, CudaTensor):
            found.append(f"gradient of {piece.name}")
    return found
