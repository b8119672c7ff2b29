"""A tensor that lies in a file: a rank reads its own slice, and nobody holds the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """`read(places)` gives the elements at one slice for each dim."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], Tensor]

    def whole(self) -> Tensor:
        return self.read(tuple(slice(0, n) for n in self.shape))

    def own_slice(self, dim: int, groups: int, size: int, rank: int) -> Tensor:
        """As `axis.own_slice` of the whole tensor: this rank's block of each group."""
        width = self.shape[dim] // (groups * size)
        starts = [(group * size + rank) * width for group in range(groups)]
        places = [
            tuple(slice(at, at + width) if d == dim else slice(0, n) for d, n in enumerate(self.shape)) for at in starts
        ]
        parts = [self.read(place) for place in places]
        return parts[0] if groups == 1 else torch.cat(parts, dim)
