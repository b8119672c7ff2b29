"""Communicators over torch.distributed: NCCL on GPUs, gloo otherwise."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.errors import PlanError, RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.ops.group import Group, Handle
from autoptd.runtime.comm.interfaces import Channel, Communicators, connect
from autoptd.runtime.comm.listening import on_named_interface
from autoptd.runtime.comm.members import group_of_members
from autoptd.runtime.comm.process_group import ProcessGroup, Works, as_bytes, default_store, store_host
from autoptd.runtime.comm.restart_store import attempt_store
from autoptd.runtime.faults.heartbeat import Timeouts
from autoptd.runtime.faults.rank_status import PendingComm, RankStatus, Unwatched
from autoptd.runtime.faults.watchdog import Watchdog


@dataclass
class ProcessChannel:
    """A `Channel` over a process group of its own."""

    group: dist.ProcessGroup
    peer: int  # global rank
    status: RankStatus = field(default_factory=RankStatus)

    def send(self, *xs: Tensor) -> Handle:
        return self._start(dist.isend, xs, PendingComm(self.status, "send to", (self.peer,)))

    def receive(self, *outs: Tensor) -> Handle:
        return self._start(dist.irecv, outs, PendingComm(self.status, "receive from", (self.peer,)))

    def _start(self, op: Callable[..., dist.Work | None], tensors: tuple[Tensor, ...], pending: PendingComm) -> Handle:
        ops = [dist.P2POp(op, as_bytes(x), self.peer, self.group) for x in tensors]
        with pending:
            return Works(dist.batch_isend_irecv(ops) if ops else (), tensors, pending)


class ProcessBackend:
    """A `Backend` over an initialised torch.distributed."""

    def __init__(self, device: torch.device, status: RankStatus) -> None:
        self.rank, self.device, self._status = dist.get_rank(), device, status

    def group(self, purpose: str, ranks: Sequence[int]) -> Group:
        world = dist.group.WORLD
        assert world is not None
        whole = len(ranks) == dist.get_world_size()
        return ProcessGroup(world if whole else group_of_members(purpose, ranks), self._status)

    def channel(self, edge: int, direction: str, source: int, target: int) -> Channel:
        group = group_of_members(f"edge {edge} {direction}", sorted((source, target)))
        return ProcessChannel(group, target if self.rank == source else source, self._status)


def connect_processes(
    mesh: Mesh, device: torch.device | None = None, timeout_s: float = 600.0, limits: Timeouts | None = None
) -> Communicators:
    """Return this process's communicators; start torch.distributed from the environment (torchrun) if necessary.

    Without torchrun's environment the world has one rank. `device` defaults to this process's GPU, or the CPU without
    one. `limits`: those of the watchdog; None for no watchdog. Raises PlanError if the world is not the mesh's, before
    any process group is started, and RuntimeFault if the port of rank 0 is taken.
    """
    _check_world(mesh)
    device = start_processes(device, timeout_s)
    watch: Watchdog | Unwatched = Unwatched(mesh.world)
    if limits is not None and mesh.world > 1:
        watch = Watchdog(default_store(), dist.get_rank(), mesh.world, limits, store_host())
        watch.start()
    with watch:
        watch.status.leave("connecting")
        made = connect(mesh, ProcessBackend(device, watch.status), watch)
        watch.status.leave()
    return made


def start_processes(device: torch.device | None = None, timeout_s: float = 600.0) -> torch.device:
    """Start torch.distributed from the environment if necessary; return the device, by default this process's."""
    device = default_device() if device is None else device
    if device.type == "cuda":  # also in a world that the caller started
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _initialise("nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s))
    return device


def _initialise(backend: str, timeout: timedelta) -> None:
    if "WORLD_SIZE" not in os.environ:  # a single process without a launcher
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        atexit.register(_end)  # else NCCL warns of it
        return
    try:
        if store_host() is None:
            store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
            store = attempt_store(store, rank, world, timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        else:
            with on_named_interface(timeout):
                dist.init_process_group(backend, timeout=timeout)
    except ValueError as error:  # raised by torch for variables that are missing, or are no numbers
        raise RuntimeFault(
            f"torch.distributed cannot start from the environment: {error}",
            where=f"rank {os.environ.get('RANK', '?')}, connecting",
            fix="start the script with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as it does",
        ) from error
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        host, port = (os.environ.get(f"MASTER_{name}", "?") for name in ("ADDR", "PORT"))
        taken = "EADDRINUSE" in str(error)
        raise RuntimeFault(
            f"port {port} of {host} is taken" if taken else f"the ranks cannot connect to {host}:{port}: {error}",
            where=f"rank {os.environ.get('RANK', '?')}, connecting",
            fix="give another port: torchrun --master-port … (MASTER_PORT), or --standalone, which takes a free one"
            if taken
            else "start as many processes as WORLD_SIZE says, which all reach this address: torchrun does so",
        ) from error


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def default_device() -> torch.device:
    """Return the GPU of this process's LOCAL_RANK, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _check_world(mesh: Mesh) -> None:
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world != mesh.world:
        raise PlanError(
            f"the plan is for {mesh.world} ranks ({mesh}), but {world} are running",
            fix=f"start it with torchrun --nproc-per-node for {mesh.world} ranks in total, or plan for world={world}",
        )
