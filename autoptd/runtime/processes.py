"""Communicators on torch.distributed: NCCL where there are GPUs, gloo otherwise; the axes come from one DeviceMesh.

gloo emulates reduce-scatter by a whole all-reduce, so here it is an all-to-all and a local sum in rank order: half the
traffic, and the same bits on every run. Booleans travel as bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoptd.errors import PlanError, RuntimeFault
from autoptd.runtime.attempts import of_this_attempt
from autoptd.runtime.beat import Limits
from autoptd.runtime.comm import Alone, Channel, Communicators, Group, Handle, Reduction, connect
from autoptd.runtime.default_store import default_store, store_host
from autoptd.runtime.mesh import AXES, AxisName, Mesh
from autoptd.runtime.place import Place, Talk, Unwatched
from autoptd.runtime.watch import Watch

# renamed in torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class _Work:
    """torch's work and the tensors that must outlive it."""

    work: dist.Work | None
    tensors: tuple[Tensor, ...]
    talk: Talk

    def wait(self) -> None:
        if self.work is not None:
            with self.talk:
                self.work.wait()
        self.work, self.tensors = None, ()


@dataclass
class _Works:
    """Several of torch's works as one."""

    works: list[dist.Work]
    tensors: tuple[Tensor, ...]
    talk: Talk

    def wait(self) -> None:
        with self.talk:
            for work in self.works:
                work.wait()
        self.works, self.tensors = [], ()


@dataclass
class _SumOfParts:
    """A reduce-scatter made of an all-to-all under way and the sum still to do."""

    work: dist.Work | None
    parts: Tensor  # [size, n]
    out: Tensor  # [n]
    x: Tensor
    talk: Talk

    def wait(self) -> None:
        if self.work is not None:
            with self.talk:
                self.work.wait()
            torch.sum(self.parts, 0, out=self.out)
            self.work, self.parts = None, self.out


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype is torch.bool else x


@dataclass
class ProcessGroup:
    """`comm.Group` over one torch process group. `place`: where it is written what this rank waits for."""

    group: dist.ProcessGroup
    gloo: bool
    place: Place = field(default_factory=Place)
    rank: int = field(init=False)
    size: int = field(init=False)
    others: tuple[int, ...] = field(init=False)  # global ranks

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.others = tuple(r for r in dist.get_process_group_ranks(self.group) if r != dist.get_rank())

    def _talk(self, what: str) -> Talk:
        return Talk(self.place, what, self.others)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        with self._talk("all-reduce with"):
            dist.all_reduce(_bytes(x), _OPS[op], group=self.group)
        return x

    def all_reduce_later(self, x: Tensor) -> Handle:
        talk = self._talk("all-reduce with")
        with talk:
            return _Work(dist.all_reduce(x, group=self.group, async_op=True), (x,), talk)

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        self.all_gather_later(_bytes(out).flatten(), _bytes(x).flatten()).wait()
        return out

    def all_gather_later(self, out: Tensor, x: Tensor) -> Handle:
        talk = self._talk("all-gather with")
        with talk:
            return _Work(_all_gather(out, x, group=self.group, async_op=True), (out, x), talk)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[1:])
        self.reduce_scatter_later(out.view(-1), x.view(-1)).wait()
        return out

    def reduce_scatter_later(self, out: Tensor, x: Tensor) -> Handle:
        talk = self._talk("reduce-scatter with")
        with talk:
            if not self.gloo:
                return _Work(_reduce_scatter(out, x, group=self.group, async_op=True), (out, x), talk)
            parts = x.new_empty(self.size, out.numel())
            work = dist.all_to_all_single(parts, x.view(self.size, -1), group=self.group, async_op=True)
            return _SumOfParts(work, parts, out, x, talk)

    def all_to_all(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        with self._talk("all-to-all with"):
            dist.all_to_all_single(_bytes(out), _bytes(x), group=self.group)
        return out

    def shift_later(self, out: Tensor, x: Tensor) -> Handle:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        both = [
            dist.P2POp(dist.isend, _bytes(x), group=self.group, group_peer=after),
            dist.P2POp(dist.irecv, _bytes(out), group=self.group, group_peer=before),
        ]
        talk = self._talk("shift round the ring of")
        with talk:
            return _Works(dist.batch_isend_irecv(both), (out, x), talk)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        with self._talk("broadcast among"):
            dist.broadcast(_bytes(x), group=self.group, group_src=source)
        return x


@dataclass
class ProcessChannel:
    """`comm.Channel` over a process group of its own."""

    group: dist.ProcessGroup
    peer: int  # global rank
    place: Place = field(default_factory=Place)

    def send(self, x: Tensor) -> Handle:
        talk = Talk(self.place, "send to", (self.peer,))
        with talk:
            return _Work(dist.isend(_bytes(x), self.peer, group=self.group), (x,), talk)

    def receive(self, out: Tensor) -> Handle:
        talk = Talk(self.place, "receive from", (self.peer,))
        with talk:
            return _Work(dist.irecv(_bytes(out), self.peer, group=self.group), (out,), talk)


class ProcessBackend:
    """`comm.Backend` on an initialised torch.distributed."""

    def __init__(self, mesh: Mesh, device: torch.device, place: Place) -> None:
        self.rank, self._place = dist.get_rank(), place
        self.device = device
        self.device_mesh: DeviceMesh = init_device_mesh(device.type, mesh.shape, mesh_dim_names=AXES)
        self._gloo = dist.get_backend() == "gloo"

    def axis(self, mesh: Mesh, name: AxisName) -> Group:
        return self._wrap(self.device_mesh.get_group(name))

    def group(self, ranks: tuple[int, ...]) -> Group | None:
        group = dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))
        assert group is not None
        return self._wrap(group) if self.rank in ranks else None

    def channel(self, source: int, target: int) -> Channel | None:
        group = dist.new_group([source, target])
        if self.rank not in (source, target):
            return None
        return ProcessChannel(group, target if self.rank == source else source, self._place)

    def _wrap(self, group: dist.ProcessGroup) -> Group:
        return Alone() if dist.get_world_size(group) == 1 else ProcessGroup(group, self._gloo, self._place)


def connect_processes(
    mesh: Mesh, device: torch.device | None = None, timeout_s: float = 600.0, limits: Limits | None = None
) -> Communicators:
    """This process's communicators; starts torch.distributed from the environment (torchrun) unless it runs already.

    Without torchrun's environment this is a world of one. `device` defaults to this process's GPU, or the CPU where
    there is none. `limits`: watch over each other's ranks (`watch.py`). Raises PlanError before any process group is
    started if the environment's world is not the mesh's, RuntimeFault where the port of rank 0 is taken.
    """
    if device is None:
        device = default_device()
    _check_world(mesh)
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _initialise("nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s))
    watch: Watch | Unwatched = Unwatched()
    if limits is not None and mesh.world > 1:
        watch = Watch(default_store(), dist.get_rank(), mesh.world, limits, store_host())
        watch.start()
    with watch:
        watch.place.leave("connecting")
        made = connect(mesh, ProcessBackend(mesh, device, watch.place), watch)
        watch.place.leave()
    return made


def _initialise(backend: str, timeout: timedelta) -> None:
    if "WORLD_SIZE" not in os.environ:  # one process that nobody launched
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    try:
        if store_host() is None:
            store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
            store = of_this_attempt(store, rank, world, timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    except dist.DistNetworkError as error:
        host, port = (os.environ.get(f"MASTER_{name}", "?") for name in ("ADDR", "PORT"))
        taken = "EADDRINUSE" in str(error)
        raise RuntimeFault(
            f"port {port} of {host} is taken" if taken else f"the ranks cannot meet at {host}:{port}: {error}",
            where=f"rank {os.environ.get('RANK', '?')}, connecting",
            fix="give another: torchrun --master-port … (MASTER_PORT), or --standalone, which takes a free one",
        ) from error


def default_device() -> torch.device:
    """The GPU of this process's LOCAL_RANK, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _check_world(mesh: Mesh) -> None:
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world != mesh.world:
        raise PlanError(
            f"the plan is for {mesh.world} ranks ({mesh}), but {world} are running",
            fix=f"start it with torchrun --nproc-per-node for {mesh.world} ranks in all, or plan for world={world}",
        )
