"""NCCL in name: the part of torch.distributed that `ProcessGroup` and `ProcessChannel` call, among threads.

As torch 2.13 does over NCCL: an op that the caller waits for at once is queued on the current stream. A later one
(`async_op`, messages) is queued on its communicator's stream, after what the current stream holds; `wait` lets the
current stream wait for it, not the host. Values arrive at the wait. Unlike torch, nothing here keeps tensors alive.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoptd.ops.group import Handle
from autoptd.runtime.comm.processes import ProcessBackend
from autoptd.runtime.comm.threaded import LockstepBackend, LockstepChannel, LockstepGroup
from autoptd.runtime.faults.rank_status import RankStatus
from autoptd.schedule import Queued, prove_communicators
from tests.runtime.fake_device.device import CudaTensor, Device, WrongDevice, quietly
from tests.runtime.fake_device.streams import Event, Streams

REDUCTIONS = {torch.distributed.ReduceOp.SUM: "sum", torch.distributed.ReduceOp.MAX: "max"}


class _Weak:
    """A tensor without a hold on its memory."""

    def __init__(self, x: Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())
        self.view = x.dtype, int(x.storage_offset()), tuple(x.shape), x.stride()

    def write(self, value: Tensor) -> None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is not None and storage.nbytes():
            dtype, *view = self.view
            torch.empty(0, dtype=dtype).set_(storage, *view).copy_(value)  # type: ignore[call-overload]


@dataclass
class _Work:
    """A queued op. `handle`: its rendezvous; `arrived`: what it gives, and where to."""

    nccl: Nccl
    communicator: str
    handle: Handle
    number: str
    ended: Event
    arrived: Sequence[tuple[_Weak, Tensor]]

    def wait(self) -> None:
        streams = self.nccl.streams
        streams.check_freed()
        self.handle.wait()
        with quietly():
            for out, value in self.arrived:
                out.write(value)
        streams.wait(streams.current, self.ended)
        self.nccl.queue("-", self.communicator, self.number)


@dataclass
class _Communicator:
    """A communicator of one rank."""

    group: LockstepGroup
    channels: dict[tuple[int, int], LockstepChannel] = field(default_factory=dict)


class Nccl:
    """A stand-in for the module torch.distributed, for all ranks. Which rank calls is known by its thread.

    `queued`: by rank, what it queued in its steps, in order; `members`: the ranks of each communicator.
    """

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, device: Device) -> None:
        self._device = device
        device.on_wait = lambda: self.queue("host")
        self._ranks: dict[str, LockstepBackend] = {}
        self._worlds: dict[str, _Communicator] = {}
        self.queued: dict[int, list[Queued]] = {}
        self._ops: Counter[tuple[int, str]] = Counter()
        self.members: dict[str, tuple[int, ...]] = {}

    def backend(self, of: LockstepBackend, size: int) -> ProcessBackend:
        """Return the backend of this thread's rank."""
        thread = threading.current_thread().name
        self._ranks[thread] = of
        self.queued[of.rank] = []
        self._worlds[thread] = self.group_of_members("world", range(size))
        return ProcessBackend(of.device, RankStatus())

    def group_of_members(self, purpose: str, ranks: Sequence[int]) -> _Communicator:
        found = self._me.group(purpose, ranks)
        assert isinstance(found, LockstepGroup)
        self.members[found.name] = tuple(ranks)
        return _Communicator(found)

    @property
    def _me(self) -> LockstepBackend:
        return self._ranks[threading.current_thread().name]

    @property
    def streams(self) -> Streams:
        return self._device.streams

    @property
    def group(self) -> SimpleNamespace:
        return SimpleNamespace(WORLD=self._worlds[threading.current_thread().name])

    def queue(self, sign: str, communicator: str = "", op: str = "") -> str:
        """Note what this rank queues, in its steps; return the number of the op, "" outside of steps."""
        if not self._device.in_step() or (sign == "-" and not op):
            return ""
        rank = self._me.rank
        self.queued[rank].append(Queued(sign, communicator, op))
        if sign in ("", "+"):
            self._ops[rank, communicator] += 1
        return str(self._ops[rank, communicator] - 1)

    def prove(self) -> None:
        """Prove that what the ranks queued cannot block. Raises StuckCommunicators."""
        channels = [name for name in self.members if name.startswith("edge ")]
        prove_communicators(self.queued, self.members, channels)

    # ---- as in torch.distributed ----

    def get_rank(self, group: _Communicator | None = None) -> int:
        return self._me.rank if group is None else group.group.rank

    def get_world_size(self, group: _Communicator | None = None) -> int:
        return (group or self.group.WORLD).group.size

    def get_process_group_ranks(self, group: _Communicator) -> list[int]:
        return list(group.group.ranks)

    def all_reduce(self, x: Tensor, op: Any = ReduceOp.SUM, *, group: _Communicator, async_op: bool = False) -> Any:
        value = _copied(x)
        how = REDUCTIONS[op]
        start = (lambda: group.group.all_reduce_later(value)) if how == "sum" else (lambda: _max(group.group, value))
        return self._run(group, f"all_reduce_{how}", [x], [(x, value)], start, async_op)

    def all_gather(self, out: Tensor, x: Tensor, *, group: _Communicator, async_op: bool = False) -> Any:
        made, value = _copied(out), _copied(x)
        return self._run(
            group, "all_gather", [x], [(out, made)], lambda: group.group.all_gather_later(made, value), async_op
        )

    def reduce_scatter(self, out: Tensor, x: Tensor, *, group: _Communicator, async_op: bool = False) -> Any:
        made, value = _copied(out), _copied(x)
        return self._run(
            group, "reduce_scatter", [x], [(out, made)], lambda: group.group.reduce_scatter_later(made, value), async_op
        )

    def all_to_all_single(
        self, out: Tensor, x: Tensor, receive: Any = None, send: Any = None, *, group: _Communicator
    ) -> None:
        size = group.group.size
        even = [x.shape[0] // size] * size
        value, made = _copied(x), _Later()

        def start() -> Handle:
            made.value = group.group.exchange(value, send or even, receive or even)
            return made

        self._run(group, "all_to_all", [x], [(out, made)], start, False)

    def broadcast(self, x: Tensor, *, group: _Communicator, group_src: int) -> None:
        value, made = _copied(x), _Later()

        def start() -> Handle:
            made.value = group.group.broadcast(value, group_src)
            return made

        self._run(group, "broadcast", [x], [(x, made)], start, False)

    isend, irecv = "isend", "irecv"

    def P2POp(
        self, op: str, x: Tensor, peer: int | None = None, group: Any = None, *, group_peer: int | None = None
    ) -> Any:
        return SimpleNamespace(op=op, x=x, group=group, peer=peer)

    def batch_isend_irecv(self, ops: Sequence[Any]) -> list[Any]:
        """Queue one kernel: a message of several tensors to or from a peer, or a shift around a ring."""
        group, peer, kinds = ops[0].group, ops[0].peer, [each.op for each in ops]
        read = [each.x for each in ops if each.op == self.isend]
        given = [(each.x, _copied(each.x)) for each in ops if each.op == self.irecv]
        values, made = [_copied(x) for x in read], [out for _, out in given]
        if kinds == [self.isend, self.irecv]:
            return [self._run(group, "shift", read, given, lambda: group.group.shift_later(made[0], values[0]), True)]
        assert len(set(kinds)) == 1 and len({each.peer for each in ops}) == 1
        if read:
            sends = self._channel(group, self._me.rank, peer)
            return [self._run(group, "message", read, [], lambda: sends.send(*values), True)]
        receives = self._channel(group, peer, self._me.rank)
        return [self._run(group, "message", [], given, lambda: receives.receive(*made), True)]

    # ---- queueing ----

    def _channel(self, group: _Communicator, source: int, target: int) -> LockstepChannel:
        if (source, target) not in group.channels:
            group.channels[source, target] = LockstepChannel(
                group.group.world, f"{group.group.name} from {source}", (source, target), self._me.rank
            )
        return group.channels[source, target]

    def _run(
        self,
        group: _Communicator,
        what: str,
        reads: Sequence[Tensor],
        gives: Sequence[tuple[Tensor, Any]],
        start: Callable[[], Handle],
        later: bool,
    ) -> _Work | None:
        """Queue an op on its stream; run it at once unless `later`. Raises WrongDevice."""
        name, streams = group.group.name, self.streams
        writes = [out for out, _ in gives]
        for x in (*reads, *writes):
            if not isinstance(x, CudaTensor):
                raise WrongDevice(f"{what} of {name} gets {x.dtype} {list(x.shape)} of the host")
        stream = self._device.stream_of(name) if later else streams.current
        if stream != streams.current:
            streams.wait(stream, streams.event(streams.current))
        with streams.on(stream):
            for x in reads:
                streams.access(x, False, f"{what} of {name}")
            for x in writes:
                streams.access(x, True, f"{what} of {name}")
        number = self.queue("+" if later else "", name, what)
        with quietly():
            handle = start()
        work = _Work(self, name, handle, number, streams.event(stream), [(_Weak(x), value) for x, value in gives])
        if later:
            return work
        work.handle.wait()
        with quietly():
            for out, value in work.arrived:
                out.write(value.value if isinstance(value, _Later) else value)
        return None


class _Later:
    """The result of an op that the lockstep runs at once."""

    value: Tensor

    def wait(self) -> None:
        return None


def _copied(x: Tensor) -> Tensor:
    with quietly():
        return x.detach().clone(memory_format=torch.contiguous_format)


def _max(group: LockstepGroup, x: Tensor) -> Handle:
    made = _Later()
    made.value = group.all_reduce(x, "max")
    return made
