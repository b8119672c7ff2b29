"""Cost of runs of segments on one type of device: seconds, bytes, and the recomputation that fits.

memory of a rank     parameters + gradients + optimizer + in flight × activations + workspace + context
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoptd.cost_models.cluster import Device
from autoptd.cost_models.memory import (
    FRAGMENTATION_LEAST,
    Memory,
    allocator_bytes,
    communicator_bytes,
    most_allocated,
)
from autoptd.schedule import Alive, row_of
from autoptd.search.pipeline.block_cost import NONE, BlockCosts, Kinds
from autoptd.search.pipeline.chunk_cost import ChunkCost, ChunkCosts
from autoptd.search.pipeline.cut_ilp import StageOption
from autoptd.search.pipeline.lp_bound import BlockOptions, Blocks
from autoptd.search.pipeline.recompute_options import (
    RecomputeChoice,
    RecomputeFront,
    RecomputeOption,
    RecomputeOptions,
    bytes_of,
    decreasing_memory,
    host_bytes_of,
    most_saving,
    without_waiting,
)
from autoptd.search.pipeline.windows import Floats

_Key = int  # of a run, by the names of its segments and by whether it starts at segment 0


@dataclass(frozen=True)
class SegmentRange:
    """The blocks of a run of segments: positions of their segments relative to the run's first, their kinds, and
    recompute options. `counting_host`: the options where host memory is a limit. `received`: whether the first of them
    received its inputs from another stage."""

    blocks: tuple[tuple[int, ...], ...]
    kinds: tuple[Kinds, ...]
    options: tuple[RecomputeOptions, ...]
    received: bool
    counting_host: tuple[RecomputeOptions, ...] = ()


class StageCost:
    """Costs of one sharded model under one candidate on one type of device.

    `unlimited`: ignore memory. `host_bytes`: a rank's share of its host's memory, None: not checked. `rough`: for some
    choice of recomputation a faster one may exist.
    """

    def __init__(
        self,
        chunks: ChunkCosts,
        blocks: BlockCosts,
        device: Device,
        unlimited: bool = False,
        host_bytes: float | None = None,
    ) -> None:
        self.chunks, self.blocks, self.device = chunks, blocks, device
        self.candidate, self.method, self.folded = chunks.candidate, chunks.method, chunks.folded
        ignored = unlimited or self.method.memory == "ignore"
        self.limit = math.inf if ignored else device.memory_bytes * (1 - self.method.headroom)
        self.host_limit = math.inf if ignored or host_bytes is None else host_bytes * (1 - self.method.headroom)
        self.rough = False
        self._least_s = blocks.least_s(self.candidate)
        self._keys: dict[tuple[int, int], _Key] = {}
        self._known: dict[tuple[bool, tuple[int, ...]], _Key] = {}
        self._spans: dict[_Key, SegmentRange] = {}
        self._states: dict[_Key, tuple[Memory, int]] = {}
        self._choices: dict[tuple[_Key, Alive], RecomputeChoice | None] = {}
        self._options: dict[tuple[_Key, Alive], tuple[StageOption, ...]] = {}
        self._costs: dict[tuple[_Key, Alive | None], ChunkCost] = {}

    # ---- seconds ----

    def cost(self, first: int, last: int, alive: Alive) -> ChunkCost | None:
        """Return the cost with the fastest recomputation that fits with `alive` microbatches in flight, or None.

        Other chunks of the rank are assumed to be equal to this one: `alive` is of one chunk (`Alive.alike`).
        """
        key, choice = (self._key(first, last), alive), self._choice(first, last, alive)
        if choice is None:
            return None
        if key not in self._costs:
            self._costs[key] = self._chunk(first, last, choice)
        return self._costs[key]

    def _choice(self, first: int, last: int, alive: Alive) -> RecomputeChoice | None:
        key = self._key(first, last), alive
        if key not in self._choices:
            span, state = self.span(first, last), self._state(first, last)
            self._choices[key] = self.choose([span], *state, alive, self.method.virtual)
        return self._choices[key]

    def _chunk(self, first: int, last: int, choice: RecomputeChoice) -> ChunkCost:
        return self.chunks.chunk(first, last, self.policies(first, self.span(first, last), choice.chosen[0]))

    def options(self, first: int, last: int, alive: Alive) -> tuple[StageOption, ...]:
        """Return the fastest recompute option that fits with `alive` microbatches in flight, after faster ones."""
        key, best = (self._key(first, last), alive), self._choice(first, last, alive)
        if best is None:
            return ()
        if key not in self._options:
            span = self.span(first, last)
            every = decreasing_memory([span.options], alive)
            quicker = (choice for choice in every if choice.recompute_s < best.recompute_s)
            self._options[key] = tuple(self._option(first, last, choice, alive) for choice in (*quicker, best))
        return self._options[key]

    def _option(self, first: int, last: int, choice: RecomputeChoice, alive: Alive) -> StageOption:
        (state, upcast), cost = self._state(first, last), self._chunk(first, last, choice)
        needed = self._needed(state, upcast, choice.kept, choice.extra, self.method.virtual)
        on_host = state.host + self.host_bytes(choice, alive, self.method.virtual)
        return StageOption(cost.forward_s + cost.backward_s, max(needed / self.limit, on_host / self.host_limit))

    def least_cost(self, first: int, last: int) -> ChunkCost:
        """Return the cost without recomputation."""
        key = self._key(first, last), None
        if key not in self._costs:
            self._costs[key] = self.chunks.chunk(first, last, {})
        return self._costs[key]

    def choose(
        self,
        spans: Sequence[SegmentRange],
        state: Memory,
        upcast: int,
        alive: Alive,
        chunks: int = 1,
        host_limit: float | None = None,
    ) -> RecomputeChoice | None:
        """Return the fastest recomputation that fits for a rank with these runs of segments, or None.

        `chunks`: number of chunks that each run stands for. `state.host`: of the whole rank. `host_limit`: by default
        the rank's.
        """
        left = (self.host_limit if host_limit is None else host_limit) - state.host
        key = tuple((span.kinds, span.received) for span in spans), alive
        if left < 0:
            return None
        if key not in self.blocks.fronts:
            self.blocks.fronts[key] = RecomputeFront([span.options for span in spans], alive)
        budget_bytes = self._work_bytes(state, upcast, chunks)
        found = self.blocks.fronts[key].within(budget_bytes)
        if found is not None and self.host_bytes(found, alive, chunks) > left:
            on_host = self._on_host(alive, chunks)
            found = self._counting_host(spans, alive).within_both(budget_bytes, on_host, left)
        self.rough = self.rough or (found is not None and not found.exact)
        return found

    def _counting_host(self, spans: Sequence[SegmentRange], alive: Alive) -> RecomputeFront:
        """Return the choices of recomputation where host memory is a limit."""
        key = tuple((span.kinds, span.received) for span in spans), alive
        if key not in self.blocks.counting_host:
            options = [span.counting_host for span in spans]
            self.blocks.counting_host[key] = RecomputeFront(options, alive, counts_host=True)
        return self.blocks.counting_host[key]

    def host_bytes(self, choice: RecomputeChoice, alive: Alive, chunks: int = 1) -> int:
        """Return the host's bytes for the activations of a choice."""
        if not self.blocks.offloads:
            return 0
        return host_bytes_of(choice.chosen, self._on_host(alive, chunks))

    def _on_host(self, alive: Alive, chunks: int) -> Alive:
        """Return the microbatches whose buffers in pinned memory are not free yet. The host queues kernels ahead of the
        device, and a buffer is free once its copies have ended: one microbatch more than are in flight."""
        return alive.ahead(self.candidate.microbatches * chunks)

    @staticmethod
    def policies(first: int, span: SegmentRange, chosen: Sequence[RecomputeOption]) -> dict[int, str]:
        """Return segment -> policy for the segments that recompute."""
        blocks = zip(span.blocks, chosen, strict=True)
        return {first + i: option.policy for block, option in blocks if option.policy != NONE for i in block}

    # ---- bytes ----

    def over_bytes(self, first: int, last: int, alive: Alive) -> float:
        """Return by how many bytes a stage of these segments exceeds its memory under the most saving recomputation."""
        kept, extra = bytes_of(most_saving([self.span(first, last).options]), alive)
        return self._needed(*self._state(first, last), kept, extra, self.method.virtual) - self.limit

    def over_host_bytes(self, first: int, last: int, alive: Alive) -> float:
        """Return by how many bytes such a stage exceeds its host's memory, with the fastest recomputation that fits on
        the device; 0 if none does."""
        (state, upcast), chunks = self._state(first, last), self.method.virtual
        choice = self.choose([self.span(first, last)], state, upcast, alive, chunks, host_limit=math.inf)
        if choice is None:
            return 0.0
        return state.host + self.host_bytes(choice, alive, chunks) - self.host_limit

    @property
    def budget_bytes(self) -> float:
        """Bytes available for state and activations."""
        return self.limit - self._communication_bytes - self.device.context_bytes

    @cached_property
    def bound_bytes(self) -> float:
        """Bytes that bounds of all cuts may count with: `state` has the host's share of each segment by itself."""
        return self.budget_bytes + self.chunks.host_spare

    def _work_bytes(self, state: Memory, upcast: int, chunks: int) -> float:
        """Return the most bytes that passes may work with, kept ones included, as `_needed` counts; -1 if none are."""
        state_bytes = (state.parameters + state.gradients + state.optimizer) * chunks
        most = most_allocated(self.budget_bytes - state_bytes, FRAGMENTATION_LEAST) - state.temporary
        return most - state.activations if upcast * chunks <= most else -1

    def _needed(self, state: Memory, upcast: int, kept: int, extra: int, chunks: int = 1) -> float:
        """Return `Memory.needed` of a rank with `chunks` chunks of this state."""
        state_bytes = (state.parameters + state.gradients + state.optimizer) * chunks
        kept += state.activations
        work = kept + max(extra, upcast * chunks - kept) + state.temporary
        held = allocator_bytes(work, FRAGMENTATION_LEAST)
        return state_bytes + work + held + self._communication_bytes + self.device.context_bytes

    def memory(self, state: Memory, upcast: int, kept: int, extra: int, host: int = 0) -> Memory:
        """Return the memory of one pipeline rank. `host`: that of activations on the host."""
        found = state + Memory(
            activations=kept,
            temporary=max(extra, upcast - kept - state.activations),
            communication=self._communication_bytes,
            context=self.device.context_bytes,
            host=host,
        )
        return found + Memory(overhead=allocator_bytes(found.activations + found.temporary, FRAGMENTATION_LEAST))

    @cached_property
    def _communication_bytes(self) -> int:
        """Bytes of the library's buffers per communicator."""
        c, (dense, *experts) = self.candidate, self.chunks.copies
        groups = [c.tp * dense.ranks * c.pp, c.tp, dense.ranks, c.pp, min(c.pp, 2)]
        groups += [size for copies in experts for size in (c.ep, copies.ranks)]  # of experts: ep and edp
        return communicator_bytes(groups)

    # ---- runs of segments and their blocks ----

    def _key(self, first: int, last: int) -> _Key:
        if (first, last) not in self._keys:
            run = first == 0, self.chunks.names[first : last + 1]
            self._keys[first, last] = self._known.setdefault(run, len(self._known))
        return self._keys[first, last]

    def span(self, first: int, last: int) -> SegmentRange:
        key = self._key(first, last)
        if key not in self._spans:
            blocks = tuple(self.blocks.within(first, last))
            received = [block[0] == first > 0 for block in blocks]
            waits = first > 0 and row_of(self.candidate.schedule).splits_backward
            both = list(zip(blocks, received, strict=True))
            options = [self.blocks.options_of(*block, waits) for block in both]
            limited = self.blocks.offloads and self.host_limit < math.inf
            more = [self.blocks.options_counting_host(*block, waits) for block in both if limited]
            if first == 0:  # no gradient leaves this stage: its B does everything
                options, more = ([without_waiting(own) for own in found] for found in (options, more))
            self._spans[key] = SegmentRange(
                tuple(tuple(i - first for i in block) for block in blocks),
                tuple(self.blocks.kinds_of(block) for block in blocks),
                tuple(options),
                first > 0,
                tuple(more),
            )
        return self._spans[key]

    def _state(self, first: int, last: int) -> tuple[Memory, int]:
        """Return an upper bound of a run's state, and the bytes of its gradients upcast for the step. Its `host` is a
        lower bound, of a rank whose chunks are all alike. Nothing if memory is unlimited."""
        key = self._key(first, last)
        if self.limit == math.inf:
            return Memory(), 0
        if key not in self._states:
            found = replace(self.chunks.state_at_most(first, last), host=self.chunks.host_at_least(first, last))
            self._states[key] = found, self.chunks.update_bytes([(first, last)])
        return self._states[key]

    # ---- lower bounds per segment ----

    @cached_property
    def _singles(self) -> list[ChunkCost]:
        known = {name: self.chunks.least(i) for name, i in self._firsts.items()}
        return [known[name] for name in self.chunks.names]

    @cached_property
    def _reductions_s(self) -> list[float]:
        """Least seconds of reducing the gradients of each segment."""
        known = {name: self.chunks.least_reduce_s(i) for name, i in self._firsts.items()}
        return [known[name] for name in self.chunks.names]

    @cached_property
    def _firsts(self) -> dict[int, int]:
        """Name of a segment -> the first segment with that name."""
        return {name: i for i, name in reversed(list(enumerate(self.chunks.names)))}

    @cached_property
    def state(self) -> Floats:
        """Least bytes of parameters, gradients and optimizer for each segment; 0 if memory is unlimited."""
        if self.limit == math.inf:
            return np.zeros(len(self.chunks.names))
        known = {name: float(self.chunks.state_at_least(i).state) for name, i in self._firsts.items()}
        return np.array([known[name] for name in self.chunks.names])

    @cached_property
    def base_s(self) -> Floats:
        """Seconds of a microbatch for each segment, with the fastest recomputation that is allowed."""
        base = np.array([cost.forward_s + cost.backward_s for cost in self._singles])
        for same in self.blocks.alike:
            policy = self.blocks.options_of(same[0])[0].policy
            again = [sum(self.blocks.added_s((i,), policy)) for i in same[0]]
            for block in same if any(again) else ():
                base[list(block)] += again
        return base

    @cached_property
    def forward_share(self) -> float:
        """Upper bound on the share of the shorter pass in the seconds of any stage."""
        if self.candidate.zero >= 2:  # gathers and reductions depend on the whole stage
            return 0.5
        if self.blocks.offloads:  # copies make the shorter pass longer too
            return 0.5
        both = ((part.forward_s, part.forward_s + part.backward_s) for part in self._singles)
        return min(0.5, max((forward_s / total_s for forward_s, total_s in both if total_s), default=0.5))

    @cached_property
    def relaxed(self) -> list[Blocks]:
        """The blocks for the linear relaxation of `search/pipeline/lp_bound.py`."""
        found = []
        last = len(self.chunks.names) - 1
        for same, parts in zip(self.blocks.alike, self.blocks.relaxed, strict=True):
            whole, *segments = [self._part(run, options) for run, options in parts]
            only = 0 if same == [(0,)] else -1 if same == [(last,)] else None
            found.append(Blocks(len(same), whole, tuple(segments), only))
        return found

    @property
    def segment_names(self) -> list[int]:
        """The name of each kind of equal segments."""
        return sorted(self._firsts)

    @cached_property
    def single(self) -> list[BlockOptions]:
        """Segments by themselves, one of each name."""
        options = self.blocks.single_options
        return [self._part((self._firsts[name],), options[name]) for name in self.segment_names]

    def _part(self, run: tuple[int, ...], options: Sequence[tuple[float, float, float]]) -> BlockOptions:
        if run not in self._least_s:
            singles = [self._singles[i] for i in run]
            forward_s, backward_s = sum(part.forward_s for part in singles), sum(part.backward_s for part in singles)
            weight_s, reduce_s = sum(part.weight_s for part in singles), sum(self._reductions_s[i] for i in run)
            self._least_s[run] = forward_s, backward_s, weight_s, reduce_s
        state = float(sum(self.state[i] for i in run))
        return BlockOptions(*self._least_s[run], state, tuple(options[:1] if self.limit == math.inf else options))
