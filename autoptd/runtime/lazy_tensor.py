"""A rank's part of a tensor, which may be in a file: only the part is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autoptd.layout.layout import TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import Split
from autoptd.ops.axis.slices import own_slice


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. `read(places)` loads the elements at one slice per dim."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], Tensor]

    def whole(self) -> Tensor:
        return self.read(tuple(slice(0, n) for n in self.shape))

    def own_slice(self, dim: int, groups: int, size: int, rank: int) -> Tensor:
        """Read this rank's block of each group, as `tp_axis.own_slice` of the whole tensor."""
        width = self.shape[dim] // (groups * size)
        starts = [(group * size + rank) * width for group in range(groups)]
        places = [
            tuple(slice(at, at + width) if d == dim else slice(0, n) for d, n in enumerate(self.shape)) for at in starts
        ]
        parts = [self.read(place) for place in places]
        return parts[0] if groups == 1 else torch.cat(parts, dim)


def own_part(full: Tensor | Stored, spec: TensorSpec, mesh: Mesh, rank: int) -> Tensor:
    """Return the part of a tensor that a rank holds."""
    expert, own = spec.part(mesh, rank)
    if spec.ep > 1:
        full = _slice(full, 0, 1, spec.ep, expert)
    if isinstance(spec.placement, Split) and mesh.tp > 1:
        full = _slice(full, spec.placement.dim, spec.placement.groups, mesh.tp, own)
    return full.whole() if isinstance(full, Stored) else full


def _slice(full: Tensor | Stored, dim: int, groups: int, size: int, rank: int) -> Tensor:
    if isinstance(full, Stored):
        return full.own_slice(dim, groups, size, rank)
    return own_slice(full, dim, groups, size, rank)
