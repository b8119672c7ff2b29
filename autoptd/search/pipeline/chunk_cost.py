"""Time and memory of a run of segments on one rank: the cost of a pipeline stage or of one of its chunks.

forward     kernels + tp collectives + exposed parameter all-gather (ZeRO-3) + copies of activations to the host
backward    like forward, + recomputation, or copies back + gradient accumulation
end         `search/step_end`

Overlapped communication is hidden up to the duration of the compute, except for its first piece. While it runs, the
device has fewer multiprocessors for kernels (`Device.collective_multiprocessors`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

import torch

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import Memory, accumulation_bytes, model_state
from autoptd.cost_models.op_time import memory_s
from autoptd.layout.host_memory import host_state_bytes
from autoptd.layout.packing import ALIGN
from autoptd.layout.placements import kind as kind_of
from autoptd.layout.state_bytes import packed
from autoptd.schedule import row_of
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.meshes import OFFLOAD, Copies
from autoptd.search.pipeline.messages import Messages
from autoptd.search.pipeline.stage_parameters import Held, block_peak
from autoptd.search.sharding.dispatch_cost import dispatched_s
from autoptd.search.sharding.kind_cost import ChunkCost as ChunkCost
from autoptd.search.sharding.kind_cost import KindCost, TpSeconds, context_seconds, exposed_s, price, tp_seconds
from autoptd.search.step_end.costs import StepEnd

_CLASSES = 8  # most buffers of a stage: parameters of one dtype, placement and set of stages share one


class ChunkCosts(StepEnd):
    """Costs of runs of segments of one sharded model under one candidate; called thousands of times."""

    @cached_property
    def _passes(self) -> dict[str, ChunkCost]:
        """Costs of the passes of runs of segments, as they are worked out."""
        return {}

    def under(self, cluster: Cluster) -> ChunkCosts:
        """Return a copy with costs on another cluster."""
        other = copy(self)
        other.cluster = cluster
        ranks, world = self.candidate.tp, self.tensors.world
        costs = {kind: price(cost.work, cluster, ranks, world) for kind, cost in self.sharded.costs.items()}
        other.sharded, other._passes = replace(self.sharded, costs=costs), {}
        for worked_out in ("_kinds", "messages"):
            other.__dict__.pop(worked_out, None)
        return other

    def sharing(self, shares: Sequence[float]) -> ChunkCosts:
        """Return a copy with these shares of the optimizer state on the host, by pipeline rank; one counts for all."""
        other = copy(self)
        other.method, other.offload = replace(self.method, offload=tuple(shares)), max(shares)
        other.__dict__.pop("_kinds", None)
        return other

    def on(self, rank: int) -> ChunkCosts:
        """Return the costs on the device type of a pipeline rank, with its share of the optimizer state on the host."""
        pools, shares = self.candidate.pools, self.method.offload
        kind = pools[rank] if pools else 0, shares[rank] if len(shares) > 1 else self.offload
        if not pools and kind[1] == self.offload:
            return self
        if kind not in self._kinds:
            self._kinds[kind] = self.under(self.cluster.pools[kind[0]]) if pools else copy(self)
            self._kinds[kind].offload = kind[1]
        return self._kinds[kind]

    @cached_property
    def _kinds(self) -> dict[tuple[int, float], ChunkCosts]:
        """Costs on other kinds of ranks, as they are worked out."""
        return {}

    def cost(self, segment: int) -> KindCost:
        return self.sharded.costs[self.folded.segments[segment].kind]

    # ---- one microbatch ----

    def chunk(self, first: int, last: int, policies: Mapping[int, str]) -> ChunkCost:
        """Return the cost of segments `first` to `last`; those in `policies` recompute under their policy."""
        forward = backward = recompute = copies = forward_tp = backward_tp = weight = statistics = 0.0
        for i in range(first, last + 1):
            part = self.segment(i)
            there, again = self.added_s(i, policies[i]) if i in policies else (0.0, 0.0)
            forward, backward = forward + part.forward_s + there, backward + part.backward_s + again
            forward_tp, backward_tp = forward_tp + part.forward_tp_s, backward_tp + part.backward_tp_s
            if there:
                copies += there + again
            else:
                recompute += again
            weight += part.weight_s
            statistics += part.sharding_s
        backward += self.accumulation_s(self.numel(first, last))
        shared_f, shared_b = self._sharding_s(first, last, forward, backward, policies)
        return ChunkCost(
            forward + shared_f,
            backward + shared_b,
            recompute,
            forward_tp,
            backward_tp,
            weight,
            shared_f + shared_b + statistics,
            copies,
        )

    def least(self, segment: int) -> ChunkCost:
        """Return the least cost that a segment adds to a stage: parameters count only in their first reader."""
        part = self.segment(segment)
        forward_s, backward_s = self.least_sharding_s(segment)
        backward_s += self.accumulation_s(self.numel_read_first(segment, None))
        return replace(part, forward_s=part.forward_s + forward_s, backward_s=part.backward_s + backward_s)

    def added_s(self, segment: int, policy: str) -> tuple[float, float]:
        """Return the seconds that a policy adds to the passes of a segment (forward, backward): of recomputation with
        its communication, or of copies to the host and back, which nothing hides.

        Where a stage ends within a block, its recomputation stops early too; that is left out, so that a segment costs
        the same in every stage."""
        if policy == OFFLOAD:
            nbytes, host = self.offloaded_bytes(segment), self.cluster.device.host
            return nbytes / host.to_bytes_per_s, nbytes / host.from_bytes_per_s
        cost, ends = self.cost(segment), segment in self.tensors.workbook.facts.block_ends
        # a policy that was not to be priced counts as "full": only its memory is asked for then
        how = (policy if (policy, ends) in cost.again_s else "full"), ends
        seconds, comm_s, tp = cost.again_s[how], cost.again_comm_s[how], self._tp(cost)
        if policy == "full" and "tp" in self.method.overlap:  # as in forward
            seconds, comm_s = seconds + tp.slower_s[0], min(comm_s, tp.forward_s)
        if any(work.attends for work in cost.work.recomputed[how].works):
            comm_s += self._context_s(cost)[0]
        if policy in ("full", "ops"):  # rows meet their experts again; what tp gathers is not gathered a third time
            comm_s += self._dispatch_s(cost, seconds) - tp.again_s
        return 0.0, max(0.0, seconds + comm_s)

    def offloaded_bytes(self, segment: int) -> int:
        """Return the bytes that a segment saves for backward and that "offload" moves to the host, per microbatch.

        A tensor that several segments of a block save counts in each of them, although it is moved once.
        """
        kept = (
            block_peak(self.tensors, self.sharded, [self.folded.segments[segment]], policy, self._gathered).kept
            for policy in ("none", OFFLOAD)
        )
        return next(kept) - next(kept)

    @cached_property
    def _gathered(self) -> SearchOptions:
        """The options under which offloaded blocks run, which re-gather nothing."""
        return replace(self.method, gathers="kept")

    def segment(self, segment: int) -> ChunkCost:
        """Return the cost of one segment without the terms that depend on the whole stage."""
        kind = self.folded.segments[segment].kind
        if kind not in self._passes:
            cost = self.sharded.costs[kind]
            compute_f, compute_b = cost.forward_s - cost.forward_comm_s, cost.backward_s - cost.backward_comm_s
            sent_s = (self._dispatch_s(cost, compute_s) for compute_s in (compute_f, compute_b))
            context_f, context_b = (x + y for x, y in zip(self._context_s(cost), sent_s, strict=True))
            context_f += self._counts_s(cost)
            tp = self._tp(cost)
            tp_f, tp_b = tp.forward_s + context_f, tp.backward_s + context_b + tp.again_s
            compute_f, compute_b = compute_f + tp.slower_s[0], compute_b + tp.slower_s[1]
            dp = self._statistics_s(cost)
            forward_s, backward_s = compute_f + tp_f + dp, compute_b + tp_b + dp
            self._passes[kind] = ChunkCost(forward_s, backward_s, 0.0, tp_f, tp_b, cost.weight_s, 2 * dp)
        return self._passes[kind]

    def _statistics_s(self, cost: KindCost) -> float:
        """Return the seconds, in one pass, of summing statistics over the batch: every op after them waits."""
        c = self.candidate
        return sum(self._collective_s("all_reduce", n, c.dp, c.tp * c.cp) for n in cost.work.statistics if c.dp > 1)

    def _tp(self, cost: KindCost) -> TpSeconds:
        return tp_seconds(cost, self.method, self.cluster, self.candidate.tp, self.tensors.world)

    def _context_s(self, cost: KindCost) -> tuple[float, float]:
        """Return exposed seconds (forward, backward) of cp communication."""
        c = self.candidate
        return context_seconds(cost, self.method, self.cluster, c.cp, c.tp, c.world)

    def _dispatch_s(self, cost: KindCost, compute_s: float) -> float:
        """Return the exposed seconds of sending rows to the ranks of their experts and back.

        Backward sends the gradients the same ways. `compute_s`: of the same pass, which hides all of it if "ep" is in
        `overlap`, as far as it lasts, on the multiprocessors that the kernels of the exchange leave.
        """
        sent_s = dispatched_s([cost.work], self.candidate, self.method, self.cluster)
        if "ep" not in self.method.overlap:
            return sent_s
        hidden_s = min(sent_s, compute_s)
        return sent_s - hidden_s + self.cluster.device.collective_share * hidden_s

    def _counts_s(self, cost: KindCost) -> float:
        """Return the seconds in which the device waits for the host, which reads how many rows each rank sends."""
        return self.cluster.device.dispatch_s if self.candidate.ep > 1 and cost.work.moved else 0.0

    def accumulation_s(self, numel: int) -> float:
        """Return seconds of adding a microbatch's gradients to the buffer."""
        c, method = self.candidate, self.method
        sizes = c.zero, c.microbatches, self.copies[0].shards
        nbytes = accumulation_bytes(numel, self.precision, method.gradients, *sizes, method.kernels == "fused")
        return memory_s(self.cluster.device, nbytes)

    def _sharding_s(
        self, first: int, last: int, forward_s: float, backward_s: float, policies: Mapping[int, str]
    ) -> tuple[float, float]:
        """Return exposed seconds (forward, backward) of all-gathering parameters (ZeRO-3) and reduce-scattering
        gradients (ZeRO-2 and 3), per block and pass as in FSDP (Zhao et al. 2023), or per bucket in large blocks."""
        c = self.candidate
        if c.zero < 2 or self.dp == 1:
            return 0.0, 0.0
        blocks = self.units(first, last)
        still = [self.frozen_bytes(first, last, backward=back) for back in (False, True)]
        passes = 1 + self._twice(first, last, policies)
        gather = back = 0.0
        for trained, copies in self._trained([(first, last)]):
            n = max(blocks, self.buckets(trained))
            back += n * self._sum_s(trained * self.gradient / n, copies)
            if c.zero == 3:
                each = ((trained * self.compute + frozen) / n for frozen in still)
                ahead, again = (n * self._collective_s("all_gather", x, copies.shards, copies.stride) for x in each)
                gather, back, still = gather + ahead, back + passes * again, [0, 0]
        if "dp" not in self.method.overlap:
            return gather, back
        slowdown = self.cluster.device.collective_share
        return (
            exposed_s(gather, forward_s, blocks) + slowdown * min(gather, forward_s),
            exposed_s(back, backward_s, blocks) + slowdown * min(back, backward_s),
        )

    def _twice(self, first: int, last: int, policies: Mapping[int, str]) -> float:
        """Return the share of a chunk's parameters that a backward pass in two, B and W, gathers for both: not those of
        recomputed blocks, nor of blocks of the first stage, whose input has no gradient."""
        if self.candidate.zero < 3 or not row_of(self.candidate.schedule).splits_backward:
            return 0.0
        both = [i for i in range(first, last + 1 if first else 1) if i not in policies]
        return sum(self.numel(i, i) for i in both) / max(1, self.numel(first, last))

    @cached_property
    def messages(self) -> Messages:
        """Times of the messages between stages."""
        return Messages(self.cluster, self.candidate, self.method, tuple(self._crossing_bytes))

    # ---- state ----

    def state(
        self, runs: list[tuple[int, int]], cut: Sequence[tuple[int, int]] = (), tied_apart: bool = False
    ) -> Memory:
        """Return parameters, gradients and optimizer state of these runs of segments, each parameter once.

        The layout is the runtime's, with padding (`layout/state_bytes.py`) and the buckets that ZeRO 2 and 3 hold
        unsharded at their peak. `cut`: the segments of all stages, if known: a parameter that several stages hold is in
        a buffer of its own. `tied_apart`: count every one that several segments read as such.
        """
        held, segments, split = dict[str, Held](), self._held, self._experts
        for first, last in runs:
            alone = first == last and self.candidate.pp == 1
            for mine in segments[first : last + 1]:
                held.update((name, own) for name, own, is_first in mine if is_first or not alone)
        own = sorted(held.items(), key=lambda item: item[1].order)
        if any(first == 0 for first, _ in runs):  # the first stage holds unused parameters
            own += self._unused.items()
        shared = dict.fromkeys(self._tied, frozenset[int]()) if tied_apart else self._sharers(cut)
        end = self.held_beside(runs, cut)
        if len(self.copies) == 1:
            return end + self._laid_out(own, shared, runs, cut, self.copies[0])
        apart = ([item for item in own if (item[0] in split) == experts] for experts in (False, True))
        dense, experts = (
            self._laid_out(mine, shared, runs, cut, c) for mine, c in zip(apart, self.copies, strict=True)
        )
        return end + dense + experts

    def _laid_out(
        self,
        own: Sequence[tuple[str, Held]],
        shared: Mapping[str, frozenset[int]],
        runs: list[tuple[int, int]],
        cut: Sequence[tuple[int, int]],
        copies: Copies,
    ) -> Memory:
        """Return the state of parameters that have the same copies."""
        unused, dtypes, whole, zero = self._unused, self._dtypes, self.whole.shapes, self.candidate.zero
        laid = [(name, h) for name, h in own if not (h.frozen and zero < 3)]
        idle = {i for i, (name, h) in enumerate(laid) if name in unused and not h.frozen}
        used = [(name, h.numel) for i, (name, h) in enumerate(laid) if i not in idle]
        idle |= {i for i, (name, _) in enumerate(laid) if name in whole}
        still = {i: dtypes[name].itemsize for i, (name, h) in enumerate(laid) if h.frozen}
        sizes = [((h.buffer, shared.get(name), dtypes[name]), h.numel) for name, h in laid]
        units = self._units([name for name, _ in laid], runs, cut) if zero >= 2 else ()
        tied = {i for i, (name, _) in enumerate(laid) if name in shared}
        layout = packed(sizes, copies.ranks, copies.shards, self.bucket, idle, units, still, self.offload, tied)
        kept = self.whole.cost.moments * layout.most_stepped + self._load(used, copies).kept
        state = self._model_state(
            layout.buckets, copies, whole_numel=layout.whole, kept=kept, on_host=layout.host_elements
        )
        nbytes = sum(h.numel * dtypes[name].itemsize for name, h in own if h.frozen and zero < 3)
        nbytes += layout.frozen_bytes + (layout.gathered_bytes(self.compute) if zero == 3 else 0)
        there = host_state_bytes(layout.hosted, precision=self.precision, optimizer=self.optimizer)
        return state + Memory(parameters=nbytes, host=there)

    def host_at_least(self, first: int, last: int) -> int:
        """Return a lower bound on the host's bytes for the state of a rank whose chunks are all like this run."""
        if not self.offload:
            return 0
        apart, own = self.untied_numel(first, last), [c.shards for c in self.copies]
        whole = ((self.method.virtual * numel, own[experts and len(own) > 1]) for numel, experts in apart)
        hosted = (math.ceil(self.offload * numel) // shards for numel, shards in whole)
        return host_state_bytes(hosted, precision=self.precision, optimizer=self.optimizer)

    def state_at_least(self, segment: int) -> Memory:
        """Return the state of a segment without padding and without parameters that another segment reads first."""
        mine, found = [p for p in self._parameters[segment] if p[4]], Memory()
        for experts, copies in enumerate(self.copies):
            part = [p for p in mine if (p[0] in self._experts) == bool(experts)]
            trained = sum(p[1] for p in part if not p[3])
            on_host = int(self.offload * trained) // copies.shards
            kept = 0 if self.whole.shapes else None  # at another rank, perhaps
            found += self._model_state([trained], copies, pad_to=copies.shards, kept=kept, on_host=on_host)
            frozen = sum(p[1] * self._dtypes[p[0]].itemsize for p in part if p[3])
            found += Memory(parameters=frozen // (copies.shards if self.candidate.zero == 3 else 1))
        return found

    @property
    def host_spare(self) -> int:
        """Bytes of state that may be on the host beyond its share, since whole buckets are: one of each buffer."""
        largest = self._memoised(f"largest, ep {self.candidate.ep}", self._largest_of_buffers)
        each = ((n, self.copies[experts]) for (_, _, experts), n in largest.items())
        spare = sum((self.bucket + n + c.ranks * ALIGN) // c.shards for n, c in each if 0 < self.offload < 1)
        return model_state([spare], precision=self.precision, optimizer=self.optimizer).optimizer

    def _largest_of_buffers(self) -> dict[tuple[str, torch.dtype, bool], int]:
        """Return the elements of the largest trained parameter of each buffer that a rank may have."""
        found: dict[tuple[str, torch.dtype, bool], int] = {}
        for name, count, stored, *_ in (p for mine in self._parameters for p in mine if not p[3]):
            key = kind_of(stored), self._dtypes[name], name in self._experts
            found[key] = max(found.get(key, 0), count)
        return found

    def state_at_most(self, first: int, last: int) -> Memory:
        """Return an upper bound on `state` of one run: below ZeRO 2 without a layout, with the largest padding."""
        frozen, unused = self.frozen_bytes(first, last), 0
        if first == 0:
            frozen += sum(h.numel * self._dtypes[name].itemsize for name, h in self._unused.items() if h.frozen)
            unused += sum(h.numel for h in self._unused.values() if not h.frozen)
        # one bucket per block, a few unsharded at a time; owners; whole buckets on the host
        if self.candidate.zero >= 2 or self.whole.shapes or self.offload not in (0, 1):
            spare = _CLASSES * self.dp * ALIGN
            laid_out = self.state([(first, last)], tied_apart=self.candidate.pp > 1)
            return laid_out + model_state([spare], precision=self.precision, optimizer="adamw")
        found = Memory(parameters=frozen) + self.held_beside([(first, last)])
        for trained, copies in self._trained([(first, last)]):
            trained += unused
            buckets = min(trained // self.bucket, len(self._order)) + _CLASSES
            padding = buckets * copies.ranks * ALIGN if copies.ranks > 1 else 0
            alone = max(0, trained - (self.shared_numel(first, last) if self.candidate.pp > 1 else 0))
            on_host = int(self.offload * alone) // copies.shards
            found += self._model_state([trained + padding], copies, on_host=on_host)
            unused = 0
        return found

    def _model_state(
        self,
        buckets: Sequence[int],
        copies: Copies,
        pad_to: int | None = None,
        whole_numel: int = 0,
        kept: int | None = None,
        on_host: int = 0,
    ) -> Memory:
        """Return `model_state` of buckets (trained elements) under this candidate."""
        return model_state(
            buckets,
            precision=self.precision,
            optimizer=self.optimizer,
            zero=self.candidate.zero,
            dp=copies.ranks,
            shards=copies.shards,
            gradients=self.method.gradients,
            pad_to=pad_to,
            whole_numel=whole_numel,
            kept=kept,
            on_host=on_host,
        )
