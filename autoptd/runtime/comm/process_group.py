"""A group over a torch.distributed process group.

NCCL and gloo support some dtypes only. Elements of other dtypes are moved as bytes and summed in a wider dtype.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from autoptd.ops.group import Handle, Reduction
from autoptd.runtime.faults.rank_status import PendingComm, RankStatus

# renamed in torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_CARRIED = (*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)
_SUMMED_IN = {torch.bool: torch.uint8, torch.int16: torch.int32}


@dataclass
class Works:
    """torch's works in progress, and the tensors that must outlive them."""

    works: Sequence[dist.Work | None]
    tensors: tuple[Tensor, ...]
    pending: PendingComm

    def wait(self) -> None:
        works, self.works = self.works, ()
        if works:
            with self.pending:
                for work in works:
                    if work is not None:
                        work.wait()
        self.tensors = ()


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as flat bytes if NCCL and gloo do not support its dtype."""
    return x if x.dtype in _CARRIED else x.view(-1).view(torch.uint8)


@dataclass
class ProcessGroup:
    """A `Group` over one torch process group. `status` records what this rank waits for."""

    group: dist.ProcessGroup
    status: RankStatus = field(default_factory=RankStatus)
    rank: int = field(init=False)
    size: int = field(init=False)
    others: tuple[int, ...] = field(init=False)  # global ranks of the group except this one

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        mine = dist.get_rank()
        self.others = tuple(rank for rank in dist.get_process_group_ranks(self.group) if rank != mine)

    def pending(self, what: str) -> PendingComm:
        return PendingComm(self.status, what, self.others)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        wide = x.to(_SUMMED_IN.get(x.dtype, x.dtype))
        with self.pending("all-reduce with"):
            dist.all_reduce(wide, _OPS[op], group=self.group)
        return x if wide is x else x.copy_(wide)

    def all_reduce_later(self, x: Tensor) -> Handle:
        pending = self.pending("all-reduce with")
        with pending:
            return Works([dist.all_reduce(x, group=self.group, async_op=True)], (x,), pending)

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        with self.pending("all-gather with"):
            _all_gather(as_bytes(out.view(-1)), as_bytes(x.reshape(-1)), group=self.group)
        return out

    def all_gather_later(self, out: Tensor, x: Tensor) -> Handle:
        pending = self.pending("all-gather with")
        with pending:
            return Works([_all_gather(as_bytes(out), as_bytes(x), group=self.group, async_op=True)], (out, x), pending)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        wide = x.to(_SUMMED_IN.get(x.dtype, x.dtype))
        out = wide.new_empty(x.shape[1:])
        with self.pending("reduce-scatter with"):
            _reduce_scatter(out.view(-1), wide.view(-1), group=self.group)
        return out.to(x.dtype)

    def reduce_scatter_later(self, out: Tensor, x: Tensor) -> Handle:
        pending = self.pending("reduce-scatter with")
        with pending:
            if x.device.type == "cpu" and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                # gloo all-reduces a copy of x, and copies a part of that to out
                return Works([dist.all_reduce(x, group=self.group, async_op=True)], (x,), pending)
            return Works([_reduce_scatter(out, x, group=self.group, async_op=True)], (out, x), pending)

    def all_to_all(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        with self.pending("all-to-all with"):
            dist.all_to_all_single(as_bytes(out), as_bytes(x), group=self.group)
        return out

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = x.new_empty(sum(receive), *x.shape[1:])
        width = 1 if as_bytes(x) is x else math.prod(x.shape[1:]) * x.itemsize  # there may be no row
        with self.pending("exchange of rows with"):
            dist.all_to_all_single(
                as_bytes(out),
                as_bytes(x),
                [n * width for n in receive],
                [n * width for n in send],
                group=self.group,
            )
        return out

    def shift_later(self, out: Tensor, x: Tensor) -> Handle:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        both = [
            dist.P2POp(dist.isend, as_bytes(x), group=self.group, group_peer=after),
            dist.P2POp(dist.irecv, as_bytes(out), group=self.group, group_peer=before),
        ]
        pending = self.pending("ring shift with")
        with pending:
            return Works(dist.batch_isend_irecv(both), (out, x), pending)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        with self.pending("broadcast among"):
            dist.broadcast(as_bytes(x), group=self.group, group_src=source)
        return x


def default_store() -> dist.Store:
    """Return a new connection to the default store, so that a thread can use it while another blocks on its own."""
    found: dist.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return found


def store_host() -> int | None:
    """Return the rank whose process holds the store, None if the launcher holds it (torchrun)."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
