"""Lower bounds on the seconds of a step, for one cut or for all cuts into a number of stages.

The chain of actions that ends last is a path through the schedule, and every path is a lower bound. With T = f + b of a
microbatch on a stage, p stages and m microbatches, stage k is busy for m T_k; its first forward follows those of all
stages before it, and its last backward precedes theirs. With messages of x_j seconds after stage j, each way:

    any schedule         m T_k + Σ_{j<k} (T_j + 2 x_j)                                              (1)
    round trip of a microbatch to the last stage and back, with the other passes of stage k before it (for the last
    microbatch) or after it (for the first); v = w - 1, where w forwards precede the first backward on stage k (1F1B:
    min(m, p - k)); GPipe: v = 0, since the last stage begins backward passes after all forward passes:
                         Σ_j (T_j + 2 x_j) + (m - 1) T_k - v_k min(f_k, b_k)                        (2)
    repeated round trips (1F1B): the forward of microbatch i + w on stage k follows the backward of i, so that one of
    every w microbatches makes its round trip alone:
                         ⌈m / w⌉ Σ_{j>=k} (T_j + 2 x_j) + Σ_{j<k} (T_j + 2 x_j) + ((m - 1) mod w) b_k        (3)
    alternating neighbours (1F1B): after the backward of microbatch i stage k runs the forward of i + w, and stage k + 1
    the backward of i + 2, so that every two microbatches two messages follow one another:
                         Σ_j (T_j + 2 x_j) + ⌊(m + 1 - w) / 2⌋ (T_k + T_k+1 + 2 x_k)                 (4)
    an edge sends its messages of one direction in sequence, after the first forward reaches it and before the last
    microbatch's other passes:
                         Σ_j (T_j + 2 x_j) + (m - 1) x_k     GPipe, in both directions: + 2 (m - 1) x_k (5)
    several chunks, or split backward (B and W): m Σ x over the stages whose messages take an edge       (6)
    interleaved: before the first forward of chunk c on rank k, of the stage s = c p + k, come those of all stages
    before it, and on this rank p forwards of each chunk before c, which are part of m T_k; likewise the last backward
    of any chunk; d = 0 … v - 1 as well as c:
                         m T_k + Σ_{j<s} (f_j + x_j) - p Σ_{a<c} f_{k,a} + the same of b, d                (7)

For all cuts, without messages, the T_k with Σ T_k = T that equalise bound (2), or (1), over all stages minimise its
maximum. In (2) min(f, b) is at most r T_k, where r (at most 1/2) bounds min(f, b) / T of any stage, which gives

    (1)    T / (1 - (1 - 1/m)^p)                (2)    T + T / Σ_k 1 / (m - 1 - r v_k)

The average of (7) over c and d, with weights w_k of the ranks that add up to 1, holds each second of stage (k, c)

    m w_k + Σ_{i>k} w_i / v + (1 - p w_k) (v - 1 - c) / v                                                    times.

`interleaved_rounds` is the most that this can be at least for all stages: bound (7) of all cuts, per second of T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import add

from autoptd.cost_models.collectives import collective_s
from autoptd.cost_models.memory import (
    COMPUTE_BYTES,
    accumulation_bytes,
    optimizer_step_bytes,
    step_gradient_bytes,
)
from autoptd.cost_models.op_time import host_update_s, memory_s
from autoptd.schedule import route_of, row_of
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.memory_filter import MemoryFilter
from autoptd.search.meshes import Candidate
from autoptd.search.sharding.cache import ShardingCache
from autoptd.search.sharding.dispatch_cost import dispatched_s, spread_over
from autoptd.search.sharding.kind_cost import floor_s
from autoptd.search.sharding.tensors import Sharded
from autoptd.search.step_end.costs import full_bucket_s, full_gather_s, least_slowdown
from autoptd.search.task import Task


def warm_up(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """Return the forward passes on a stage before its first backward pass, for schedules with one chunk per rank."""
    return microbatches if schedule == "gpipe" else min(microbatches, stages - stage)


def passed_over(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """Return v of path (2): the passes on a stage that it leaves out."""
    return 0 if schedule == "gpipe" else warm_up(schedule, stage, stages, microbatches) - 1


def even_bound_s(seconds: float, schedule: str, stages: int, microbatches: int, virtual: int, share: float) -> float:
    """Return a lower bound over all cuts of a model that takes `seconds` per microbatch.

    `share`: upper bound on min(f, b) / T of any stage."""
    m, p = microbatches, stages
    if row_of(schedule).splits_backward:  # parameter gradients (W) are on no path to another stage
        return seconds * m / p
    if virtual > 1:
        return seconds * interleaved_rounds(p, m, virtual)
    busy = seconds / (1 - (1 - 1 / m) ** p)
    left = [m - 1 - share * passed_over(schedule, k, p, m) for k in range(p)]
    if min(left) <= 0:
        return busy
    return max(busy, seconds + seconds / sum(1 / x for x in left))


@lru_cache(maxsize=4096)
def interleaved_rounds(ranks: int, microbatches: int, virtual: int) -> float:
    """Return bound (7) of all cuts into `virtual` chunks per rank, per second of a microbatch through all stages."""
    if microbatches % ranks:
        return microbatches / ranks  # the schedule refuses it
    later = (virtual - 1) / virtual

    def weights(rounds: float) -> float:
        """Return the least sum of weights that hold each second so many times."""
        behind = 0.0
        for _ in range(ranks):
            weight = (rounds - behind / virtual) / microbatches
            if ranks * weight > 1:  # the first chunk of such a rank has the fewest
                weight = (rounds - behind / virtual - later) / (microbatches - ranks * later)
            behind += weight
        return behind

    least, most = microbatches / ranks, microbatches / ranks + 1.0
    for _ in range(50):
        middle = (least + most) / 2
        least, most = (middle, most) if weights(middle) <= 1 else (least, middle)
    return least


def chain_s(passes_s: Sequence[float], sends_s: Sequence[float], ranks: int, rank: int) -> float:
    """Return the most that the first passes of one chunk add to a rank's own in bound (7), over all its chunks.

    `passes_s`: forward or backward of the stages, with those of the last ones left out or not; `sends_s`: of a message
    after each."""
    found = own = before = 0.0
    for stage, (seconds, send) in enumerate(zip(passes_s, sends_s, strict=True)):
        if stage % ranks == rank:
            found = max(found, before - ranks * own)
            own += seconds
        before += seconds + send * (ranks > 1)  # a rank sends itself nothing
    return found


def busiest_edge_s(sends_s: Sequence[float], schedule: str, ranks: int, microbatches: int) -> float:
    """Return bound (6), the busiest edge alone. `sends_s`: of a message after each stage but the last."""
    route = route_of(schedule, ranks, (len(sends_s) + 1) // ranks)
    busy = dict.fromkeys(route.edges(), 0.0)  # between different ranks only
    for stage, seconds in enumerate(sends_s):
        if route.edge(stage) in busy:
            busy[route.edge(stage)] += microbatches * seconds
    return max(busy.values(), default=0.0)


def message_path_s(sends_s: Sequence[float], schedule: str, microbatches: int) -> float:
    """Return the message terms of bound (5), for one chunk per rank and unsplit backward passes."""
    both = 2 if schedule == "gpipe" else 1
    return 2 * sum(sends_s) + both * (microbatches - 1) * max(sends_s, default=0.0)


def alternations(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """Return the number of alternations of a stage with the next one in bound (4)."""
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
    """Return the largest bound of one cut. `sends_s`: of a message after each stage, missing ones count as 0."""
    m, total = microbatches, [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    route = route_of(schedule, ranks, len(total) // ranks)
    busy = [m * sum(route.of(total, rank)) for rank in range(ranks)]
    messages = [*sends_s, *[0.0] * (len(total) - len(sends_s))]
    edges = busiest_edge_s(messages[:-1], schedule, ranks, m)
    if row_of(schedule).splits_backward:
        return max(edges, *(busy[k] + sum(forward_s[:k]) + sum(messages[:k]) for k in range(ranks)))
    if len(total) > ranks:
        chains = (sum(chain_s(each, messages, ranks, k) for each in (forward_s, backward_s)) for k in range(ranks))
        return max(edges, *map(add, busy, chains))
    found = max(edges, *(busy[k] + sum(total[:k]) + 2 * sum(messages[:k]) for k in range(ranks)))
    after = list(accumulate((t + 2 * x for t, x in zip(total[::-1], messages[::-1], strict=True))))[::-1]
    for k, t in enumerate(total):
        w = warm_up(schedule, k, ranks, m)
        round_trip_s = after[0] + (m - 1) * t - passed_over(schedule, k, ranks, m) * min(forward_s[k], backward_s[k])
        rounds = after[0] + (-(-m // w) - 1) * after[k] + (m - 1) % w * backward_s[k]
        after_next = total[k + 1] if k + 1 < ranks else 0.0
        alternating_s = after[0] + alternations(schedule, k, ranks, m) * (t + after_next + 2 * messages[k])
        found = max(found, round_trip_s, rounds, alternating_s)
    return max(found, sum(total) + message_path_s(messages, schedule, m))


@dataclass(frozen=True)
class CandidateBounds:
    """Lower bounds on the step times of a task's candidates."""

    task: Task
    known: ShardingCache
    method: SearchOptions
    memory: MemoryFilter
    _products: dict[tuple[int, int, str, int, int, int], float] = field(default_factory=dict)
    _floors: dict[tuple[int, int, int, int], float] = field(default_factory=dict)
    _spread: dict[tuple[int, int, int], tuple[Sharded, Sharded, float]] = field(default_factory=dict)
    _gradients: dict[tuple[tuple[float, ...], int], tuple[float, float]] = field(default_factory=dict)
    _ends: dict[tuple[tuple[float, ...], bool], tuple[float, float]] = field(default_factory=dict)

    def floor_s(self, c: Candidate) -> float:
        """Return the bound from matrix products at the device's sustained rate, for any splits."""
        key = c.tp * c.cp, c.micro, c.schedule, c.pp, c.microbatches, c.virtual
        if key not in self._products:
            self._products[key] = even_bound_s(self._product_s * c.micro / (c.tp * c.cp), *key[2:], 0.5)
        return self._products[key]

    @cached_property
    def _product_s(self) -> float:
        """Seconds of a sample's matrix products on one device, each at the best rate for its precision."""
        devices = [pool.device for pool in self.task.cluster.pools]
        flops = self.known.product_flops(tuple(self.task.sizes.items()), in_fp8=bool(self.method.fp8))
        return sum(
            n / max(d.matmul_flops_per_s.of(of) * d.matmul_fraction(of) for d in devices) for of, n in flops.items()
        )

    def bound_s(self, c: Candidate, sharded: Sharded) -> float:
        """Return a lower bound over all cuts, without recomputation, with the step end of an average pipeline rank."""
        overlapped = "tp" in self.method.overlap
        if c.pools:  # left to the relaxation, which knows the device type of each stage
            return 0.0
        sharded, sent_s = self._with_experts(c, sharded)
        dispatched = 0.0 if "ep" in self.method.overlap else sent_s
        seconds = (sharded.compute_seconds if overlapped else sharded.seconds) + dispatched
        costs = [k for k in sharded.costs.values() if k.forward_s]
        share = 0.5  # upper bound on min(f, b) / T of any stage
        if not overlapped and c.zero < 2 and not dispatched:  # experts' rows are sent equally in both passes
            sent = (1 / 3 if sharded.context == "ring" else 0.5) if c.cp > 1 else 0.0  # a ring sends twice in backward
            share = min(share, max([sent, *(k.forward_s / (k.forward_s + k.backward_s) for k in costs)]))
        return max(self._even_s(c, self._with_gradients_s(c, seconds), share), self._to_last_s(c, sharded, seconds))

    def _to_last_s(self, c: Candidate, sharded: Sharded, seconds: float) -> float:
        """Return bound (7) of the last chunk, which has the last segment of the model: all other stages precede its
        first pass and follow its last one. `seconds`: of a microbatch."""
        if row_of(c.schedule).splits_backward:
            return 0.0
        cost = sharded.costs[self.known.folded.segments[-1].kind]
        last_s = cost.forward_s + cost.backward_s
        if "tp" in self.method.overlap:
            last_s -= cost.forward_comm_s + cost.backward_comm_s
        return self.with_end_s(c, seconds + (c.microbatches - 1) * last_s)

    def _even_s(self, c: Candidate, seconds: float, share: float) -> float:
        """Return a lower bound over all cuts of a model that takes `seconds` per microbatch, with the step's end: some
        rank's own passes and reduction take at least the average. `share` as in `even_bound_s`."""
        passes = even_bound_s(seconds, c.schedule, c.pp, c.microbatches, c.virtual, share)
        return self.with_end_s(c, max(passes, c.microbatches * seconds / c.pp + self._end_s(c)[0]))

    def _with_experts(self, c: Candidate, sharded: Sharded) -> tuple[Sharded, float]:
        """Return the work of the fullest rank, and seconds per microbatch of experts' rows to others and back."""
        key = id(sharded), c.ep, c.etp
        if key not in self._spread:
            cluster = self.task.cluster
            spread = spread_over(sharded, c, self.method, cluster)
            sent = (n * dispatched_s([cost.work], c, self.method, cluster) for n, cost in spread.every_kind if c.ep > 1)
            self._spread[key] = sharded, spread, 2 * sum(sent)  # holds the key's object, so that its id stays its own
        return self._spread[key][1:]

    def _with_gradients_s(self, c: Candidate, passes_s: float) -> float:
        """Return the bound `passes_s` of a microbatch extended by adding gradients to the buffer, and by all-gathers
        and reduce-scatters (ZeRO 2, 3), with the model as one stage."""
        if c.pools:
            return passes_s
        if (key := (c.sharded_state, c.microbatches)) not in self._gradients:
            self._gradients[key] = self._accumulation_s(c), self._sharding_s(c)
        added_s, sent_s = self._gradients[key]
        passes_s, share = passes_s + added_s, least_slowdown(self.method, self.task.cluster)
        return max(passes_s + share * sent_s, sent_s + share * passes_s)

    def _accumulation_s(self, c: Candidate) -> float:
        numel, method = sum(n for n, _ in self.memory.parts(c)) // c.tp, self.method
        sizes = c.zero, c.microbatches, c.copies[0].shards
        nbytes = accumulation_bytes(numel, self.task.precision, method.gradients, *sizes, method.kernels == "fused")
        return memory_s(self.task.cluster.device, nbytes)

    def _sharding_s(self, c: Candidate) -> float:
        seconds = 0.0
        for numel, copies in self.memory.parts(c):
            gather_s, sum_s = full_gather_s(c, copies, self.method, self.task.precision, self.task.cluster)
            seconds += numel / c.tp * (2 * gather_s + sum_s)
        return seconds

    def with_end_s(self, c: Candidate, passes_s: float) -> float:
        """Return the bound `passes_s`, of passes and reductions, extended by the rest of the step: all ranks wait for
        one another before they update their parameters."""
        return passes_s if c.pools else passes_s + self._end_s(c)[1]

    def reduces_no_faster(self, c: Candidate, other: Candidate) -> bool:
        """Return whether no reduction of gradients takes less time than that of the other candidate of this mesh."""
        mine, others = (
            [full_bucket_s(each, n, self.method, self.task.precision, self.task.cluster) for n in each.copies]
            for each in (c, other)
        )
        return all(a >= b for a, b in zip(mine, others, strict=True))

    def end_s(self, c: Candidate) -> float:
        """Return seconds of the step's end for an even share of the parameters on a rank, on the first device type."""
        return sum(self._end_s(c))

    def _end_s(self, c: Candidate) -> tuple[float, float]:
        if (key := (c.sharded_state, c.virtual > 1)) not in self._ends:
            self._ends[key] = self._even_end_s(c)
        return self._ends[key]

    def _even_end_s(self, c: Candidate) -> tuple[float, float]:
        """Return seconds of (reduction; optimizer step and all-gather) for an even share of the parameters on a rank,
        as far as passes cannot hide them."""
        task, cluster = self.task, self.task.cluster
        parts = [(numel / (c.tp * c.pp), copies) for numel, copies in self.memory.parts(c)]
        own = int(sum(numel / copies.shards for numel, copies in parts))
        by_hand = self.method.kernels == "fused"
        before = step_gradient_bytes(own, task.precision, self.method.gradients, c.zero, by_hand)
        update_s = memory_s(cluster.device, before)
        if c.offload:
            share = min(self.method.offload, default=c.offload)  # of the rank with least, where ranks have their own
            moved = share * max(0.0, own - self.memory.shared_numel / (c.tp * c.pp))
            update_s += host_update_s(cluster.device, int(moved), task.precision, task.optimizer)
        else:
            nbytes = optimizer_step_bytes(own, precision=task.precision, optimizer=task.optimizer)
            update_s += memory_s(cluster.device, nbytes)
        reduce_s = 0.0
        for numel, copies in parts:
            reduce_s += numel * full_bucket_s(c, copies, self.method, task.precision, cluster)
            if c.zero in (1, 2) and copies.shards > 1 and ("dp" not in self.method.overlap or c.pp == 1):
                gathered = numel * COMPUTE_BYTES[task.precision]
                gather_s = collective_s("all_gather", gathered, cluster, copies.shards, copies.stride, c.world)
                update_s += least_slowdown(self.method, cluster) * gather_s
        return reduce_s, update_s

    def shared_out_s(self, c: Candidate, whole: Sequence[Sharded]) -> float:
        """Return the bound from the model's work on one rank, in each context that may be, for any splits."""
        key = c.tp, c.micro, c.cp, c.ep  # of any etp: what a rank computes is the same
        if key not in self._floors:
            device = self.task.cluster.device
            spread = (spread_over(sharded, c, self.method, self.task.cluster) for sharded in whole)
            self._floors[key] = min(
                sum(times * floor_s(kind.work, device, c.tp) for times, kind in sharded.every_kind)
                for sharded in spread
            )
        return self._even_s(c, self._with_gradients_s(c, self._floors[key]), 0.5)
