"""What ranks say to each other: groups for collectives, channels for the edges of the pipeline.

`Group` and `Channel` have two implementations: torch.distributed (`processes.py`) and the threads of one process
(`lockstep.py`). Nothing else of the runtime knows which one it uses.

A channel is one direction of one edge between stages with a communicator of its own: it is a FIFO, so the static proof
of `autoptd.schedule` holds for it. Tensors of a collective are contiguous and of equal shape and dtype on all ranks.
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
    """One direction between two neighbouring stages."""

    def send(self, x: Tensor) -> Handle:
        """Start sending; the handle keeps x alive. Nobody may write to x until it is waited for."""
        ...

    def receive(self, out: Tensor) -> Handle:
        """Start receiving into a contiguous tensor of exactly the sent shape and dtype."""
        ...


def all_gather_text(text: str, group: Group, device: torch.device, width: int) -> list[str]:
    """What each rank of a group says, by rank; of each the first `width` bytes in UTF-8. A collective."""
    raw = text.encode()[:width]
    line = torch.frombuffer(bytearray(raw.ljust(width, b"\0")), dtype=torch.uint8)
    rows = group.all_gather(line.to(device)).tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


class Backend(Protocol):
    """Makes communicators. All ranks of the world call for the same ones in the same order, members or not."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def axis(self, mesh: Mesh, name: AxisName) -> Group:
        """This rank's group of a mesh axis."""
        ...

    def group(self, ranks: tuple[int, ...]) -> Group | None:
        """A group of these global ranks, None if this rank is not one of them."""
        ...

    def channel(self, source: int, target: int) -> Channel | None:
        """A channel between two global ranks, None if this rank is neither."""
        ...


class Watcher(Protocol):
    """`with` it around what a rank does with others: a fault ends the job everywhere (`watch.py`)."""

    place: RankStatus

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class Communicators:
    """All that one rank talks through. `data`: dp and cp together, over which parameters are copies.

    `edges`: as `autoptd.schedule.channel_of` names them, those of its route.
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
    edges: Mapping[tuple[int, str], Channel]
    make_group: Callable[[tuple[int, ...]], Group | None]
    watch: Watcher = field(default_factory=Unwatched)

    @property
    def stage(self) -> int:
        """The pipeline rank."""
        return self.mesh.coordinates(self.rank)[0]

    def over_stages(self, stages: tuple[int, ...]) -> Group | None:
        """A new group of this rank's counterparts on some pipeline ranks, None if its own is not among them.

        All ranks of the world call it for the same ones in the same order.
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
        """This rank's group of so many neighbours on the data axis, and that of its counterparts in the other groups.

        All ranks of the world call it for the same in the same order. `ranks` divides dp × cp.
        """
        if ranks == self.mesh.copies:
            return self.data, SingleRankGroup()
        if ranks == 1:
            return SingleRankGroup(), self.data
        groups = range(self.mesh.copies // ranks)
        inside = [[g * ranks + i for i in range(ranks)] for g in groups]
        across = [[g * ranks + i for g in groups] for i in range(ranks)]
        return self._part_of_dp(inside), self._part_of_dp(across)

    def _part_of_dp(self, parts: list[list[int]]) -> Group:
        """This rank's one of groups that partition the data axis."""
        mine: Group = SingleRankGroup()
        for pp, tp, part in product(range(self.mesh.pp), range(self.mesh.tp), parts):
            group = self.make_group(tuple(self.mesh.group_of(self.mesh.rank(pp, 0, tp), "data")[i] for i in part))
            mine = group if group is not None else mine
        mine.all_reduce(torch.ones(1, device=self.device))
        return mine


def connect(mesh: Mesh, backend: Backend, watch: Watcher | None = None) -> Communicators:
    """Create and warm up all communicators of a rank, in one fixed order: axes, world, then the edges upwards."""
    rank = backend.rank
    groups = {name: backend.axis(mesh, name) for name in AXES}
    groups["data"] = groups["dp"] if mesh.cp == 1 else _one_of(backend, mesh.groups("data"))
    world = backend.group(tuple(range(mesh.world)))
    assert world is not None
    edges: dict[tuple[int, str], Channel] = {}
    for (edge, ends), dp, cp, tp in product(mesh.route.edges().items(), range(mesh.dp), range(mesh.cp), range(mesh.tp)):
        below, above = (mesh.rank(end, dp, tp, cp) for end in ends)
        for direction, source, target in (("forward", below, above), ("backward", above, below)):
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
        edges=edges,
        make_group=backend.group,
        watch=watch or Unwatched(),
    )
    _warm_up(communicators)
    return communicators


def _one_of(backend: Backend, groups: Sequence[tuple[int, ...]]) -> Group:
    """This rank's of groups that every rank is in one of; all ranks make all."""
    mine = [made for ranks in groups if (made := backend.group(ranks)) is not None]
    assert len(mine) == 1
    return mine[0]


def _warm_up(c: Communicators) -> None:
    """One small message through everything, so that lazily built connections come up in the same order everywhere."""
    one = torch.ones(1, device=c.device)
    for group in (c.tp, c.dp, c.cp, c.data, c.pp, c.world):
        group.all_reduce(one.clone())
    for edge, (below, above) in c.mesh.route.edges().items():
        for direction, source in (("forward", below), ("backward", above)):
            channel = c.edges.get((edge, direction))
            if channel is not None and c.stage in (below, above):
                (channel.send(one) if c.stage == source else channel.receive(one.clone())).wait()
