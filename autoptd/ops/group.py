"""The ranks of one axis as ops and the runtime see them: collectives on a group, and the group of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

Reduction: TypeAlias = Literal["sum", "max"]


class Handle(Protocol):
    """Something under way. The tensors handed in may be neither read nor written before `wait` returns."""

    def wait(self) -> None: ...


class Group(Protocol):
    """The ranks of one axis. `rank` is this rank's index in it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce in place; returns x."""
        ...

    def all_reduce_later(self, x: Tensor) -> Handle:
        """Sum in place, of floating point."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...]."""
        ...

    def all_gather_later(self, out: Tensor, x: Tensor) -> Handle:
        """x [n] of every rank into out [size * n], flat; x may be this rank's part of out."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size, ...] -> [...]: the sum over ranks of this rank's row."""
        ...

    def reduce_scatter_later(self, out: Tensor, x: Tensor) -> Handle:
        """x [size * n] into out [n], flat, of floating point; out may be this rank's part of x."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size, ...] -> [size, ...]: row j goes to rank j, row i comes from rank i."""
        ...

    def shift_later(self, out: Tensor, x: Tensor) -> Handle:
        """Round the ring: x goes to the next rank, out comes from the one before, of the same shape and dtype."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with that of the group's rank `source`; returns x."""
        ...


class Done:
    """A handle of something that is complete."""

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

    def shift_later(self, out: Tensor, x: Tensor) -> Handle:
        return self.all_gather_later(out, x)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x
