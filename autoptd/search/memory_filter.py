"""Whether the state of training alone has room, and what to say when nothing fits.

    state of a rank  >=  N / (tp pp) * (parameters + gradients + optimizer / dp under ZeRO-1)        bytes, N elements

No mesh needs less, so those without room for that are left out before tensors are split or stages are cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import Memory, model_state
from autoptd.errors import DoesNotFit
from autoptd.passes.fold import Folded
from autoptd.passes.graph import infos
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.partition import InfeasibleStages

_LEANEST = 4  # candidates that are tried where none has room, to say what is missing
_SHOWN = 4  # stages listed one by one
_GIB = 2**30


@dataclass(frozen=True)
class Room:
    """What devices can hold, and what a model's state takes."""

    folded: Folded
    cluster: Cluster
    precision: str
    optimizer: str
    headroom: float = 0.0

    def promising(self, options: Sequence[Candidate]) -> list[Candidate]:
        """The candidates whose state may fit; where none is, the few that lack least."""
        usable = max(pool.device.usable_bytes for pool in self.cluster.pools) * (1 - self.headroom)
        fitting = [c for c in options if self.least_bytes(c) <= usable]
        return fitting or sorted(options, key=lambda c: (self.least_bytes(c), -c.tp))[:_LEANEST]

    def least_bytes(self, c: Candidate) -> float:
        """What the fullest rank holds at least."""
        return self._state(c.shards or c.dp * c.cp, c.zero).total / (c.tp * c.pp)

    def least_world(self) -> int:
        """Devices that the state takes, each part of it held once; whole nodes where it is more than one."""
        devices = math.ceil(self._state(1).total / self.cluster.device.usable_bytes)
        node = self.cluster.gpus_per_node
        return devices if not node or devices <= node else math.ceil(devices / node) * node

    def _state(self, shards: int, zero: int = 0) -> Memory:
        optimizer = self.optimizer if self.optimizer in ("adamw", "sgd") else "adamw"
        trained, _ = self.numel
        state = model_state([trained], precision=self.precision, optimizer=optimizer, zero=zero, dp=shards)
        return state + Memory(parameters=self.frozen_bytes // (shards if zero == 3 else 1))

    @cached_property
    def frozen_bytes(self) -> int:
        """Of the frozen parameters of the whole model in their own dtypes, tied ones once."""
        traced = self.folded.traced
        nodes = {traced.parameters[n.name]: infos(n)[0] for s in self.folded.segments for n in s.parameters}
        return sum(
            math.prod(map(int, x.shape)) * x.dtype.itemsize for name, x in nodes.items() if name in traced.frozen
        )

    @cached_property
    def numel(self) -> tuple[int, int]:
        """Elements (trained, frozen) of the whole model, tied parameters once."""
        traced = self.folded.traced
        sizes = {
            traced.parameters[node.name]: math.prod(map(int, infos(node)[0].shape))
            for segment in self.folded.segments
            for node in segment.parameters
        }
        frozen = sum(n for name, n in sizes.items() if name in traced.frozen)
        return sum(sizes.values()) - frozen, frozen

    # ---- nothing fits ----

    def refusal(
        self, world: int, tried: int, closest: Candidate, error: DoesNotFit, fixed: Collection[str]
    ) -> DoesNotFit:
        """`closest` with its own answer: the stages over their budget, and what would mend that."""
        device = self.cluster.device
        usable = max(0.0, device.usable_bytes - self.headroom * device.memory_bytes)
        free = f" if {100 * self.headroom:.4g} % stays free" if self.headroom else ""
        return DoesNotFit(
            f"no plan fits: {tried} meshes considered on {world} × {device.name}, "
            f"which have {usable / _GIB:.1f} GiB each for training{free}",
            where=f"closest: {closest}\n{self._missing(error)}",
            fix=self._remedies(world, error, fixed),
        )

    def _missing(self, error: DoesNotFit) -> str:
        if not isinstance(error, InfeasibleStages):
            return error.where
        names = [s.name for s in self.folded.segments]
        over = [
            f"stage {k} ({names[first]} … {names[last]}) lacks {missing / _GIB:.2f} GiB"
            for k, ((first, last), missing) in enumerate(zip(error.boundaries, error.missing_bytes, strict=True))
            if missing > 0
        ]
        if len(over) <= _SHOWN:
            return "\n".join(over)
        worst = max(error.missing_bytes) / _GIB
        return "\n".join([*over[: _SHOWN - 1], f"and {len(over) - _SHOWN + 1} more stages, up to {worst:.2f} GiB"])

    def _remedies(self, world: int, error: DoesNotFit, fixed: Collection[str]) -> str:
        if not isinstance(error, InfeasibleStages):
            return error.fix
        remedies = ["recompute (leave fix['recompute'] out)"] if error.recompute_fits else []
        state, least = self._state(1).total, self.least_world()
        if least > world:
            remedies.append(
                f"a world of at least {least}: parameters, gradients and optimizer state alone are "
                f"{state / _GIB:,.0f} GiB"
            )
        else:
            remedies.append("a larger world, or a shorter sequence")
        if fixed:
            remedies.append(f"fixing less than {', '.join(sorted(fixed))}")
        needed = (error.budget_bytes + self.cluster.device.context_bytes) / (1 - self.headroom)
        larger = [n for n in Cluster.names() if Cluster.load(n).device.memory_bytes >= needed]
        which = f" ({', '.join(larger)})" if larger else ""
        return "; or ".join([*remedies, f"devices of {math.ceil(10 * needed / _GIB) / 10:.1f} GiB{which}"])
