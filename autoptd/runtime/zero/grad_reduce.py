"""Gradients of a step: where they are added up, and when each bucket is summed over the data-parallel ranks.

    ZeRO 0, 1   added up whole over all microbatches; a bucket is summed when its last gradient of the last one is there
    ZeRO 2, 3   added up for one backward pass, in room that is made for the first gradient of a bucket; once complete
                it is summed, this rank's shard of the sum added to that of the step, and the room given back

Buckets are summed in one fixed order on all dp ranks, whichever parameters took part, so a parameter without gradient
delays the buckets behind it to the end of its round (the step, or the backward pass) and can hang nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from autoptd.layout.packing import Bucket
from autoptd.ops.group import Handle
from autoptd.runtime.zero.flat_buffer import Buffer

UNDER_WAY = 1  # sums of ZeRO 2 and 3 that run beside the backward pass, each with its bucket's room


@dataclass(eq=False)
class Live:
    """A bucket during a step."""

    bucket: Bucket
    buffer: Buffer
    priority: int  # index in the model of its earliest parameter: the last whose gradient comes
    total: Tensor | None = None  # gradients to be summed over dp
    fresh: set[str] = field(default_factory=set)  # parameters without a gradient in it
    launched: bool = False
    begun: bool = False  # whether the step's shard holds a gradient

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self.bucket.slots]

    def add(self, name: str, gradient: Tensor) -> None:
        """The first partial value overwrites."""
        if self.total is None:
            self.total = self.buffer.empty_gradient(self.bucket)
        mine = self.buffer.view(self.total, self.bucket, name)
        if name in self.fresh:
            mine.copy_(gradient)
            self.fresh.discard(name)
        else:
            mine.add_(gradient)

    def start_sum(self) -> tuple[Handle, Tensor]:
        """Of all dp ranks; what is waited for, and where this rank's part of it then is."""
        total = self.buffer.empty_gradient(self.bucket) if self.total is None else self.total
        for name in self.fresh:
            self.buffer.view(total, self.bucket, name).zero_()
        own = self.buffer.own_part(total, self.bucket)
        return self.buffer.sharing.sum_later(total, own), own


class _Round:
    """Buckets in the order in which every dp rank sums them, each once its gradients are there."""

    def __init__(self, lives: Sequence[Live], holders: Sequence[Collection[str]], chunks: Collection[int]) -> None:
        self._lives = lives
        self._awaited = [{(n, k) for k in chunks for n in live.names if n in holders[k]} for live in lives]
        self._place = {live: i for i, live in enumerate(lives)}
        self.restart()

    def restart(self) -> None:
        self._pending = [set(keys) for keys in self._awaited]
        self._next = 0

    def came(self, live: Live, name: str, chunk: int) -> None:
        self._pending[self._place[live]].discard((name, chunk))

    def take(self, *, all: bool) -> Iterator[Live]:
        """Those whose turn it is: as far as they are complete, or all that are left."""
        while self._next < len(self._lives) and (all or not self._pending[self._next]):
            self._next += 1
            yield self._lives[self._next - 1]


class Reduction:
    """`holders`: by chunk, the parameters that get a gradient from it. `lives` in the order of their sums."""

    def __init__(self, lives: Sequence[Live], holders: Sequence[frozenset[str]], overlap: bool, zero: int) -> None:
        self._lives, self._overlap = lives, overlap
        self._each = zero >= 2  # every backward pass has sums of its own
        chunks = range(len(holders))
        if self._each:
            mine = [[live for live in lives if not held.isdisjoint(live.names)] for held in holders]
            self._rounds = [_Round(mine[k], holders, [k]) for k in chunks]
        else:
            self._rounds = [_Round(lives, holders, chunks)]
        self._under_way: deque[tuple[Live, Handle, Tensor]] = deque()
        self.start_step()

    def start_step(self) -> None:
        self.used: set[str] = set()
        self._now: tuple[_Round, int] | None = None
        for live in self._lives:
            live.fresh = set(live.names)
            live.launched = live.begun = False
            if not self._each:
                live.total = live.buffer.grad[live.bucket.start : live.bucket.stop]
        for turn in self._rounds:
            turn.restart()

    def expect(self, chunk: int, last: bool) -> None:
        """Gradients of a chunk, the step's last of it: what becomes complete may be summed at once.

        Without overlap it is waited for: rooms of one backward pass would otherwise all be there at its end.
        """
        now = self._each or (self._overlap and last)
        self._now = (self._rounds[chunk if self._each else 0], chunk) if now else None

    def take(self, live: Live, name: str, gradient: Tensor) -> None:
        """A gradient has come."""
        assert not live.launched, f"gradient of {name} after its bucket was reduced"
        live.add(name, gradient)
        self.used.add(name)
        if self._now is not None:
            turn, chunk = self._now
            turn.came(live, name, chunk)
            for ready in turn.take(all=False):
                self._launch(ready)

    def end_backward(self, chunk: int) -> None:
        """All gradients of a microbatch have come from a chunk."""
        if self._each:
            for live in self._rounds[chunk].take(all=True):
                self._launch(live)
            self._rounds[chunk].restart()
            self._settle(0)
        self._now = None

    def finish(self) -> None:
        """Start what is left and wait for all: afterwards this rank's shards hold the sums over dp."""
        if not self._each:
            for live in self._rounds[0].take(all=True):
                self._launch(live)
        self._settle(0)
        for live in self._lives:
            assert not self._each or live.total is None, "a gradient that came after its bucket was reduced"
            if self._each and not live.begun:
                live.buffer.grad_shard(live.bucket).zero_()

    def _launch(self, live: Live) -> None:
        handle, own = live.start_sum()
        self._under_way.append((live, handle, own))
        if self._each:
            live.total, live.fresh = None, set(live.names)
            self._settle(UNDER_WAY if self._overlap else 0)
        else:
            live.launched = True

    def _settle(self, left: int) -> None:
        """Wait for sums until so many are under way."""
        while len(self._under_way) > left:
            live, handle, own = self._under_way.popleft()
            handle.wait()
            if self._each:
                shard = live.buffer.grad_shard(live.bucket)
                shard.add_(own) if live.begun else shard.copy_(own)
                live.begun = True
