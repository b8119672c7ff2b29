"""Counts of the global batch, from what each of its microbatches adds to them.

They are under way until the first forward pass asks for them: no rank waits for the others at the start of a step. A
count that is computed from others takes a round of its own.

A loss that is no sum but a function of sums over the global batch: f(S), S = Σ of what its microbatches add.

Each microbatch's gradient is that of its partial values, times the derivative of f at the sums of the whole batch:

    dL/dθ = Σ_i ∂f/∂S_i (S) · Σ_k dS_i^(k)/dθ

So the sums must be known before the first backward pass: on a last stage that has all its forward passes behind it by
then they are held meanwhile, and one small all-reduce is all that it takes; where a schedule begins backward passes
sooner, forward passes of the whole batch go ahead of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from autoptd.ops.group import Group
from autoptd.ops.stage import Count, Stage
from autoptd.runtime.batch import Microbatch
from autoptd.runtime.comm.interfaces import Communicators


def counts_under_way(
    stages: Sequence[Stage], microbatches: Sequence[Microbatch], dp: Group, device: torch.device
) -> Callable[[], tuple[Tensor, ...]]:
    """Begin the first round; the result waits for it, and gives the counts, float64. () where no stage reads any."""
    stage = next((s for s in stages if s.is_last or s.reads_counts), None)
    if stage is None or not stage.count_inputs:
        return tuple
    return _Counts(stage, microbatches, dp, device)


class _Counts:
    def __init__(self, stage: Stage, microbatches: Sequence[Microbatch], dp: Group, device: torch.device) -> None:
        self.stage, self.microbatches, self.dp, self.device = stage, microbatches, dp, device
        self.counted: tuple[Count, ...] = stage.counted
        self.known: tuple[Tensor, ...] | None = None
        self.round = 0
        self._begin()

    def __call__(self) -> tuple[Tensor, ...]:
        if self.known is None:
            self._finish()
            while self.round < max((count.round for count in self.counted), default=0):
                self.round += 1
                self._begin()
                self._finish()
        assert self.known is not None
        return self.known

    def _begin(self) -> None:
        """Count this rank's microbatches, and send it."""
        rows = [[x.to(self.device, torch.float64).reshape(-1) for x in self._row(mb)] for mb in self.microbatches]
        own = self._combined(torch.stack(list(map(torch.cat, rows))))
        self.every = own.new_empty(self.dp.size * own.numel())
        self.under_way = self.dp.all_gather_later(self.every, own)

    def _row(self, microbatch: Microbatch) -> tuple[Tensor, ...]:
        given = {name: microbatch[name] for name in self.stage.count_inputs}
        if not any(count.round for count in self.counted):
            return self.stage.loss_counts(**given)
        known = self.known or tuple(
            torch.ones(count.shape, dtype=torch.float64, device=self.device) for count in self.counted
        )
        return self.stage.loss_counts(**given, counts=known)

    def _finish(self) -> None:
        self.under_way.wait()
        whole = self._combined(self.every.view(self.dp.size, -1))
        if not self.counted:
            self.known = whole.unbind()
            return
        parts = whole.split([prod(count.shape) for count in self.counted])
        self.known = tuple(part.view(count.shape) for part, count in zip(parts, self.counted, strict=True))

    def _combined(self, rows: Tensor) -> Tensor:
        """Rows of counts, side by side, as one."""
        found = rows.sum(0)
        at = 0
        for count in self.counted:
            here = slice(at, at := at + prod(count.shape))
            if count.combine != "sum":
                found[here] = rows[:, here].amax(0) if count.combine == "max" else rows[:, here].amin(0)
        return found


class LossOfSums:
    """The function of a step, once its sums are complete. On ranks without the last stage there is nothing to know."""

    def __init__(self, stage: Stage, communicators: Communicators, counts: Callable[[], tuple[Tensor, ...]]) -> None:
        self._stage, self._communicators, self._counts = stage, communicators, counts
        self.loss: Tensor | None = None  # 0-dim float64
        self._gradient: Tensor | None = None

    def take(self, own: Tensor) -> None:
        """What this rank's microbatches add to the sums, float64 [partial_sums]. A collective over the ranks that share
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
        """Of the loss, at the sums, [partial_sums]; `own`: this rank's part of them, if they are not taken yet."""
        if self._gradient is None:
            self.take(own)
        assert self._gradient is not None
        return self._gradient
