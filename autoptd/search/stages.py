"""From a sharded model to stages: what the cuts search is asked with, and time and memory of what it chose.

memory of a rank     parameters + gradients + optimizer + in flight × activations + workspace + context
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import FRAGMENTATION_LEAST, Memory, allocator_bytes, communicator_bytes, in_flight
from autoptd.errors import DoesNotFit
from autoptd.search.bounds import warm_up
from autoptd.search.chunks import ChunkCost, Chunks
from autoptd.search.cuts import Cuts, leanest, refuse, solve_cuts
from autoptd.search.even import even_cuts
from autoptd.search.footprints import block_peak
from autoptd.search.menus import Choice, Menu, Way, bytes_of, choose, menu_of
from autoptd.search.menus import leanest as leanest_ways
from autoptd.search.meshes import Candidate
from autoptd.search.relax import Blocks, Part, Pipeline, relaxed_bound_s
from autoptd.search.staged import Staged, StageSolution, timed
from autoptd.search.tensors import Sharded, Tensors
from autoptd.search.windows import Line, partition
from autoptd.search.wishes import Method

NONE = "none"


class NoRoom(DoesNotFit):
    """Nothing of a candidate fits; `Stages.refusal` says what is missing, which takes longer than to find out."""


@dataclass(frozen=True)
class _Stretch:
    """What a run of segments holds: state (at the most), gradients in the main type while stepping, blocks."""

    state: Memory
    upcast: int
    blocks: tuple[tuple[int, ...], ...]  # positions of each block's segments, from the run's first on
    menus: tuple[Menu, ...]


_Key = tuple[bool, tuple[int, ...], int]  # whether from the first segment on, what is in it, chunks in flight


class Stages:
    """The stage-level problem of one candidate, given a sharding."""

    def __init__(
        self,
        tensors: Tensors,
        sharded: Sharded,
        candidate: Candidate,
        method: Method,
        precision: str,
        optimizer: str,
        cluster: Cluster | None = None,
    ) -> None:
        """`cluster`: where it differs in what devices hold from the one that tensors were split for."""
        self.tensors, self.sharded, self.candidate, self.method = tensors, sharded, candidate, method
        self.device = (cluster or tensors.cluster).device
        self.folded = tensors.folded
        self.chunks = Chunks(tensors, sharded, candidate, method, precision, optimizer)
        self.limit = math.inf if method.memory == "ignore" else self.device.memory_bytes * (1 - method.headroom)
        self._stretches: dict[tuple[bool, tuple[int, ...]], _Stretch] = {}
        self._choices: dict[_Key, Choice | None] = {}
        self._costs: dict[_Key, ChunkCost] = {}
        self._menus: dict[tuple[str, ...], Menu] = {}
        self._free = False  # whether memory is left out of account

    def solve(self) -> Staged:
        """The best cut. Raises DoesNotFit."""
        if self.method.stages == "even":
            return self.finish(even_cuts(self.folded, self.count))
        if self.method.virtual == 1:
            return self.finish(self._cut())
        self._free = True  # memory is a matter of all chunks of a rank together
        cuts = self._cut()
        self._free = False
        del self.line
        self._choices.clear()
        self._costs.clear()
        try:
            return self.finish(cuts)
        except DoesNotFit:
            return self.finish(self._cut())  # as if the other chunks of a rank were like the one looked at

    @property
    def fixed(self) -> bool:
        """Whether the cut is not a matter of choice."""
        return self.method.stages == "even"

    @property
    def count(self) -> int:
        """Stages: chunks of all pipeline ranks."""
        return self.candidate.pp * self.method.virtual

    def finish(self, cuts: Cuts) -> Staged:
        """These stages with the quickest recomputation that fits; of the step, the bound. Raises DoesNotFit."""
        c, policies = self.candidate, [dict[int, str]() for _ in cuts]
        memory: list[Memory] = []
        for rank in range(c.pp):
            mine = range(rank, len(cuts), c.pp)
            stretches = [self._stretch(*cuts[stage]) for stage in mine]
            state = self.chunks.state([cuts[stage] for stage in mine], self._largest_block, cuts)
            upcast = self.chunks.upcast_bytes([cuts[stage] for stage in mine])
            choice = self._chosen(stretches, state, upcast, self.alive(rank))
            if choice is None:
                raise NoRoom("these stages do not fit")
            for stage, stretch, ways in zip(mine, stretches, choice.ways, strict=True):
                policies[stage] = _policies(cuts[stage][0], stretch, ways)
            memory.append(self._memory(state, upcast, choice.kept, choice.extra))
        return timed(self.chunks, StageSolution(cuts, tuple(policies)), tuple(memory))

    # ---- what the cuts search asks ----

    def _cut(self) -> Cuts:
        """Raises DoesNotFit."""
        ramp = self.candidate.microbatches - 1
        found = solve_cuts(self.line, ramp * self.method.virtual**2, self.seconds)
        if found is None:
            raise NoRoom("no cut fits")
        return found

    @cached_property
    def line(self) -> Line:
        """The segments, without recomputation."""
        base = np.array([cost.forward_s + cost.backward_s for cost in self._singles])
        alive = tuple(self.alive(k % self.candidate.pp) for k in range(self.count))
        nothing = np.zeros(len(base))
        if self._free or self.limit == math.inf:
            return Line(self.chunks.names, base, self._sends, alive, nothing, nothing, nothing)
        kept, lean, again_s, rates = nothing.copy(), nothing.copy(), nothing.copy(), []
        for block, menu in self._all_blocks:
            alone = [self._menu((i,)) for i in block]
            own = [max(way.peak.kept for way in m) for m in alone]
            whole = menu[0].peak.kept / max(1, sum(own))
            for i, nbytes in zip(block, own, strict=True):
                kept[i] = nbytes * min(1.0, whole)
                lean[i] = min(min(way.peak.kept for way in m) for m in (menu, *alone)) / len(block)
                again_s[i] = 0.0 if menu[0].policy == NONE else self.chunks.again_s(i, menu[0].policy)
            rates += [r for m in (menu, *alone) if (r := _rate(m)) is not None]
        v = self.method.virtual
        room = self.limit - self._communication_bytes - self.device.context_bytes
        state = np.array([self._least_state[i] for i in self.chunks.names]) * v
        return Line(
            self.chunks.names, base + again_s, self._sends, alive, state, kept, lean, min(rates, default=math.inf), room
        )

    def contiguous_bound_s(self) -> float:
        """Of all cuts, by the slowest stage of the best of them, were memory as `Line` counts it.

        The slowest takes B: path (1) of `search/bounds.py` is m B, path (2) T + (m - 1) B - (w - 1) B / 2 at the least.
        """
        c, method = self.candidate, self.method
        line = replace(self.line, send_s=np.zeros(len(self.line.send_s)))  # messages may overlap with passes
        total = float(line.base_s.sum())
        width = 2.0 * max(total / line.stages, float(line.base_s.max()))
        while True:
            windows = line.windows(width)
            found = partition(windows.lower_s, windows.starts, minimax=True)
            if width >= total or (found is not None and found.value <= width):
                break
            width *= 2.0
        if found is None:
            return math.inf
        slowest, m = found.value, c.microbatches
        if method.virtual > 1 or method.schedule == "zero-bubble":
            return m * slowest
        waits = warm_up(method.schedule, 0, c.pp, m) - 1
        return max(m * slowest, total + (m - 1 - waits / 2) * slowest)

    def relaxed_bound_s(self) -> float:
        """Of all cuts; infinite where none fits. See `search/relax.py`."""
        alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for block, _ in self._all_blocks:
            alike.setdefault(tuple(self.chunks.names[i] for i in block), []).append(block)
        blocks = []
        for same in alike.values():
            block = same[0]
            most = [max(way.peak.kept for way in self._menu((i,))) for i in block]
            shares = [n / max(1, sum(most)) for n in most]
            segments = zip(block, shares, strict=True) if len(block) > 1 else ()
            blocks.append(Blocks(len(same), self._part(block), tuple(self._part((i,), block, x) for i, x in segments)))
        c, method = self.candidate, self.method
        alive = tuple(self.alive(rank) for rank in range(c.pp))
        room = self.limit - self._communication_bytes - self.device.context_bytes
        return relaxed_bound_s(blocks, Pipeline(method.schedule, c.microbatches, method.virtual, alive, room))

    def _part(self, run: tuple[int, ...], block: tuple[int, ...] = (), share: float = 1.0) -> Part:
        """A block, or a segment of one. Of three and more, two may keep less together than each by itself."""
        ignored = self.limit == math.inf
        whole = {way.policy: way.peak.kept for way in self._menu(block)} if len(block) > 2 else {}
        ways = tuple(
            (
                0.0 if way.policy == NONE else sum(self.chunks.again_s(i, way.policy) for i in run),
                min(way.peak.kept, share * whole.get(way.policy, math.inf)),
            )
            for way in self._menu(run)
        )
        return Part(
            sum(self._singles[i].forward_s for i in run),
            sum(self._singles[i].backward_s for i in run),
            0.0 if ignored else sum(self._least_state[self.chunks.names[i]] for i in run),
            ways[:1] if ignored else ways,
        )

    @cached_property
    def _least_state(self) -> list[float]:
        """By name of a segment: bytes of its parameters, gradients and optimizer that no stage does without."""
        found: dict[int, float] = {}
        for i, name in enumerate(self.chunks.names):
            if name not in found:
                found[name] = float(self.chunks.state_at_least(i).state)
        return [found[name] for name in range(len(found))]

    @cached_property
    def _all_blocks(self) -> list[tuple[tuple[int, ...], Menu]]:
        return [(block, self._menu(block)) for block in self._blocks(0, len(self.chunks.names) - 1)]

    @cached_property
    def _singles(self) -> list[ChunkCost]:
        known: dict[int, ChunkCost] = {}
        for i, name in enumerate(self.chunks.names):
            if name not in known:
                known[name] = self.chunks.least(i)
        return [known[name] for name in self.chunks.names]

    @cached_property
    def _sends(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        sends = [2 * self.chunks.send_s(i + 1) for i in range(len(self.chunks.names) - 1)]
        return np.array([*sends, 0.0])

    def seconds(self, stage: int, first: int, last: int) -> float:
        """What a stage of these segments takes per microbatch with the quickest recomputation that fits."""
        key = *self._key(first, last), self.alive(stage % self.candidate.pp)
        if key not in self._choices:
            self._choices[key] = self._choose(first, last, key[-1])
        choice = self._choices[key]
        if choice is None:
            return math.inf
        cost = self._cost(key, first, last, choice)
        return cost.forward_s + cost.backward_s

    def _cost(self, key: _Key, first: int, last: int, choice: Choice) -> ChunkCost:
        if key not in self._costs:
            policies = _policies(first, self._stretch(first, last), choice.ways[0])
            self._costs[key] = self.chunks.chunk(first, last, policies)
        return self._costs[key]

    def passes(self, stage: int, first: int, last: int) -> tuple[float, float] | None:
        """(forward, backward) of a stage at the least; None where nothing fits.

        Where a rank has several chunks, without recomputation: what fits is a matter of all of them."""
        if self.method.virtual > 1:
            key = *self._key(first, last), 0
            if key not in self._costs:
                self._costs[key] = self.chunks.chunk(first, last, {})
        elif self.seconds(stage, first, last) == math.inf:
            return None
        else:
            key = *self._key(first, last), self.alive(stage)
        return self._costs[key].forward_s, self._costs[key].backward_s

    def over_bytes(self, stage: int, first: int, last: int) -> float:
        """By how much a stage of these segments is over its memory at the least."""
        stretch, v = self._stretch(first, last), self.method.virtual
        kept, extra = bytes_of(leanest_ways([stretch.menus]), self.alive(stage % self.candidate.pp))
        return self._needed(stretch.state, stretch.upcast, kept, extra, v) - self.limit

    def _choose(self, first: int, last: int, alive: int) -> Choice | None:
        """Of several chunks of a rank, the others are taken to be like this one."""
        stretch, v = self._stretch(first, last), self.method.virtual
        return choose(
            [stretch.menus],
            alive,
            lambda kept, extra: self._free or self._needed(stretch.state, stretch.upcast, kept, extra, v) <= self.limit,
        )

    def _chosen(self, stretches: Sequence[_Stretch], state: Memory, upcast: int, alive: int) -> Choice | None:
        return choose(
            [stretch.menus for stretch in stretches],
            alive,
            lambda kept, extra: self._needed(state, upcast, kept, extra) <= self.limit,
        )

    def alive(self, rank: int) -> int:
        """Chunks whose activations a pipeline rank holds at its fullest."""
        c = self.candidate
        return in_flight(rank, c.pp, c.microbatches, self.method.schedule, self.method.virtual)

    # ---- stretches ----

    def _key(self, first: int, last: int) -> tuple[bool, tuple[int, ...]]:
        return first == 0, self.chunks.names[first : last + 1]

    def _stretch(self, first: int, last: int) -> _Stretch:
        key = self._key(first, last)
        if key not in self._stretches:
            blocks = tuple(self._blocks(first, last))
            self._stretches[key] = _Stretch(
                self.chunks.state_at_most(first, last, self._largest_block),
                self.chunks.upcast_bytes([(first, last)]),
                tuple(tuple(i - first for i in block) for block in blocks),
                tuple(self._menu(block) for block in blocks),
            )
        return self._stretches[key]

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, ...]]:
        """The segments of each block of a stage: repetitions of units, or the parts of them that lie inside."""
        for unit in self.folded.units:
            if unit.last < first or unit.first > last:
                continue
            begin = unit.first + max(0, first - unit.first) // unit.length * unit.length
            for start in range(begin, min(unit.last, last) + 1, unit.length):
                if inside := tuple(i for i in range(start, start + unit.length) if first <= i <= last):
                    yield inside

    def _menu(self, block: tuple[int, ...]) -> Menu:
        kinds = tuple(self.folded.segments[i].kind for i in block)
        if kinds not in self._menus:
            self._menus[kinds] = menu_of([self._way(block, policy) for policy in self._policies_for(block)])
        return self._menus[kinds]

    def _policies_for(self, block: tuple[int, ...]) -> tuple[str, ...]:
        wanted = self.candidate.recompute
        if wanted == "auto":
            return (NONE, *self.method.policies)
        return (wanted,) if self._repeats(block) else (NONE,)

    def _way(self, block: tuple[int, ...], policy: str) -> Way:
        segments = [self.folded.segments[i] for i in block]
        peak = block_peak(self.tensors, self.sharded, segments, policy, self.method)
        return Way(policy, 0.0 if policy == NONE else sum(self.chunks.again_s(i, policy) for i in block), peak)

    def _repeats(self, block: tuple[int, ...]) -> bool:
        """Whether a block is one of many: what a full recompute means, where a model has any that repeat."""
        units = [u for u in self.folded.units if u.count > 1] or list(self.folded.units)
        return any(u.first <= block[0] <= u.last for u in units)

    # ---- memory ----

    def _needed(self, state: Memory, upcast: int, kept: int, extra: int, chunks: int = 1) -> float:
        """As `Memory.needed`, where a rank has so many chunks like this."""
        state_bytes = (state.parameters + state.gradients + state.optimizer) * chunks
        work = kept + max(extra, upcast * chunks - kept)
        held = allocator_bytes(work, FRAGMENTATION_LEAST)
        return state_bytes + work + held + self._communication_bytes + self.device.context_bytes

    def _memory(self, state: Memory, upcast: int, kept: int, extra: int) -> Memory:
        """Of one pipeline rank."""
        device, work = self.device, kept + extra
        found = state + Memory(
            activations=kept,
            temporary=max(extra, upcast - kept),
            communication=self._communication_bytes,
            context=device.context_bytes,
        )
        # blocks of a pass are no use to the step, which wants few large ones: the allocator keeps both
        unused = allocator_bytes(work) + min(work, upcast)
        return found + Memory(overhead=min(unused, max(0, device.memory_bytes - found.total)))

    def refusal(self) -> DoesNotFit:
        """What the leanest cut lacks, and what would mend it."""
        cuts = even_cuts(self.folded, self.count) if self.fixed else leanest(self.line).cuts
        over = [self.over_bytes(k, *run) for k, run in enumerate(cuts)]
        helps = self.candidate.recompute != "auto" and self._auto_would_do(cuts)
        budget = self.limit - self.device.context_bytes - self._communication_bytes
        return refuse(cuts, over, budget, helps, [s.name for s in self.folded.segments])

    def _auto_would_do(self, cuts: Cuts) -> bool:
        other = Stages(
            self.tensors,
            self.sharded,
            replace(self.candidate, recompute="auto"),
            self.method,
            self.chunks.precision,
            self.chunks.optimizer,
        )
        return all(other.over_bytes(k, *run) <= 0 for k, run in enumerate(cuts))

    @property
    def _communication_bytes(self) -> int:
        """Buffers of the library, by communicator, and of gradients on their way."""
        c, dp = self.candidate, self.chunks.dp
        groups = (c.tp * dp * c.pp, c.tp, dp, c.pp, min(c.pp, 2))
        return communicator_bytes(groups) + 3 * self.method.bucket_bytes  # two to reduce by turns, one to gather

    @cached_property
    def _largest_block(self) -> int:
        """Local elements of the block that has most, of those that repeat."""
        found = (self.chunks.numel(u.first, u.first + u.length - 1)[1] for u in self.folded.units if u.count > 1)
        return max(found, default=0)


def _rate(menu: Menu) -> float | None:
    """The least seconds that recomputation takes for a byte that it saves, were an input nothing."""
    quickest, *others = menu
    rates = [
        (way.again_s - quickest.again_s) / max(1, quickest.peak.kept - (0 if way.policy == "full" else way.peak.kept))
        for way in others
    ]
    return min(rates, default=None)


def _policies(first: int, stretch: _Stretch, ways: Sequence[Way]) -> dict[int, str]:
    """Segment -> policy, of those that recompute."""
    blocks = zip(stretch.blocks, ways, strict=True)
    return {first + i: way.policy for block, way in blocks if way.policy != NONE for i in block}
