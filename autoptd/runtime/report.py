"""Progress reports of training: a line of text on rank 0, and numbers for a logger."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from autoptd.plans.data import PlanData


@dataclass(frozen=True)
class StepReport:
    """A progress report. `loss` and `grad_norm` (before clipping) are of the last step; rates are means since the
    previous report, or since the first step, without evaluations. `mfu`: model FLOPs over the devices' peak;
    `memory_bytes`: peak of this rank's allocator, 0 on a CPU."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float  # per step
    units_per_s: float
    mfu: float
    memory_bytes: int
    averaged: bool = False  # the loss is the mean of per-microbatch losses, not that of the batch
    unit: str = "tokens"  # that `units_per_s` counts, or "samples" of a model without a sequence
    pixels_per_s: float = 0.0  # of a model whose convolutions read pictures

    def to_data(self) -> dict[str, float]:
        """Return the numbers for a logger.

        `for name, value in report.to_data().items(): writer.add_scalar(name, value, report.step)`
        """
        left_out = {"averaged", "unit"} if self.pixels_per_s else {"averaged", "unit", "pixels_per_s"}
        numbers = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {(f"{self.unit}_per_s" if name == "units_per_s" else name): value for name, value in numbers.items()}

    def __str__(self) -> str:
        memory = f"  {self.memory_bytes / 2**30:.2f} GiB" if self.memory_bytes else ""
        loss = f"loss {self.loss:.4f}" + " per microbatch" * self.averaged
        pixels = f"  {_count(self.pixels_per_s)} pixels/s" if self.pixels_per_s else ""
        return (
            f"step {self.step:6}  {loss}  |g| {self.grad_norm:.3g}  lr {self.learning_rate:.3g}  "
            f"{self.seconds:.3g} s  {_count(self.units_per_s)} {self.unit}/s{pixels}  MFU {self.mfu:.1%}{memory}"
        )


class Meter:
    """Counts steps and seconds between reports."""

    def __init__(
        self,
        units: float,
        flops: float,
        peak_flops_per_s: float,
        averaged: bool = False,
        unit: str = "tokens",
        pixels: float = 0.0,
    ) -> None:
        """`units` (as `unit` says), `flops`, `pixels`: of one step; `peak_flops_per_s`: the sum over devices.

        `averaged`: the loss is the mean of per-microbatch losses.
        """
        self.step, self._averaged, self._unit = 0, averaged, unit
        self._units, self._flops, self._peak, self._pixels = units, flops, peak_flops_per_s, pixels
        self._since, self._from = 0, time.perf_counter()

    def count(self) -> None:
        self.step += 1
        self._since += 1

    def restart(self) -> None:
        """Restart the clock and the count of steps for the next report."""
        self._since, self._from = 0, time.perf_counter()

    @contextmanager
    def paused(self, device: torch.device) -> Iterator[None]:
        """Stop the clock for what is no training. Synchronises with the device, whose queued steps are training."""
        _synchronise(device)
        began = time.perf_counter()
        try:
            yield
        finally:
            _synchronise(device)
            self._from += time.perf_counter() - began

    def report(self, loss: torch.Tensor, norm: torch.Tensor, learning_rate: float, device: torch.device) -> StepReport:
        """Report the steps since the last report. Synchronises with the device."""
        _synchronise(device)
        value, grad_norm, now = float(loss), float(norm), time.perf_counter()
        seconds = (now - self._from) / max(1, self._since)
        self.restart()
        return StepReport(
            step=self.step,
            loss=value,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            seconds=seconds,
            units_per_s=self._units / seconds,
            mfu=self._flops / (seconds * self._peak),
            memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            averaged=self._averaged,
            unit=self._unit,
            pixels_per_s=self._pixels / seconds,
        )


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _count(x: float) -> str:
    """Format a count as `950`, `12.3k`, `1.25M`."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if x >= limit:
            return f"{x / limit:.3g}{unit}"
    return f"{x:.3g}"


def meter_of(plan: PlanData, pixels: int = 0) -> Meter:
    """Return the meter of a plan. `pixels`: of a sample."""
    ranks = plan.cluster.pool_ranks(plan.world)
    peak = sum(
        n * pool.device.matmul_flops_per_s.of(plan.precision) for n, pool in zip(ranks, plan.cluster.pools, strict=True)
    )
    averaged = plan.loss_averaging != "global"
    return Meter(
        plan.units_per_step, plan.predicted.model_flops_per_step, peak, averaged, plan.unit, plan.batch * pixels
    )
