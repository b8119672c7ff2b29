"""Variants of a candidate that take less memory and more time, which are tried once memory limits it.

    memory-saving   splits weigh each byte saved for backward by the time of recomputing it
    offload         more of the optimizer state is in host memory, if that holds it, and updated there, while the device
                    waits
    activations     blocks may keep what they save for backward in host memory, while the device waits for the copies:
                    where these are quicker than recomputation, or where nothing fits otherwise

No variant is faster than a candidate that memory does not limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autoptd.cost_models.memory import UPDATE_COSTS
from autoptd.search.memory_filter import MemoryFilter
from autoptd.search.meshes import AUTO, OFFLOAD, WITH_HOST, Candidate
from autoptd.search.task import Task

SHARES = (0.125, 0.25, 0.5, 1.0)  # of the optimizer state in host memory, tried in this order


class Variants:
    """The variants that a task allows."""

    def __init__(self, task: Task, memory: MemoryFilter) -> None:
        self.memory, self._ignored = memory, task.constraints.method.memory == "ignore"
        searched = "offload" in task.constraints.searched - task.constraints.fixed
        on_gpus = task.cluster.device.kind == "cuda"  # otherwise the host is the device
        self._offloads = searched and on_gpus and UPDATE_COSTS[task.optimizer].whole == "none"
        self._moves_activations = on_gpus and OFFLOAD in task.constraints.method.policies

    def of(self, c: Candidate, on_host: bool = True) -> Iterator[Candidate]:
        """Yield the next variants of a candidate, which may be one itself; `on_host`: with those of activations."""
        if self._ignored or c.memory_saving:
            return
        if c.tp > 1 and not (self._offloads and c.offload):
            yield c._replace(memory_saving=True)
        if self._offloads and c.zero < 3 and c.offload < 1:
            more = c._replace(offload=next(share for share in SHARES if share > c.offload))
            if self.memory.fits_host(more):
                yield more
        if on_host:
            yield from self.on_host([c])

    def most_offload(self, c: Candidate) -> float:
        """Return the share of the optimizer state in host memory that no variant of a candidate exceeds."""
        return SHARES[-1] if self._offloads and c.zero < 3 else c.offload

    def on_host(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the variants of candidates that may keep activations in host memory."""
        moved = [c for c in candidates if self._moves_activations and c.recompute == AUTO and not c.memory_saving]
        return [c._replace(recompute=WITH_HOST) for c in moved]

    def every(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates and all their variants."""
        found = list(candidates)
        for c in found:
            found += self.of(c)
        return found

    def promising(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates whose state may fit, and those with offload whose state may fit only so."""
        if self._ignored:
            return list(candidates)
        found = self.memory.promising(candidates)
        if not self._offloads:
            return found
        known = set(found)
        more = [c._replace(offload=SHARES[0]) for c in candidates if c.zero < 3 and c not in known]
        return [*found, *filter(self.memory.fits_host, self.memory.fitting(more))]
