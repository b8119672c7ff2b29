"""Timing of collectives and messages: all ranks of a group at once, through the communicators that training uses.

Every decision (whether all ranks have the memory, how many runs, when to stop) is made from all-reduced numbers, so
that no rank waits in a collective that another has skipped. A case's time is that of its slowest rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autoptd.profile.budget import first_line
from autoptd.profile.host import host_run
from autoptd.profile.ops import DTYPES, clock_of
from autoptd.profile.record import Case, Measurement, Skipped
from autoptd.profile.timing import ENOUGH_S, LEAST, MOST, Run, Timer, runs_per_sample
from autoptd.runtime.comm.members import group_of_members
from autoptd.runtime.comm.process_group import ProcessGroup
from autoptd.runtime.comm.processes import ProcessChannel


class Network:
    """The process groups of a running world. All ranks must make the same calls in the same order."""

    def __init__(self, device: torch.device, clock: Timer) -> None:
        self.device, self.clock = device, clock
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._groups: dict[tuple[int, int], ProcessGroup] = {}
        self._channels: dict[int, ProcessChannel] = {}

    def agree(self, *values: float) -> list[float]:
        """Return the maximum of each value over all ranks. A collective."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return [float(x) for x in numbers.tolist()]

    def sums(self, values: Sequence[int]) -> list[int]:
        """Return the sum of each value over all ranks. A collective."""
        numbers = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(numbers)
        return numbers.tolist()

    def medians(self, values: Sequence[float | None]) -> list[float | None]:
        """Return the median of each positive value over the ranks that have it; None if none does. A collective.

        The two numbers in the middle are found bit by bit, by counting the ranks with a smaller one, so that no rank
        has the numbers of all. The bits of positive floats, as integers, are in the order of the floats.
        """
        own = torch.tensor([math.inf if x is None else x for x in values], dtype=torch.float64).view(torch.int64)
        known = self.sums([x is not None for x in values])
        below = torch.tensor([[(n - 1) // 2 for n in known], [n // 2 for n in known]])  # smaller numbers, of each
        found = torch.zeros_like(below)
        for bit in reversed(range(63)):
            tried = found + (1 << bit)
            smaller = torch.tensor(self.sums((own < tried).flatten().tolist())).view_as(below)
            found = torch.where(smaller <= below, tried, found)
        middle = found.view(torch.float64).mean(0).tolist()
        return [x if n else None for x, n in zip(middle, known, strict=True)]

    def group(self, ranks: int, stride: int) -> ProcessGroup:
        """Return this rank's group of `ranks` members `stride` apart, made on first use. A collective of these."""
        if (ranks, stride) not in self._groups:
            first = self.rank - self.rank % (ranks * stride) + self.rank % stride
            members = range(first, first + ranks * stride, stride)
            self._groups[ranks, stride] = ProcessGroup(group_of_members(f"{ranks} ranks by {stride}", members))
        return self._groups[ranks, stride]

    def channel(self, stride: int) -> ProcessChannel | None:
        """Return the channel between rank 0 and rank `stride`; None on other ranks. A collective of the two."""
        if self.rank not in (0, stride):
            return None
        if stride not in self._channels:
            group = group_of_members("message", (0, stride))
            self._channels[stride] = ProcessChannel(group, stride - self.rank)
        return self._channels[stride]

    def run_of(self, case: Case) -> Run:
        """Allocate a case's tensors and return the function that runs it once on this rank."""
        if case.family == "p2p":
            return self._message(case)
        if case.family == "host":  # no communication, but all ranks of a node at once
            return host_run(case, self.device)
        group = self.group(case.ranks, case.stride)
        count = case.bytes_moved // DTYPES[case.dtype].itemsize
        whole, part = count, count // case.ranks
        x = torch.zeros(
            whole if case.op in ("all_reduce", "reduce_scatter") else part, dtype=DTYPES[case.dtype], device=self.device
        )
        match case.op:
            case "all_reduce":
                return lambda: group.all_reduce(x)
            case "all_gather":
                return lambda: group.all_gather(x)
            case "reduce_scatter":
                rows = x.view(case.ranks, -1)
                return lambda: group.reduce_scatter(rows)
            case "all_to_all":
                rows = x.view(case.ranks, -1)
                return lambda: group.all_to_all(rows)
            case _:
                raise ValueError(f"unknown collective {case.op!r}")

    def _message(self, case: Case) -> Run:
        """Return a round trip, since a send alone may return as soon as the message is buffered."""
        channel = self.channel(case.stride)
        x = torch.zeros(case.bytes_moved // DTYPES[case.dtype].itemsize, dtype=DTYPES[case.dtype], device=self.device)

        def there_and_back() -> None:
            if channel is None:
                return
            first, second = (channel.send, channel.receive) if self.rank == 0 else (channel.receive, channel.send)
            first(x).wait()
            second(x).wait()

        return there_and_back

    def measure(self, case: Case, share_s: float) -> Measurement | Skipped:
        """Time a case. A collective; the result is the same on all ranks."""
        run, problem = self._prepared(case)
        if any(self.agree(problem is not None)):
            return Skipped(case=case, why=problem or "another rank could not allocate its tensors")
        try:
            clock = clock_of(case, self.clock)
            run()
            _, once_s = self.agree(0.0, clock.once(run))
        except RuntimeError as error:  # the backend lacks the collective, so it fails on all ranks
            return Skipped(case=case, why=first_line(error))
        runs = runs_per_sample(once_s)
        count = max(LEAST, min(MOST, int(min(share_s, ENOUGH_S) / (once_s * runs))))
        samples = self.agree(*(clock.sample(run, runs) for _ in range(count)))
        seconds = statistics.median(samples) / (2 if case.family == "p2p" else 1)
        return Measurement(case=case, seconds=seconds, repeats=runs * len(samples))

    def _prepared(self, case: Case) -> tuple[Run, str | None]:
        try:
            return self.run_of(case), None
        except (RuntimeError, MemoryError) as error:
            return (lambda: None), first_line(error)
