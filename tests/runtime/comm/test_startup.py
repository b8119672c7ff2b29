"""The set-up of 16,384 ranks, simulated in one process: who makes which groups, and in which order.

`benchmarks/startup.py` times real ones.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoptd.checkpoint.saver import Saver
from autoptd.errors import CheckpointError
from autoptd.layout.layout import Layout
from autoptd.layout.mesh import Mesh
from autoptd.ops.tp_axis import Axis
from autoptd.profile.network import Network
from autoptd.profile.timing import timer
from autoptd.runtime.comm import interfaces, members
from autoptd.runtime.comm.along_tree import SHOWN
from autoptd.runtime.comm.interfaces import Communicators, connect
from autoptd.runtime.comm.members import group_name
from autoptd.runtime.comm.processes import connect_processes
from autoptd.runtime.trainer import Trainer
from autoptd.runtime.zero.materialise import tied_groups
from benchmarks.startup import KINDS, SIMULATED
from tests.runtime import tiny_model as tiny

CPU, ROOT = torch.device("cpu"), Path(__file__).parents[3]
MOST = 20  # groups of a rank, with that of checkpoints


# ---- one rank ----


@dataclass
class Silent:
    """A group or channel through which nothing goes."""

    rank: int = 0
    size: int = 2

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return x

    def send(self, x: Tensor) -> Silent:
        return self

    receive = send

    def wait(self) -> None:
        pass


@dataclass
class Recorder:
    """A `Backend` that records what a rank makes: name and members, in order."""

    rank: int
    world: int
    device: torch.device = CPU
    made: list[tuple[str, Sequence[int]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def group(self, purpose: str, ranks: Sequence[int]) -> Any:
        if len(ranks) < self.world:  # the world has a group already
            self.made.append((group_name(purpose, ranks, self.counts), ranks))
        return Silent(ranks.index(self.rank) if self.rank in ranks else -1, len(ranks))

    def channel(self, edge: int, direction: str, source: int, target: int) -> Any:
        ranks = sorted((source, target))
        self.made.append((group_name(f"edge {edge} {direction}", ranks, self.counts), ranks))
        return Silent()


@cache
def layout_of(mesh: Mesh) -> Layout:
    """Return a layout in which the first and the last stage share a parameter, with shards in groups if possible."""
    schedule = "zero-bubble-v" if mesh.stage_order == "v" else "1f1b" if mesh.virtual == 1 else "interleaved"
    shards = 4 if mesh.ep == 1 and mesh.copies % 4 == 0 else 0
    return tiny.layout(mesh, 1, mesh.pp, schedule=schedule, zero=1, shards=shards)


def set_up(mesh: Mesh, rank: int) -> Recorder:
    """Make all groups of a rank, as `Trainer` does; checkpoints have one more, of the world."""
    backend, layout = Recorder(rank, mesh.world), layout_of(mesh)
    c = connect(mesh, backend)
    tied_groups(layout, c)
    c.within_dp(layout.sharing)
    c.within_edp(layout.zero > 0)
    c.make_group("stage", mesh.stage_ranks(c.stage))
    return backend


# ---- all ranks ----


def complaints(ranks: Sequence[Recorder]) -> list[str]:
    """Return what is wrong with the groups that all ranks make, each waiting in each until all members have come."""
    found, members_of, makers = [], dict[str, Sequence[int]](), dict[str, list[int]]()
    for each in ranks:
        for name, group in each.made:
            if members_of.setdefault(name, group) != group:
                found.append(f"{name}: rank {each.rank} has other members than rank {makers[name][0]}")
            makers.setdefault(name, []).append(each.rank)
    found += [f"{name}: made by {len(m)}" for name, m in makers.items() if m != list(members_of[name])]
    if any(len(each.made) >= MOST for each in ranks):  # with that of checkpoints
        found.append(f"a rank makes {1 + max(len(each.made) for each in ranks)} groups")
    return found or waits(ranks)


def waits(ranks: Sequence[Recorder]) -> list[str]:
    """Run all ranks, each to the first of its groups that others have not come to, and say which can never be made."""
    left = [deque(each.made) for each in ranks]
    come, longest, rounds = Counter[str](), 0, [0] * len(ranks)
    waiting: dict[str, list[int]] = {}
    ready = deque(range(len(ranks)))
    while ready:
        rank = ready.popleft()
        if not left[rank]:
            continue
        name, group = left[rank].popleft()
        come[name] += 1
        waiting.setdefault(name, []).append(rank)
        if come[name] == len(group):
            done = max(rounds[other] for other in waiting[name]) + 1
            longest = max(longest, done)
            for other in waiting[name]:
                rounds[other] = done
            ready.extend(waiting.pop(name))
    stuck = [f"{name}: some wait for ever" for name in waiting]
    return stuck or ([f"{longest} groups one after the other"] if longest > MOST + 4 else [])


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_all_ranks_fit_together(kind: str) -> None:
    mesh = KINDS[kind]
    assert mesh.world == SIMULATED
    assert not complaints([set_up(mesh, rank) for rank in range(SIMULATED)])


# ---- in torch ----


@pytest.fixture
def joined() -> Iterator[Callable[[int], None]]:
    """Function that makes this process a rank of a world that answers at once."""

    def join(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIMULATED)

    yield join
    dist.destroy_process_group()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Names and members of the groups that torch makes. Its own functions are calls of the whole world."""
    found: list[tuple[str, list[int]]] = []
    honest = distributed_c10d._new_process_group_helper

    def new(size: int, rank: int, ranks: list[int], backend: Any, store: Any, name: str, **options: Any) -> Any:
        if ranks:  # not the world
            found.append((name.removeprefix("autoptd/"), ranks))
        return honest(size, rank, ranks, backend, store, name, **options)

    def of_all(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a call of the whole world for one group")

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", new)
    for module in (dist, distributed_c10d, device_mesh):
        monkeypatch.setattr(module, "new_group", of_all)
        monkeypatch.setattr(module, "split_group", of_all, raising=False)
    monkeypatch.setattr(members, "_made", Counter())
    return found


@pytest.mark.parametrize("kind", ["data", "interleaved", "all"])
def test_torch_makes_no_other_groups(
    kind: str, joined: Callable[[int], None], made: list[tuple[str, list[int]]]
) -> None:
    """The ranks of a real set-up make what the simulated ones do, but for the group of a stage: no whole tensors."""
    mesh = KINDS[kind]
    for rank in (0, 4321, SIMULATED - 1):
        joined(rank)
        members._made.clear()
        made.clear()
        c = connect_processes(mesh, CPU)
        stages = [tiny.make_stage(Axis(c.tp), mesh.stages, index) for index in mesh.stages_of(c.stage)]
        Trainer(stages, layout_of(mesh), c, lr=0.1)
        expected = [(name, list(ranks)) for name, ranks in set_up(mesh, rank).made if not name.startswith("stage of")]
        assert made == expected


def test_groups_that_are_measured_have_their_members_alone(
    joined: Callable[[int], None], made: list[tuple[str, list[int]]]
) -> None:
    found: dict[str, set[int]] = {}
    for rank in range(64):
        joined(rank)
        members._made.clear()
        network = Network(CPU, timer(CPU))
        for ranks, stride in ((8, 1), (4, 8), (8, 1)):
            assert network.group(ranks, stride).size == ranks
        network.channel(8)
        for name, _ in made:
            found.setdefault(name, set()).add(rank)
        for name, ranks in made:
            assert rank in ranks, name
        made.clear()
    assert len(found) == 64 // 8 + 64 // 4 + 1


def test_a_world_with_a_device_splits_no_communicator(joined: Callable[[int], None]) -> None:
    """torch would take the ranks of a group out of the world's communicator, which every rank has to join."""
    joined(5)
    world = distributed_c10d._get_default_group()
    world.bound_device_id = torch.device("cuda", 0)
    seen: list[object] = []
    helper = distributed_c10d._new_process_group_helper

    def new(*args: Any, **options: Any) -> Any:
        seen.append(world.bound_device_id)
        return helper(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_new_process_group_helper", new)
        members.group_of_members("some", range(4, 8))
    assert seen == [None] and world.bound_device_id == torch.device("cuda", 0)


def test_checkpoints_need_few_connections(joined: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo connects each rank to all others, unless it is set to wait for a message."""
    joined(5)
    seen: list[tuple[Any, ...]] = []

    def new(size: int, *args: Any, **options: Any) -> tuple[object, None]:
        seen.append((size, args[2], os.environ.get("TORCH_GLOO_LAZY_INIT")))
        return object(), None

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", new)
    for before in (None, "0"):
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
        if before is not None:
            monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", before)
        Saver()
        assert os.environ.get("TORCH_GLOO_LAZY_INIT") == before
    assert seen == 2 * [(SIMULATED, "gloo", "1")]


# ---- exchanges along the tree ----


@dataclass
class Mail:
    """Messages between simulated ranks, which one process runs one after the other; calls and bytes of each."""

    world: int
    rank: int = 0
    sent: dict[tuple[int, int], bytes] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)
    nbytes: Counter[int] = field(default_factory=Counter)

    def send(self, values: list[Any], to: int, group: Any) -> None:
        self.sent[self.rank, to] = pickle.dumps(values)
        self._count(self.rank, to)

    def receive(self, values: list[Any], source: int, group: Any) -> None:
        if (source, self.rank) not in self.sent:
            raise Later
        values[:] = pickle.loads(self.sent[source, self.rank])
        self._count(source, self.rank)

    def _count(self, source: int, to: int) -> None:
        self.calls[self.rank] += 1
        self.nbytes[self.rank] += len(self.sent[source, to])


class Later(Exception):
    """A rank that has to wait for the one above it: it is run again once that one has sent."""


def in_all_ranks(world: int, run: Callable[[int], object]) -> Mail:
    """Run a function on each rank: first up the tree, to where it waits for the rank above, then down the tree."""
    mail = Mail(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send_object_list", mail.send)
        patch.setattr(dist, "recv_object_list", mail.receive)
        patch.setattr(dist, "get_rank", lambda group: mail.rank)
        patch.setattr(dist, "get_world_size", lambda group: mail.world)
        for mail.rank in reversed(range(world)):
            with suppress(Later, CheckpointError):
                run(mail.rank)
        mail.calls.clear()
        mail.nbytes.clear()
        for mail.rank in range(world):
            run(mail.rank)
    return mail


def a_save(rank: int, fails: bool, raised: list[str]) -> None:
    """Let a rank agree with all others on a step of a save."""
    saver = object.__new__(Saver)
    saver.rank, saver.group = rank, object()  # type: ignore[assignment]

    def step() -> None:
        if fails:
            raise OSError(28, f"No space left on node {rank}")

    try:
        saver.on_all_ranks("finish", step)
    except CheckpointError as error:
        raised.append(str(error))


@pytest.mark.parametrize("failing", [False, True])
def test_a_save_asks_no_more_of_a_rank_in_a_large_world(failing: bool) -> None:
    """Calls and bytes of a rank are those in a world of a sixteenth, and all ranks raise the same error."""
    most = []
    for world in (SIMULATED // 16, SIMULATED):
        raised: list[str] = []
        mail = in_all_ranks(world, lambda rank, raised=raised: a_save(rank, bool(failing), raised))  # type: ignore[misc]
        raised = raised[-world:]
        assert len(raised) == (world if failing else 0) and len(set(raised)) <= 1
        if failing:
            assert all(f"No space left on node {rank}" in raised[0] for rank in range(SHOWN))
            assert "finish, rank 0\n" in raised[0] and f"and {world - SHOWN} more" in raised[0]
        most.append((max(mail.calls.values()), max(mail.nbytes.values())))
    (calls, nbytes), (calls_there, bytes_there) = most
    assert calls_there <= calls <= 66 and bytes_there <= 1.1 * nbytes < 66 * 600


# ---- processes ----


@pytest.mark.ranks
def test_processes_connect_and_exchange() -> None:
    command = [sys.executable, "-m", "benchmarks.startup", "--worlds", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "8 processes" in done.stdout and done.stdout.count("at most") == 1 + len(KINDS)


# ---- faults ----

SMALL, CHAIN = Mesh(dp=2, tp=2, pp=4, cp=2, ep=2, virtual=2), Mesh(dp=8, tp=4, pp=3)


def another_order_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    honest = Mesh.channels_of
    patch.setattr(Mesh, "channels_of", lambda self, rank: honest(self, rank)[:: -1 if rank == 5 else 1])


def along_the_pipeline(patch: pytest.MonkeyPatch) -> None:
    """Every pair of neighbours waits for the pair before it."""
    honest = Mesh.channels_of
    patch.setattr(Mesh, "channels_of", lambda self, rank: sorted(honest(self, rank)))


def of_a_non_member(patch: pytest.MonkeyPatch) -> None:
    """Every rank makes the group of tied stages, as all of them had to with torch's own function."""

    def over_stages(self: Communicators, stages: tuple[int, ...]) -> Any:
        column = self.mesh.group_of(self.rank, "pp")
        return self.make_group(f"stages {stages}", tuple(column[stage] for stage in stages))

    patch.setattr(Communicators, "over_stages", over_stages)


def without_a_member(patch: pytest.MonkeyPatch) -> None:
    honest = Communicators.within_dp
    patch.setattr(Communicators, "within_dp", lambda self, ranks: None if self.rank == 3 else honest(self, ranks))


def other_members(patch: pytest.MonkeyPatch) -> None:
    honest = Mesh.group_of

    def group_of(self: Mesh, rank: int, axis: Any) -> range:
        found = honest(self, rank, axis)
        return range(found.start, found.stop, 2 * found.step) if axis == "tp" and rank == 0 else found

    patch.setattr(Mesh, "group_of", group_of)


def named_by_number(patch: pytest.MonkeyPatch) -> None:
    """A group is named by its ranks and the number of groups that this rank has made, as torch does."""

    def name(purpose: str, ranks: Sequence[int], made: Counter[str]) -> str:
        made[""] += 1
        return f"{list(ranks)} {made['']}"

    patch.setitem(globals(), "group_name", name)


def for_every_edge(patch: pytest.MonkeyPatch) -> None:
    """Every rank makes a group for each edge of its pipeline."""
    honest = interfaces._open

    def opened(backend: Any, edge: int, direction: str, source: int, target: int) -> Any:
        for other in range(16):
            backend.channel(other, direction, source, target)
        return honest(backend, edge, direction, source, target)

    patch.setattr(interfaces, "_open", opened)


@pytest.mark.parametrize(
    ("plant", "mesh", "sees"),
    [
        pytest.param(
            another_order_on_one_rank, SMALL, "for ever", marks=pytest.mark.fault("communicators in another order")
        ),
        pytest.param(along_the_pipeline, Mesh(pp=64), "one after the other", marks=pytest.mark.fault("a slow start")),
        pytest.param(of_a_non_member, SMALL, "made by", marks=pytest.mark.fault("a group of others")),
        pytest.param(without_a_member, CHAIN, "made by", marks=pytest.mark.fault("a group of others")),
        pytest.param(other_members, CHAIN, "made by|other members", marks=pytest.mark.fault("a group of others")),
        pytest.param(named_by_number, CHAIN, "made by", marks=pytest.mark.fault("a group under two names")),
        pytest.param(for_every_edge, SMALL, "makes [0-9]+ groups", marks=pytest.mark.fault("a slow start")),
    ],
)
def test_planted_faults_of_the_start_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None], mesh: Mesh, sees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = range(mesh.world)
    assert not complaints([set_up(mesh, rank) for rank in ranks])
    plant(monkeypatch)
    found = complaints([set_up(mesh, rank) for rank in ranks])
    assert any(re.search(sees, each) for each in found), found
