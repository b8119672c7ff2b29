"""Communicators on gloo: collectives made of messages between every two ranks, where these are quicker than gloo's own.

gloo's all-gather receives into room of its own and copies, it emulates reduce-scatter by a whole all-reduce, and a step
of its rings changes threads. Here each rank sends to all others at once:

    all-gather        into its place
    reduce-scatter    by pieces, into room for a few of them that is used again and again (fresh memory costs more than
                      the transfer); summed in rank order: the same bits on every run
    small all-reduce  all-gather and a sum in rank order: one exchange in place of 2 (size - 1) one after the other

Large all-reduces are gloo's, whose ring moves as much and needs no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.comm import Handle, Reduction
from autoptd.runtime.place import Talk
from autoptd.runtime.process_group import ProcessGroup, Works, as_bytes

PIECE_BYTES = 2**21  # of what is received for one piece of a reduce-scatter, from all ranks
ROOMS = 4  # pieces that are received at once
SMALL_BYTES = 2**16  # of an all-reduce, gathered from all ranks
_TAGS = 2**30
Rows = Sequence[Tensor] | Tensor


@dataclass
class GlooGroup(ProcessGroup):
    """Each collective has a tag, so that none takes another's messages, whatever is waited for first."""

    _tag: int = field(init=False, default=0)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        if self.size * x.numel() * x.itemsize > SMALL_BYTES:
            return super().all_reduce(x, op)
        every = self.all_gather(x)
        return x.copy_(every.sum(0, dtype=x.dtype) if op == "sum" else every.amax(0))

    def all_gather_later(self, out: Tensor, x: Tensor) -> Handle:
        talk, rows = self.talk("all-gather with"), out.view(self.size, x.numel())
        with talk:
            works = self.receive_rows(rows, tag := self.next_tag())
            works += self.send_rows([x] * self.size, tag)
            if rows[self.rank].data_ptr() != x.data_ptr():
                rows[self.rank].copy_(x)
            return Works(works, (out, x), talk)

    def reduce_scatter_later(self, out: Tensor, x: Tensor) -> Handle:
        talk = self.talk("reduce-scatter with")
        with talk:
            return _ScatteredSum(self, out, x.view(self.size, out.numel()), talk)

    def next_tag(self) -> int:
        self._tag = self._tag % _TAGS + 1  # 0 is that of other messages
        return self._tag

    def receive_rows(self, rows: Rows, tag: int) -> list[dist.Work | None]:
        """Row i from rank i, first from the rank before."""
        return [
            dist.irecv(as_bytes(rows[i]), group=self.group, group_src=i, tag=tag)
            for i in ((self.rank - d) % self.size for d in range(1, self.size))
            if rows[i].numel()
        ]

    def send_rows(self, rows: Rows, tag: int) -> list[dist.Work | None]:
        """Row j to rank j, first to the next rank."""
        return [
            dist.isend(as_bytes(rows[j]), group=self.group, group_dst=j, tag=tag)
            for j in ((self.rank + d) % self.size for d in range(1, self.size))
            if rows[j].numel()
        ]


class _ScatteredSum:
    """A reduce-scatter under way: rows [size, n] of every rank, the sum of this rank's row into `out` [n]."""

    def __init__(self, group: GlooGroup, out: Tensor, rows: Tensor, talk: Talk) -> None:
        self._group, self._out, self._rows, self._talk = group, out, rows, talk
        self._tag = group.next_tag()
        width = max(1, PIECE_BYTES // (group.size * rows.itemsize))
        self._pieces = [slice(start, start + width) for start in range(0, rows.shape[1], width)]
        self._room = rows.new_empty(min(ROOMS, len(self._pieces)), group.size, min(width, rows.shape[1]))
        self._arriving = [self._receive(k) for k in range(len(self._room))]
        self._leaving = [work for piece in self._pieces for work in group.send_rows(rows[:, piece], self._tag)]

    def _received(self, k: int) -> Tensor:
        """Where piece k of every rank lies."""
        return self._room[k % ROOMS][:, : self._rows[0, self._pieces[k]].numel()]

    def _receive(self, k: int) -> list[dist.Work | None]:
        return self._group.receive_rows(self._received(k), self._tag)

    def wait(self) -> None:
        for k, piece in enumerate(self._pieces):
            parts, own = self._received(k), self._rows[self._group.rank, piece]
            Works(self._arriving[k], (), self._talk).wait()
            parts[self._group.rank].copy_(own)
            torch.sum(parts, 0, out=self._out[piece])
            if k + ROOMS < len(self._pieces):
                self._arriving.append(self._receive(k + ROOMS))
        Works(self._leaving, (), self._talk).wait()
        self._pieces, self._leaving, self._room = [], [], self._room.new_empty(0)
