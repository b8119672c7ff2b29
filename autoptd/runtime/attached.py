"""Communicators of processes on one machine: what a rank needs of the others' tensors it reads out of their memory.

What goes through sockets is copied twice by the kernel, piece by piece, each end waiting for the other. Linux copies
from one process to another at once (process_vm_readv; message-passing libraries call it cross-memory attach), if both
belong to one user and the system allows it. A group tries when it is made; else it is one of messages (`gloo.py`).

Messages only say when. Of each collective, from every rank to every other one:

    offer     here lies my tensor
    summed    my part of it is the sum now (all-reduce)
    read      I need yours no more: only now is it free for others

A thread of the group reads, so that a rank that computes serves those that wait, in whatever order they do.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.comm import Handle, Reduction
from autoptd.runtime.gloo import GlooGroup
from autoptd.runtime.place import Talk

LEAST_BYTES = 2**23  # of a whole tensor; with smaller ones, telling each other takes longer than messages do
PIECE_BYTES = 2**21  # of all ranks' tensors: what is summed at once, in room that stays in the cache
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h


class _Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _libc() -> ctypes.CDLL | None:
    """With what reads another process's memory; None on systems without."""
    try:
        found = ctypes.CDLL(None, use_errno=True)
        found.process_vm_readv.restype, number, pointer = ctypes.c_ssize_t, ctypes.c_ulong, ctypes.c_void_p
        found.process_vm_readv.argtypes = (ctypes.c_int, pointer, number, pointer, number, number)
    except (OSError, TypeError, AttributeError):
        return None
    return found


_LIBC = _libc()


def read_memory(process: int, address: int, out: Tensor) -> None:
    """What lies there in a process's memory, into a contiguous tensor. Raises RuntimeError where it cannot be read."""
    assert _LIBC is not None and out.is_contiguous()
    done, nbytes = 0, out.numel() * out.itemsize
    while done < nbytes:
        mine, theirs = (_Vector(start + done, nbytes - done) for start in (out.data_ptr(), address))
        count = _LIBC.process_vm_readv(process, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if count <= 0:
            raise RuntimeError(f"the memory of process {process} cannot be read: {os.strerror(ctypes.get_errno())}")
        done += count


def attach(group: GlooGroup) -> GlooGroup:
    """The same group, attached where all of its ranks can read each other's memory. A collective of the group."""
    token = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64)
    if _LIBC is not None and hasattr(_LIBC, "prctl"):  # lets those that the same process started look at this one
        _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
    known = group.all_gather(torch.cat((torch.tensor([os.getpid(), token.data_ptr()]), token)))
    readable = torch.tensor([_LIBC is not None and all(map(_is_there, known))], dtype=torch.int64)
    if not bool(group.all_gather(readable).all()):  # the tokens are read by now
        return group
    return AttachedGroup(group.group, group.place, tuple(known[:, 0].tolist()))


def _is_there(row: Tensor) -> bool:
    """Whether a process that can be read has this token at this address: one of another machine has not."""
    process, address, *token = row.tolist()
    found = torch.zeros(2, dtype=torch.int64)
    try:
        read_memory(process, address, found)
    except RuntimeError:
        return False
    return bool(found.tolist() == token)


class _Reader:
    """A daemon thread that does one thing after the other; it is there once something is to do."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, task: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="autoptd reader", daemon=True)
            self._thread.start()
        done: Future[None] = Future()
        self._queue.put((task, done))
        return done

    @torch.no_grad()
    def _work(self) -> None:
        while True:
            task, done = self._queue.get()
            try:
                task()
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001  raised by who waits
                done.set_exception(error)
            del task, done  # a tensor of what is done is held by nobody


@dataclass
class _UnderWay:
    """A collective that the reader carries out."""

    done: Future[None] | None
    talk: Talk

    def wait(self) -> None:
        done, self.done = self.done, None
        if done is not None:
            with self.talk:
                done.result()


@dataclass
class AttachedGroup(GlooGroup):
    """`processes`: of each rank."""

    processes: tuple[int, ...] = ()
    _reader: _Reader = field(init=False, default_factory=_Reader)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        if op != "sum" or not _is_large(x):
            return super().all_reduce(x, op)
        self.all_reduce_later(x).wait()
        return x

    def all_reduce_later(self, x: Tensor) -> Handle:
        if not _is_large(x):
            return super().all_reduce_later(x)
        return self._later("all-reduce with", x.view(-1), _sum_everywhere)

    def all_gather_later(self, out: Tensor, x: Tensor) -> Handle:
        if not _is_large(out):
            return super().all_gather_later(out, x)
        rows = out.view(self.size, x.numel())
        return self._later("all-gather with", x, lambda exchange: _gather(exchange, rows))

    def reduce_scatter_later(self, out: Tensor, x: Tensor) -> Handle:
        if not _is_large(x):
            return super().reduce_scatter_later(out, x)
        return self._later("reduce-scatter with", x, lambda exchange: _sum_own(exchange, out))

    def _later(self, what: str, x: Tensor, read: Callable[[_Exchange], None]) -> Handle:
        talk = self.talk(what)
        with talk:
            exchange = _Exchange(self, x)
            return _UnderWay(self._reader.start(lambda: read(exchange)), talk)


def _is_large(whole: Tensor) -> bool:
    return whole.numel() * whole.itemsize >= LEAST_BYTES


_Said: TypeAlias = "tuple[list[dist.Work | None], tuple[Tensor, ...]]"  # and what must outlive them


class _Exchange:
    """One collective of a group: every rank's tensor `x`, flat, of one size, readable until `agree` was called last."""

    def __init__(self, group: AttachedGroup, x: Tensor) -> None:
        self.group, self.x, self.rank, self.size = group, x, group.rank, group.size
        self._tag = group.next_tag()
        self._addresses = torch.zeros(self.size, 1, dtype=torch.int64)
        self._offers = self._said(torch.tensor([x.data_ptr()]), self._addresses)

    def _said(self, word: Tensor, words: Tensor) -> _Said:
        works = self.group.receive_rows(words, self._tag) + self.group.send_rows([word] * self.size, self._tag)
        return works, (word, words)

    def offers(self) -> None:
        """Wait until every rank has told where its tensor lies."""
        _wait(self._offers)

    def agree(self) -> None:
        """Wait until every rank has come so far."""
        _wait(self._said(torch.zeros(1, dtype=torch.uint8), torch.zeros(self.size, 1, dtype=torch.uint8)))

    @property
    def others(self) -> list[int]:
        """First the next one, so that not all read from one."""
        return [(self.rank + d) % self.size for d in range(1, self.size)]

    def read(self, rank: int, first: int, out: Tensor) -> None:
        """A rank's elements from `first` on."""
        address = int(self._addresses[rank]) + first * self.x.itemsize
        read_memory(self.group.processes[rank], address, out)

    def own_part(self) -> slice:
        """Of all elements, those that this rank sums up."""
        return self.part(self.rank)

    def part(self, rank: int) -> slice:
        n = self.x.numel()
        return slice(n * rank // self.size, n * (rank + 1) // self.size)

    def sum_part(self, part: slice, out: Tensor) -> None:
        """Of every rank's tensor a part, summed in rank order: the same bits on every run. `out` may be x's own."""
        width = max(1, PIECE_BYTES // (self.size * self.x.itemsize))
        room = self.x.new_empty(self.size, min(width, part.stop - part.start))
        for first in range(part.start, part.stop, width):
            last = min(first + width, part.stop)
            rows = room[:, : last - first]
            for rank in self.others:
                self.read(rank, first, rows[rank])
            rows[self.rank].copy_(self.x[first:last])
            torch.sum(rows, 0, out=out[first - part.start : last - part.start])


def _wait(said: _Said) -> None:
    for work in said[0]:
        if work is not None:
            work.wait()


def _gather(exchange: _Exchange, rows: Tensor) -> None:
    """Row i from rank i."""
    exchange.offers()
    if rows[exchange.rank].data_ptr() != exchange.x.data_ptr():
        rows[exchange.rank].copy_(exchange.x)
    for rank in exchange.others:
        exchange.read(rank, 0, rows[rank])
    exchange.agree()


def _sum_own(exchange: _Exchange, out: Tensor) -> None:
    """Of x [size * n] this rank's row, summed."""
    exchange.offers()
    exchange.sum_part(exchange.own_part(), out)
    exchange.agree()


def _sum_everywhere(exchange: _Exchange) -> None:
    """Of x all elements: each rank sums a part, and reads the others' parts from them."""
    exchange.offers()
    own = exchange.own_part()
    exchange.sum_part(own, exchange.x[own])
    exchange.agree()
    for rank in exchange.others:
        part = exchange.part(rank)
        exchange.read(rank, part.start, exchange.x[part])
    exchange.agree()
