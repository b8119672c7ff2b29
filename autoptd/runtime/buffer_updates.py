"""Buffers that forward updates: sums over the batch, and the new values computed from them at the end of a step.

All forward passes of a step, recomputed ones too, read the old values. The sums of a rank's microbatches are added up
in float64, and over ranks by the all-reduce at the end of the step, so that every rank has those of all stages: ranks
that hold copies of a buffer compute equal values. Passes without a backward pass add nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autoptd.ops.stage import Stage


class BatchSums:
    """The sums of one step, float64 [width], over this rank's microbatches."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.own = torch.zeros(width, dtype=torch.float64, device=device)

    def add(self, stage: Stage, sums: Sequence[Tensor]) -> None:
        """Add the sums of one microbatch, partial values on tp and cp."""
        for (start, stop), x in zip(stage.summed, sums, strict=True):
            self.own[start:stop] += x.detach().reshape(-1).to(torch.float64)



@torch.no_grad()
def update_buffers(stages: Sequence[Stage], sums: Tensor, counts: Callable[[], tuple[Tensor, ...]]) -> None:
    """Write the new values of all buffers, computed from the old ones and from sums over the batch."""
    found = [(stage, stage.update_buffers(sums, counts())) for stage in stages]
    for stage, values in found:
        for name, value in values.items():
            stage.get_buffer(name).copy_(value)
