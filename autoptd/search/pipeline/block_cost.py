"""Recomputation of the blocks of a model: options of each block, and bounds of what any stage keeps.

They depend on the splits, ep and cp, and on the type of device: candidates that differ in other ways share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from autoptd.cost_models.memory import FRAGMENTATION_LEAST
from autoptd.passes.analysis.heads import heads_of
from autoptd.passes.blocks import layer_segments
from autoptd.schedule import Alive
from autoptd.search.meshes import AUTO, OFFLOAD, WITH_HOST, Candidate
from autoptd.search.pipeline.chunk_cost import ChunkCosts
from autoptd.search.pipeline.recompute_options import RecomputeFront, RecomputeOption, RecomputeOptions, undominated
from autoptd.search.pipeline.stage_parameters import block_peak, block_pinned
from autoptd.search.pipeline.windows import Floats, Ints

NONE, LOGITS = "none", "logits"
Kinds = tuple[str, ...]  # of a block's segments
RankKey = tuple[tuple[tuple[tuple[Kinds, ...], bool], ...], Alive]  # by chunk
Relaxed = tuple[tuple[int, ...], tuple[tuple[float, float, float], ...]]  # segments, and options as in `BlockOptions`


class BlockCosts:
    """The blocks of one sharded model on one type of device."""

    def __init__(self, chunks: ChunkCosts) -> None:
        self.chunks, self.folded, self.method = chunks, chunks.folded, chunks.method
        self._wanted = chunks.candidate.recompute
        self._blocks = chunks.tensors.workbook.facts.blocks
        self._at = [at for at, block in enumerate(self._blocks) for _ in range(block.length)]  # by segment
        self._options: dict[tuple[Kinds, bool, bool], RecomputeOptions] = {}
        self.fronts: dict[RankKey, RecomputeFront] = {}
        self.counting_host: dict[RankKey, RecomputeFront] = {}  # the same where host memory is a limit
        self._least_s: dict[Candidate, dict[tuple[int, ...], tuple[float, float, float, float]]] = {}

    def least_s(self, c: Candidate) -> dict[tuple[int, ...], tuple[float, float, float, float]]:
        """Return the least seconds of runs of segments (forward, backward, weights' gradients, reduction), as far as
        they are worked out. Neither schedule nor offload changes them."""
        return self._least_s.setdefault(c._replace(schedule="", virtual=1, offload=0.0), {})

    def within(self, first: int, last: int) -> Iterator[tuple[int, ...]]:
        """Yield the segments of each block of a stage, or of the part of it inside the stage."""
        for block in self._blocks[self._at[first] : self._at[last] + 1]:
            yield block.inside(first, last)

    def kinds_of(self, block: tuple[int, ...]) -> Kinds:
        return tuple(self.folded.segments[i].kind for i in block)

    def options_of(self, block: tuple[int, ...], received: bool = False, waits: bool = False) -> RecomputeOptions:
        """Return the recompute options of a block, without dominated ones; see `all_options`. `waits`: with those that
        hold less between the parts of a split backward pass."""
        key = self.kinds_of(block), received and self.offloads, waits
        if key not in self._options:
            self._options[key] = undominated(self.all_options(block, received), counts_waiting=waits)
        return self._options[key]

    def options_counting_host(
        self, block: tuple[int, ...], received: bool = False, waits: bool = False
    ) -> RecomputeOptions:
        """Return the same where host memory is a limit: with those that take less of it."""
        return undominated(self.all_options(block, received), counts_host=True, counts_waiting=waits)

    def all_options(self, block: tuple[int, ...], received: bool = False) -> list[RecomputeOption]:
        """Return all recompute options of a block.

        `received`: the block is the first of its stage, where the tensors that it received stay on the device.
        """
        found = [self.option(block, policy) for policy in self.policies_for(block)]
        if not (received and self.offloads):
            return found
        segments = [self.folded.segments[i] for i in block]
        held = block_peak(self.chunks.tensors, self.chunks.sharded, segments, "full", self.method).kept
        return [w._replace(peak=w.peak.above(held)) if w.policy == OFFLOAD else w for w in found]

    def policies_for(self, block: tuple[int, ...]) -> tuple[str, ...]:
        heads = self.method.loss in ("auto", "chunked") and self._has_heads(block)
        if heads and self.method.loss == "chunked":
            return (LOGITS,)
        if self._wanted in (AUTO, WITH_HOST):
            without = (*[OFFLOAD] * (self._wanted != WITH_HOST), *[LOGITS] * (not heads))
            return (NONE, *(policy for policy in self.method.policies if policy not in without))
        return (self._wanted,) if block[0] in self._layers else (NONE,)

    def _has_heads(self, block: tuple[int, ...]) -> bool:
        """Return whether a block computes a loss from logits that nothing else reads."""
        kinds = self.chunks.sharded.sharding.kinds
        return any(heads_of(self.folded.representatives[kind], kinds[kind]) for kind in self.kinds_of(block))

    def option(self, block: tuple[int, ...], policy: str) -> RecomputeOption:
        segments = [self.folded.segments[i] for i in block]
        of = self.chunks.tensors, self.chunks.sharded, segments
        host = block_pinned(*of, self.method) if policy == OFFLOAD else 0
        return RecomputeOption(policy, sum(self.added_s(block, policy)), block_peak(*of, policy, self.method), host)

    def added_s(self, run: Sequence[int], policy: str) -> tuple[float, float]:
        """Return the seconds that a policy adds to the passes of segments (forward, backward)."""
        added = [(0.0, 0.0) if policy == NONE else self.chunks.added_s(i, policy) for i in run]
        return sum(forward_s for forward_s, _ in added), sum(backward_s for _, backward_s in added)

    @property
    def offloads(self) -> bool:
        """True if any block may be offloaded."""
        return self._wanted in (OFFLOAD, WITH_HOST) and (self._wanted == OFFLOAD or OFFLOAD in self.method.policies)

    @cached_property
    def copies_quickly(self) -> bool:
        """True if copies to the host and back of some repeated block take less time than its full recomputation."""
        repeated = (block for block, *_ in self.alike if block[0] in self._layers)
        return any(sum(self.added_s(b, OFFLOAD)) < sum(self.added_s(b, "full")) for b in repeated)

    @cached_property
    def _layers(self) -> frozenset[int]:
        """The segments that a fixed policy applies to."""
        return layer_segments(self.folded)

    # ---- bounds ----

    @cached_property
    def alike(self) -> list[list[tuple[int, ...]]]:
        """Blocks, grouped by equality."""
        alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for block in self.within(0, len(self.chunks.names) - 1):
            alike.setdefault(tuple(self.chunks.names[i] for i in block), []).append(block)
        return list(alike.values())

    @cached_property
    def relaxed(self) -> list[list[Relaxed]]:
        """Each block of `alike` and then its segments, if there are several, with their options in the linear
        relaxation of `search/pipeline/lp_bound.py`.

        In a block of three or more, two segments may keep less together than alone: one counts as its share at most.
        """
        found = []
        for block, *_ in self.alike:
            most = [max(option.peak.kept for option in self.options_of((i,))) for i in block]
            whole = {option.policy: option.peak.kept for option in self.options_of(block)} if len(block) > 2 else {}
            parts = [self._relaxed(block, {})]
            for i, n in zip(block, most, strict=True) if len(block) > 1 else ():
                parts.append(self._relaxed((i,), {name: kept * n / max(1, sum(most)) for name, kept in whole.items()}))
            found.append(parts)
        return found

    def _relaxed(self, run: tuple[int, ...], at_most: Mapping[str, float]) -> Relaxed:
        """Return segments with their options: seconds added to forward, to backward, and the bytes kept."""
        return run, tuple(
            (
                *self.added_s(run, option.policy),
                min(option.peak.kept, at_most.get(option.policy, math.inf)) * (1 + FRAGMENTATION_LEAST),
            )
            for option in self.options_of(run)
        )

    @cached_property
    def single_options(self) -> dict[int, tuple[tuple[float, float, float], ...]]:
        """Options as in `relaxed` of each segment, by its name: its own, and its share of those of its whole block, in
        which several segments may keep less together than alone."""
        found = dict[int, dict[tuple[float, float, float], None]]()
        for block, *_ in self.alike:
            most = [max(option.peak.kept for option in self.options_of((i,))) for i in block]
            for i, n in zip(block, most, strict=True):
                _, own = self._relaxed((i,), {})
                share = (1 + FRAGMENTATION_LEAST) * n / max(1, sum(most))
                whole = ((*self.added_s((i,), w.policy), w.peak.kept * share) for w in self.options_of(block))
                found.setdefault(self.chunks.names[i], {}).update(dict.fromkeys((*own, *whole)))
        return {name: tuple(options) for name, options in found.items()}

    @cached_property
    def kept(self) -> tuple[Floats, Floats]:
        """Bytes per microbatch that each segment keeps (its share of its block), and the least of any option."""
        kept, least_kept = np.zeros(len(self.chunks.names)), np.zeros(len(self.chunks.names))
        for same in self.alike:
            options, alone = self.options_of(same[0]), [self.options_of((i,)) for i in same[0]]
            own = np.array([max(option.peak.kept for option in m) for m in alone], dtype=float)
            share = min(1.0, options[0].peak.kept / max(1, own.sum()))
            least = min(option.peak.kept for m in (options, *alone) for option in m) / len(same[0])
            for block in same:
                kept[list(block)], least_kept[list(block)] = own * share, least
        return kept, least_kept

    @cached_property
    def temporary(self) -> Floats:
        """Least bytes beyond those kept, for each segment that is the last of a stage which holds its block from the
        start: the last block's peak comes on top of all that the stage keeps. 0 within a block, to save time."""
        found = np.zeros(len(self.chunks.names))
        for same in self.alike:
            first, whole = same[0][:1], same[0]
            for run in (first, whole):
                least = min(option.peak.temporary for option in self.options_of(run))
                found[[block[len(run) - 1] for block in same]] = least
        return found

    @cached_property
    def starts(self) -> Ints:
        """The first segment of each segment's block."""
        found = np.arange(len(self.chunks.names))
        for block in self.within(0, len(found) - 1):
            found[list(block)] = block[0]
        return found

    @cached_property
    def recompute_s(self) -> float:
        """Least seconds of recomputation per byte saved, if the kept inputs of full recomputation took no memory."""
        alternatives = (self.options_of(part) for b, *_ in self.alike for part in (b, *((i,) for i in b)))
        return min((rate for options in alternatives for rate in _rates(options)), default=math.inf)


def _rates(options: RecomputeOptions) -> Iterator[float]:
    quickest, *others = options
    for option in others:
        left = 0 if option.policy == "full" else option.peak.kept
        yield (option.recompute_s - quickest.recompute_s) / max(1, quickest.peak.kept - left)
