"""Drop meshes on which parameters, gradients and optimizer state alone exceed the memory of a device.

    state of a rank  >=  N / (tp pp) * (parameters + gradients + optimizer / dp under ZeRO-1)        bytes, N elements

This is a lower bound for every split and cut, so these meshes are dropped before tensors are split or stages are cut.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import MAIN_BYTES, MOMENTS, Memory, model_state
from autoptd.layout.host_memory import host_share
from autoptd.passes.fold import Folded
from autoptd.passes.graph import infos
from autoptd.passes.sharding.expert_regions import expert_parameters
from autoptd.search.meshes import Candidate, Copies

_CLOSEST = 4  # candidates that are tried if none fits, to report how much memory is missing


@dataclass(frozen=True)
class MemoryFilter:
    """The memory of a cluster's devices and the bytes of a model's state."""

    folded: Folded
    cluster: Cluster
    precision: str
    optimizer: str
    headroom: float = 0.0
    _bytes: dict[tuple[float, ...], float] = field(default_factory=dict)
    _fits_host: dict[tuple[float, ...], bool] = field(default_factory=dict)

    def promising(self, options: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates whose state may fit; if there are none, the few with the smallest state."""
        return self.fitting(options) or sorted(options, key=lambda c: (self.least_bytes(c), -c.tp))[:_CLOSEST]

    def fitting(self, options: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates whose state may fit."""
        usable = max(pool.device.usable_bytes for pool in self.cluster.pools) * (1 - self.headroom)
        return [c for c in options if self.least_bytes(c) <= usable]

    def least_bytes(self, c: Candidate) -> float:
        """Return a lower bound on the bytes of the fullest rank."""
        if (key := c.sharded_state) not in self._bytes:
            states = (
                self._state(numel, copies.shards if c.shards else copies.ranks, c.zero, frozen=not experts)
                for experts, (numel, copies) in enumerate(self.parts(c))
            )
            self._bytes[key] = sum(s.state - s.optimizer * (c.offload > 0) for s in states) / (c.tp * c.pp)
        return self._bytes[key]

    def fits_host(self, c: Candidate) -> bool:
        """Return whether its share of the optimizer state may fit into the hosts' memory."""
        if (key := c.sharded_state) not in self._fits_host:
            hosts = [host_share(pool, c.world) for pool in self.cluster.pools]
            most = max(math.inf if nbytes is None else nbytes * (1 - self.headroom) for nbytes in hosts)
            self._fits_host[key] = self.least_host_bytes(c) <= most
        return self._fits_host[key]

    def least_host_bytes(self, c: Candidate) -> float:
        """Return a lower bound on the host's bytes of the fullest rank: main copies, gradients and optimizer state."""
        dense, *experts = ((numel, copies.shards) for numel, copies in self.parts(c))
        alone = max(0, dense[0] - self.shared_numel * c.tp), dense[1]  # tied parameters stay on the device
        elements = sum(numel / shards for numel, shards in (alone, *experts)) / (c.tp * c.pp)
        return MAIN_BYTES[self.precision] * (2 + MOMENTS[self.optimizer]) * c.offload * elements

    def least_world(self, state: int) -> int:
        """Return the number of devices that the bytes of a state take, rounded up to whole nodes beyond one node; 0 if
        none hold any."""
        device = self.cluster.device
        if (each := device.usable_bytes - self.headroom * device.memory_bytes) <= 0:
            return 0
        devices = math.ceil(state / each)
        node = self.cluster.gpus_per_node
        return devices if not node or devices <= node else math.ceil(devices / node) * node

    def state(self, shards: int, zero: int = 0) -> Memory:
        return self._state(self.numel[0], shards, zero)

    def _state(self, trained: int, shards: int, zero: int, frozen: bool = True) -> Memory:
        state = model_state([trained], precision=self.precision, optimizer=self.optimizer, zero=zero, dp=shards)
        return state + Memory(parameters=self.frozen_bytes // (shards if zero == 3 else 1) if frozen else 0)

    def parts(self, c: Candidate) -> list[tuple[int, Copies]]:
        """Return tp times the trained elements of the model that a rank holds, with their copies: all, or the others
        and then the experts."""
        numel = [self.numel[0]]
        if c.ep > 1:
            numel = [numel[0] - self.expert_numel, self.expert_numel * c.tp // (c.ep * c.sharers)]
        return list(zip(numel, c.copies, strict=True))

    @cached_property
    def shared_numel(self) -> int:
        """Trained elements that several segments read, which several stages may hold."""
        traced = self.folded.traced
        readers = Counter(traced.parameters[n.name] for s in self.folded.segments for n in s.parameters)
        sizes = {traced.parameters[n.name]: infos(n)[0] for s in self.folded.segments for n in s.parameters}
        tied = (sizes[name] for name, n in readers.items() if n > 1 and name not in traced.frozen)
        return sum(math.prod(map(int, x.shape)) for x in tied)

    @cached_property
    def expert_numel(self) -> int:
        """Trained elements of all experts."""
        traced, names = self.folded.traced, expert_parameters(self.folded)
        nodes = {traced.parameters[n.name]: infos(n)[0] for s in self.folded.segments for n in s.parameters}
        return sum(math.prod(map(int, nodes[name].shape)) for name in names if name not in traced.frozen)

    @cached_property
    def frozen_bytes(self) -> int:
        """Bytes of the model's frozen parameters in their own dtypes, tied ones once."""
        traced = self.folded.traced
        nodes = {traced.parameters[n.name]: infos(n)[0] for s in self.folded.segments for n in s.parameters}
        return sum(
            math.prod(map(int, x.shape)) * x.dtype.itemsize for name, x in nodes.items() if name in traced.frozen
        )

    @cached_property
    def numel(self) -> tuple[int, int]:
        """Parameter elements (trained, frozen) of the whole model, tied ones once."""
        traced = self.folded.traced
        sizes = {
            traced.parameters[node.name]: math.prod(map(int, infos(node)[0].shape))
            for segment in self.folded.segments
            for node in segment.parameters
        }
        frozen = sum(n for name, n in sizes.items() if name in traced.frozen)
        return sum(sizes.values()) - frozen, frozen
