"""The dp axis of an emitted program: ranks that compute other samples at the same time.

A loss may be averaged over microbatches where one microbatch is that of all dp ranks: its sums are then summed over
them in every forward pass. So are statistics over the batch that samples are normalised by. All other communication
over dp is the runtime's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoptd.ops.group import Group
from autoptd.ops.tp_axis import Axis


@dataclass
class Mode:
    """The use of the microbatches of a forward pass; shared by the copies of an axis.

    `counted`: whether the microbatch counts; one that only keeps other ranks company does not. `running`: whether
    running statistics stand in for those of the batch, as in evaluation. `alone`: whether they stand in for all, so
    that no rank needs to know the others'.
    """

    counted: bool = True
    running: bool = False
    alone: bool = False


class Replicas(Axis):
    """Sums over dp ranks. A program without dp ranks has `Replicas` of one."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.mode = Mode()

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks: each one's loss is a function of the result, so gradients are summed too."""
        return self.all_reduce_both(x if self.mode.counted else torch.zeros_like(x))

    def batch_sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, each of which has all its samples in one microbatch; gradients are summed too."""
        return x if self.mode.alone else self.all_reduce_both(x)

    def in_training(self, x: Tensor, running: Tensor) -> Tensor:
        """Return a statistic of the batch, or the running one that stands in for it."""
        return running if self.mode.running else x
