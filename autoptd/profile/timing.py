"""Time of one run of something, as the device sees it: the median of repeated runs after a warm-up.

On a GPU, events around runs that were queued while the GPU was still busy with other work, so that the time is the
GPU's and not that of Python handing over kernels one by one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

Run = Callable[[], object]
LEAST, MOST = 3, 50  # samples
ENOUGH_S = 0.5  # of one case: long enough for the clock of a GPU to settle under the load
_SAMPLE_S = 1e-3  # short runs are timed several at once, until they take this long together
_QUEUE = 200  # runs that are queued at most; CUDA holds about a thousand launches


class Timer(Protocol):
    """Times runs on one device."""

    def once(self, run: Run) -> float:
        """Seconds of one run, from start to finish, host included."""

    def sample(self, run: Run, runs: int) -> float:
        """Seconds of each of `runs` runs, one after the other without a pause."""


class HostTimer:
    """On a CPU a run is over when it returns."""

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
    """Events on the current stream, behind work that keeps the GPU busy while runs are queued."""

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
    """The timer for a device of this process."""
    return CudaTimer() if device.type == "cuda" else HostTimer()


def runs_per_sample(once_s: float) -> int:
    """How many runs are timed together, given the time of one."""
    return max(1, min(_QUEUE, int(_SAMPLE_S / max(once_s, 1e-9))))


def median_s(clock: Timer, run: Run, share_s: float) -> tuple[float, int]:
    """(seconds of a run, runs timed), within about `share_s` seconds, but of no fewer than `LEAST` samples."""
    end = time.perf_counter() + min(share_s, ENOUGH_S)
    run()  # makes what is made once: kernels are loaded, memory is taken
    once_s = clock.once(run)
    runs = runs_per_sample(once_s)
    samples: list[float] = []
    while len(samples) < LEAST or (len(samples) < MOST and time.perf_counter() < end):
        samples.append(clock.sample(run, runs))
    return statistics.median(samples), runs * len(samples)
