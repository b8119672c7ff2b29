"""Gradient accumulation, and reduction of each bucket over the data-parallel ranks.

    ZeRO 0, 1   accumulates full gradients over all microbatches; reduces a bucket at its last gradient of the step, if
                its chunk has a SUM in the action list, else at the end
    ZeRO 2, 3   accumulates over one backward pass, in a temporary buffer allocated at the bucket's first gradient;
                reduces the complete bucket, adds this rank's shard to that of the step, and frees the buffer

Gradients are summed in place by autograd itself where their type is the sum's (`Buffer.in_place`): a parameter's first
gradient of a step goes to the flat buffer, which becomes its `.grad`. Where no rank has anything to add (`alone`), the
tensor that autograd made stays, uncopied.

All dp ranks reduce the buckets in one fixed order, whichever parameters took part. A parameter without a gradient
delays the buckets behind it to the end of the round (the step, or the backward pass) and causes no deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from autoptd.layout.packing import Bucket
from autoptd.ops.group import Done, Handle
from autoptd.runtime.zero.flat_buffer import Buffer, TransientMemory

UNDER_WAY = 1  # reductions of ZeRO 2 and 3 overlapped with the backward pass, each with a temporary buffer


class BucketState:
    """The gradients of a bucket during a step.

    `priority`: index in the model of its first parameter, whose gradient comes last. `views`: of each parameter its
    gradient, in its own shape. `launched`: whether the bucket is being, or has been, reduced. `accumulated`: whether
    the shard of the step holds a gradient.
    """

    def __init__(self, bucket: Bucket, buffer: Buffer, priority: int) -> None:
        self.bucket, self.buffer, self.priority = bucket, buffer, priority
        self.names = frozenset(slot.name for slot in bucket.slots)
        self.views = buffer.grads
        if not (buffer.frozen or buffer.alone):
            self.total = buffer.whole_gradient(bucket)  # to be reduced over dp
            self.views = {slot.name: buffer.view(self.total, bucket, slot.name) for slot in bucket.slots}
            self.own, self.shard = buffer.own_part(self.total, bucket), buffer.grad_shard(bucket)
            self._memory = TransientMemory(self.total) if buffer.zero >= 2 else None
            self.free()
        self.restart()

    def restart(self) -> None:
        """Discard the gradients of the step before."""
        self.unwritten = set(self.names)  # parameters without a gradient so far
        self.launched = self.accumulated = False

    def allocate(self) -> None:
        """Allocate the storage of `total`, unless it is a view of the step's gradients."""
        if self._memory is not None:
            self._memory.allocate()
            self.allocated = True

    def free(self) -> None:
        """Free it. Views of it are valid again once it is allocated."""
        self.allocated = self._memory is None
        if self._memory is not None:
            self._memory.free()

    def take(self, name: str, parameter: Tensor) -> None:
        """Add the gradient that a parameter has got, if it has. The first overwrites."""
        gradient = parameter.grad
        if gradient is None:  # torch announces one where a user's backward pass has returned none
            return
        if name not in self.unwritten:
            if self.buffer.in_place:
                assert gradient is self.views[name], f"{name}.grad was replaced between two backward passes"
            else:
                self.views[name].add_(gradient)
                parameter.grad = None
            return
        self.unwritten.discard(name)
        if self.buffer.alone:
            parameter.grad = self.views[name] = gradient if has_one_owner(gradient) else gradient.clone()
            return
        if not self.allocated:
            self.allocate()
        mine = self.views[name].copy_(gradient)
        parameter.grad = mine if self.buffer.in_place else None

    def start_sum(self) -> Handle:
        """Start to reduce the bucket over dp; `own` then becomes this rank's shard of the sum."""
        if self.buffer.alone:
            self.views.update((name, self.buffer.no_gradient(name)) for name in self.unwritten)
            return Done()
        if not self.allocated:
            self.allocate()
        for name in self.unwritten:
            self.views[name].zero_()
        return self.buffer.sharing.sum_later(self.total, self.own)

    def add_shard(self) -> None:
        """Add this rank's shard of a backward pass to that of the step, and forget the pass."""
        self.shard.add_(self.own) if self.accumulated else self.shard.copy_(self.own)
        self.accumulated, self.launched, self.unwritten = True, False, set(self.names)
        self.free()


def _owners(x: Tensor) -> int:
    """Return torch's private count of what holds the storage of `x`, as of 2.13.0."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


_ONE = _owners(torch.empty(1))


def has_one_owner(x: Tensor) -> bool:
    """Return whether nothing but `x` has the memory of `x`.

    Autograd gives a gradient that it made for several readers to a parameter without a copy if each has a view of its
    own, as x and p of `x.view(n) + p.view(n)`; a later gradient would then be added to the others too.
    """
    return _owners(x) == _ONE


class _Round:
    """The buckets in their common order of reduction, each ready once its gradients are complete."""

    def __init__(
        self, states: Sequence[BucketState], holders: Sequence[Collection[str]], chunks: Collection[int]
    ) -> None:
        self._states = states
        self._awaited = {state: {(n, k) for k in chunks for n in state.names if n in holders[k]} for state in states}
        self.restart()

    def restart(self) -> None:
        self._pending = {state: set(keys) for state, keys in self._awaited.items()}
        self._next = 0

    def completed_by(self, state: BucketState, name: str, chunk: int) -> bool:
        """Record that a gradient has come; return whether it completes its bucket."""
        pending = self._pending[state]
        pending.discard((name, chunk))
        return not pending

    def take(self, *, all: bool) -> Iterator[BucketState]:
        """Yield the next buckets of the order: those before the first incomplete one, or all that remain."""
        while self._next < len(self._states) and (all or not self._pending[self._states[self._next]]):
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
        self._under_way: deque[tuple[BucketState, Handle]] = deque()
        self.start_step()

    def start_step(self) -> None:
        self.used: set[str] = set()
        self._now: tuple[_Round, int] | None = None
        self._summing: set[int] = set()  # chunks whose gradients the next pass completes
        for state in self._states:
            state.restart()
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

    def take(self, state: BucketState, name: str, parameter: Tensor) -> None:
        """Accumulate the gradient that a parameter has got; start the reductions that are ready."""
        if state.launched:
            assert self._per_backward, f"gradient of {name} after its bucket was reduced"
            self._settle(0)  # the bucket was complete in the B of an earlier microbatch, whose W is still to come
        state.take(name, parameter)
        if self._now is not None:
            turn, chunk = self._now
            if turn.completed_by(state, name, chunk):
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
        for state in self._states if self._per_backward else ():
            assert not state.allocated, "a gradient arrived after its bucket was reduced"
            if not state.accumulated:
                state.shard.zero_()

    def _launch(self, state: BucketState) -> None:
        self.used |= state.names - state.unwritten if state.unwritten else state.names
        self._under_way.append((state, state.start_sum()))
        state.launched = True
        if self._per_backward:
            self._settle(UNDER_WAY if self._overlap else 0)

    def _settle(self, left: int) -> None:
        """Wait for reductions until at most `left` are in progress."""
        while len(self._under_way) > left:
            state, handle = self._under_way.popleft()
            handle.wait()
            if self._per_backward:
                state.add_shard()
