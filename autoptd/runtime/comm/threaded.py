"""All ranks of a mesh as threads of one process, which checks parity over many meshes in milliseconds.

Every collective is a rendezvous: each rank of the group deposits its tensors, and the last one computes every rank's
result in rank order, under one lock. Ranks that disagree on operation, shape, dtype or order raise an error that names
both. If every running rank waits, that is a deadlock and is reported at once. The first error ends all ranks and is
raised in the caller with its rank.

With `in_turn` one rank computes at a time, until it waits. Otherwise all threads contend for Python's GIL at every op,
which costs little with a few ranks and several times the work with 64.

Backward passes run in the rank's own thread: autograd runs CPU nodes there, and on a GPU, which all ranks then share,
its thread per device is off. Grad mode, saved-tensor hooks and default devices are per thread in torch; the default
dtype and the default random generators are per process.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.grad_mode import set_multithreading_enabled

from autoptd.errors import RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.ops.group import Group, Handle, Reduction
from autoptd.runtime.comm import combine
from autoptd.runtime.comm.combine import Combine
from autoptd.runtime.comm.interfaces import Channel, Communicators, connect
from autoptd.runtime.comm.members import group_name

T = TypeVar("T")
CPU = torch.device("cpu")


class _Ended(BaseException):
    """Raised in a rank to unwind it because another one failed."""


@dataclass
class _Rendezvous:
    """A collective or message in progress: the tensors deposited so far, and each rank's description of it."""

    ranks: tuple[int, ...]
    names: dict[int, str] = field(default_factory=dict)
    tensors: dict[int, Any] = field(default_factory=dict)
    done: bool = False


class _World:
    """The state shared by the ranks' threads, guarded by `lock`."""

    def __init__(self, world: int, timeout_s: float, in_turn: bool) -> None:
        self.timeout_s, self.in_turn = timeout_s, in_turn
        self.lock = threading.Lock()
        self.wake = [threading.Condition(self.lock) for _ in range(world)]
        self.pending: dict[tuple[Any, int], _Rendezvous] = {}
        self.waiting: dict[int, tuple[_Rendezvous, str]] = {}
        self.alive = set(range(world))
        self.failure: tuple[int, BaseException] | None = None
        self._turn = threading.Lock()
        self._computing: int | None = None

    def meet(
        self, rank: int, ranks: tuple[int, ...], key: tuple[Any, int], name: str, own: Any, combine: Combine
    ) -> _Rendezvous:
        """Join rendezvous `key`; the last rank runs `combine`. `name`: the operation as this rank describes it."""
        with self.lock:
            self._check_failure()
            rendezvous = self.pending.setdefault(key, _Rendezvous(ranks))
            for other, theirs in rendezvous.names.items():
                if theirs != name:
                    raise RuntimeFault(
                        f"ranks {other} and {rank} disagree: rank {other} {theirs}, rank {rank} {name}",
                        where=f"group {list(ranks)}",
                    )
            rendezvous.names[rank] = name
            rendezvous.tensors[rank] = own
            if len(rendezvous.tensors) == len(ranks):
                with torch.no_grad():
                    combine([rendezvous.tensors[r] for r in ranks])
                rendezvous.done = True
                rendezvous.tensors.clear()
                del self.pending[key]
                for r in [r for r in ranks if r in self.waiting and self.waiting[r][0] is rendezvous]:
                    del self.waiting[r]
                    self.wake[r].notify()
            return rendezvous

    def wait(self, rank: int, rendezvous: _Rendezvous, doing: str) -> None:
        """Block until all ranks have joined, and let others compute. Raises RuntimeFault on deadlock or timeout."""
        if rendezvous.done:
            return
        self.end_turn(rank)
        self._wait(rank, rendezvous, doing)
        self.begin_turn(rank)

    def begin_turn(self, rank: int) -> None:
        """Wait until no other rank computes."""
        if self.in_turn:
            self._turn.acquire()
            self._computing = rank

    def end_turn(self, rank: int) -> None:
        """Let another rank compute. A no-op for a rank without the turn, such as one that failed while waiting."""
        if self._computing == rank:
            self._computing = None
            self._turn.release()

    def _wait(self, rank: int, rendezvous: _Rendezvous, doing: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        with self.lock:
            while not rendezvous.done:
                self._check_failure()
                self.waiting[rank] = (rendezvous, doing)
                self._check_deadlock()
                if not self.wake[rank].wait(deadline - time.monotonic()) and not rendezvous.done:
                    self._check_failure()
                    missing = sorted(set(rendezvous.ranks) - set(rendezvous.names))
                    raise RuntimeFault(f"rank {rank} waited {self.timeout_s:g} s in {doing} for ranks {missing}")

    def _check_failure(self) -> None:
        if self.failure is not None:
            raise _Ended

    def _check_deadlock(self) -> None:
        if len(self.waiting) < len(self.alive):
            return
        lines = [
            f"rank {r} in {doing}, without ranks {sorted(set(m.ranks) - set(m.names))}"
            for r, (m, doing) in sorted(self.waiting.items())
        ]
        raise RuntimeFault("deadlock: every rank waits for another", where="\n".join(lines))

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Record that a rank's function returned or raised."""
        with self.lock:
            self.alive.discard(rank)
            self.waiting.pop(rank, None)
            if error is not None and not isinstance(error, _Ended) and self.failure is None:
                self.failure = (rank, error)
            if self.failure is None and self.alive:
                try:
                    self._check_deadlock()
                except RuntimeFault as fault:
                    self.failure = (rank, fault)
            if self.failure is not None:
                for condition in self.wake:
                    condition.notify_all()


@dataclass
class _ThreadHandle:
    world: _World
    rank: int
    rendezvous: _Rendezvous
    doing: str

    def wait(self) -> None:
        self.world.wait(self.rank, self.rendezvous, self.doing)


def _describe(op: str, *xs: Tensor) -> str:
    return f"{op}({', '.join(str(x.dtype).removeprefix('torch.') + str(list(x.shape)) for x in xs)})"


@dataclass
class LockstepGroup:
    """A `Group` among threads. Sums are in rank order, so results are bitwise reproducible."""

    world: _World
    name: str
    ranks: tuple[int, ...]
    rank: int  # index in ranks
    count: int = 0  # collectives so far; their order is the same on all members

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _start(self, op: str, x: Tensor, own: Any, combine: Combine) -> _ThreadHandle:
        assert x.is_contiguous(), f"{op} of a tensor that is not contiguous"
        me, doing = self.ranks[self.rank], _describe(op, x)
        joined = self.world.meet(me, self.ranks, (self.name, self.count), doing, own, combine)
        self.count += 1
        return _ThreadHandle(self.world, me, joined, f"{doing} number {self.count - 1} of group {self.name}")

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        self._start(f"all_reduce {op}", x, x, combine.all_reduce(op)).wait()
        return x

    def all_reduce_later(self, x: Tensor) -> Handle:
        return self._start("all_reduce sum", x, x, combine.all_reduce("sum"))

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        self._start("all_gather", x, (out.flatten(), x.flatten()), combine.all_gather).wait()
        return out

    def all_gather_later(self, out: Tensor, x: Tensor) -> Handle:
        return self._start("all_gather", x, (out, x), combine.all_gather)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[1:])
        self._start("reduce_scatter", x, (out.view(-1), x.view(-1)), combine.reduce_scatter).wait()
        return out

    def reduce_scatter_later(self, out: Tensor, x: Tensor) -> Handle:
        return self._start("reduce_scatter", x, (out, x), combine.reduce_scatter)

    def all_to_all(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._start("all_to_all", x, (out, x), combine.all_to_all).wait()
        return out

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        assert x.is_contiguous() and x.shape[0] == sum(send)
        out = x.new_empty(sum(receive), *x.shape[1:])
        self._start("exchange", x[:0], (out, x, send), combine.exchange).wait()
        return out

    def shift_later(self, out: Tensor, x: Tensor) -> Handle:
        return self._start("shift", x, (out, x), combine.shift)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self._start(f"broadcast from {source}", x, x, combine.broadcast(source)).wait()
        return x


@dataclass
class LockstepChannel:
    """A `Channel` among threads. Writing to a tensor between send and receipt raises RuntimeFault."""

    world: _World
    name: str
    ranks: tuple[int, int]  # source, target
    rank: int  # global
    count: int = 0

    def send(self, *xs: Tensor) -> Handle:
        assert self.rank == self.ranks[0]
        return self._start("send", [(x.detach(), x._version) for x in xs])

    def receive(self, *outs: Tensor) -> Handle:
        assert self.rank == self.ranks[1] and all(out.is_contiguous() for out in outs)
        return self._start("receive", [(out, 0) for out in outs])

    def _start(self, verb: str, own: list[tuple[Tensor, int]]) -> _ThreadHandle:
        def deliver(both: Sequence[list[tuple[Tensor, int]]]) -> None:
            for (x, version), (out, _) in zip(*both, strict=True):
                if x._version != version:
                    where = self.name
                    raise RuntimeFault(f"rank {self.ranks[0]} wrote to a tensor that it was still sending", where=where)
                out.copy_(x)

        doing = _describe("message", *(x for x, _ in own))
        joined = self.world.meet(self.rank, self.ranks, (self.name, self.count), doing, own, deliver)
        self.count += 1
        return _ThreadHandle(self.world, self.rank, joined, f"{verb} {doing} number {self.count - 1} of {self.name}")


class LockstepBackend:
    """The `Backend` of one rank."""

    def __init__(self, world: _World, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._world = world
        self._made: Counter[str] = Counter()

    def group(self, purpose: str, ranks: Sequence[int]) -> Group:
        name = group_name(purpose, ranks, self._made)
        return LockstepGroup(self._world, name, tuple(ranks), ranks.index(self.rank))

    def channel(self, edge: int, direction: str, source: int, target: int) -> Channel:
        name = group_name(f"channel {edge} {direction}", (source, target), self._made)
        return LockstepChannel(self._world, name, (source, target), self.rank)


def run_lockstep(
    mesh: Mesh,
    fn: Callable[[Communicators], T],
    *,
    timeout_s: float = 60.0,
    in_turn: bool = False,
    device: torch.device = CPU,
) -> list[T]:
    """Run `fn(communicators)` on every rank of the mesh concurrently, all on one device; return the results by rank.

    Raises RuntimeFault that names the first rank that failed and its error, with the original as its cause. Intra-op
    parallelism is off meanwhile.
    """
    world = _World(mesh.world, timeout_s, in_turn)
    results: list[Any] = [None] * mesh.world

    def body(rank: int) -> None:
        error: BaseException | None = None
        world.begin_turn(rank)
        try:
            with set_multithreading_enabled(False):
                results[rank] = fn(connect(mesh, LockstepBackend(world, rank, device)))
        except BaseException as caught:  # noqa: BLE001  `leave` passes any error on to the caller
            error = caught
        world.leave(rank, error)
        world.end_turn(rank)

    with one_thread():
        ranks = [threading.Thread(target=body, args=(i,), name=f"rank {i}", daemon=True) for i in range(mesh.world)]
        for thread in ranks:
            thread.start()
        _join(ranks, world)
    if world.failure is not None:
        rank, error = world.failure
        raise RuntimeFault(f"rank {rank} failed: {type(error).__name__}: {error}", where=str(mesh)) from error
    return results


@contextmanager
def one_thread() -> Iterator[None]:
    """Turn torch's intra-op parallelism off: on small tensors its threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _join(threads: list[threading.Thread], world: _World) -> None:
    """Join all threads; after a failure, a rank that is computing gets one second to reach its next rendezvous."""
    grace_s = 1.0
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2 if world.failure is None else grace_s)
            if world.failure is not None and thread.is_alive():
                thread.join(grace_s)
                break
