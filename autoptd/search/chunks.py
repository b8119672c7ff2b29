"""Time and memory of a run of segments on one rank: what a pipeline stage, or a chunk of it, costs.

forward     kernels + tp collectives + what of gathering its parameters (ZeRO-3) compute does not hide
backward    the same, + recomputation + adding up gradients
end         reduction of gradients over dp, optimizer step, gathering of updated parameters

What overlaps with compute is hidden as far as there is compute, but for its first piece; while it runs, the device has
fewer multiprocessors for kernels (`Device.collective_multiprocessors`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s, p2p_s
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES, Memory, model_state, optimizer_step_bytes
from autoptd.cost_models.op_time import memory_s
from autoptd.passes.fold import Folded
from autoptd.passes.graph import infos
from autoptd.passes.placements import BP, B, Placement, Split
from autoptd.runtime.footprint import buffer_class, packed
from autoptd.search.kinds import KindCost, price
from autoptd.search.meshes import Candidate
from autoptd.search.tensors import Sharded, Tensors
from autoptd.search.wishes import Method


@dataclass(frozen=True)
class ChunkCost:
    """Seconds of one microbatch. `forward_s` and `backward_s` hold all that the others name."""

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    forward_tp_s: float = 0.0  # not hidden by compute
    backward_tp_s: float = 0.0
    sharding_s: float = 0.0  # exchange of sharded parameters and gradients, not hidden


@dataclass(frozen=True)
class _Held:
    """A parameter on a stage: its place in forward order, local elements, how it is stored, whether it is frozen."""

    order: int
    numel: int
    placement: Placement
    frozen: bool


class Chunks:
    """Costs of runs of segments of one sharded model under one candidate; asked for thousands of times."""

    def __init__(
        self, tensors: Tensors, sharded: Sharded, candidate: Candidate, method: Method, precision: str, optimizer: str
    ) -> None:
        self.tensors, self.sharded, self.candidate, self.method = tensors, sharded, candidate, method
        self.precision = precision
        self.optimizer = optimizer if optimizer in ("adamw", "sgd") else "adamw"
        self.folded: Folded = tensors.folded
        self.cluster: Cluster = tensors.cluster
        self.dp = candidate.dp * method.cp  # ranks that hold the same parameters
        self.shards = min(method.shards or self.dp, self.dp)
        self.main, self.compute = MAIN_BYTES[precision], COMPUTE_BYTES[precision]
        self.gradient = self.compute if method.gradients == "compute" else self.main

    def under(self, cluster: Cluster) -> Chunks:
        """The same chunks on another cluster."""
        other = copy(self)
        other.cluster = cluster
        costs = {kind: price(cost.work, cluster, self.candidate.tp) for kind, cost in self.sharded.costs.items()}
        other.sharded = replace(self.sharded, costs=costs)
        return other

    def cost(self, segment: int) -> KindCost:
        return self.sharded.costs[self.folded.segments[segment].kind]

    # ---- one microbatch ----

    def chunk(self, first: int, last: int, recomputed: frozenset[int], policy: str) -> ChunkCost:
        """Segments `first` to `last`, of which `recomputed` run (a part of) their forward pass again."""
        forward = backward = recompute = forward_tp = backward_tp = 0.0
        for i in range(first, last + 1):
            cost = self.cost(i)
            compute_f, compute_b = cost.forward_s - cost.forward_comm_s, cost.backward_s - cost.backward_comm_s
            ring = self._ring_s(cost)
            tp_f = self._exposed_tp_s(cost.forward_comm_s, compute_f) + ring
            tp_b = self._exposed_tp_s(cost.backward_comm_s, compute_b) + 2 * ring
            again = 0.0
            if i in recomputed:
                again = cost.again_s[policy] if policy in cost.again_s else compute_f + tp_f
            forward, backward = forward + compute_f + tp_f, backward + compute_b + tp_b + again
            forward_tp, backward_tp, recompute = forward_tp + tp_f, backward_tp + tp_b, recompute + again
        backward += self._accumulate_s(first, last)
        shared_f, shared_b = self._sharding_s(first, last, forward, backward)
        return ChunkCost(
            forward + shared_f, backward + shared_b, recompute, forward_tp, backward_tp, shared_f + shared_b
        )

    def _exposed_tp_s(self, comm_s: float, compute_s: float) -> float:
        pieces = self.candidate.tp if "tp" in self.method.overlap else 1
        return exposed_s(comm_s, compute_s, pieces) if pieces > 1 else comm_s

    def _ring_s(self, cost: KindCost) -> float:
        """Keys and values of the other cp ranks, as far as attention does not hide them."""
        if self.method.cp == 1 or not cost.work.ring_bytes:
            return 0.0
        ranks = self.method.cp
        comm_s = collective_s("all_gather", cost.work.ring_bytes * ranks, self.cluster, ranks, self.candidate.tp)
        return exposed_s(comm_s, cost.attention_s, ranks)

    def _accumulate_s(self, first: int, last: int) -> float:
        """Adding each microbatch's gradients to the buffer; matmul kernels written for it do so as they compute."""
        if self.candidate.zero >= 2 or (self.method.kernels != "eager" and self.method.gradients == "main"):
            return 0.0
        if self.gradient == self.compute and self.candidate.microbatches == 1:
            return 0.0
        per_element = 2 * self.gradient + self.compute
        return memory_s(self.cluster.device, self.numel(first, last)[1] * per_element)

    def _sharding_s(self, first: int, last: int, forward_s: float, backward_s: float) -> tuple[float, float]:
        """Gathering parameters for each pass and scattering gradients (Zhao et al. 2023, FSDP), where not hidden."""
        c = self.candidate
        if c.zero < 2 or self.dp == 1:
            return 0.0, 0.0
        trained = self.numel(first, last)[1]
        stride, blocks = c.tp, max(1, last - first)
        inside = self.shards
        gather = collective_s("all_gather", trained * self.compute / blocks, self.cluster, inside, stride) * blocks
        scatter = (
            collective_s("reduce_scatter", trained * self.gradient / blocks, self.cluster, inside, stride) * blocks
        )
        if self.dp > inside:
            share = trained * self.gradient / inside / blocks
            scatter += blocks * collective_s("all_reduce", share, self.cluster, self.dp // inside, stride * inside)
        back = scatter + (gather if c.zero == 3 else 0.0)
        if "dp" not in self.method.overlap:
            return gather, back
        tax = self.cluster.device.collective_share
        return (
            exposed_s(gather, forward_s, blocks) + tax * min(gather, forward_s),
            exposed_s(back, backward_s, blocks) + tax * min(back, backward_s),
        )

    def send_s(self, place: int) -> float:
        """Seconds to send what crosses a place, one way."""
        whole, split = self._crossing_bytes[place] if place < len(self._crossing_bytes) else (0, 0)
        c = self.candidate
        if c.pp == 1 or not whole + split:
            return 0.0
        stride = c.tp * self.dp
        if self.method.sends == "slices" and c.tp > 1 and whole:
            gathered = collective_s("all_gather", whole, self.cluster, c.tp)
            return p2p_s(whole / c.tp + split, self.cluster, stride) + gathered
        return p2p_s(whole + split, self.cluster, stride)

    @cached_property
    def _crossing_bytes(self) -> list[tuple[int, int]]:
        """Local bytes alive at each place between segments: (held by every tp rank, split)."""
        placed: dict[fx.Node, tuple[int, Placement]] = {}
        last: dict[fx.Node, int] = {}
        for segment in self.folded.segments:
            decided = self.sharded.sharding.kinds[segment.kind]
            for node in segment.receives:
                last[node] = segment.index
            for node, placement in zip(segment.sends, decided.sends, strict=True):
                placed[node] = segment.index, placement
        found = [[0, 0] for _ in self.folded.segments]
        for node, until in last.items():
            made, placement = placed[node]
            for place in range(made + 1, until + 1):
                found[place][isinstance(placement, Split)] += self.tensors.nbytes(infos(node)[0], placement)
        return [(whole, split) for whole, split in found]

    # ---- parameters ----

    def numel(self, first: int, last: int, placement: Placement | None = None) -> tuple[int, int]:
        """Local elements (frozen, trained), of one placement or of all; tied parameters of these segments once.

        Without a pipeline a tied parameter counts where it is read first; with one, on every stage that reads it.
        """
        alone = first == last and self.candidate.pp == 1
        frozen = trained = 0
        seen: set[str] = set()
        for i in range(first, last + 1):
            for name, count, stored, is_frozen, is_first in self._parameters[i]:
                if (placement is None or stored == placement) and name not in seen and (is_first or not alone):
                    seen.add(name)
                    frozen, trained = (frozen + count, trained) if is_frozen else (frozen, trained + count)
        return frozen, trained

    @cached_property
    def _parameters(self) -> list[list[tuple[str, int, Placement, bool, bool]]]:
        """Of each segment: (name, local elements, placement, frozen, whether read here first)."""
        traced = self.folded.traced
        reader: dict[str, int] = {}
        found = []
        for segment in self.folded.segments:
            decided = self.sharded.sharding.kinds[segment.kind]
            mine = []
            for node, stored in zip(segment.parameters, decided.parameters, strict=True):
                name = traced.parameters[node.name]
                tensor = infos(node)[0]
                count = self.tensors.nbytes(tensor, stored) // tensor.dtype.itemsize
                first = reader.setdefault(name, segment.index) == segment.index
                mine.append((name, count, stored, name in traced.frozen, first))
            found.append(mine)
        return found

    def alike(self, segment: int) -> Hashable:
        """Equal for segments of one kind only if they cost the same: by their parameters, and what crosses behind."""
        behind = self._crossing_bytes[segment + 1] if segment + 1 < len(self._crossing_bytes) else (0, 0)
        return tuple(parameter[1:] for parameter in self._parameters[segment]), behind

    def state(self, runs: list[tuple[int, int]], block_numel: int = 0, cut: Sequence[tuple[int, int]] = ()) -> Memory:
        """Parameters, gradients and optimizer state of these runs of segments, each parameter once.

        As the runtime lays them out, with padding (`runtime/footprint.py`). `block_numel`: of the largest block, which
        ZeRO 2 and 3 hold whole. `cut`: the segments of all stages, where known: a parameter that several hold lies in a
        buffer of its own.
        """
        held: dict[str, _Held] = {}
        for first, last in runs:
            alone = first == last and self.candidate.pp == 1
            for i in range(first, last + 1):
                for name, count, stored, frozen, is_first in self._parameters[i]:
                    if is_first or not alone:
                        held.setdefault(name, _Held(self._order[name], count, stored, frozen))
        own = sorted(held.items(), key=lambda item: item[1].order)
        if any(first == 0 for first, _ in runs):  # the first stage keeps what nobody reads
            own += self._unused.items()
        shared = self._sharers(cut)
        trained = [(name, h) for name, h in own if not h.frozen]
        zero = self.candidate.zero
        idle = {i for i, (name, _) in enumerate(trained) if name in self._unused}
        sizes = [((buffer_class(h.placement), shared.get(name)), h.numel) for name, h in trained]
        layout = packed(sizes, self.dp, zero, idle=idle) if zero < 2 else None
        state = model_state(
            layout.buckets if layout else [sum(h.numel for _, h in trained)],
            precision=self.precision,
            optimizer=self.optimizer,
            zero=zero,
            dp=self.dp,
            shards=self.shards,
            gradients=self.method.gradients,
            block_numel=block_numel,
            stepped=layout.most_stepped if layout else None,
        )
        return state + Memory(parameters=sum(h.numel for _, h in own if h.frozen) * self.compute)

    def _sharers(self, cut: Sequence[tuple[int, int]]) -> dict[str, frozenset[int]]:
        """Parameters that several pipeline ranks hold -> those ranks."""
        if self.candidate.pp == 1 or not cut:
            return {}
        rank = {i: at % self.candidate.pp for at, (first, last) in enumerate(cut) for i in range(first, last + 1)}
        found = {name: frozenset(rank[i] for i in readers) for name, readers in self._tied.items()}
        return {name: ranks for name, ranks in found.items() if len(ranks) > 1}

    @cached_property
    def _order(self) -> dict[str, int]:
        """Name of a parameter -> its place in the model's forward order."""
        names = dict.fromkeys(parameter[0] for mine in self._parameters for parameter in mine)
        return {name: i for i, name in enumerate(names)}

    @cached_property
    def _unused(self) -> dict[str, _Held]:
        """Parameters that do not reach the loss."""
        traced, found = self.folded.traced, {}
        for node in self.folded.unused_parameters:
            name, tensor = traced.parameters[node.name], infos(node)[0]
            count = self.tensors.nbytes(tensor) // tensor.dtype.itemsize
            found[name] = _Held(len(self._order), count, B, name in traced.frozen)
        return found

    def upcast_bytes(self, runs: list[tuple[int, int]]) -> int:
        """Gradients that the optimizer needs in the main type, where they were kept in the compute type."""
        if self.gradient == self.main:
            return 0
        shards = {0: 1, 1: self.dp}.get(self.candidate.zero, self.shards)
        return self.main * -(-sum(self.numel(*run)[1] for run in runs) // shards)

    # ---- the end of a step ----

    def reduce_s(self, runs: list[tuple[int, int]]) -> float:
        """Seconds to sum the gradients of these runs of segments over the ranks that share them."""
        c = self.candidate
        trained = sum(self.numel(*run)[1] for run in runs)
        partial = sum(self.numel(*run, BP)[1] for run in runs)
        found = collective_s("all_reduce", partial * self.gradient, self.cluster, c.tp, 1) if partial else 0.0
        if c.zero < 2 and self.dp > 1:
            kind = "reduce_scatter" if c.zero else "all_reduce"
            buckets = self.buckets(trained)
            found += buckets * collective_s(kind, trained * self.gradient / buckets, self.cluster, self.dp, c.tp)
        return found + self._tied_s(runs)

    def buckets(self, trained: int) -> int:
        """Into how many parts the gradients of so many elements are cut to be reduced."""
        size = self.method.bucket_bytes
        return max(1, -(-trained * self.gradient // size)) if size else 1

    def gather_s(self, runs: list[tuple[int, int]]) -> float:
        """Seconds to collect the updated parameters."""
        trained = sum(self.numel(*run)[1] for run in runs)
        if self.candidate.zero != 1 or self.dp == 1:
            return 0.0
        return collective_s("all_gather", trained * self.compute, self.cluster, self.dp, self.candidate.tp)

    def step_s(self, runs: list[tuple[int, int]]) -> float:
        """Seconds of the optimizer on this rank's share."""
        shards = {0: 1, 1: self.dp}.get(self.candidate.zero, self.shards)
        shard = -(-sum(self.numel(*run)[1] for run in runs) // shards)
        nbytes = optimizer_step_bytes(shard, precision=self.precision, optimizer=self.optimizer)
        return memory_s(self.cluster.device, nbytes)

    def _tied_s(self, runs: list[tuple[int, int]]) -> float:
        """The sum over stages of gradients of parameters that other stages hold too."""
        if self.candidate.pp == 1:
            return 0.0
        inside = {i for first, last in runs for i in range(first, last + 1)}
        mine = {p[0]: p[1] for i in inside for p in self._parameters[i] if not p[3]}
        numel = sum(mine.get(name, 0) for name, readers in self._tied.items() if readers & inside and readers - inside)
        stride = self.candidate.tp * self.dp * (self.candidate.pp - 1)
        shard = numel * self.gradient / (self.dp if self.candidate.zero else 1)
        return collective_s("all_reduce", shard, self.cluster, 2, stride) if numel else 0.0

    @cached_property
    def _tied(self) -> dict[str, set[int]]:
        """Parameters that several segments read -> those segments."""
        readers: dict[str, set[int]] = {}
        for i, parameters in enumerate(self._parameters):
            for name, *_ in parameters:
                readers.setdefault(name, set()).add(i)
        return {name: where for name, where in readers.items() if len(where) > 1}


def exposed_s(comm_s: float, compute_s: float, pieces: int) -> float:
    """What compute of that length does not hide: one of so many pieces, and what is longer than the compute."""
    first = comm_s / pieces
    return first + max(0.0, comm_s - first - compute_s)
