"""Deadlock and memory proofs of a schedule, and the grid that shows one that is stuck; see `autoptd.schedule`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from autoptd.schedule.actions import RECEIVES, SENDS, Action, Actions, Alive, Schedule, chunks_of, moments
from autoptd.schedule.stage_map import StageMap, channel_of, peer_of

SENDS_UNDER_WAY = 2  # microbatches per channel; a further send waits for the oldest, which bounds the sent tensors


class StuckSchedule(ValueError):
    """A schedule that cannot finish. The message holds the rank × step grid with the position of each rank."""


def prove(
    schedule: Schedule,
    route: StageMap | None = None,
    channel: Callable[[int, Action], object] | None = None,
    under_way: int = SENDS_UNDER_WAY,
) -> None:
    """Prove that the schedule finishes and that every F, B and W has its inputs, whatever the durations.

    Model: a rank runs its list in order. A send or receive is queued on its (rank, channel), a FIFO; the heads of the
    two queues of a channel complete together when one sends what the other receives (rendezvous). A receive blocks its
    rank until complete; a send blocks it while `under_way` earlier ones of the channel are not complete. Run to a
    fixpoint: since completing one pair never disables another, the fixpoint does not depend on the order.

    `route`: the stage map of the schedule's kind; default, a loop. `channel`: maps (rank, action) to a communicator;
    default, `channel_of`.

    Raises StuckSchedule with a rank × step grid, `<` marking the position of each rank, and the cycle of waiting ranks.
    """
    route = route or StageMap(len(schedule), chunks_of(schedule))
    run = _ProofRun(schedule, route, channel or partial(channel_of, route=route), under_way)
    run.finish()
    for rank, actions in enumerate(schedule):
        _prove_data_flow(rank, route, actions)


class UncountedActivations(ValueError):
    """A schedule that holds more activations than the predicted memory counts."""


def prove_memory(schedule: Schedule, counted: Sequence[Alive]) -> None:
    """Raise UncountedActivations if a rank ever holds activations of more microbatches than were counted."""
    for rank, (actions, most) in enumerate(zip(schedule, counted, strict=True)):
        for alive, waiting in moments(actions):
            if not most.covers(alive, waiting):
                held = _in_words(alive, waiting)
                counted_for = " or ".join(map(_in_words, most.rows, most.waiting or [()] * len(most.rows)))
                raise UncountedActivations(
                    f"rank {rank} holds activations of {held} microbatches (by chunk), but memory is predicted for "
                    f"{counted_for}"
                )


def _in_words(alive: Sequence[int], waiting: Sequence[int]) -> str:
    text = "+".join(map(str, alive))
    return f"{text} ({'+'.join(map(str, waiting))} before their W)" if any(waiting) else text


class _ProofRun:
    """The positions of all ranks in their lists, and the messages queued between them."""

    def __init__(
        self, schedule: Schedule, route: StageMap, channel: Callable[[int, Action], object], under_way: int
    ) -> None:
        self.schedule, self.route, self.channel, self.under_way = schedule, route, channel, under_way
        self.position = [0] * len(schedule)
        self.queues: dict[tuple[int, object], deque[Action]] = {}
        self.received: list[set[Action]] = [set() for _ in schedule]

    def finish(self) -> None:
        """Advance all ranks until no one can. Raises StuckSchedule if one has not finished."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.schedule)):
                while self._advance(rank):
                    moved = True
            for owner, key in list(self.queues):
                while self.queues[owner, key] and self._match(owner, key):
                    moved = True
        unsent = [f"stage {rank}: {queue[0]} is never received" for (rank, _), queue in self.queues.items() if queue]
        if unsent or any(map(self._unfinished, range(len(self.schedule)))):
            picture = grid(self.schedule, self.position)
            raise StuckSchedule("\n".join(["the schedule cannot finish", picture, *self._waits(), *unsent]))

    def _match(self, rank: int, key: object) -> bool:
        """Complete the head of one FIFO together with the head of its peer's."""
        mine = self.queues[rank, key][0]
        other, awaited = self._peer(rank, mine)
        theirs = self.queues.get((other, key))
        if not theirs or theirs[0] != awaited:
            return False
        for owner in (rank, other):
            done = self.queues[owner, key].popleft()
            if done.kind in RECEIVES:
                self.received[owner].add(done)
        return True

    def _advance(self, rank: int) -> bool:
        if not self._unfinished(rank):
            return False
        action = self.schedule[rank][self.position[rank]]
        if action.kind in SENDS + RECEIVES:
            self._peer(rank, action)
            queue = self.queues.setdefault((rank, self.channel(rank, action)), deque())
            if action.kind in SENDS:
                if sum(waiting.kind in SENDS for waiting in queue) >= self.under_way:
                    return False
                queue.append(action)
            elif action not in self.received[rank]:
                if action in queue:
                    return False
                queue.append(action)
                return True
        self.position[rank] += 1
        return True

    def _peer(self, rank: int, action: Action) -> tuple[int, Action]:
        if (found := peer_of(rank, action, self.route)) is None:
            raise StuckSchedule(f"stage {rank}: {action} has no neighbour to communicate with")
        return found

    # ---- the message of a stuck schedule ----

    def _unfinished(self, rank: int) -> bool:
        return self.position[rank] < len(self.schedule[rank])

    def _waits(self) -> Iterator[str]:
        """Yield every cycle of waiting ranks, `rank 0 SF3 -> rank 1 RF2 -> rank 0`, and every wait for a done rank."""
        from networkx import DiGraph, simple_cycles  # for this message alone

        awaited = {rank: self._awaited(rank) for rank in filter(self._unfinished, range(len(self.schedule)))}
        cycles = [c[i:] + c[:i] for c in simple_cycles(DiGraph(list(awaited.items()))) for i in [c.index(min(c))]]
        for cycle in sorted(cycles):
            yield " -> ".join([*map(self._current, cycle), f"rank {cycle[0]}"])
        for rank, other in awaited.items():
            if other not in awaited:
                yield f"{self._current(rank)} -> rank {other}, which is done"

    def _current(self, rank: int) -> str:
        return f"rank {rank} {self.schedule[rank][self.position[rank]]}"

    def _awaited(self, rank: int) -> int:
        """Return the rank that `rank` waits for: the peer of the oldest message in its channel's queue."""
        action = self.schedule[rank][self.position[rank]]
        return self._peer(rank, self.queues[rank, self.channel(rank, action)][0])[0]


def _prove_data_flow(rank: int, route: StageMap, actions: Actions) -> None:
    """Raise StuckSchedule unless actions are unique, follow those they need, and every F has its B (and W)."""
    seen: set[Action] = set()
    for action in actions:
        for need in _needs(rank, action, route):
            if need not in seen:
                raise StuckSchedule(f"stage {rank}: {action} comes before {need}")
        if action in seen:
            raise StuckSchedule(f"stage {rank}: {action} is repeated")
        seen.add(action)
    done = {kind: {(a.microbatch, a.chunk) for a in actions if a.kind == kind} for kind in "FBW"}
    for kind in "BW":
        if missing := done[kind] and sorted(done["F"] - done[kind]):
            raise StuckSchedule(f"stage {rank}: {Action('F', *missing[0])} has no {Action(kind, *missing[0])}")


def _needs(rank: int, action: Action, route: StageMap) -> Iterator[Action]:
    """Yield the actions that must precede an action on its rank. A neighbouring chunk of the rank needs no receive."""
    kind, i, chunk = action
    match kind:
        case "F" | "B":
            if kind == "B":
                yield Action("F", i, chunk)
            there = route.hop(rank, chunk, -1 if kind == "F" else 1)
            if there is not None:
                yield Action(kind, i, there[1]) if there[0] == rank else Action(f"R{kind}", i, chunk)
        case "W" | "SB":
            yield Action("B", i, chunk)
        case "SF":
            yield Action("F", i, chunk)


def grid(schedule: Schedule, position: Sequence[int] | None = None) -> str:
    """Draw ranks as rows and steps as columns; with `position`, `<` marks the current action of each rank."""
    at = position if position is not None else [-1] * len(schedule)
    rows = [
        [f"{a}{'<' * (k == here)}" for k, a in enumerate(actions)] for actions, here in zip(schedule, at, strict=True)
    ]
    columns = max(map(len, rows), default=0)
    widths = [max((len(row[k]) for row in rows if k < len(row)), default=0) for k in range(columns)]
    return "\n".join(
        f"stage {stage}  " + " ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)).rstrip()
        for stage, row in enumerate(rows)
    )
