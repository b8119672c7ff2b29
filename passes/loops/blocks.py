"""Constants with a block for each sample: known for the samples of the example, written for any number of them.

Positions, windows and lengths of pictures are such constants, once the pictures' sizes are known. Block i is the first
block plus i times a fixed step:

    [0 1 2 3, 0 1 2 3, …]      step 0      positions within each picture
    [0 1 2 3, 4 5 6 7, …]      step 4      rows of each picture among those of all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoptd.passes.traced_reads import eager


@dataclass(frozen=True)
class SampleBlocks:
    """The blocks of all samples, one after another in `dim`."""

    first: Tensor
    step: Tensor  # 0-dim if it is the same for all elements of a block
    dim: int

    def write(self, count: Any) -> Tensor:
        """Return the blocks of `count` samples, a size of the trace, as ops of it."""
        base = literal(self.first)
        spread = base.expand(count, *base.shape)
        with eager():
            step = self.step.tolist() if self.step.any() else 0
            within = isinstance(step, int) and bool((self.first >= 0).all() and (self.first < step).all())
        if step:
            at = torch.arange(count, dtype=base.dtype).reshape(-1, *[1] * base.ndim)
            # `% step` changes nothing, and shows that each block numbers rows of its own sample
            first: Tensor = base % step if within else base  # type: ignore[operator]
            spread = first + at * (step if isinstance(step, int) else literal(self.step))
        return spread.movedim(0, self.dim).flatten(self.dim, self.dim + 1)


def literal(value: Tensor) -> Tensor:
    """Return a constant of the trace."""
    with eager():
        data = value.tolist()
    return torch.tensor(data, dtype=value.dtype).reshape(value.shape)


def blocks_of(blocks: Sequence[Tensor], dim: int) -> SampleBlocks | None:
    """Return the rule of some blocks; None if the difference of neighbours is not the same for all."""
    first = blocks[0]
    if any(x.shape != first.shape or x.dtype != first.dtype for x in blocks):
        return None
    if all(torch.equal(x, first) for x in blocks):
        return SampleBlocks(first, torch.zeros((), dtype=first.dtype), dim)
    if first.is_floating_point() or first.is_complex() or first.dtype == torch.bool:
        return None
    step = blocks[1] - first
    if not all(torch.equal(x, first + i * step) for i, x in enumerate(blocks)):
        return None
    even = bool((step == step.flatten()[0]).all())
    return SampleBlocks(first, step.flatten()[0] if even else step, dim)
