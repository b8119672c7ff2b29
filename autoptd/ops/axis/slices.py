"""Slices of a dim that ranks hold: a dim in groups is viewed as (groups, size, width), and rank r has [:, r, :]."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def own_slice(x: Tensor, dim: int, groups: int, size: int, rank: int) -> Tensor:
    """[..., groups*size*w, ...] -> [..., groups*w, ...]: this rank's block of each group. A view for one group."""
    length = x.shape[dim]
    assert length % (groups * size) == 0, f"dim {dim} of {list(x.shape)} does not divide by {groups} × {size}"
    if groups == 1:
        return x.narrow(dim, rank * (length // size), length // size)
    blocks = x.unflatten(dim, (groups, size, length // (groups * size)))
    return blocks.select(dim + 1, rank).flatten(dim, dim + 1)


def to_slices(x: Tensor, dim: int, groups: int, size: int) -> Tensor:
    """[..., groups*size*w, ...] -> [size, ..., groups*w, ...], contiguous: every rank's slice, by rank."""
    length = x.shape[dim]
    assert length % (groups * size) == 0, f"dim {dim} of {list(x.shape)} does not divide by {groups} × {size}"
    blocks = x.unflatten(dim, (groups, size, length // (groups * size)))
    return blocks.movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()


def from_slices(slices: Tensor, dim: int, groups: int) -> Tensor:
    """The inverse of `to_slices`: [size, ..., groups*w, ...] -> [..., groups*size*w, ...]."""
    blocks = slices.unflatten(dim + 1, (groups, slices.shape[dim + 1] // groups))
    return blocks.movedim(0, dim + 1).flatten(dim, dim + 2)


@dataclass(frozen=True)
class Slice:
    """The slice of a dim that one rank holds: its block of each of `groups` equal parts."""

    dim: int
    groups: int
    size: int  # ranks
    rank: int

    def whole(self, index: Tensor, length: int) -> Tensor:
        """Map positions in the slice, which is `length` long, to positions in the whole dim."""
        width = length // self.groups
        return index // width * (width * self.size) + self.rank * width + index % width
