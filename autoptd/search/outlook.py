"""What a candidate takes at the least, before it is cut into stages."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoptd.cost_models.collectives import collective_s, sum_in_shards_s
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES, optimizer_step_bytes
from autoptd.cost_models.op_time import memory_s
from autoptd.search.bounds import even_bound_s
from autoptd.search.kinds import floor_s
from autoptd.search.known import Known
from autoptd.search.meshes import Candidate
from autoptd.search.room import Room
from autoptd.search.task import Task
from autoptd.search.tensors import Sharded
from autoptd.search.wishes import Method


@dataclass(frozen=True)
class Outlook:
    """Bounds of the candidates of one task."""

    task: Task
    known: Known
    method: Method
    room: Room
    _floors: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def floor_s(self, c: Candidate) -> float:
        """Its matrix products at the device's sustained rate, however they are split."""
        task, devices = self.task, [pool.device for pool in self.task.cluster.pools]
        flops = self.known.product_flops(tuple(task.sizes.items())) * c.micro / (c.tp * c.cp)
        rate = max(d.matmul_flops_per_s.of(task.precision) * d.matmul_sustained.fraction for d in devices)
        seconds = flops / rate
        return even_bound_s(seconds, c.schedule, c.pp, c.microbatches, c.virtual, 0.5)

    def bound_s(self, c: Candidate, sharded: Sharded) -> float:
        """Of all its cuts, without recomputation, and with the end of the step of an average pipeline rank."""
        overlapped = "tp" in self.method.overlap
        if c.pools:  # the relaxation knows which stage is where
            return 0.0
        seconds = sharded.compute_seconds if overlapped else sharded.seconds
        costs = [k for k in sharded.costs.values() if k.forward_s]
        share = 0.5  # of the forward pass in any stage, at the most
        if not overlapped and c.zero < 2:
            ring = 1 / 3 if c.cp > 1 else 0.0  # passed once in the forward pass, twice in the backward pass
            share = min(share, max([ring, *(k.forward_s / (k.forward_s + k.backward_s) for k in costs)]))
        seconds += self._sharding_s(c)
        passes = even_bound_s(seconds, c.schedule, c.pp, c.microbatches, c.virtual, share)
        return self.with_end_s(c, passes, sharded.seconds)

    def _sharding_s(self, c: Candidate) -> float:
        """Of gathering parameters and scattering gradients in every microbatch, as if the model were one stage."""
        dp = c.dp * c.cp
        if c.zero < 2 or dp == 1 or "dp" in self.method.overlap or c.pools:
            return 0.0
        numel, inside = self.room.numel[0] / c.tp, c.sharing
        width = COMPUTE_BYTES if self.method.gradients == "compute" else MAIN_BYTES
        compute, gradient = (numel * table[self.task.precision] for table in (COMPUTE_BYTES, width))
        gather = collective_s("all_gather", compute, self.task.cluster, inside, c.tp, c.world)
        return (c.zero - 1) * gather + sum_in_shards_s(gradient, self.task.cluster, dp, inside, c.tp, c.world)

    def with_end_s(self, c: Candidate, passes_s: float, microbatch_s: float) -> float:
        """The same with the end of the step, which a rank may begin while the first ones do their last microbatch.

        `microbatch_s`: of both passes over all stages, with messages where `passes_s` has them; with recomputation the
        backward passes take no longer than that.
        """
        if c.pools:
            return passes_s
        return max(passes_s, passes_s - (microbatch_s + self._sharding_s(c)) * (c.pp > 1) + self.end_s(c))

    def end_s(self, c: Candidate) -> float:
        """Reduction, optimizer step and gathering of one pipeline rank's even share of the parameters."""
        task, cluster, dp = self.task, self.task.cluster, c.dp * c.cp
        numel = self.room.numel[0] / (c.tp * c.pp)
        optimizer = task.optimizer if task.optimizer in ("adamw", "sgd") else "adamw"
        touched = optimizer_step_bytes(int(numel / c.sharing), precision=task.precision, optimizer=optimizer)
        seconds = memory_s(cluster.device, touched)
        if c.zero > 1 or dp == 1 or "dp" in self.method.overlap:
            return seconds
        width = COMPUTE_BYTES if self.method.gradients == "compute" else MAIN_BYTES
        seconds += sum_in_shards_s(numel * width[task.precision], cluster, dp, c.sharing, c.tp, c.world)
        gathered = numel * COMPUTE_BYTES[task.precision]
        return seconds + collective_s("all_gather", gathered, cluster, c.sharing, c.tp, c.world)

    def shared_out_s(self, c: Candidate, whole: Sharded) -> float:
        """By the model's work on one rank, `whole`, however tensors are split."""
        key = c.tp, c.micro, c.cp
        if key not in self._floors:
            device = self.task.cluster.device
            self._floors[key] = sum(times * floor_s(kind.work, device, c.tp) for times, kind in whole.every_kind)
        seconds = self._floors[key]
        seconds += self._sharding_s(c)
        passes = even_bound_s(seconds, c.schedule, c.pp, c.microbatches, c.virtual, 0.5)
        return self.with_end_s(c, passes, seconds)
