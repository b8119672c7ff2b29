"""Proof that communicators never wait for each other in a circle, by the rules of NCCL on GPUs.

The kernel of a communicator's op runs on each member's GPU, and ends once it runs on all. What a rank queues, as text:

    tp:sum        an op on the current stream
    +dp:sum       an op on the communicator's own stream, behind what the current stream holds now
    -dp:3         the current stream waits for the communicator's op number 3
    :F3           kernels of this rank alone, on the current stream
    host          the host waits for the current stream
    device        the host waits for all streams

A communicator's ops must come in one order on all its members. A stream runs in order; the host queues in order. Three
limits are assumed on every rank, which a real GPU has or not, so that none of them can be the cause of a circle:

    one queue          all streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1): nothing starts before what
                       was queued earlier has started, on whichever stream
    one at a time      a GPU holds the kernel of one collective, and beside it those of messages
    nothing buffered   a send does not end before its receive has started

So a GPU must hold one collective and one message of each of its channels at once, `most_kernels` of them, each of at
most NCCL_MAX_CTAS thread blocks.

Whatever completes disables nothing, so there is one outcome in whatever order ranks are visited. Ranks that differ only
in dp, cp, tp or ep queue the same, and their groups have equal members; so one rank of each stands for all of them, and
the proof takes as many ranks as the pipeline has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

HOST, DEVICE, CURRENT = "host", "device", "current"


class StuckCommunicators(ValueError):
    """Lists of queued ops that cannot finish. The message names the circle, or the ops in different orders."""


class Queued(NamedTuple):
    """An op that a rank's host queues, or a wait; see the module's docstring. `op`: of a wait, the op's number."""

    sign: str  # "", "+", "-", "host" or "device"
    communicator: str = ""
    op: str = ""

    def __str__(self) -> str:
        return self.sign if self.sign in (HOST, DEVICE) else f"{self.sign}{self.communicator}:{self.op}"


Lists: TypeAlias = Mapping[int, Sequence[Queued]]  # by rank


def parse_queued(text: str) -> Queued:
    """Parse the output of `str(queued)`. Raises ValueError naming the text."""
    if text in (HOST, DEVICE):
        return Queued(text)
    sign = text[0] if text[:1] in ("+", "-") else ""
    communicator, colon, op = text[len(sign) :].partition(":")
    if not colon or not op or (sign and not communicator) or (sign == "-" and not op.isdigit()):
        raise ValueError(f"{text!r} is nothing that a rank queues; write tp:sum, +dp:sum, -dp:3, :F3, host or device")
    return Queued(sign, communicator, op)


def most_kernels(lists: Lists, channels: Collection[str]) -> int:
    """Return how many kernels of communicators a GPU must hold at once: one collective, and one message per channel."""
    used = [{q.communicator for q in each if q.sign != "-" and q.communicator} for each in lists.values()]
    return max((len(names.intersection(channels)) + bool(names.difference(channels)) for names in used), default=0)


def prove_communicators(lists: Lists, members: Mapping[str, Sequence[int]], channels: Collection[str] = ()) -> None:
    """Prove that all ranks finish. `members`: the ranks of each communicator; `channels`: those that carry messages.

    Raises StuckCommunicators.
    """
    _Run(lists, members, frozenset(channels)).finish()


class _Entry(NamedTuple):
    """A place in a rank's hardware queue. `after`: how much of the current stream must be done before it starts."""

    stream: str
    number: int  # in its stream
    queued: Queued
    op: tuple[str, int]  # communicator, number of its op on this rank
    after: int


@dataclass
class _Rank:
    """One rank: its host, its hardware queue, and its streams."""

    queued: Sequence[Queued]
    at: int = 0
    queue: deque[_Entry] = field(default_factory=deque)
    issued: dict[str, int] = field(default_factory=dict)  # by stream
    done: dict[str, int] = field(default_factory=dict)  # by stream
    ops: dict[str, int] = field(default_factory=dict)  # by communicator
    running: dict[str, tuple[str, int]] = field(default_factory=dict)  # by stream

    @property
    def finished(self) -> bool:
        return self.at == len(self.queued) and not self.unfinished()

    def unfinished(self, *streams: str) -> list[str]:
        return [s for s in streams or self.issued if self.issued.get(s, 0) > self.done.get(s, 0)]


class _Run:
    def __init__(self, lists: Lists, members: Mapping[str, Sequence[int]], channels: frozenset[str]) -> None:
        self.ranks = {rank: _Rank(each) for rank, each in lists.items()}
        self.members, self.channels = members, channels
        self.started: dict[tuple[str, int], dict[int, str]] = {}  # op -> rank -> stream
        self.names: dict[tuple[str, int], tuple[int, str]] = {}  # op -> the rank that came first, its name there
        self.ended: set[tuple[str, int]] = set()

    def finish(self) -> None:
        ready = deque(self.ranks)
        while ready:
            rank = ready.popleft()
            for other in self._advance(rank):
                if other not in ready:
                    ready.append(other)
        if stuck := [rank for rank, state in self.ranks.items() if not state.finished]:
            raise StuckCommunicators("\n".join(["communicators wait for each other", *self._explained(stuck)]))

    def _advance(self, rank: int) -> set[int]:
        """Let one rank go on until it waits; return the ranks that may now go on."""
        state, woken, moved = self.ranks[rank], set[int](), True
        while moved:
            moved = False
            while state.at < len(state.queued) and self._may_queue(state, state.queued[state.at]):
                self._queue(state, state.queued[state.at])
                state.at += 1
                moved = True
            while state.queue and self._may_start(state, state.queue[0]):
                woken |= self._start(rank, state, state.queue.popleft())
                moved = True
        return woken - {rank}

    def _may_queue(self, state: _Rank, queued: Queued) -> bool:
        return not {HOST: state.unfinished(CURRENT), DEVICE: state.unfinished()}.get(queued.sign)

    def _queue(self, state: _Rank, queued: Queued) -> None:
        if queued.sign in (HOST, DEVICE):
            return
        stream = queued.communicator if queued.sign == "+" else CURRENT
        number = state.issued.get(stream, 0)
        state.issued[stream] = number + 1
        if queued.sign == "-":
            op = queued.communicator, int(queued.op)
        else:
            op = queued.communicator, state.ops.get(queued.communicator, 0)
            state.ops[queued.communicator] = op[1] + 1
        after = state.issued.get(CURRENT, 0) if queued.sign == "+" else 0
        state.queue.append(_Entry(stream, number, queued, op, after))

    def _may_start(self, state: _Rank, entry: _Entry) -> bool:
        if state.done.get(entry.stream, 0) < entry.number or state.done.get(CURRENT, 0) < entry.after:
            return False
        if entry.queued.sign == "-":
            return entry.op in self.ended
        return not (self._is_collective(entry.op) and any(map(self._is_collective, state.running.values())))

    def _is_collective(self, op: tuple[str, int]) -> bool:
        return bool(op[0]) and op[0] not in self.channels

    def _start(self, rank: int, state: _Rank, entry: _Entry) -> set[int]:
        """Start what is at the head of a queue; return the ranks that it lets go on."""
        stream = entry.stream
        if entry.queued.sign == "-" or not entry.queued.communicator:
            state.done[stream] = state.done.get(stream, 0) + 1
            return set()
        first, name = self.names.setdefault(entry.op, (rank, entry.queued.op))
        if name != entry.queued.op:
            raise StuckCommunicators(
                f"op {entry.op[1]} of {entry.op[0]} is {name} on rank {first}, but {entry.queued.op} on rank {rank}"
            )
        started = self.started.setdefault(entry.op, {})
        started[rank] = stream
        state.running[stream] = entry.op
        if len(started) < len(self.members[entry.op[0]]):
            return set()
        for other, its in self.started.pop(entry.op).items():
            self.ranks[other].done[its] = self.ranks[other].done.get(its, 0) + 1
            del self.ranks[other].running[its]
        del self.names[entry.op]
        self.ended.add(entry.op)
        return set(started)

    # ---- the message of stuck lists ----

    def _explained(self, stuck: Sequence[int]) -> Iterator[str]:
        """Yield a circle of waiting ranks, `rank 0 tp:sum -> rank 1 dp:sum -> rank 0`, or a wait for a done rank."""
        awaits = {rank: dict(self._awaited(rank)) for rank in stuck}
        path, rank = [], stuck[0]
        while rank in awaits and awaits[rank] and rank not in path:
            path.append(rank)
            rank = min(awaits[rank], key=lambda other: (other not in awaits, other))
        shown = path[path.index(rank) :] if rank in path else path
        steps = [*shown, rank]
        told = [f"rank {here} {awaits[here][there]}" for here, there in pairwise(steps)]
        yield " -> ".join([*told, f"rank {rank}" + ("" if rank in path else ", which does not come to it")])
        for each in stuck:
            state = self.ranks[each]
            place = str(state.queued[state.at]) if state.at < len(state.queued) else "the end"
            yield f"rank {each} is at {place}, {state.at} of {len(state.queued)}"

    def _awaited(self, rank: int) -> Iterator[tuple[int, str]]:
        """Yield (rank, op) that a stuck rank waits for: members that have not started an op that blocks it."""
        for op in self._blocking(self.ranks[rank]):
            for other in self.members[op[0]]:
                if other not in self.started[op]:
                    yield other, f"{op[0]}:{self.names[op][1]}"

    def _blocking(self, state: _Rank) -> Iterator[tuple[str, int]]:
        """Yield the running ops that the head of the queue, or the host, waits for."""
        if not state.queue:
            yield from state.running.values()
            return
        head = state.queue[0]
        for stream, op in state.running.items():
            same = stream == head.stream or op == head.op or (head.after and stream == CURRENT)
            if same or (head.queued.sign != "-" and self._is_collective(head.op) and self._is_collective(op)):
                yield op
