"""A loss that is no sum but a function of sums over the global batch: f(S), S = Σ of what its microbatches add.

Each microbatch's gradient is that of its addends, times the derivative of f at the sums of the whole batch:

    dL/dθ = Σ_i ∂f/∂S_i (S) · Σ_k dS_i^(k)/dθ

So the sums must be known before the first backward pass: on a last stage that has all its forward passes behind it by
then they are held meanwhile, and one small all-reduce is all that it takes; where a schedule begins backward passes
sooner, forward passes of the whole batch go ahead of the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autoptd.runtime.comm import Communicators
from autoptd.runtime.stage import Stage


class LossOfSums:
    """The function of a step, once its sums are complete. On ranks without the last stage there is nothing to know."""

    def __init__(self, stage: Stage, communicators: Communicators, counts: Callable[[], tuple[Tensor, ...]]) -> None:
        self._stage, self._communicators, self._counts = stage, communicators, counts
        self.loss: Tensor | None = None  # 0-dim float64
        self._gradient: Tensor | None = None

    def take(self, own: Tensor) -> None:
        """What this rank's microbatches add to the sums, float64 [addends]. A collective over the ranks that share
        the batch and its tokens."""
        sums = self._communicators.data.all_reduce(own.clone()).requires_grad_()
        with torch.enable_grad():
            loss = self._stage.loss_of(sums, self._counts())
            (gradient,) = torch.autograd.grad(loss, sums)
        self.loss, self._gradient = loss.detach().to(torch.float64), gradient

    def share(self) -> Tensor:
        """The loss on one of the ranks that know it, 0 on the others."""
        assert self.loss is not None
        return self.loss if self._communicators.data.rank == 0 else torch.zeros_like(self.loss)

    def gradient(self, own: Tensor) -> Tensor:
        """Of the loss, at the sums, [addends]; `own`: this rank's part of them, if they are not taken yet."""
        if self._gradient is None:
            self.take(own)
        assert self._gradient is not None
        return self._gradient
