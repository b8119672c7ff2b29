"""Queues of each rank's GPU in a step, derived from its action list: the input of `prove_communicators`.

It follows the executor: a message is one kernel, a receive is posted one message ahead of the action that waits for it,
a send waits for the oldest one of its channel once `SENDS_UNDER_WAY` are on their way, and hooks of passes reduce and
gather. Collectives of ranks that queue the same stand for one each here, since they block no rank: several of a pass
are one op, and a sum of two chunks' gradients in one bucket, which starts in the later pass, is one of each chunk.

Before the first pass of each kind on each chunk the host waits for the device, as it may when a kernel is loaded that
has not run before (CUDA_MODULE_LOADING=LAZY; NVIDIA's guides to CUDA and NCCL warn of it). Such a wait before any pass
would be too much: CUDA_LAUNCH_BLOCKING=1 makes all schedules but GPipe's hang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoptd.schedule.actions import RECEIVES, SENDS, Action, Actions, Schedule
from autoptd.schedule.communicators import DEVICE, HOST, Queued, prove_communicators
from autoptd.schedule.proof import SENDS_UNDER_WAY
from autoptd.schedule.stage_map import StageMap, channel_of, peer_of


def receives_posted(actions: Actions) -> int:
    """Return how many receives of a channel a rank posts at once, with the one that it waits for.

    In an evaluation over several chunks, the next message may depend on what this rank has yet to compute.
    """
    return 2 if all(action.chunk == 0 for action in actions) or any(action.kind == "B" for action in actions) else 1


@dataclass(frozen=True)
class Communicates:
    """Communication of a step besides messages.

    `passes`: axes with collectives in passes, on the current stream. `rings`: axes that passes send around the ring of;
    those of tp may re-gather in W, for gradients of weights. `data`: gradients are summed over dp; `zero`: stage.
    `tied`: pipeline ranks that hold the same parameters, by set. `host`: passes wait on the host. `counts`: the last
    stage counts over dp.
    """

    passes: tuple[str, ...] = ()
    rings: tuple[str, ...] = ()
    data: bool = False
    zero: int = 1
    tied: tuple[tuple[int, ...], ...] = ()
    host: bool = False
    counts: bool = False


@dataclass(frozen=True)
class RankQueues:
    """Lists of what the pipeline ranks queue, and the communicators: their members, and which carry messages."""

    lists: dict[int, list[Queued]]
    members: dict[str, tuple[int, ...]]
    channels: tuple[str, ...]

    def prove(self) -> None:
        """Raise StuckCommunicators unless the ranks finish."""
        prove_communicators(self.lists, self.members, self.channels)


def rank_queues(schedule: Schedule, route: StageMap, how: Communicates, steps: int = 1) -> RankQueues:
    """Return what the ranks of a pipeline queue in `steps` steps; other ranks queue the same as one of these."""
    members: dict[str, tuple[int, ...]] = {"world": tuple(range(route.ranks))}
    channels: dict[str, tuple[int, ...]] = {}
    lists = {}
    for rank, actions in enumerate(schedule):
        writer = _QueueWriter(rank, route, how)
        lists[rank] = [queued for _ in range(steps) for queued in writer.step(actions)]
        channels |= writer.channels
        members |= dict.fromkeys(writer.own, (rank,))
    members |= {_tied(ranks): ranks for ranks in how.tied}
    return RankQueues(lists, members | channels, tuple(channels))


def _tied(ranks: Sequence[int]) -> str:
    return "stages" + "+".join(map(str, ranks))


class _QueueWriter:
    """One rank's lists, and its ops so far."""

    def __init__(self, rank: int, route: StageMap, how: Communicates) -> None:
        self.rank, self.route, self.how = rank, route, how
        self.loaded: set[tuple[str, int]] = set()
        self.ops: dict[str, int] = {}
        self.own: dict[str, None] = {}  # communicators of ranks that queue the same
        self.channels: dict[str, tuple[int, ...]] = {}

    def step(self, actions: Actions) -> Iterator[Queued]:
        self.most = receives_posted(actions)
        self.posted: dict[str, deque[int]] = {}
        self.sending: dict[str, deque[int]] = {}
        self.expected: dict[str, deque[str]] = {}
        for action in actions:
            if action.kind in RECEIVES:
                self.expected.setdefault(self._channel(action), deque()).append(self._message(action))
        self.gathering: list[int] = []
        self.summing: set[int] = set()
        self.sums: list[int] = []
        self.summed: set[int] = set()
        self.early = actions[0].kind == "GATHER"
        self.splits = any(action.kind == "W" for action in actions)
        self.counting: int | None = None
        if self.how.counts and self.route.stages - 1 in self.route.stages_of(self.rank):
            yield self._start("dp", "counts")
            self.counting = self.ops[self._name("dp")] - 1
        for action in actions:
            yield from self._of(action)
        for name, numbers in self.sending.items():
            yield from (Queued("-", name, str(number)) for number in numbers)

    def _of(self, action: Action) -> Iterator[Queued]:
        match action.kind:
            case kind if kind in RECEIVES:
                yield from self._receive(action)
            case kind if kind in SENDS:
                yield from self._send(action)
            case "F" | "B" | "W":
                yield from self._pass(action)
            case "SUM":
                self.summing.add(action.chunk)
            case "REDUCE":
                if self.how.data and self.how.zero < 2:
                    for chunk in sorted(set(range(self.route.virtual)) - self.summed):
                        yield from self._sum(chunk)
                yield from self._waits("dp", self.sums)
                yield from (self._run(axis, "partial") for axis in self.how.passes if axis == "tp")
                for ranks in self.how.tied:
                    if self.rank in ranks:
                        yield Queued("", _tied(ranks), "sum")
            case "STEP":
                yield Queued("", "world", "finish")
                yield Queued(HOST)
            case "GATHER":
                if self.how.data and 0 < self.how.zero < 3:
                    yield self._start("dp", "gather")
                    self.gathering.append(self.ops[self._name("dp")] - 1)
                    if not self.early:
                        yield from self._waits("dp", self.gathering)
            case kind:
                raise ValueError(f"unknown action {kind}")

    # ---- messages ----

    def _channel(self, action: Action) -> str:
        edge, way = channel_of(self.rank, action, self.route)
        name = f"edge{edge}{way}"
        peer = peer_of(self.rank, action, self.route)
        assert peer is not None, f"{action} has no neighbour"
        self.channels[name] = tuple(sorted((self.rank, peer[0])))
        return name

    def _message(self, action: Action) -> str:
        """Return a name of the message that is the same on both sides: its kind, microbatch and edge of the model."""
        stage = self.route.stage(self.rank, action.chunk)
        return f"{action.kind[1]}{action.microbatch}.{stage if action.kind in ('SF', 'RB') else stage - 1}"

    def _receive(self, action: Action) -> Iterator[Queued]:
        name = self._channel(action)
        posted, expected = self.posted.setdefault(name, deque()), self.expected[name]
        while len(posted) < self.most and expected:
            yield Queued("+", name, expected.popleft())
            posted.append(self._count(name))
        yield Queued("-", name, str(posted.popleft()))

    def _send(self, action: Action) -> Iterator[Queued]:
        name = self._channel(action)
        sending = self.sending.setdefault(name, deque())
        if len(sending) == SENDS_UNDER_WAY:
            yield Queued("-", name, str(sending.popleft()))
        yield Queued("+", name, self._message(action))
        sending.append(self._count(name))

    # ---- passes ----

    def _pass(self, action: Action) -> Iterator[Queued]:
        kind, chunk = action.kind, action.chunk
        if (kind, chunk) not in self.loaded:
            self.loaded.add((kind, chunk))
            yield Queued(DEVICE)
        if kind == "F":
            yield from self._waits("dp", self.gathering)
            if self.counting is not None and self.route.stage(self.rank, chunk) == self.route.stages - 1:
                yield from self._waits("dp", [self.counting])
                self.counting = None
        if self.how.data and self.how.zero == 3:
            yield from self._at_once("dp", "gather")
        yield Queued("", "", str(action))
        if kind != "W":
            if self.how.host:
                yield Queued(HOST)
            yield from (self._run(axis, str(action)) for axis in self.how.passes)
        for axis in self.how.rings:
            if kind != "W" or axis == "tp":
                yield from self._at_once(axis, str(action))
        if kind == ("W" if self.splits else "B") and self.how.data:
            if self.how.zero >= 2:
                yield from self._at_once("dp", "sum")
            elif chunk in self.summing:
                yield from self._sum(chunk)
                self.summing.discard(chunk)
        yield Queued("", "", str(action))

    def _sum(self, chunk: int) -> Iterator[Queued]:
        self.summed.add(chunk)
        yield self._start("dp", f"sum.{chunk}")
        self.sums.append(self.ops[self._name("dp")] - 1)

    # ---- groups of ranks that queue the same ----

    def _name(self, axis: str) -> str:
        self.own[name := f"{axis}@{self.rank}"] = None
        return name

    def _count(self, name: str) -> int:
        self.ops[name] = self.ops.get(name, 0) + 1
        return self.ops[name] - 1

    def _run(self, axis: str, op: str) -> Queued:
        self._count(self._name(axis))
        return Queued("", self._name(axis), op)

    def _start(self, axis: str, op: str) -> Queued:
        self._count(self._name(axis))
        return Queued("+", self._name(axis), op)

    def _at_once(self, axis: str, op: str) -> Iterator[Queued]:
        """Start an op beside this rank's kernels, and wait for it."""
        yield self._start(axis, op)
        yield Queued("-", self._name(axis), str(self.ops[self._name(axis)] - 1))

    def _waits(self, axis: str, numbers: list[int]) -> Iterator[Queued]:
        name = self._name(axis)
        yield from (Queued("-", name, str(number)) for number in numbers)
        numbers.clear()
