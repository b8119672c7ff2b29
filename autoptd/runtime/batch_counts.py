"""Counts over the global batch, and losses that are functions of sums over it.

Counts are gathered from all microbatches and dp ranks asynchronously until the first forward pass reads them, so no
rank waits at the start of a step. A count computed from other counts takes a further round.

A loss that is not a sum over microbatches k but a function f(S) of sums S_i = Σ_k S_i^(k) has the gradient

    dL/dθ = Σ_i ∂f/∂S_i (S) · Σ_k dS_i^(k)/dθ

so S must be known before the first backward pass. If the last stage finishes all its forward passes before its first
backward pass, one small all-reduce suffices. With other schedules, extra forward passes of the whole batch precede the
step.

The new value of a buffer that forward updates is a function of sums too. All forward passes of a step, recomputed ones
too, read the old value. The sums of a rank's microbatches are added up in float64, and over ranks by the all-reduce at
the end of the step: every rank has the sums of all stages, and ranks that hold copies of a buffer compute equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from autoptd.ops.group import Group, on_device
from autoptd.ops.stage import Count, Stage
from autoptd.runtime.batch import Microbatch, sample_count
from autoptd.runtime.comm.interfaces import Communicators


def start_counts(
    stages: Sequence[Stage], microbatches: Sequence[Microbatch], dp: Group, device: torch.device
) -> Callable[[], tuple[Tensor, ...]]:
    """Start the first round; return a function that waits for the counts, float64. () if no stage reads any."""
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
        """Count this rank's microbatches and start the all-gather of a round."""
        rows = [
            [on_device(x, torch.float64, self.device).reshape(-1) for x in self._row(mb)] for mb in self.microbatches
        ]
        own = self._combined(torch.stack(list(map(torch.cat, rows))))
        self.gathered = own.new_empty(self.dp.size * own.numel())
        self.handle = self.dp.all_gather_later(self.gathered, own)

    def _row(self, microbatch: Microbatch) -> tuple[Tensor, ...]:
        given = {name: microbatch[name] for name in self.stage.count_inputs}
        if not any(count.round for count in self.counted):
            return self.stage.loss_counts(**given)
        known = self.known or tuple(
            torch.ones(count.shape, dtype=torch.float64, device=self.device) for count in self.counted
        )
        return self.stage.loss_counts(**given, counts=known)

    def _finish(self) -> None:
        self.handle.wait()
        whole = self._combined(self.gathered.view(self.dp.size, -1))
        if not self.counted:
            self.known = whole.unbind()
            return
        parts = whole.split([prod(count.shape) for count in self.counted])
        self.known = tuple(part.view(count.shape) for part, count in zip(parts, self.counted, strict=True))

    def _combined(self, rows: Tensor) -> Tensor:
        """Combine rows of counts into one, each count by its own rule."""
        found = rows.sum(0)
        at = 0
        for count in self.counted:
            here = slice(at, at := at + prod(count.shape))
            if count.combine != "sum":
                found[here] = rows[:, here].amax(0) if count.combine == "max" else rows[:, here].amin(0)
        return found


@dataclass
class LossTotal:
    """Sum over a rank's microbatches of what the last stage returns for its loss.

    values: the loss, 0-dim, or the sums that it is a function of and the rows of all samples of the batch, float64
    [sums + samples * width]. Rows of other ranks' samples are 0, so the rows of the batch are a sum over ranks too.
    first: this dp rank's first sample.
    """

    values: Tensor
    sums: int = 0
    width: int = 0
    first: int = 0

    @staticmethod
    def of(stage: Stage, c: Communicators, microbatches: Sequence[Microbatch]) -> LossTotal:
        """Return the total of none of a rank's microbatches. A collective over dp if the stage's loss reads rows."""
        samples = first = 0
        if stage.row_width:
            own = on_device([sum(map(sample_count, microbatches))], torch.int64, c.device)
            shares = c.dp.all_gather(own).flatten().tolist()
            samples, first = sum(shares), sum(shares[: c.dp.rank])
        size = stage.partial_sums + samples * stage.row_width
        values = torch.zeros((size,) if size else (), dtype=torch.float64, device=c.device)
        return LossTotal(values, stage.partial_sums, stage.row_width, first)

    def anew(self) -> LossTotal:
        """Return the total of no microbatch, for a further pass over the same batch."""
        return replace(self, values=torch.zeros_like(self.values))

    def add(self, share: Tensor, sample: int) -> None:
        """Add the share of a microbatch whose first sample is `sample` of this dp rank."""
        if not self.width:
            self.values += share
            return
        self.values[: self.sums] += share[: self.sums]
        self.values[self._rows(share, sample)] += share[self.sums :]

    def gradient_of(self, gradient: Tensor, share: Tensor, sample: int) -> Tensor:
        """Return a microbatch's part of the gradient with respect to the sums and rows of the batch."""
        if not self.width:
            return gradient
        return torch.cat((gradient[: self.sums], gradient[self._rows(share, sample)]))

    def _rows(self, share: Tensor, sample: int) -> slice:
        start = self.sums + (self.first + sample) * self.width
        return slice(start, start + share.numel() - self.sums)


class LossOfSums:
    """The loss of one step as a function of its sums, and its gradient there. For ranks with the last stage only."""

    def __init__(self, stage: Stage, communicators: Communicators, counts: Callable[[], tuple[Tensor, ...]]) -> None:
        self._stage, self._communicators, self._counts = stage, communicators, counts
        self.loss: Tensor | None = None  # 0-dim float64
        self._gradient: Tensor | None = None

    def take(self, own: Tensor) -> None:
        """Sum `own`, the values of a `LossTotal`, over the data axis; evaluate the loss and its gradient.

        A collective.
        """
        sums = self._communicators.data.all_reduce(own.clone()).requires_grad_()
        with torch.enable_grad():
            loss = self._stage.loss_of(sums, self._counts())
            (gradient,) = torch.autograd.grad(loss, sums)
        self.loss, self._gradient = loss.detach().to(torch.float64), gradient

    def share(self) -> Tensor:
        """Return the loss on the first rank of the data axis, 0 on the others."""
        assert self.loss is not None
        return self.loss if self._communicators.data.rank == 0 else torch.zeros_like(self.loss)

    def gradient(self, own: Tensor) -> Tensor:
        """Return the loss's gradient at the sums and rows of the batch; `own`: this rank's, read by the first call."""
        if self._gradient is None:
            self.take(own)
        assert self._gradient is not None
        return self._gradient


class BatchSums:
    """The sums of one step for buffers: `own`, float64 [width], has those of this rank's microbatches."""

    def __init__(
        self, stages: Sequence[Stage], width: int, counts: Callable[[], tuple[Tensor, ...]], device: torch.device
    ) -> None:
        self.own = torch.zeros(width, dtype=torch.float64, device=device)
        self._stages, self._counts = stages, counts

    def add(self, stage: Stage, sums: Sequence[Tensor]) -> None:
        """Add the sums of one microbatch, partial values on tp and cp."""
        for (start, stop), x in zip(stage.summed, sums, strict=True):
            self.own[start:stop] += x.detach().reshape(-1).to(torch.float64)

    @torch.no_grad()
    def new_buffers(self, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return all buffers with their new values, computed from the old ones and from the sums of all ranks."""
        found = [(stage, stage.update_buffers(whole, self._counts())) for stage in self._stages]
        return [(stage.get_buffer(name), value) for stage, values in found for name, value in values.items()]


def write(buffers: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give each buffer its new value."""
    for buffer, value in buffers:
        buffer.copy_(value)
