"""Time and memory of the end of a step on one rank: gradient reduction, optimizer, all-gather of new parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import all_reduce_between_s, collective_s, sum_in_shards_s
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES, optimizer_step_bytes, step_gradient_bytes
from autoptd.cost_models.op_time import host_update_s, memory_s
from autoptd.layout.placements import BP
from autoptd.layout.state_bytes import elements_of
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.meshes import Candidate, Copies
from autoptd.search.pipeline.chunk_parameters import ChunkParameters
from autoptd.search.sharding.dispatch_cost import spread_over
from autoptd.search.sharding.tensors import Sharded, Tensors
from autoptd.search.step_end.whole_updates import WholeLoad, WholeUpdates, whole_updates


def full_bucket_s(c: Candidate, copies: Copies, method: SearchOptions, precision: str, cluster: Cluster) -> float:
    """Return seconds per element of reducing a full bucket at the end of a step, which smaller ones take too, as far as
    passes cannot hide them: those of other chunks may hide all."""
    if c.zero >= 2 or copies.ranks == 1 or ("dp" in method.overlap and c.virtual > 1):
        return 0.0
    width = (COMPUTE_BYTES if method.gradients == "compute" else MAIN_BYTES)[precision]
    numel = elements_of(method.bucket_bytes, width, c.dp * c.cp)
    sum_s = sum_in_shards_s(numel * width, cluster, copies.ranks, copies.shards, copies.stride, c.world)
    return least_slowdown(method, cluster) * sum_s / numel


def full_gather_s(
    c: Candidate, copies: Copies, method: SearchOptions, precision: str, cluster: Cluster
) -> tuple[float, float]:
    """Return seconds per element and microbatch of (all-gathering parameters in each pass, reduce-scattering gradients)
    in full buckets, which smaller ones take too, under ZeRO 2 and 3."""
    if c.zero < 2 or c.dp * c.cp == 1:
        return 0.0, 0.0
    compute = COMPUTE_BYTES[precision]
    width = compute if method.gradients == "compute" else MAIN_BYTES[precision]
    numel = elements_of(method.bucket_bytes, width, c.dp * c.cp)
    sum_s = sum_in_shards_s(numel * width, cluster, copies.ranks, copies.shards, copies.stride, c.world)
    gather_s = collective_s("all_gather", numel * compute, cluster, copies.shards, copies.stride, c.world)
    return gather_s / numel if c.zero == 3 else 0.0, sum_s / numel


def least_slowdown(method: SearchOptions, cluster: Cluster) -> float:
    """Return the share of the seconds of gathers and reductions beside passes by which these take longer at least.

    Of communication c beside a pass p, the device gives a share s to min(c, p), and c - p is exposed: at least p + s c,
    and c + s p."""
    return cluster.device.collective_share if "dp" in method.overlap else 1.0


class StepEnd(ChunkParameters):
    """Costs of the end of a step for runs of segments of one sharded model under one candidate."""

    def __init__(
        self,
        tensors: Tensors,
        sharded: Sharded,
        candidate: Candidate,
        method: SearchOptions,
        precision: str,
        optimizer: str,
    ) -> None:
        super().__init__(tensors, spread_over(sharded, candidate, method, tensors.cluster), candidate)
        self.method, self.offload = method, candidate.offload
        self.precision = precision
        self.optimizer = optimizer
        self.whole: WholeUpdates = self._memoised(
            f"whole updates, {optimizer}", lambda: whole_updates(self.folded, optimizer)
        )
        self.cluster: Cluster = tensors.cluster
        self.copies = candidate._replace(shards=method.shards).copies  # of dense parameters, and of experts
        self.dp, self.shards = self.copies[0].ranks, self.copies[0].shards
        self.main, self.compute = MAIN_BYTES[precision], COMPUTE_BYTES[precision]
        self.gradient = self.compute if method.gradients == "compute" else self.main
        self.bucket = elements_of(method.bucket_bytes, self.gradient, candidate.dp * candidate.cp)  # elements

    def _collective_s(self, name: str, nbytes: float, ranks: int, stride: int = 0) -> float:
        """Return seconds of a collective over ranks `stride` apart, by default neighbours on the data axis."""
        return collective_s(name, nbytes, self.cluster, ranks, stride or self.candidate.tp, self.candidate.world)

    def _sum_s(self, nbytes: float, copies: Copies) -> float:
        """Return seconds of reducing gradients over the ranks that hold the same parameters."""
        c = self.candidate
        return sum_in_shards_s(nbytes, self.cluster, copies.ranks, copies.shards, copies.stride, c.world)

    def _trained(self, runs: Sequence[tuple[int, int]]) -> list[tuple[int, Copies]]:
        """Return the local trained elements of these runs of segments, with their copies: experts apart."""
        if len(self.copies) == 1:
            return [(sum(self.numel(*run) for run in runs), self.copies[0])]
        kinds = zip((False, True), self.copies, strict=True)
        return [(sum(self.numel(*run, experts=experts) for run in runs), copies) for experts, copies in kinds]

    def reduce_s(self, runs: list[tuple[int, int]], cut: Sequence[tuple[int, int]] = ()) -> float:
        """Return seconds of reducing the gradients of these runs of segments over the ranks that share them.

        `cut`: the segments of all stages, which determine the parameters tied across stages.
        """
        c = self.candidate
        partial = sum(self.numel(*run, BP, experts=None if c.ep == 1 else False) for run in runs)
        found = 0.0
        if partial:
            found = collective_s("all_reduce", partial * self.gradient, self.cluster, c.tp, 1, c.world)
        for trained, copies in self._trained(runs) if c.zero < 2 else ():
            if copies.ranks > 1 and trained:
                buckets = self.buckets(trained)
                found += buckets * self._sum_s(trained * self.gradient / buckets, copies)
        return found + self._tied_s(runs, cut)

    def least_reduce_s(self, segment: int) -> float:
        """Return a lower bound on what a segment adds to `reduce_s` of its rank."""
        return sum(
            rate * self.numel_read_first(segment, None if len(self.copies) == 1 else bool(experts))
            for experts, rate in enumerate(self._full_buckets_s)
            if rate
        )

    @cached_property
    def _full_buckets_s(self) -> list[float]:
        """Seconds per element of reducing full buckets, for each of `copies`."""
        return [full_bucket_s(self.candidate, c, self.method, self.precision, self.cluster) for c in self.copies]

    def least_sharding_s(self, segment: int) -> tuple[float, float]:
        """Return lower bounds on what a segment adds to the all-gathers and reduce-scatters of a stage's forward and
        backward pass (ZeRO 2 and 3)."""
        forward_s = backward_s = 0.0
        for experts, (gather_s, sum_s) in enumerate(self._full_gathers_s):
            if sum_s:
                numel = self.numel_read_first(segment, None if len(self.copies) == 1 else bool(experts))
                forward_s, backward_s = forward_s + gather_s * numel, backward_s + (gather_s + sum_s) * numel
        return forward_s, backward_s

    @cached_property
    def _full_gathers_s(self) -> list[tuple[float, float]]:
        """`full_gather_s` for each of `copies`, as far as passes cannot hide it."""
        share = least_slowdown(self.method, self.cluster)
        each = (full_gather_s(self.candidate, c, self.method, self.precision, self.cluster) for c in self.copies)
        return [(share * gather_s, share * sum_s) for gather_s, sum_s in each]

    def buckets(self, trained: int) -> int:
        """Return the number of buckets of `trained` elements, which are reduced and gathered one after another."""
        return max(1, -(-trained // self.bucket))

    def gather_s(self, runs: list[tuple[int, int]]) -> float:
        """Return seconds of all-gathering the updated parameters (ZeRO-1 and 2)."""
        if self.candidate.zero not in (1, 2) or self.dp == 1:
            return 0.0
        blocks = sum(self.units(*run) for run in runs) if self.candidate.zero == 2 else 1  # no bucket spans two
        found = 0.0
        for trained, copies in self._trained(runs):
            buckets = max(blocks, self.buckets(trained))
            each = trained * self.compute / buckets
            found += buckets * self._collective_s("all_gather", each, copies.shards, copies.stride)
        return found

    def step_s(self, runs: list[tuple[int, int]]) -> float:
        """Return seconds of the optimizer on this rank's shard: on the device, and beside it on the host."""
        load, on_host = self.whole_load(runs), self.host_numel(runs)
        flat = ((trained - self._whole_numel(runs, i), c.shards) for i, (trained, c) in enumerate(self._trained(runs)))
        shard = sum(-(-numel // shards) for numel, shards in flat)
        kept = self.whole.cost.moments * (shard - on_host) + load.kept
        nbytes = optimizer_step_bytes(
            shard - on_host + load.stepped, precision=self.precision, optimizer=self.optimizer, kept=kept
        )
        device = self.cluster.device
        here_s = memory_s(device, nbytes) + self.whole_s(load)
        there_s = host_update_s(device, on_host, self.precision, self.optimizer)
        method = self.method
        by_hand = method.kernels == "fused"
        before = step_gradient_bytes(shard, self.precision, method.gradients, self.candidate.zero, by_hand)
        return memory_s(device, before) + max(here_s, there_s)

    def host_numel(self, runs: list[tuple[int, int]]) -> int:
        """Return about how many elements this rank updates on the host: those of whole buckets."""
        found = 0
        for trained, copies in self._trained(runs) if self.offload else ():
            buckets = self.buckets(trained)
            found += -(-trained * math.ceil(buckets * self.offload) // (buckets * copies.shards))
        return found

    def whole_s(self, load: WholeLoad) -> float:
        """Return seconds of the products of whole parameters, and of bringing these together and sending them back."""
        device, ranks = self.cluster.device, self.stage_ranks
        products_s = load.flops / (device.matmul_flops_per_s.of("bf16") * device.matmul_fraction("bf16"))
        exchanged = (n * load.moved * self.main for n in (2, 1))
        return products_s + sum(self._collective_s("all_to_all", n, ranks, 1) for n in exchanged if n and ranks > 1)

    def _tied_s(self, runs: list[tuple[int, int]], cut: Sequence[tuple[int, int]]) -> float:
        """Return seconds of all-reducing gradients of tied parameters, each over the stages that hold it."""
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

    def update_bytes(self, runs: list[tuple[int, int]]) -> int:
        """Return the bytes during the optimizer step: gradients in the main type, and whole parameters at owners."""
        found = self.whole_load(runs).temporary_bytes(self.main, self.stage_ranks) if self.whole.shapes else 0
        if self.gradient == self.main:
            return found
        return found + self.main * sum(-(-trained // copies.shards) for trained, copies in self._trained(runs))

    def whole_load(self, runs: Sequence[tuple[int, int]]) -> WholeLoad:
        """Return the whole parameters of these runs of segments on the fullest rank."""
        loads = (self._load(self._whole_parameters(runs, i), copies) for i, copies in enumerate(self.copies))
        return sum(loads, WholeLoad())

    def _whole_parameters(self, runs: Sequence[tuple[int, int]], experts: int) -> list[tuple[str, int]]:
        """Return (name, local elements) of the whole parameters of these runs: of experts on ep ranks, or others."""
        if not self.whole.shapes:
            return []
        held = {p[0]: p[1] for first, last in runs for i in range(first, last + 1) for p in self._parameters[i]}
        return [(n, k) for n, k in held.items() if n in self.whole.shapes and bool(experts) == (n in self._experts)]

    def _whole_numel(self, runs: Sequence[tuple[int, int]], experts: int) -> int:
        return sum(numel for _, numel in self._whole_parameters(runs, experts))

    def _load(self, held: Sequence[tuple[str, int]], copies: Copies) -> WholeLoad:
        """Return the load of parameters with these copies."""
        return self.whole.load(held, self.stage_ranks * copies.shards // copies.ranks, copies.shards)

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.candidate.tp * self.candidate.dp * self.candidate.cp
