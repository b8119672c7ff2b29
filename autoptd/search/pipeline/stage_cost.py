"""What runs of segments take on one type of device: their seconds, their bytes, the recomputation that fits.

memory of a rank     parameters + gradients + optimizer + in flight × activations + workspace + context
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoptd.cost_models.cluster import Device
from autoptd.cost_models.memory import FRAGMENTATION_LEAST, Memory, allocator_bytes, communicator_bytes
from autoptd.schedule import Alive
from autoptd.search.pipeline.chunk_cost import ChunkCost, ChunkCosts
from autoptd.search.pipeline.cut_ilp import StageOption
from autoptd.search.pipeline.lp_bound import BlockOptions, Blocks
from autoptd.search.pipeline.recompute_options import (
    RecomputeChoice,
    RecomputeOption,
    RecomputeOptions,
    bytes_of,
    choose,
    ever_less,
    leanest,
    menu_of,
)
from autoptd.search.pipeline.stage_parameters import block_peak
from autoptd.search.pipeline.windows import Floats

NONE = "none"
_Key = tuple[bool, tuple[int, ...]]  # whether from the first segment on, and what is in it


@dataclass(frozen=True)
class SegmentRange:
    """What a run of segments holds: state (at the most), gradients in the main type while stepping, blocks."""

    state: Memory
    upcast: int
    blocks: tuple[tuple[int, ...], ...]  # positions of each block's segments, from the run's first on
    menus: tuple[RecomputeOptions, ...]


class StageCost:
    """The segments of one sharded model, under one candidate, on one type of device.

    `free`: whether memory is left out of account. `rough`: whether a quicker recomputation than one chosen may exist.
    """

    def __init__(self, chunks: ChunkCosts, device: Device, free: bool = False) -> None:
        self.chunks, self.device = chunks, device
        self.candidate, self.method, self.folded = chunks.candidate, chunks.method, chunks.folded
        ignored = free or self.method.memory == "ignore"
        self.limit = math.inf if ignored else device.memory_bytes * (1 - self.method.headroom)
        self.rough = False
        self._stretches: dict[_Key, SegmentRange] = {}
        self._choices: dict[tuple[_Key, int], RecomputeChoice | None] = {}
        self._options: dict[tuple[_Key, int], tuple[StageOption, ...]] = {}
        self._costs: dict[tuple[_Key, int], ChunkCost] = {}
        self._menus: dict[tuple[str, ...], RecomputeOptions] = {}

    # ---- seconds ----

    def cost(self, first: int, last: int, alive: int) -> ChunkCost | None:
        """With the quickest recomputation that fits beside so many chunks in flight; None where nothing does.

        Of several chunks of a rank, the others are taken to be like this one.
        """
        key, choice = (self._key(first, last), alive), self._choice(first, last, alive)
        if choice is None:
            return None
        if key not in self._costs:
            self._costs[key] = self._chunk(first, last, choice)
        return self._costs[key]

    def _choice(self, first: int, last: int, alive: int) -> RecomputeChoice | None:
        key = self._key(first, last), alive
        if key not in self._choices:
            stretch, chunks = self.stretch(first, last), self.method.virtual
            self._choices[key] = self.choose([stretch], stretch.state, stretch.upcast, Alive(((alive,),)), chunks)
        return self._choices[key]

    def _chunk(self, first: int, last: int, choice: RecomputeChoice) -> ChunkCost:
        return self.chunks.chunk(first, last, self.policies(first, self.stretch(first, last), choice.ways[0]))

    def options(self, first: int, last: int, alive: int) -> tuple[StageOption, ...]:
        """Ways to recompute beside so many chunks in flight: the quickest that fits, and those that would be quicker;
        none where nothing fits."""
        key, best = (self._key(first, last), alive), self._choice(first, last, alive)
        if best is None:
            return ()
        if key not in self._options:
            stretch = self.stretch(first, last)
            quicker = (c for c in ever_less([stretch.menus], Alive(((alive,),))) if c.again_s < best.again_s)
            self._options[key] = tuple(self._option(first, last, choice) for choice in (*quicker, best))
        return self._options[key]

    def _option(self, first: int, last: int, choice: RecomputeChoice) -> StageOption:
        stretch, cost = self.stretch(first, last), self._chunk(first, last, choice)
        needed = self._needed(stretch.state, stretch.upcast, choice.kept, choice.extra, self.method.virtual)
        return StageOption(cost.forward_s + cost.backward_s, needed / self.limit)

    def least_cost(self, first: int, last: int) -> ChunkCost:
        """Without recomputation."""
        key = self._key(first, last), 0
        if key not in self._costs:
            self._costs[key] = self.chunks.chunk(first, last, {})
        return self._costs[key]

    def choose(
        self, stretches: Sequence[SegmentRange], state: Memory, upcast: int, alive: Alive, chunks: int = 1
    ) -> RecomputeChoice | None:
        """The quickest recomputation of a rank with these stretches that fits; each stands for so many chunks."""
        found = choose(
            [stretch.menus for stretch in stretches],
            alive,
            lambda kept, extra: self._needed(state, upcast, kept, extra, chunks) <= self.limit,
        )
        self.rough = self.rough or (found is not None and not found.exact)
        return found

    @staticmethod
    def policies(first: int, stretch: SegmentRange, ways: Sequence[RecomputeOption]) -> dict[int, str]:
        """Segment -> policy, of those that recompute."""
        blocks = zip(stretch.blocks, ways, strict=True)
        return {first + i: way.policy for block, way in blocks if way.policy != NONE for i in block}

    # ---- bytes ----

    def over_bytes(self, first: int, last: int, alive: int) -> float:
        """By how much a stage of these segments is over its memory at the least."""
        stretch = self.stretch(first, last)
        kept, extra = bytes_of(leanest([stretch.menus]), Alive(((alive,),)))
        return self._needed(stretch.state, stretch.upcast, kept, extra, self.method.virtual) - self.limit

    @property
    def room(self) -> float:
        """For state and activations."""
        return self.limit - self._communication_bytes - self.device.context_bytes

    def _needed(self, state: Memory, upcast: int, kept: int, extra: int, chunks: int = 1) -> float:
        """As `Memory.needed`, where a rank has so many chunks like this."""
        state_bytes = (state.parameters + state.gradients + state.optimizer) * chunks
        work = kept + max(extra, upcast * chunks - kept)
        held = allocator_bytes(work, FRAGMENTATION_LEAST)
        return state_bytes + work + held + self._communication_bytes + self.device.context_bytes

    def memory(self, state: Memory, upcast: int, kept: int, extra: int) -> Memory:
        """Of one pipeline rank."""
        work = kept + extra
        found = state + Memory(
            activations=kept,
            temporary=max(extra, upcast - kept),
            communication=self._communication_bytes,
            context=self.device.context_bytes,
        )
        # blocks of a pass are no use to the step, which wants few large ones: the allocator keeps both
        unused = allocator_bytes(work) + min(work, upcast)
        return found + Memory(overhead=min(unused, max(0, self.device.memory_bytes - found.total)))

    @cached_property
    def _communication_bytes(self) -> int:
        """Buffers of the library, by communicator, and of gradients on their way."""
        c, dp = self.candidate, self.chunks.dp
        groups = (c.tp * dp * c.pp, c.tp, dp, c.pp, min(c.pp, 2))
        return communicator_bytes(groups) + 3 * self.method.bucket_bytes  # two to reduce by turns, one to gather

    # ---- stretches and their blocks ----

    def _key(self, first: int, last: int) -> _Key:
        return first == 0, self.chunks.names[first : last + 1]

    def stretch(self, first: int, last: int) -> SegmentRange:
        key = self._key(first, last)
        if key not in self._stretches:
            blocks = tuple(self.blocks(first, last))
            self._stretches[key] = SegmentRange(
                self.chunks.state_at_most(first, last),
                self.chunks.upcast_bytes([(first, last)]),
                tuple(tuple(i - first for i in block) for block in blocks),
                tuple(self.menu(block) for block in blocks),
            )
        return self._stretches[key]

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, ...]]:
        """The segments of each block of a stage: repetitions of units, or the parts of them that lie inside."""
        for unit in self.folded.units:
            if unit.last < first or unit.first > last:
                continue
            begin = unit.first + max(0, first - unit.first) // unit.length * unit.length
            for start in range(begin, min(unit.last, last) + 1, unit.length):
                if inside := tuple(i for i in range(start, start + unit.length) if first <= i <= last):
                    yield inside

    def menu(self, block: tuple[int, ...]) -> RecomputeOptions:
        """Ways to recompute a block."""
        kinds = tuple(self.folded.segments[i].kind for i in block)
        if kinds not in self._menus:
            self._menus[kinds] = menu_of([self.way(block, policy) for policy in self.policies_for(block)])
        return self._menus[kinds]

    def policies_for(self, block: tuple[int, ...]) -> tuple[str, ...]:
        wanted = self.candidate.recompute
        if wanted == "auto":
            return (NONE, *self.method.policies)
        return (wanted,) if self._repeats(block) else (NONE,)

    def way(self, block: tuple[int, ...], policy: str) -> RecomputeOption:
        segments = [self.folded.segments[i] for i in block]
        peak = block_peak(self.chunks.tensors, self.chunks.sharded, segments, policy, self.method)
        return RecomputeOption(policy, self._again_s(block, policy), peak)

    def _again_s(self, run: Sequence[int], policy: str) -> float:
        return 0.0 if policy == NONE else sum(self.chunks.again_s(i, policy) for i in run)

    def _repeats(self, block: tuple[int, ...]) -> bool:
        """Whether a block is one of many: what a full recompute means, where a model has any that repeat."""
        units = [u for u in self.folded.units if u.count > 1] or list(self.folded.units)
        return any(u.first <= block[0] <= u.last for u in units)

    # ---- what no stage does without ----

    @cached_property
    def _alike(self) -> list[list[tuple[int, ...]]]:
        """Every block, equal ones together."""
        alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for block in self.blocks(0, len(self.chunks.names) - 1):
            alike.setdefault(tuple(self.chunks.names[i] for i in block), []).append(block)
        return list(alike.values())

    @cached_property
    def _singles(self) -> list[ChunkCost]:
        known = {name: self.chunks.least(i) for name, i in self._firsts.items()}
        return [known[name] for name in self.chunks.names]

    @cached_property
    def _firsts(self) -> dict[int, int]:
        """Name of a segment -> the first that has it."""
        return {name: i for i, name in reversed(list(enumerate(self.chunks.names)))}

    @cached_property
    def state(self) -> Floats:
        """Of each segment: bytes of parameters, gradients and optimizer."""
        if self.limit == math.inf:
            return np.zeros(len(self.chunks.names))
        known = {name: float(self.chunks.state_at_least(i).state) for name, i in self._firsts.items()}
        return np.array([known[name] for name in self.chunks.names])

    @cached_property
    def base_s(self) -> Floats:
        """Of each segment: seconds of a microbatch, with the quickest recomputation that is allowed."""
        base = np.array([cost.forward_s + cost.backward_s for cost in self._singles])
        for same in self._alike:
            policy = self.menu(same[0])[0].policy
            again = [self._again_s((i,), policy) for i in same[0]]
            for block in same if any(again) else ():
                base[list(block)] += again
        return base

    @cached_property
    def kept(self) -> tuple[Floats, Floats]:
        """Of each segment: bytes that it keeps per microbatch (its share of its block), and at the least."""
        kept, lean = np.zeros(len(self.chunks.names)), np.zeros(len(self.chunks.names))
        for same in self._alike:
            menu, alone = self.menu(same[0]), [self.menu((i,)) for i in same[0]]
            own = np.array([max(way.peak.kept for way in m) for m in alone], dtype=float)
            share = min(1.0, menu[0].peak.kept / max(1, own.sum()))
            least = min(way.peak.kept for m in (menu, *alone) for way in m) / len(same[0])
            for block in same:
                kept[list(block)], lean[list(block)] = own * share, least
        return kept, lean

    @cached_property
    def again_s(self) -> float:
        """The least seconds that recomputation takes for a byte that it saves, were an input nothing."""
        menus = [menu for b, *_ in self._alike for menu in (self.menu(b), *(self.menu((i,)) for i in b))]
        return min((rate for menu in menus for rate in _rates(menu)), default=math.inf)

    def relaxed(self) -> list[Blocks]:
        """The blocks, as `search/pipeline/lp_bound.py` shares them out."""
        found = []
        for same in self._alike:
            block = same[0]
            most = [max(way.peak.kept for way in self.menu((i,))) for i in block]
            shares = [n / max(1, sum(most)) for n in most]
            segments = zip(block, shares, strict=True) if len(block) > 1 else ()
            found.append(Blocks(len(same), self._part(block), tuple(self._part((i,), block, x) for i, x in segments)))
        return found

    def _part(self, run: tuple[int, ...], block: tuple[int, ...] = (), share: float = 1.0) -> BlockOptions:
        """A block, or a segment of one. Of three and more, two may keep less together than each by itself."""
        whole = {way.policy: way.peak.kept for way in self.menu(block)} if len(block) > 2 else {}
        ways = tuple(
            (self._again_s(run, way.policy), min(way.peak.kept, share * whole.get(way.policy, math.inf)))
            for way in self.menu(run)
        )
        forward_s, backward_s = (sum(getattr(self._singles[i], n) for i in run) for n in ("forward_s", "backward_s"))
        return BlockOptions(
            forward_s,
            backward_s,
            float(sum(self.state[i] for i in run)),
            ways[:1] if self.limit == math.inf else ways,
        )


def _rates(menu: RecomputeOptions) -> Iterator[float]:
    quickest, *others = menu
    for way in others:
        left = 0 if way.policy == "full" else way.peak.kept
        yield (way.again_s - quickest.again_s) / max(1, quickest.peak.kept - left)
