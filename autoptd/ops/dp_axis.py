"""The dp axis of an emitted program: ranks that compute other samples at the same time.

A loss may be averaged over microbatches where one microbatch is that of all dp ranks: its sums are then summed over
them in every forward pass. All other communication over dp is the runtime's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoptd.ops.group import Group
from autoptd.ops.tp_axis import Axis


class Replicas(Axis):
    """Sums over dp ranks. `counted`: whether the microbatch counts; one that only keeps other ranks company does not.

    A program without dp ranks has `Replicas` of one.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.counted = True

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks: each one's loss is a function of the result, so gradients are summed too."""
        return self.all_reduce_both(x if self.counted else torch.zeros_like(x))
