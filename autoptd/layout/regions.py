"""Boxes of the whole tensor that a rank's elements fill: how checkpoints and whole-tensor optimizers describe shards.

A ZeRO shard is a range of a flat buffer, so it may begin and end within a row. Such a range of a contiguous tensor of n
dims is at most 2 n - 1 boxes: the rest of a row, whole rows, the start of a row, and recursively within those rows. A
tp split in several groups (three, for queries, keys and values in one matrix) also cuts boxes at the groups' borders.

    flat [2, 11) of [4, 3]      offsets  sizes
    . . x                       (0, 2)   (1, 1)
    x x x                       (1, 0)   (2, 3)
    x x x
    x x .                       (3, 0)   (1, 2)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from autoptd.layout.layout import TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import Placement, Split

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """A box of a whole tensor, and its position in a rank's flat elements."""

    offsets: Ints  # in the whole tensor
    sizes: Ints
    start: int  # index in the flat elements of the local box that it is cut from
    cut_from: Ints  # sizes of that box
    cut: tuple[int, int] | None = None  # dim and first index of the cut; None for the whole local box

    def of(self, flat: Tensor) -> Tensor:
        """Return a view of a rank's elements [n], in the shape `sizes`."""
        box = flat[self.start : self.start + math.prod(self.cut_from)].view(self.cut_from)
        if self.cut is None:
            return box
        dim, first = self.cut
        return box.narrow(dim, first, self.sizes[dim])


def regions_of(spec: TensorSpec, mesh: Mesh, rank: int, start: int, stop: int) -> tuple[Region, ...]:
    """Return the regions of elements [start, stop) of a rank's local part of a tensor, split over ep and tp."""
    shape, (expert, own) = tuple(spec.shape), spec.part(mesh, rank)
    if spec.ep > 1:
        shape = (shape[0] // spec.ep, *shape[1:])
    found = regions(shape, spec.placement, mesh.tp, own, start, stop)
    first = expert * shape[0] if spec.ep > 1 else 0
    return tuple(replace(r, offsets=(r.offsets[0] + first, *r.offsets[1:])) if first else r for r in found)


def regions(shape: Ints, placement: Placement, ranks: int, rank: int, start: int, stop: int) -> list[Region]:
    """Return the regions of elements [start, stop) of a rank's local tensor; `shape` is the whole tensor's."""
    if not isinstance(placement, Split) or ranks == 1:
        return [Region(offsets, sizes, at - start, sizes) for offsets, sizes, at in _boxes(shape, start, stop)]
    dim, groups = placement.dim, placement.groups
    local = (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])
    width = local[dim] // groups
    found = []
    for offsets, sizes, at in _boxes(local, start, stop):
        first, end = offsets[dim], offsets[dim] + sizes[dim]
        while first < end:
            group, inside = divmod(first, width)
            count = min(end - first, width - inside)
            whole = (group * ranks + rank) * width + inside
            found.append(
                Region(
                    (*offsets[:dim], whole, *offsets[dim + 1 :]),
                    (*sizes[:dim], count, *sizes[dim + 1 :]),
                    at - start,
                    sizes,
                    (dim, first - offsets[dim]),
                )
            )
            first += count
    return found


def _boxes(shape: Ints, start: int, stop: int) -> Iterator[tuple[Ints, Ints, int]]:
    """Yield (offsets, sizes, flat index) of the boxes that make up a range of a contiguous tensor."""
    if start >= stop:
        return
    if not shape:
        yield (), (), start
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # within one row
        yield from _row(shape, last, start, stop)
        return
    if start < first * inner:
        yield from _row(shape, first - 1, start, first * inner)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * inner
    if last * inner < stop:
        yield from _row(shape, last, last * inner, stop)


def _row(shape: Ints, row: int, start: int, stop: int) -> Iterator[tuple[Ints, Ints, int]]:
    base = row * math.prod(shape[1:])
    for offsets, sizes, at in _boxes(shape[1:], start - base, stop - base):
        yield (row, *offsets), (1, *sizes), at + base
