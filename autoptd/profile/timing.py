"""Device time of a function: the median of repeated runs after a warm-up.

On a GPU, events enclose runs that were queued while the GPU was still busy with other work, so that they measure the
GPU and not the rate at which Python launches kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

Run = Callable[[], object]
LEAST, MOST = 3, 50  # samples
ENOUGH_S = 0.5  # for one case: long enough for a GPU's clock to settle under the load
_SAMPLE_S = 1e-3  # a sample is as many runs as take this long
_QUEUE = 200  # runs queued at once, at most; CUDA's queue holds about a thousand launches


class Timer(Protocol):
    """A timer of runs on one device."""

    def once(self, run: Run) -> float:
        """Return the seconds of one run, from start to finish, host included."""

    def sample(self, run: Run, runs: int) -> float:
        """Return the mean seconds of `runs` runs, back to back."""


class HostTimer:
    """A timer for CPUs, where a run is finished when it returns."""

    def once(self, run: Run) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def sample(self, run: Run, runs: int) -> float:
        start = time.perf_counter()
        for _ in range(runs):
            run()
        return (time.perf_counter() - start) / runs


class CudaTimer:
    """A timer with events on the current stream, after work that keeps the GPU busy while runs are queued."""

    def __init__(self) -> None:
        self._busy = torch.ones(2048, 2048, device="cuda")
        self._busy_s = 0.0

    def once(self, run: Run) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def sample(self, run: Run, runs: int) -> float:
        if not self._busy_s:
            self._busy_s = min(self.once(self._one_busy) for _ in range(5))
        start = time.perf_counter()
        run()
        queueing_s = (time.perf_counter() - start) * runs
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(min(_QUEUE, 1 + int(2 * queueing_s / self._busy_s))):
            self._one_busy()
        begin.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / runs

    def _one_busy(self) -> torch.Tensor:
        return self._busy @ self._busy


def timer(device: torch.device) -> Timer:
    """Return the timer for a device of this process."""
    return CudaTimer() if device.type == "cuda" else HostTimer()


def runs_per_sample(once_s: float) -> int:
    """Return the number of runs in a sample, given the time of one."""
    return max(1, min(_QUEUE, int(_SAMPLE_S / max(once_s, 1e-9))))


def median_s(clock: Timer, run: Run, share_s: float) -> tuple[float, int]:
    """Return (seconds of a run, number of runs), within about `share_s` seconds but with at least `LEAST` samples."""
    end = time.perf_counter() + min(share_s, ENOUGH_S)
    run()  # one-time work: loading kernels, allocating memory
    once_s = clock.once(run)
    runs = runs_per_sample(once_s)
    samples: list[float] = []
    while len(samples) < LEAST or (len(samples) < MOST and time.perf_counter() < end):
        samples.append(clock.sample(run, runs))
    return statistics.median(samples), runs * len(samples)
