"""Gradient accumulation, and reduction of each bucket over the data-parallel ranks.

    ZeRO 0, 1   accumulates full gradients over all microbatches; reduces a bucket at its last gradient of the step, if
                its chunk has a SUM in the action list, else at the end
    ZeRO 2, 3   accumulates over one backward pass, in a temporary buffer allocated at the bucket's first gradient;
                reduces the complete bucket, adds this rank's shard to that of the step, and frees the buffer

All dp ranks reduce the buckets in one fixed order, whichever parameters took part. A parameter without a gradient
delays the buckets behind it to the end of the round (the step, or the backward pass) and causes no deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from autoptd.layout.packing import Bucket
from autoptd.ops.group import Handle
from autoptd.runtime.zero.flat_buffer import Buffer

UNDER_WAY = 1  # reductions of ZeRO 2 and 3 overlapped with the backward pass, each with a temporary buffer


@dataclass(eq=False)
class BucketState:
    """The state of a bucket during a step."""

    bucket: Bucket
    buffer: Buffer
    priority: int  # index in the model of its first parameter, whose gradient comes last
    total: Tensor | None = None  # accumulated gradients, to be reduced over dp
    views: dict[str, Tensor] = field(default_factory=dict)  # of `total`, by parameter, once there is a gradient
    unwritten: set[str] = field(default_factory=set)  # parameters without a gradient in `total`
    launched: bool = False
    accumulated: bool = False  # whether the shard of the step holds a gradient

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self.bucket.slots]

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to `total`; a parameter's first gradient overwrites."""
        mine = self.views.get(name)
        if mine is None:
            if self.total is None:
                self.total = self.buffer.empty_gradient(self.bucket)
            mine = self.views[name] = self.buffer.view(self.total, self.bucket, name)
        if name in self.unwritten:
            mine.copy_(gradient)
            self.unwritten.discard(name)
        else:
            mine.add_(gradient)

    def start_sum(self) -> tuple[Handle, Tensor]:
        """Start to reduce the bucket over dp; return the handle and this rank's shard of the sum."""
        total = self.buffer.empty_gradient(self.bucket) if self.total is None else self.total
        for name in self.unwritten:
            self.buffer.view(total, self.bucket, name).zero_()
        own = self.buffer.own_part(total, self.bucket)
        return self.buffer.sharing.sum_later(total, own), own


class _Round:
    """The buckets in their common order of reduction, each ready once its gradients are complete."""

    def __init__(
        self, states: Sequence[BucketState], holders: Sequence[Collection[str]], chunks: Collection[int]
    ) -> None:
        self._states = states
        self._awaited = [{(n, k) for k in chunks for n in state.names if n in holders[k]} for state in states]
        self._index = {state: i for i, state in enumerate(states)}
        self.restart()

    def restart(self) -> None:
        self._pending = [set(keys) for keys in self._awaited]
        self._next = 0

    def arrived(self, state: BucketState, name: str, chunk: int) -> None:
        self._pending[self._index[state]].discard((name, chunk))

    def take(self, *, all: bool) -> Iterator[BucketState]:
        """Yield the next buckets of the order: those before the first incomplete one, or all that remain."""
        while self._next < len(self._states) and (all or not self._pending[self._next]):
            self._next += 1
            yield self._states[self._next - 1]


class Reduction:
    """Gradient reduction of a step. `states`: in reduction order; `holders`: by chunk, parameters with gradients."""

    def __init__(
        self, states: Sequence[BucketState], holders: Sequence[frozenset[str]], overlap: bool, zero: int
    ) -> None:
        self._states, self._overlap = states, overlap
        self._per_backward = zero >= 2  # reduce in every backward pass
        chunks = range(len(holders))
        if self._per_backward:
            mine = [[state for state in states if not held.isdisjoint(state.names)] for held in holders]
            self._rounds = [_Round(mine[k], holders, [k]) for k in chunks]
        else:
            self._rounds = [_Round(states, holders, chunks)]
        self._under_way: deque[tuple[BucketState, Handle, Tensor]] = deque()
        for state in states if not self._per_backward else ():
            state.total = state.buffer.grad[state.bucket.start : state.bucket.stop]
        self.start_step()

    def start_step(self) -> None:
        self.used: set[str] = set()
        self._now: tuple[_Round, int] | None = None
        self._summing: set[int] = set()  # chunks whose gradients the next pass completes
        for state in self._states:
            state.unwritten = set(state.names)
            state.launched = state.accumulated = False
        for turn in self._rounds:
            turn.restart()

    def start_sum(self, chunk: int) -> None:
        """Let a chunk's buckets be reduced as its next pass completes them."""
        self._summing.add(chunk)

    def expect(self, chunk: int) -> None:
        """Announce a backward pass of a chunk.

        Complete buckets are reduced at once: with ZeRO 2 and 3 in every pass, with ZeRO 0 and 1 after the chunk's SUM.
        Without overlap ZeRO 2 and 3 wait for each reduction, which bounds the number of temporary buffers.
        """
        now = self._per_backward or chunk in self._summing
        self._now = (self._rounds[chunk if self._per_backward else 0], chunk) if now else None

    def take(self, state: BucketState, name: str, gradient: Tensor) -> None:
        """Accumulate a gradient; start the reductions that are ready."""
        assert not state.launched, f"gradient of {name} after its bucket was reduced"
        state.add(name, gradient)
        self.used.add(name)
        if self._now is not None:
            turn, chunk = self._now
            turn.arrived(state, name, chunk)
            for ready in turn.take(all=False):
                self._launch(ready)

    def end_backward(self, chunk: int) -> None:
        """Record that a chunk has produced all gradients of a microbatch."""
        if self._per_backward:
            for state in self._rounds[chunk].take(all=True):
                self._launch(state)
            self._rounds[chunk].restart()
            self._settle(0)
        self._now = None

    def finish(self) -> None:
        """Start the remaining reductions and wait for all; this rank's shards then hold the sums over dp."""
        if not self._per_backward:
            for state in self._rounds[0].take(all=True):
                self._launch(state)
        self._settle(0)
        for state in self._states:
            assert not self._per_backward or state.total is None, "a gradient arrived after its bucket was reduced"
            if self._per_backward and not state.accumulated:
                state.buffer.grad_shard(state.bucket).zero_()

    def _launch(self, state: BucketState) -> None:
        handle, own = state.start_sum()
        self._under_way.append((state, handle, own))
        if self._per_backward:
            state.total, state.views, state.unwritten = None, {}, set(state.names)
            self._settle(UNDER_WAY if self._overlap else 0)
        else:
            state.launched = True

    def _settle(self, left: int) -> None:
        """Wait for reductions until at most `left` are in progress."""
        while len(self._under_way) > left:
            state, handle, own = self._under_way.popleft()
            handle.wait()
            if self._per_backward:
                shard = state.buffer.grad_shard(state.bucket)
                shard.add_(own) if state.accumulated else shard.copy_(own)
                state.accumulated = True
