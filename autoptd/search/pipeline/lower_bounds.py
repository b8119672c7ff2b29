"""Lower bounds on the seconds of a step, of one cut or of all cuts into so many stages.

The chain of actions that ends last is a path through the schedule, and every path is a bound. With T = f + b of a
microbatch on a stage, p stages and m microbatches, stage k is busy for m T_k; its first forward follows those of all
stages before it, and its last backward is followed by theirs. With messages of x_j seconds behind stage j, each way:

    any schedule         m T_k + Σ_{j<k} (T_j + 2 x_j)                                              (1)
    with w forwards before the first backward on stage k (1F1B: min(m, p - k); GPipe: m), a microbatch that goes to
    the last stage and returns, with what stage k does before it (its last microbatch) or after it (its first):
                         Σ_j (T_j + 2 x_j) + (m - 1) T_k - (w - 1) min(f_k, b_k)                    (2)

    the same (1F1B) as often as it goes round: the forward of microbatch i + w on stage k follows the backward of i, so
    that of every w microbatches one goes there and back alone:
                         ⌈m / w⌉ Σ_{j>=k} (T_j + 2 x_j) + Σ_{j<k} (T_j + 2 x_j) + ((m - 1) mod w) b_k        (3)

    neighbours by turns (1F1B): after the backward of microbatch i stage k does the forward of i + w, stage k + 1 the
    backward of i + 2, so that every two microbatches there are two messages one after the other:
                         Σ_j (T_j + 2 x_j) + ⌊(m + 1 - w) / 2⌋ (T_k + T_k+1 + 2 x_k)                 (4)
    an edge sends one message after the other, each way, here behind the first and before the rest of the last:
                         Σ_j (T_j + 2 x_j) + (m - 1) x_k            GPipe, both ways: + 2 (m - 1) x_k (5)
    several chunks, or backward passes in two halves: m Σ x over the stages whose messages take an edge   (6)

For all cuts, without messages: the T_k that make every bound (2), or (1), as small as the others' sum to T = Σ T_k. In
(2) min(f, b) is at most r T_k, r being the least share of a pass in any segment (1/2 at the most), which gives

    (1)    T / (1 - (1 - 1/m)^p)                (2)    T + T / Σ_k 1 / (m - 1 - r (w_k - 1))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from autoptd.cost_models.collectives import collective_s, sum_in_shards_s
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES, optimizer_step_bytes
from autoptd.cost_models.op_time import memory_s
from autoptd.schedule import route_of, row_of
from autoptd.search.constraints.options import Method
from autoptd.search.memory_filter import MemoryFilter
from autoptd.search.meshes import Candidate
from autoptd.search.sharding.cache import ShardingCache
from autoptd.search.sharding.kind_cost import floor_s
from autoptd.search.sharding.tensors import Sharded
from autoptd.search.task import Task


def warm_up(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """Forward passes on a stage before its first backward pass; schedules of one chunk per rank."""
    return microbatches if schedule == "gpipe" else min(microbatches, stages - stage)


def even_bound_s(seconds: float, schedule: str, stages: int, microbatches: int, virtual: int, share: float) -> float:
    """Of all cuts of work that takes so long per microbatch. `share`: the least part that a pass has of any segment."""
    m, p = microbatches, stages
    if virtual > 1 or row_of(schedule).halves:  # gradients of parameters are on no path to another stage
        return seconds * m / p
    busy = seconds / (1 - (1 - 1 / m) ** p)
    left = [m - 1 - share * (warm_up(schedule, k, p, m) - 1) for k in range(p)]
    if min(left) <= 0:
        return busy
    return max(busy, seconds + seconds / sum(1 / x for x in left))


def edges_s(sends_s: Sequence[float], schedule: str, ranks: int, microbatches: int) -> float:
    """Bound (6): the busiest edge alone. `sends_s`: of a message behind each stage but the last."""
    route = route_of(schedule, ranks, (len(sends_s) + 1) // ranks)
    busy = dict.fromkeys(route.edges(), 0.0)  # none where both ends are one rank
    for stage, seconds in enumerate(sends_s):
        if route.edge(stage) in busy:
            busy[route.edge(stage)] += microbatches * seconds
    return max(busy.values(), default=0.0)


def beside_s(sends_s: Sequence[float], schedule: str, microbatches: int) -> float:
    """What messages add to all work of a microbatch in bound (5); one chunk per rank, backward passes in one piece."""
    both = 2 if schedule == "gpipe" else 1
    return 2 * sum(sends_s) + both * (microbatches - 1) * max(sends_s, default=0.0)


def turns(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """How often a stage and the next wait for each other's messages in bound (4)."""
    if schedule != "1f1b" or stage == stages - 1:
        return 0
    return max(0, (microbatches + 1 - warm_up(schedule, stage, stages, microbatches)) // 2)


def cut_bound_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    schedule: str,
    ranks: int,
    microbatches: int,
    sends_s: Sequence[float] = (),
) -> float:
    """Of these stages, one for each chunk of so many ranks. `sends_s`: of a message behind each, as far as known."""
    m, total = microbatches, [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    route = route_of(schedule, ranks, len(total) // ranks)
    busy = [m * sum(route.of(total, rank)) for rank in range(ranks)]
    messages = [*sends_s, *[0.0] * (len(total) - len(sends_s))]
    edges = edges_s(messages[:-1], schedule, ranks, m)
    if row_of(schedule).halves:
        return max(edges, *(busy[k] + sum(forward_s[:k]) + sum(messages[:k]) for k in range(ranks)))
    found = max(edges, *(busy[k] + sum(total[:k]) + 2 * sum(messages[:k]) for k in range(ranks)))
    if len(total) > ranks:
        return found
    after = list(accumulate((t + 2 * x for t, x in zip(total[::-1], messages[::-1], strict=True))))[::-1]
    for k, t in enumerate(total):
        w = warm_up(schedule, k, ranks, m)
        there_and_back = after[0] + (m - 1) * t - (w - 1) * min(forward_s[k], backward_s[k])
        rounds = after[0] + (-(-m // w) - 1) * after[k] + (m - 1) % w * backward_s[k]
        after_next = total[k + 1] if k + 1 < ranks else 0.0
        by_turns = after[0] + turns(schedule, k, ranks, m) * (t + after_next + 2 * messages[k])
        found = max(found, there_and_back, rounds, by_turns)
    return max(found, sum(total) + beside_s(messages, schedule, m))


@dataclass(frozen=True)
class CandidateBounds:
    """Bounds of the candidates of one task."""

    task: Task
    known: ShardingCache
    method: Method
    memory: MemoryFilter
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
        numel, inside = self.memory.numel[0] / c.tp, c.sharing
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
        numel = self.memory.numel[0] / (c.tp * c.pp)
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
