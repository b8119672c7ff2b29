"""All ranks of a plan in turn on one GPU in name: their steps under the rules of `device.py`."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autoptd.api import Parallel
from autoptd.ops import offload
from autoptd.runtime.batch import share_of
from autoptd.runtime.comm import threaded
from autoptd.runtime.comm.interfaces import Communicators
from tests.runtime.fake_device.device import CUDA, CudaTensor, Device, Place, WrongDevice


@contextmanager
def gpu(device: Device) -> Iterator[None]:
    """Replace what torch refuses without CUDA, for all threads: streams, capability, and collectives that check."""
    stream = SimpleNamespace(synchronize=device.synchronise)
    with ExitStack() as patches:
        for name, by in {
            "current_stream": lambda *_: stream,
            "synchronize": lambda *_: device.synchronise(),
            "get_device_capability": lambda *_: (9, 0),
            "max_memory_allocated": lambda *_: 0,
        }.items():
            patches.enter_context(patch.object(torch.cuda, name, by))
        patches.enter_context(patch.object(threaded, "connect", _within(device, threaded.connect)))
        patches.enter_context(patch.object(offload, "Tensor", CudaTensor))  # which leaves subclasses on the device
        for kind in (threaded.LockstepGroup, threaded.LockstepChannel):
            patches.enter_context(patch.object(kind, "_start", _checked(kind._start)))
        yield


def _within(device: Device, connect: Callable[..., Communicators]) -> Callable[..., Communicators]:
    def within(*args: Any) -> Communicators:
        with device:
            return connect(*args)

    return within


def _checked(start: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, *args: Any) -> Any:
        for x in tree_leaves(args):
            if isinstance(x, Tensor) and not isinstance(x, CudaTensor):
                raise WrongDevice(f"a collective gets {x.dtype} {list(x.shape)} of the host: {args[0]}")
        return start(self, *args)

    return checked


@dataclass(frozen=True)
class Ran:
    """What the ranks of a plan did."""

    losses: tuple[float, ...]
    met: Mapping[str, Counter[tuple[str, Place]]]  # by rank: events of all steps
    ops: int


def steps(
    parallel: Parallel, batches: Sequence[Mapping[str, Any]], allowed: Callable[[Place], bool], evaluates: bool = False
) -> Ran:
    """Train one step per global batch on all ranks."""
    layout, device = parallel.layout, Device(allowed)
    values = parallel.initial_values()

    def body(communicators: Communicators) -> list[float]:
        name = threading.current_thread().name
        with device:
            mine = copy.copy(parallel)
            mine.start(communicators, values)
            losses = []
            for batch in batches:
                flat = layout.nest.flat(batch)
                share = share_of(flat, layout.specs, mine.dp_rank, mine.dp_size)
                share = {n: device.pin(x.clone()) for n, x in share.items()}
                device.strict.add(name)
                loss = mine.train_step(share)
                device.strict.discard(name)
                losses.append(float(loss))
            return losses

    with gpu(device):
        results = threaded.run_lockstep(layout.mesh, body, in_turn=True, device=CUDA)
    return Ran(tuple(results[0]), device.met, sum(device.ops.values()))
