"""`Group`, the interface of collectives among the ranks of one axis, and the group of one rank; numbers that the host
makes on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

Reduction: TypeAlias = Literal["sum", "max"]


class Handle(Protocol):
    """An asynchronous collective. Its tensors may be neither read nor written before `wait` returns."""

    def wait(self) -> None: ...


class Group(Protocol):
    """The ranks of one axis. `rank` is this rank's index in it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce in place and return x."""
        ...

    def all_reduce_later(self, x: Tensor) -> Handle:
        """Sum a floating-point x in place, asynchronously."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather x [...] of every rank: [size, ...]."""
        ...

    def all_gather_later(self, out: Tensor, x: Tensor) -> Handle:
        """Gather x [n] of every rank into out [size * n], asynchronously; x may be this rank's part of out."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of this rank's row: [size, ...] -> [...]."""
        ...

    def reduce_scatter_later(self, out: Tensor, x: Tensor) -> Handle:
        """Reduce-scatter floating-point x [size * n] into out [n], asynchronously. out may be this rank's part of x, of
        which the rest is then undefined."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """Exchange rows, [size, ...] -> [size, ...]: row j goes to rank j, row i comes from rank i."""
        ...

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange uneven parts, [sum(send), ...] -> [sum(receive), ...]: the next `send[j]` rows go to rank j, and the
        next `receive[i]` come from rank i."""
        ...

    def shift_later(self, out: Tensor, x: Tensor) -> Handle:
        """Send x to the next rank of the ring, and receive out, of equal shape and dtype, from the previous one."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with the x of the group's rank `source`, and return it."""
        ...


class Done:
    """The handle of a completed collective."""

    def wait(self) -> None:
        return None


@dataclass(frozen=True)
class SingleRankGroup:
    """The group of one rank: every collective is the identity."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        return x

    def all_reduce_later(self, x: Tensor) -> Handle:
        return Done()

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def all_gather_later(self, out: Tensor, x: Tensor) -> Handle:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Done()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.squeeze(0)

    def reduce_scatter_later(self, out: Tensor, x: Tensor) -> Handle:
        return self.all_gather_later(out, x)

    def all_to_all(self, x: Tensor) -> Tensor:
        return x

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return x

    def shift_later(self, out: Tensor, x: Tensor) -> Handle:
        return self.all_gather_later(out, x)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x


def on_device(numbers: Tensor | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device. Does not wait for a GPU, as a copy of unpinned memory does."""
    found = torch.as_tensor(numbers, dtype=dtype)
    if device.type == "cuda" and found.device.type == "cpu":
        return found.pin_memory().to(device, non_blocking=True)
    return found.to(device)
