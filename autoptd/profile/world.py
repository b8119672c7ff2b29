"""The processes of a measurement: those that torchrun started, or those that torch's launcher starts here."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from autoptd.errors import RuntimeFault
from autoptd.runtime.comm.listening import LOOPBACK, host_store, on_loopback, on_named_interface
from autoptd.runtime.comm.members import lazy_gloo
from autoptd.runtime.comm.processes import default_device

_TIMEOUT = timedelta(seconds=120)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # torch's launcher replaces their handlers
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """This process's rank and device in a measurement."""

    rank: int
    world: int
    node_ranks: int
    device: torch.device


def default_processes() -> int:
    """Return one per GPU; without a GPU two, the fewest that can communicate, if there are as many cores."""
    return torch.cuda.device_count() or min(2, os.cpu_count() or 1)


def launched() -> bool:
    """Return whether a launcher such as torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def joined() -> Iterator[Place]:
    """Join torch's process group if a launcher started this process, and leave it at the end."""
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not launched():
        yield Place(0, 1, 1, device)
        return
    with on_named_interface(_TIMEOUT), lazy_gloo(True):
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        try:
            world = dist.get_world_size()
            yield Place(dist.get_rank(), world, int(os.environ.get("LOCAL_WORLD_SIZE", world)), device)
        finally:
            dist.destroy_process_group()


def launch(processes: int, fn: Callable[..., T], *args: object) -> T:
    """Run a function in processes on this machine, as torchrun would, and return rank 0's result.

    Function, arguments and result are pickled. Raises RuntimeFault with the message of the first process that failed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    log = logging.getLogger("torch.distributed.elastic")
    level, log.disabled = log.level, False
    log.setLevel(logging.CRITICAL)  # the error holds its report of a failed process
    try:
        with on_loopback(), tempfile.TemporaryDirectory(prefix="autoptd-") as folder:
            # the launcher's own store would listen on all interfaces
            store = host_store(LOOPBACK, 0, processes, _TIMEOUT, shared=True)
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                run_id=uuid.uuid4().hex,
                rdzv_backend="static",
                rdzv_endpoint=f"{LOOPBACK}:{store.port}",
                rdzv_configs={"rank": 0, "timeout": int(_TIMEOUT.total_seconds())},
                local_addr=LOOPBACK,
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            results: dict[int, T] = elastic_launch(config, fn)(*args)
            return results[0]
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RuntimeFault(f"process {rank} ended with code {failure.exitcode}\n{failure.message}") from error
    finally:
        log.setLevel(level)
        for number, handler in before.items():
            signal.signal(number, handler)
