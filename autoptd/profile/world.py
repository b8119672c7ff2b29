"""The processes that measure together: those that torchrun started, or those that torch's launcher starts here."""

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
from autoptd.runtime.comm.processes import default_device

_TIMEOUT = timedelta(seconds=120)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # that torch's launcher takes over
T = TypeVar("T")


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


@contextmanager
def joined() -> Iterator[Place]:
    """Join torch's process group among the processes that a launcher started; none for one that nobody launched."""
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not launched():
        yield Place(0, 1, 1, device)
        return
    with on_named_interface(_TIMEOUT):
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        try:
            world = dist.get_world_size()
            yield Place(dist.get_rank(), world, int(os.environ.get("LOCAL_WORLD_SIZE", world)), device)
        finally:
            dist.destroy_process_group()


def launch(processes: int, fn: Callable[..., T], *args: object) -> T:
    """Run a function on processes of this machine, as torchrun would, and return rank 0's result.

    Function, arguments and result are pickled. Raises RuntimeFault with what the first process that failed said.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    said = logging.getLogger("torch.distributed.elastic")
    level, said.disabled = said.level, False
    said.setLevel(logging.CRITICAL)  # what it reports of a failed process is in the error
    try:
        with on_loopback(), tempfile.TemporaryDirectory(prefix="autoptd-") as folder:
            store = host_store(
                LOOPBACK, 0, processes, _TIMEOUT, shared=True
            )  # the launcher's own would listen everywhere
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
        said.setLevel(level)
        for number, handler in before.items():
            signal.signal(number, handler)
