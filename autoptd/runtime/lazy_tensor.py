"""A tensor in a file, of which a rank reads its own slice without loading the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
