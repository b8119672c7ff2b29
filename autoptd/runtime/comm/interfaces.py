"""Interfaces for communication between ranks: groups for collectives, channels for the edges of the pipeline.

`Group` and `Channel` have two implementations: torch.distributed (`processes.py`) and the threads of one process
(`threaded.py`). The rest of the runtime does not depend on which one it uses.

A channel is one direction of one edge between stages, with a communicator of its own. It is a FIFO, as the deadlock
proof of `autoptd.schedule` assumes. Tensors of a collective are contiguous, of equal shape and dtype on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from autoptd.layout.mesh import AXES, AxisName, Mesh
from autoptd.ops.group import Group, Handle, SingleRankGroup
from autoptd.runtime.faults.rank_status import RankStatus, Unwatched


class Channel(Protocol):
    """One direction of the edge between two neighbouring stages."""

    def send(self, x: Tensor) -> Handle:
        """Start sending; the handle keeps x alive. x must not be written to before `wait` returns."""
        ...

    def receive(self, out: Tensor) -> Handle:
        """Start receiving into a contiguous tensor of the same shape and dtype as the sent one."""
        ...


def all_gather_text(text: str, group: Group, device: torch.device, width: int) -> list[str]:
    """Gather a string of each rank, cut to `width` bytes of UTF-8, ordered by rank. A collective."""
    raw = text.encode()[:width]
    row = torch.frombuffer(bytearray(raw.ljust(width, b"\0")), dtype=torch.uint8)
    rows = group.all_gather(row.to(device)).tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


class Backend(Protocol):
    """A factory of communicators. All ranks of the world make the same calls in the same order, members or not."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def axis(self, mesh: Mesh, name: AxisName) -> Group:
        """Return this rank's group of a mesh axis."""
        ...

    def group(self, ranks: tuple[int, ...]) -> Group | None:
        """Return a group of these global ranks, None if this rank is not one of them."""
        ...

    def channel(self, source: int, target: int) -> Channel | None:
        """Return a channel between two global ranks, None if this rank is neither."""
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
    make_group: Callable[[tuple[int, ...]], Group | None]
    watch: Watcher = field(default_factory=Unwatched)

    @property
    def stage(self) -> int:
        """This rank's index on the pipeline axis."""
        return self.mesh.coordinates(self.rank)[0]

    def over_stages(self, stages: tuple[int, ...]) -> Group | None:
        """Create the group of this rank's counterparts on `stages` (pipeline ranks); None if its own is not among them.

        All ranks of the world make the same calls in the same order.
        """
        if len(stages) == 1:
            return SingleRankGroup() if self.stage == stages[0] else None
        mine = None
        for dp, cp, tp in product(range(self.mesh.dp), range(self.mesh.cp), range(self.mesh.tp)):
            group = self.make_group(tuple(self.mesh.rank(stage, dp, tp, cp) for stage in stages))
            mine = group if group is not None else mine
        if mine is not None:
            mine.all_reduce(torch.ones(1, device=self.device))
        return mine

    def within_dp(self, ranks: int) -> tuple[Group, Group]:
        """Partition the data axis into groups of `ranks` neighbours; return this rank's, and that of its counterparts.

        All ranks of the world make the same calls in the same order. `ranks` divides dp × cp.
        """
        if ranks == self.mesh.copies:
            return self.data, SingleRankGroup()
        if ranks == 1:
            return SingleRankGroup(), self.data
        groups = range(self.mesh.copies // ranks)
        inside = [[g * ranks + i for i in range(ranks)] for g in groups]
        across = [[g * ranks + i for g in groups] for i in range(ranks)]
        return self._part_of_dp(inside), self._part_of_dp(across)

    def within_edp(self, sharded: bool) -> tuple[Group, Group]:
        """Return the ranks that shard the state of this rank's experts, and those that hold copies of its shard."""
        return (self.edp, SingleRankGroup()) if sharded else (SingleRankGroup(), self.edp)

    def _part_of_dp(self, parts: list[list[int]]) -> Group:
        """Create all groups of a partition of the data axis; return this rank's."""
        mine: Group = SingleRankGroup()
        for pp, tp, part in product(range(self.mesh.pp), range(self.mesh.tp), parts):
            group = self.make_group(tuple(self.mesh.group_of(self.mesh.rank(pp, 0, tp), "data")[i] for i in part))
            mine = group if group is not None else mine
        mine.all_reduce(torch.ones(1, device=self.device))
        return mine


def connect(mesh: Mesh, backend: Backend, watch: Watcher | None = None) -> Communicators:
    """Create and warm up all communicators of a rank, in a fixed order: axes, world, then edges by number."""
    rank = backend.rank
    groups = {name: backend.axis(mesh, name) for name in AXES}
    groups["data"] = groups["dp"] if mesh.cp == 1 else _one_of(backend, mesh.groups("data"))
    experts = {name: _one_of(backend, mesh.groups(name)) for name in (("ep", "edp") if mesh.ep > 1 else ())}
    world = backend.group(tuple(range(mesh.world)))
    assert world is not None
    edges: dict[tuple[int, str], Channel] = {}
    for edge, direction, source, target in mesh.channels:
        channel = backend.channel(source, target)
        if channel is not None:
            edges[edge, direction] = channel
    communicators = Communicators(
        mesh=mesh,
        rank=rank,
        device=backend.device,
        world=world,
        tp=groups["tp"],
        dp=groups["dp"],
        cp=groups["cp"],
        data=groups["data"],
        pp=groups["pp"],
        ep=experts.get("ep", SingleRankGroup()),
        edp=experts.get("edp", groups["data"]),
        edges=edges,
        make_group=backend.group,
        watch=watch or Unwatched(),
    )
    _warm_up(communicators)
    return communicators


def _one_of(backend: Backend, groups: Sequence[tuple[int, ...]]) -> Group:
    """Create groups that partition the world; return this rank's."""
    mine = [made for ranks in groups if (made := backend.group(ranks)) is not None]
    assert len(mine) == 1
    return mine[0]


def _warm_up(c: Communicators) -> None:
    """Send a small message through each communicator, so that all ranks build lazy connections in the same order."""
    one = torch.ones(1, device=c.device)
    experts = (c.ep, c.edp) if c.mesh.ep > 1 else ()
    for group in (c.tp, c.dp, c.cp, c.data, c.pp, *experts, c.world):
        group.all_reduce(one.clone())
    for edge, (below, above) in c.mesh.route.edges().items():
        for direction, source in (("forward", below), ("backward", above)):
            channel = c.edges.get((edge, direction))
            if channel is not None and c.stage in (below, above):
                (channel.send(one) if c.stage == source else channel.receive(one.clone())).wait()
