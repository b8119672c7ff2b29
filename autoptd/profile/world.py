"""The processes that measure together: those that torchrun started, or this one and others like it on this machine.

Rank 0 is always the process that a person started, so that it shows the progress and can be interrupted; the others are
`python -m autoptd.profile.worker` and end with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import IO

import torch
import torch.distributed as dist

from autoptd.errors import RuntimeFault
from autoptd.runtime.listening import LOOPBACK, host_store, on_loopback, on_named_interface
from autoptd.runtime.processes import default_device

_TIMEOUT = timedelta(seconds=120)
_DYING_S = 0.2  # the loss of a peer is noticed before its process has quite ended


@dataclass(frozen=True)
class Place:
    """Where this process is among those that measure."""

    rank: int
    world: int
    node_ranks: int
    device: torch.device


def default_processes() -> int:
    """One per GPU; without a GPU two, the fewest that can talk to each other, if there are as many cores."""
    return torch.cuda.device_count() or min(2, os.cpu_count() or 1)


def launched() -> bool:
    """Whether a launcher such as torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True)
class Seat:
    """What a worker is told: its rank among `world` processes, and where rank 0's store listens."""

    rank: int
    world: int
    port: int


@contextmanager
def joined(processes: int, arguments: list[str], seat: Seat | None = None) -> Iterator[Place]:
    """Torch's process group among `processes` of this machine, or those that torchrun started; none for one process.

    `arguments` are those of the workers, and `seat` is a worker's. Raises RuntimeFault with what a worker said if the
    group cannot be started.
    """
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if seat is not None:
        store = dist.TCPStore(LOOPBACK, seat.port, seat.world, is_master=False, timeout=_TIMEOUT)
        store.set(_present(seat.rank), "")
        with _group(device, store, seat.rank, seat.world):
            yield Place(seat.rank, seat.world, seat.world, device)
    elif launched():
        with on_named_interface(_TIMEOUT), _group(device):
            world = dist.get_world_size()
            yield Place(dist.get_rank(), world, int(os.environ.get("LOCAL_WORLD_SIZE", world)), device)
    elif processes == 1:
        yield Place(0, 1, 1, device)
    else:
        with on_loopback(), _with_workers(processes, arguments, device):
            yield Place(0, processes, processes, device)


@contextmanager
def _group(device: torch.device, store: dist.Store | None = None, rank: int = -1, world: int = -1) -> Iterator[None]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _with_workers(processes: int, arguments: list[str], device: torch.device) -> Iterator[None]:
    store = host_store(LOOPBACK, 0, processes, _TIMEOUT)
    with tempfile.TemporaryFile("w+") as said:
        seats = [Seat(rank, processes, store.port) for rank in range(1, processes)]
        workers = [_worker(seat, arguments, said) for seat in seats]
        try:
            _wait_for(store, workers)
            with _group(device, store, 0, processes):
                yield
                for worker in workers:
                    worker.wait(_TIMEOUT.total_seconds())
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # torch's DistError is a RuntimeError
            time.sleep(_DYING_S)
            code = next((code for code in (worker.poll() for worker in workers) if code), None)
            if code is None:
                raise
            said.seek(0)
            raise RuntimeFault(f"a process of the measurement ended with code {code}\n{said.read()}") from error
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _wait_for(store: dist.Store, workers: list[subprocess.Popen[bytes]]) -> None:
    """Until all are there. In small steps: torch's waiting can neither be interrupted nor sees that one has ended."""
    end = time.monotonic() + _TIMEOUT.total_seconds()
    while not store.check([_present(1 + i) for i in range(len(workers))]):
        if time.monotonic() > end or any(worker.poll() is not None for worker in workers):
            raise RuntimeError("not all processes of the measurement have started")
        time.sleep(0.02)


def _present(rank: int) -> str:
    return f"present/{rank}"


def _worker(seat: Seat, arguments: list[str], said: IO[str]) -> subprocess.Popen[bytes]:
    words = [*arguments, *map(str, (seat.rank, seat.world, seat.port))]
    command = [sys.executable, "-m", "autoptd.profile.worker", *words]
    environment = os.environ | {"LOCAL_RANK": str(seat.rank)}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
