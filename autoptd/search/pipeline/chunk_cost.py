"""Time and memory of a run of segments on one rank: what a pipeline stage, or a chunk of it, costs.

forward     kernels + tp collectives + what of gathering its parameters (ZeRO-3) compute does not hide
backward    the same, + recomputation + adding up gradients
end         reduction of gradients over dp, optimizer step, gathering of updated parameters

What overlaps with compute is hidden as far as there is compute, but for its first piece; while it runs, the device has
fewer multiprocessors for kernels (`Device.collective_multiprocessors`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import all_reduce_between_s, collective_s, sum_in_shards_s
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES, Memory, model_state, optimizer_step_bytes
from autoptd.cost_models.op_time import memory_s
from autoptd.layout.packing import ALIGN
from autoptd.layout.placements import BP
from autoptd.layout.state_bytes import buffer_class, elements_of, packed
from autoptd.search.constraints.options import Method
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.chunk_parameters import ChunkParameters
from autoptd.search.pipeline.messages import Messages
from autoptd.search.pipeline.stage_parameters import Held
from autoptd.search.sharding.kind_cost import ChunkCost as ChunkCost
from autoptd.search.sharding.kind_cost import KindCost, exposed_s, price
from autoptd.search.sharding.tensors import Sharded, Tensors

_CLASSES = 8  # buffers of a stage at the most: parameters of one dtype, placement and set of stages share one


class ChunkCosts(ChunkParameters):
    """Costs of runs of segments of one sharded model under one candidate; asked for thousands of times."""

    def __init__(
        self, tensors: Tensors, sharded: Sharded, candidate: Candidate, method: Method, precision: str, optimizer: str
    ) -> None:
        super().__init__(tensors, sharded, candidate)
        self.method = method
        self.precision = precision
        self.optimizer = optimizer if optimizer in ("adamw", "sgd") else "adamw"
        self.cluster: Cluster = tensors.cluster
        self.dp = candidate.dp * method.cp  # ranks that hold the same parameters
        self.shards = replace(candidate, shards=method.shards).sharing
        self.main, self.compute = MAIN_BYTES[precision], COMPUTE_BYTES[precision]
        self.gradient = self.compute if method.gradients == "compute" else self.main
        self.bucket = elements_of(method.bucket_bytes, self.main)
        self._passes: dict[str, ChunkCost] = {}

    def under(self, cluster: Cluster) -> ChunkCosts:
        """The same chunks on another cluster."""
        other = copy(self)
        other.cluster = cluster
        ranks, world = self.candidate.tp, self.tensors.world
        costs = {kind: price(cost.work, cluster, ranks, world) for kind, cost in self.sharded.costs.items()}
        other.sharded, other._passes = replace(self.sharded, costs=costs), {}
        for worked_out in ("_of_pools", "messages"):
            other.__dict__.pop(worked_out, None)
        return other

    def on(self, rank: int) -> ChunkCosts:
        """The same chunks on the devices of a pipeline rank."""
        pools = self.candidate.pools
        return self._of_pools[pools[rank]] if pools else self

    @cached_property
    def _of_pools(self) -> list[ChunkCosts]:
        return [self.under(cluster) for cluster in self.cluster.pools]

    def cost(self, segment: int) -> KindCost:
        return self.sharded.costs[self.folded.segments[segment].kind]

    # ---- one microbatch ----

    def chunk(self, first: int, last: int, policies: Mapping[int, str]) -> ChunkCost:
        """Segments `first` to `last`, of which those with a policy run (a part of) their forward pass again."""
        forward = backward = recompute = forward_tp = backward_tp = weight = 0.0
        for i in range(first, last + 1):
            part = self._segment(i)
            again = self.recompute_s(i, policies[i]) if i in policies else 0.0
            forward, backward = forward + part.forward_s, backward + part.backward_s + again
            forward_tp, backward_tp = forward_tp + part.forward_tp_s, backward_tp + part.backward_tp_s
            recompute, weight = recompute + again, weight + part.weight_s
        backward += self._accumulate_s(first, last)
        shared_f, shared_b = self._sharding_s(first, last, forward, backward)
        return ChunkCost(
            forward + shared_f,
            backward + shared_b,
            recompute,
            forward_tp,
            backward_tp,
            weight,
            shared_f + shared_b,
        )

    def least(self, segment: int) -> ChunkCost:
        """What a segment adds at the least to any stage that holds it: parameters count where they are read first."""
        part = self._segment(segment)
        mine = sum(numel for _, numel, _, frozen, is_first in self._parameters[segment] if is_first and not frozen)
        return replace(part, backward_s=part.backward_s + self._adding_s(mine))

    def recompute_s(self, segment: int, policy: str) -> float:
        """What a policy of recomputation runs again: with attention, what the cp axis is asked for as well."""
        cost = self.cost(segment)
        if policy not in cost.policy_s:
            return self._segment(segment).forward_s
        attends = any(work.attends for work in cost.work.recomputed[policy])
        return cost.policy_s[policy] + (self._context_s(cost)[0] if attends else 0.0)

    def _segment(self, segment: int) -> ChunkCost:
        """Passes of one segment, but for what depends on the whole stage."""
        kind = self.folded.segments[segment].kind
        if kind not in self._passes:
            cost = self.sharded.costs[kind]
            compute_f, compute_b = cost.forward_s - cost.forward_comm_s, cost.backward_s - cost.backward_comm_s
            context_f, context_b = self._context_s(cost)
            tp_f = self._exposed_tp_s(cost.forward_comm_s, compute_f) + context_f
            tp_b = self._exposed_tp_s(cost.backward_comm_s, compute_b) + context_b
            self._passes[kind] = ChunkCost(compute_f + tp_f, compute_b + tp_b, 0.0, tp_f, tp_b, cost.weight_s)
        return self._passes[kind]

    def _exposed_tp_s(self, comm_s: float, compute_s: float) -> float:
        pieces = self.candidate.tp if "tp" in self.method.overlap else 1
        return exposed_s(comm_s, compute_s, pieces) if pieces > 1 else comm_s

    def _context_s(self, cost: KindCost) -> tuple[float, float]:
        """What the cp axis is asked for, (forward, backward), as far as attention does not hide it.

        By Ulysses all four tensors of attention are exchanged, and so are their gradients; nothing hides that.
        """
        if self.method.context == "ring":
            ring = self._ring_s(cost)
            return ring, 2 * ring
        ranks, nbytes = self.method.cp, cost.work.exchanged_bytes * self.method.cp
        exchange = self._collective_s("all_to_all", nbytes, ranks) if nbytes else 0.0
        return exchange, exchange

    def _ring_s(self, cost: KindCost) -> float:
        """Keys and values of the other cp ranks, as far as attention does not hide them."""
        if self.method.cp == 1 or not cost.work.ring_bytes:
            return 0.0
        ranks = self.method.cp
        comm_s = self._collective_s("all_gather", cost.work.ring_bytes * ranks, ranks)
        return exposed_s(comm_s, cost.attention_s, ranks)

    def _accumulate_s(self, first: int, last: int) -> float:
        return self._adding_s(self.numel(first, last)[1])

    def _adding_s(self, numel: int) -> float:
        """Adding each microbatch's gradients to the buffer; matmul kernels written for it do so as they compute."""
        if self.candidate.zero >= 2 or (self.method.kernels != "eager" and self.method.gradients == "main"):
            return 0.0
        if self.gradient == self.compute and self.candidate.microbatches == 1:
            return 0.0
        per_element = 2 * self.gradient + self.compute
        return memory_s(self.cluster.device, numel * per_element)

    def _sharding_s(self, first: int, last: int, forward_s: float, backward_s: float) -> tuple[float, float]:
        """Gathering parameters for each pass and scattering gradients (Zhao et al. 2023, FSDP), where not hidden."""
        c = self.candidate
        if c.zero < 2 or self.dp == 1:
            return 0.0, 0.0
        trained = self.numel(first, last)[1]
        blocks = max(1, last - first)
        still = [self.frozen_bytes(first, last, backward=back) if c.zero == 3 else 0 for back in (False, True)]
        each = ((trained * self.compute + frozen) / blocks for frozen in still)
        gather, again = (self._collective_s("all_gather", n, self.shards) * blocks for n in each)
        back = blocks * self._sum_s(trained * self.gradient / blocks)
        back += again if c.zero == 3 else 0.0
        if "dp" not in self.method.overlap:
            return gather, back
        tax = self.cluster.device.collective_share
        return (
            exposed_s(gather, forward_s, blocks) + tax * min(gather, forward_s),
            exposed_s(back, backward_s, blocks) + tax * min(back, backward_s),
        )

    def _collective_s(self, name: str, nbytes: float, ranks: int) -> float:
        """Of neighbours on the data axis."""
        return collective_s(name, nbytes, self.cluster, ranks, self.candidate.tp, self.candidate.world)

    def _sum_s(self, nbytes: float) -> float:
        """To sum gradients over the ranks that hold the same parameters."""
        c = self.candidate
        return sum_in_shards_s(nbytes, self.cluster, self.dp, self.shards, c.tp, c.world)

    @cached_property
    def messages(self) -> Messages:
        """Between stages."""
        return Messages(self.cluster, self.candidate, self.method, tuple(self._crossing_bytes))

    # ---- state ----

    def state(self, runs: list[tuple[int, int]], cut: Sequence[tuple[int, int]] = ()) -> Memory:
        """Parameters, gradients and optimizer state of these runs of segments, each parameter once.

        As the runtime lays them out, with padding (`layout/state_bytes.py`), and with what ZeRO 2 and 3 hold whole when
        they hold most. `cut`: the segments of all stages, where known: a parameter that several hold lies in a buffer
        of its own.
        """
        held: dict[str, Held] = {}
        for first, last in runs:
            alone = first == last and self.candidate.pp == 1
            for i in range(first, last + 1):
                for name, count, stored, frozen, is_first in self._parameters[i]:
                    if is_first or not alone:
                        held.setdefault(name, Held(self._order[name], count, stored, frozen))
        own = sorted(held.items(), key=lambda item: item[1].order)
        if any(first == 0 for first, _ in runs):  # the first stage keeps what nobody reads
            own += self._unused.items()
        shared = self._sharers(cut)
        laid = [(name, h) for name, h in own if not (h.frozen and self.candidate.zero < 3)]
        idle = {i for i, (name, h) in enumerate(laid) if name in self._unused and not h.frozen}
        still = {i: self._dtypes[name].itemsize for i, (name, h) in enumerate(laid) if h.frozen}
        sizes = [((buffer_class(h.placement), shared.get(name), self._dtypes[name]), h.numel) for name, h in laid]
        units = [self._unit(name, runs, cut) for name, _ in laid] if self.candidate.zero >= 2 else ()
        layout = packed(sizes, self.dp, self.shards, self.bucket, idle, units, still)
        state = model_state(
            layout.buckets,
            precision=self.precision,
            optimizer=self.optimizer,
            zero=self.candidate.zero,
            dp=self.dp,
            shards=self.shards,
            gradients=self.method.gradients,
            whole_numel=layout.whole,
            stepped=layout.most_stepped,
        )
        nbytes = sum(h.numel * self._dtypes[name].itemsize for name, h in own if h.frozen and self.candidate.zero < 3)
        nbytes += layout.frozen_bytes + (layout.gathered_bytes(self.compute) if self.candidate.zero == 3 else 0)
        return state + Memory(parameters=nbytes)

    def state_at_least(self, segment: int) -> Memory:
        """Of a segment, without padding, and without parameters that another one reads first."""
        mine = [p for p in self._parameters[segment] if p[4]]
        state = model_state(
            [sum(p[1] for p in mine if not p[3])],
            precision=self.precision,
            optimizer=self.optimizer,
            zero=self.candidate.zero,
            dp=self.dp,
            pad_to=self.shards,
            shards=self.shards,
            gradients=self.method.gradients,
        )
        frozen = sum(p[1] * self._dtypes[p[0]].itemsize for p in mine if p[3])
        return state + Memory(parameters=frozen // (self.shards if self.candidate.zero == 3 else 1))

    def state_at_most(self, first: int, last: int) -> Memory:
        """The same of one run, without ZeRO 2 and 3 not laid out: with all the padding that there may be."""
        frozen, trained = self.frozen_bytes(first, last), self.numel(first, last)[1]
        if first == 0:
            frozen += sum(h.numel * self._dtypes[name].itemsize for name, h in self._unused.items() if h.frozen)
            trained += sum(h.numel for h in self._unused.values() if not h.frozen)
        if self.candidate.zero >= 2:  # buckets of blocks are many, and some are whole at a time
            spare = _CLASSES * self.dp * ALIGN
            return self.state([(first, last)]) + model_state([spare], precision=self.precision, optimizer="adamw")
        buckets = min(trained // self.bucket, len(self._order)) + _CLASSES
        padding = buckets * self.dp * ALIGN if self.dp > 1 else 0
        state = model_state(
            [trained + padding],
            precision=self.precision,
            optimizer=self.optimizer,
            zero=self.candidate.zero,
            dp=self.dp,
            shards=self.shards,
            gradients=self.method.gradients,
        )
        return state + Memory(parameters=frozen)

    def upcast_bytes(self, runs: list[tuple[int, int]]) -> int:
        """Gradients that the optimizer needs in the main type, where they were kept in the compute type."""
        if self.gradient == self.main:
            return 0
        return self.main * -(-sum(self.numel(*run)[1] for run in runs) // self.shards)

    # ---- the end of a step ----

    def reduce_s(self, runs: list[tuple[int, int]], cut: Sequence[tuple[int, int]] = ()) -> float:
        """Seconds to sum the gradients of these runs of segments over the ranks that share them.

        `cut`: the segments of all stages, which say what is tied over several.
        """
        c = self.candidate
        trained = sum(self.numel(*run)[1] for run in runs)
        partial = sum(self.numel(*run, BP)[1] for run in runs)
        found = 0.0
        if partial:
            found = collective_s("all_reduce", partial * self.gradient, self.cluster, c.tp, 1, c.world)
        if c.zero < 2 and self.dp > 1:
            buckets = self.buckets(trained)
            each = trained * self.gradient / buckets
            found += buckets * self._sum_s(each)
        return found + self._tied_s(runs, cut)

    def buckets(self, trained: int) -> int:
        """Into how many parts the gradients of so many elements are cut to be reduced."""
        size = self.method.bucket_bytes
        return max(1, -(-trained * self.gradient // size)) if size else 1

    def gather_s(self, runs: list[tuple[int, int]]) -> float:
        """Seconds to collect the updated parameters."""
        trained = sum(self.numel(*run)[1] for run in runs)
        if self.candidate.zero != 1 or self.dp == 1:
            return 0.0
        return self._collective_s("all_gather", trained * self.compute, self.shards)

    def step_s(self, runs: list[tuple[int, int]]) -> float:
        """Seconds of the optimizer on this rank's share."""
        shard = -(-sum(self.numel(*run)[1] for run in runs) // self.shards)
        nbytes = optimizer_step_bytes(shard, precision=self.precision, optimizer=self.optimizer)
        return memory_s(self.cluster.device, nbytes)

    def _tied_s(self, runs: list[tuple[int, int]], cut: Sequence[tuple[int, int]]) -> float:
        """The sums over stages of gradients of parameters that other stages hold too, each among those that do."""
        width = self.candidate.tp * self.dp
        inside = {i for first, last in runs for i in range(first, last + 1)}
        mine = {p[0]: p[1] for i in inside for p in self._parameters[i] if not p[3]}
        numel: dict[frozenset[int], int] = {}
        for name, holders in self._sharers(cut).items():
            if name in mine:
                numel[holders] = numel.get(holders, 0) + mine[name]
        return sum(
            all_reduce_between_s(
                count * self.gradient / self.shards, self.cluster, tuple(k * width for k in sorted(holders)), width
            )
            for holders, count in numel.items()
        )
