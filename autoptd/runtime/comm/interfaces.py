"""Interfaces for communication between ranks: groups for collectives, channels for the edges of the pipeline.

`Group` and `Channel` have two implementations: torch.distributed (`processes.py`) and the threads of one process
(`threaded.py`). The rest of the runtime does not depend on which one it uses.

A channel is one direction of one edge between stages, with a communicator of its own. It is a FIFO, as the deadlock
proof of `autoptd.schedule` assumes. Tensors of a collective are contiguous, of equal shape and dtype on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from autoptd.layout.mesh import AXES, AxisName, Mesh
from autoptd.ops.group import Group, Handle, SingleRankGroup
from autoptd.runtime.faults.rank_status import RankStatus, Unwatched


class Channel(Protocol):
    """One direction of the edge between two neighbouring stages."""

    def send(self, *xs: Tensor) -> Handle:
        """Start sending the tensors of a message, on a GPU in one kernel; the handle keeps them alive.

        They must not be written to before `wait` returns.
        """
        ...

    def receive(self, *outs: Tensor) -> Handle:
        """Start receiving a message into contiguous tensors of the same shapes and dtypes as the sent ones."""
        ...


def all_gather_text(text: str, group: Group, device: torch.device, width: int) -> list[str]:
    """Gather a string of each rank, cut to `width` bytes of UTF-8, ordered by rank. A collective."""
    raw = text.encode()[:width]
    row = torch.frombuffer(bytearray(raw.ljust(width, b"\0")), dtype=torch.uint8)
    rows = group.all_gather(row.to(device)).tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


class Backend(Protocol):
    """A factory of communicators. The members of a group or channel make it, no other rank."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def group(self, purpose: str, ranks: Sequence[int]) -> Group:
        """Make a group of several global ranks, ascending. A rank is in at most one group of a purpose."""
        ...

    def channel(self, edge: int, direction: str, source: int, target: int) -> Channel:
        """Make a channel of the pipeline between two global ranks."""
        ...


class Watcher(Protocol):
    """A context manager around steps and collectives: a fault within ends the job on all ranks (`watchdog.py`)."""

    status: RankStatus

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class Communicators:
    """The groups and channels of one rank. `data`: dp and cp together, the ranks that hold copies of the parameters;
    `ep`, `edp`: its parts that hold different experts and the same.

    `edges`: the channels of this rank's pipeline neighbours, keyed as by `autoptd.schedule.channel_of`.

    `make_group` makes a further group for a purpose, called by its members alone. All ranks make theirs in the same
    order of purposes (`members.py`).
    """

    mesh: Mesh
    rank: int
    device: torch.device
    world: Group
    tp: Group
    dp: Group
    cp: Group
    data: Group
    pp: Group
    ep: Group
    edp: Group
    edges: Mapping[tuple[int, str], Channel]
    make_group: Callable[[str, Sequence[int]], Group]
    watch: Watcher = field(default_factory=Unwatched)

    @property
    def stage(self) -> int:
        """This rank's index on the pipeline axis."""
        return self.mesh.coordinates(self.rank)[0]

    def over_stages(self, stages: tuple[int, ...]) -> Group | None:
        """Make the group of this rank's counterparts on `stages` (pipeline ranks); None if its own is not among them.

        All ranks of the world make the same calls in the same order.
        """
        if self.stage not in stages:
            return None
        column = self.mesh.group_of(self.rank, "pp")
        return self.make_group(f"stages {stages}", tuple(column[stage] for stage in stages))

    def within_dp(self, ranks: int) -> tuple[Group, Group]:
        """Partition the data axis into groups of `ranks` neighbours; return this rank's, and that of its counterparts.

        All ranks of the world make the same calls in the same order. `ranks` divides dp × cp.
        """
        if ranks == self.mesh.copies:
            return self.data, SingleRankGroup()
        if ranks == 1:
            return SingleRankGroup(), self.data
        data = self.mesh.group_of(self.rank, "data")
        part, index = divmod(data.index(self.rank), ranks)
        inside, across = data[part * ranks : (part + 1) * ranks], data[index::ranks]
        return self.make_group("shards", inside), self.make_group("copies of a shard", across)

    def within_edp(self, sharded: bool) -> tuple[Group, Group]:
        """Return the ranks that shard the state of this rank's experts, and those that hold copies of its shard."""
        return (self.edp, SingleRankGroup()) if sharded else (SingleRankGroup(), self.edp)


def connect(mesh: Mesh, backend: Backend, watch: Watcher | None = None) -> Communicators:
    """Make this rank's communicators: the world, its axes, then the channels of its edges."""
    rank = backend.rank

    def axis(name: AxisName) -> Group:
        return _started(backend, name, mesh.group_of(rank, name))

    world = _started(backend, "world", range(mesh.world))
    groups = {name: axis(name) for name in AXES}
    data = groups["dp"] if mesh.cp == 1 else axis("data")
    ep, edp = (axis("ep"), axis("edp")) if mesh.ep > 1 else (SingleRankGroup(), data)
    return Communicators(
        mesh=mesh,
        rank=rank,
        device=backend.device,
        world=world,
        tp=groups["tp"],
        dp=groups["dp"],
        cp=groups["cp"],
        data=data,
        pp=groups["pp"],
        ep=ep,
        edp=edp,
        edges={(edge, way): _open(backend, edge, way, *ends) for edge, way, *ends in mesh.channels_of(rank)},
        make_group=partial(_started, backend),
        watch=watch or Unwatched(),
    )


def _started(backend: Backend, purpose: str, ranks: Sequence[int]) -> Group:
    """Make a group and send a number through it, since backends connect at the first message."""
    if len(ranks) == 1:
        return SingleRankGroup()
    group = backend.group(purpose, ranks)
    group.all_reduce(torch.ones(1, device=backend.device))
    return group


def _open(backend: Backend, edge: int, direction: str, source: int, target: int) -> Channel:
    """Make a channel and send a number through it."""
    channel, one = backend.channel(edge, direction, source, target), torch.ones(1, device=backend.device)
    (channel.send(one) if backend.rank == source else channel.receive(one)).wait()
    return channel
