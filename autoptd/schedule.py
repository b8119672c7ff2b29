"""Pipeline schedules as data: for every rank of the pipeline the list of actions that one step executes in order.

    text    action                                                   channel
    F0      forward of microbatch 0
    B0      backward of microbatch 0
    W0      gradients of the parameters, where B0 makes those of the input alone (zero-bubble)
    RF0     receive its activation from the previous stage           (s-1, forward)
    SF0     send its activation to the next stage                    (s, forward)
    RB0     receive its gradient from the next stage                 (s, backward)
    SB0     send its gradient to the previous stage                  (s-1, backward)
    REDUCE  finish the reduction of the parameters' gradients
    STEP    clip and run the optimizer on this rank's share
    GATHER  collect the updated parameters

    F3.1    the same on this rank's chunk 1; without a dot, on chunk 0

A rank r of p may hold v chunks of the model: chunk c is the stage c p + r of v p in all, so that the last rank sends
the output of its chunk c to the first one's chunk c + 1. With v = 1 a stage is a rank. A rank alone (p = 1) sends
nothing.

The simulator, the picture and the executor read the same lists. A schedule is one row of `SCHEDULES`: a pure function
of (ranks, microbatches, chunks) that gives F, B and W of each rank; `with_communication` adds the rest mechanically.

    gpipe        all forwards, then all backwards                      Huang et al. 2019 (its figure drains backwards)
    1f1b         one forward, one backward                             Narayanan et al. 2019, PipeDream-flush
    interleaved  1F1B over v chunks per rank, in groups of p           Narayanan et al. 2021, section 2.2
    zero-bubble  1F1B whose W fill the drain; memory as 1F1B's         Qi et al. 2023, ZB-H1
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple, TypeAlias

from autoptd.errors import PlanError, nearest

SENDS = ("SF", "SB")
RECEIVES = ("RF", "RB")
STEP_END = ("REDUCE", "STEP", "GATHER")
SENDS_UNDER_WAY = (
    2  # microbatches per channel: a further send waits for the oldest, so that sent tensors do not pile up
)


class Action(NamedTuple):
    """One thing that a rank does; `microbatch` is None for the actions at the end of a step.

    A tuple, since schedules of a hundred thousand actions are made, proved and simulated.
    """

    kind: str
    microbatch: int | None = None
    chunk: int = 0

    def __str__(self) -> str:
        if self.microbatch is None:
            return self.kind
        return f"{self.kind}{self.microbatch}.{self.chunk}" if self.chunk else f"{self.kind}{self.microbatch}"


Actions: TypeAlias = tuple[Action, ...]
Schedule: TypeAlias = tuple[Actions, ...]  # one entry per rank
Channel: TypeAlias = tuple[int, str]  # (lower rank of the edge, "forward" | "backward")


class StuckSchedule(ValueError):
    """A schedule that cannot finish; the message holds the grid of what each rank did and where it stands."""


def parse_action(text: str) -> Action:
    """Read back what `str` wrote. Raises ValueError naming the text."""
    if text in STEP_END:
        return Action(text)
    if match := re.fullmatch(r"(F|B|W|SF|RF|SB|RB)(\d+)(?:\.([1-9]\d*))?", text):
        return Action(match[1], int(match[2]), int(match[3] or 0))
    raise ValueError(f"{text!r} is not an action; write F0, B0, W0, F0.1, SF0, RF0, SB0, RB0, REDUCE, STEP or GATHER")


def text(schedule: Schedule) -> list[str]:
    """One line per rank, actions separated by blanks."""
    return [" ".join(map(str, actions)) for actions in schedule]


def parse(lines: Iterable[str]) -> Schedule:
    """`parse(text(schedule)) == schedule`."""
    return tuple(tuple(parse_action(word) for word in line.split()) for line in lines)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, each in order: a rank holds the activations of every microbatch."""
    forwards, backwards = (tuple(Action(kind, i) for i in range(microbatches)) for kind in "FB")
    return (forwards + backwards,) * stages


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward: stage s warms up with `stages - s - 1` forwards (at most m), alternates, drains."""
    order = [(i, 0) for i in range(microbatches)]
    return tuple(tuple(_warm_up_and_alternate(order, order, stages - stage - 1)) for stage in range(stages))


def interleaved(stages: int, microbatches: int, virtual: int) -> Schedule:
    """1F1B over `virtual` chunks per rank: p microbatches on chunk 0, the same p on chunk 1, …, then the next p.

    The order of Megatron-LM (`schedules.py`, forward_backward_pipelining_with_interleaving, with its default group of p
    microbatches): backwards take the chunks from the last to the first; rank r warms up with
    2 (p - r - 1) + (v - 1) p forwards, at most v m. With one chunk it is 1F1B, as there.

    Raises PlanError unless p divides m. (Megatron-LM raises RuntimeError for a last group of fewer than p microbatches,
    which would wait in the middle of the pipeline; its releases of 2021–2024 ask that p divide m.)
    """
    if virtual == 1:
        return one_f_one_b(stages, microbatches)
    if microbatches % stages:
        raise PlanError(
            f"interleaved takes the microbatches in groups of as many as there are pipeline ranks: {microbatches} "
            f"microbatches over {stages} ranks leave a group of {microbatches % stages}",
            where="schedule",
            fix=f"use a multiple of {stages} microbatches, or the schedule 1f1b",
        )
    groups = range(0, microbatches, stages)
    forwards, backwards = (
        [(first + i, chunk) for first in groups for chunk in chunks for i in range(stages)]
        for chunks in (range(virtual), range(virtual)[::-1])
    )
    ahead = (virtual - 1) * stages
    return tuple(
        tuple(_warm_up_and_alternate(forwards, backwards, ahead + 2 * (stages - rank - 1))) for rank in range(stages)
    )


def _warm_up_and_alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warm_up: int
) -> Iterator[Action]:
    """`warm_up` forwards (at most all), then a forward and a backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    yield from (Action("F", *at) for at in forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield Action("F", *forward)
        yield Action("B", *backward)
    yield from (Action("B", *at) for at in backwards[steady:])


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: the F and B of 1F1B; stage s does W of microbatch i - s after B of i, and the last s of them at the end.

    Every stage then holds p microbatches at most, counted from F to W, as the first one of 1F1B does. The bubble of a
    step is (p - 1)(F + B - W) instead of 1F1B's (p - 1)(F + B + W), here with B for the input's gradients alone.
    """

    def actions(stage: int) -> Iterator[Action]:
        order = [(i, 0) for i in range(microbatches)]
        for action in _warm_up_and_alternate(order, order, stages - stage - 1):
            yield action
            if action.kind == "B" and action.microbatch is not None and action.microbatch >= stage:
                yield Action("W", action.microbatch - stage)
        yield from (Action("W", i) for i in range(max(0, microbatches - stage), microbatches))

    return tuple(tuple(actions(stage)) for stage in range(stages))


def forward_only(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Evaluation: every rank runs the forwards in the order of `interleaved`, whose last group may be smaller here."""
    order = [
        Action("F", i, chunk)
        for first in range(0, microbatches, stages)
        for chunk in range(virtual)
        for i in range(first, min(first + stages, microbatches))
    ]
    return (tuple(order),) * stages


def _one_chunk(kind: str, rows: Callable[[int, int], Schedule]) -> Callable[[int, int, int], Schedule]:
    def schedule(stages: int, microbatches: int, virtual: int) -> Schedule:
        if virtual != 1:
            raise PlanError(
                f"the schedule {kind} has one chunk per rank, not {virtual}", where="schedule", fix="use interleaved"
            )
        return rows(stages, microbatches)

    return schedule


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": _one_chunk("1f1b", one_f_one_b),
    "gpipe": _one_chunk("gpipe", gpipe),
    "interleaved": interleaved,
    "zero-bubble": _one_chunk("zero-bubble", zero_bubble),
}
RUNNABLE = tuple(SCHEDULES)  # what the executor has actions for


def period_of(kind: str, stages: int) -> int:
    """After how many microbatches the rounds of a kind are alike: interleaved takes them in groups of p."""
    return stages if kind == "interleaved" else 1


def chunks_of(schedule: Schedule) -> int:
    """Chunks per rank: one more than the highest that is named."""
    return 1 + max((action.chunk for actions in schedule for action in actions), default=0)


def with_communication(schedule: Schedule) -> Schedule:
    """Insert the receive before and the send after every F and B that has a neighbour, as near as can be."""
    ranks = len(schedule)
    last = ranks * chunks_of(schedule) - 1  # stage of the model, not rank
    if ranks == 1:
        return schedule

    one = cache(Action)  # shared by all ranks: schedules of millions of actions are made

    def around(rank: int) -> Iterator[Action]:
        for kind, i, chunk in schedule[rank]:
            if kind == "W":
                yield one(kind, i, chunk)
                continue
            stage = chunk * ranks + rank
            at_first, at_last = stage == 0, stage == last
            if not (at_first if kind == "F" else at_last):
                yield one("R" + kind, i, chunk)
            yield one(kind, i, chunk)
            if not (at_last if kind == "F" else at_first):
                yield one("S" + kind, i, chunk)

    return tuple(tuple(around(rank)) for rank in range(ranks))


def with_step_end(schedule: Schedule) -> Schedule:
    """Append REDUCE, STEP, GATHER to every rank."""
    end = tuple(Action(kind) for kind in STEP_END)
    return tuple(actions + end for actions in schedule)


def training_step(kind: str, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """`step_lists`, proved to finish. Raises what that does, and StuckSchedule for a schedule that blocks."""
    schedule = step_lists(kind, stages, microbatches, virtual)
    prove(schedule)
    return schedule


def step_lists(kind: str, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The whole step of a row of `SCHEDULES`: compute, communication, step end; not yet proved.

    `stages` is the number of pipeline ranks, `virtual` the chunks that each holds. Raises PlanError for an unknown kind
    and for numbers that the kind cannot take.
    """
    if kind not in SCHEDULES:
        raise PlanError(f"unknown schedule {kind!r}", where="schedule", fix=nearest(kind, SCHEDULES))
    return with_step_end(with_communication(SCHEDULES[kind](stages, microbatches, virtual)))


def in_flight(actions: Sequence[Action], chunk_bytes: Sequence[float] = ()) -> tuple[int, ...]:
    """By chunk, of how many microbatches a rank holds activations when it holds most.

    Activations live from F to B, or to W where the rank has W (an upper bound: W needs but part of them). `chunk_bytes`
    weighs the chunks, by one microbatch's activations on each; all alike without.
    """
    freeing = "W" if any(action.kind == "W" for action in actions) else "B"
    alive = [0] * chunks_of((tuple(actions),))
    weights = chunk_bytes or [1] * len(alive)
    fullest, most = tuple(alive), 0.0
    for action in actions:
        if action.kind == "F":
            alive[action.chunk] += 1
            if (now := sum(n * weight for n, weight in zip(alive, weights, strict=True))) > most:
                fullest, most = tuple(alive), now
        elif action.kind == freeing:
            alive[action.chunk] -= 1
    return fullest


def channel_of(rank: int, action: Action, ranks: int | None = None) -> Channel:
    """The communicator that a send or receive uses: one per edge and direction.

    With `ranks`, the edge from the last rank to the first is that of the last; without, 0 < rank < last is assumed.
    """
    match action.kind:
        case "SF" | "RB":
            lower = rank
        case "RF" | "SB":
            lower = rank - 1
        case _:
            raise ValueError(f"{action} uses no channel")
    return lower % ranks if ranks else lower, "forward" if action.kind in ("SF", "RF") else "backward"


def peer_of(rank: int, action: Action, ranks: int, virtual: int) -> tuple[int, Action] | None:
    """Who a send or receive meets, and that one's action; None where the model begins or ends, or a rank is alone."""
    stage = action.chunk * ranks + rank + (1 if action.kind in ("SF", "RB") else -1)
    if ranks == 1 or not 0 <= stage < ranks * virtual:
        return None
    kind = ("R" if action.kind[0] == "S" else "S") + action.kind[1]
    return stage % ranks, Action(kind, action.microbatch, stage // ranks)


def prove(
    schedule: Schedule, channel: Callable[[int, Action], object] | None = None, under_way: int = SENDS_UNDER_WAY
) -> None:
    """Show that the schedule finishes and every F, B and W has what it needs, whatever the durations.

    Model: a rank runs its list in order. A send or receive is queued on its (rank, channel), a FIFO; the heads of the
    two queues of a channel complete together when one sends what the other receives (rendezvous). A receive holds its
    rank until complete; a send holds it while `under_way` earlier ones of the channel are not complete. Run to a
    fixpoint: since completing one pair never disables another, the fixpoint does not depend on the order. `channel`
    maps (rank, action) to a communicator, by default `channel_of`.

    Raises StuckSchedule with a rank × step grid, `<` marking where a rank stands.
    """
    ranks, virtual = len(schedule), chunks_of(schedule)
    channel = channel or partial(channel_of, ranks=ranks)
    position = [0] * ranks
    queues: dict[tuple[int, object], deque[Action]] = {}
    received: list[set[Action]] = [set() for _ in range(ranks)]

    def match(rank: int, key: object) -> bool:
        """Complete the head of one FIFO together with the head of its peer's."""
        mine = queues[rank, key][0]
        other, awaited = peer_of(rank, mine, ranks, virtual)  # type: ignore[misc]  # queued only with a peer
        theirs = queues.get((other, key))
        if not theirs or theirs[0] != awaited:
            return False
        for owner in (rank, other):
            done = queues[owner, key].popleft()
            if done.kind in RECEIVES:
                received[owner].add(done)
        return True

    def advance(rank: int) -> bool:
        if position[rank] == len(schedule[rank]):
            return False
        action = schedule[rank][position[rank]]
        if action.kind in SENDS + RECEIVES:
            if peer_of(rank, action, ranks, virtual) is None:
                raise StuckSchedule(f"stage {rank}: {action} has no neighbour to talk to")
            queue = queues.setdefault((rank, channel(rank, action)), deque())
            if action.kind in SENDS:
                if sum(waiting.kind in SENDS for waiting in queue) >= under_way:
                    return False
                queue.append(action)
            elif action not in received[rank]:
                if action in queue:
                    return False
                queue.append(action)
                return True
        position[rank] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while advance(rank):
                moved = True
        for owner, key in list(queues):
            while queues[owner, key] and match(owner, key):
                moved = True
    stuck = [rank for rank in range(ranks) if position[rank] < len(schedule[rank])]
    unsent = [f"stage {rank}: {queue[0]} is never received" for (rank, _), queue in queues.items() if queue]
    if stuck or unsent:
        raise StuckSchedule("\n".join(["the schedule cannot finish", grid(schedule, position), *unsent]))
    for rank, actions in enumerate(schedule):
        _prove_data_flow(rank, ranks, virtual, actions)


def _prove_data_flow(rank: int, ranks: int, virtual: int, actions: Actions) -> None:
    """What an action needs must stand before it, each action once, and what is begun must be finished."""
    seen: set[Action] = set()
    for action in actions:
        for need in _needs(rank, action, ranks, virtual):
            if need not in seen:
                raise StuckSchedule(f"stage {rank}: {action} comes before {need}")
        if action in seen:
            raise StuckSchedule(f"stage {rank}: {action} is repeated")
        seen.add(action)
    done = {kind: {(a.microbatch, a.chunk) for a in actions if a.kind == kind} for kind in "FBW"}
    for kind in "BW":
        if missing := done[kind] and sorted(done["F"] - done[kind]):
            raise StuckSchedule(f"stage {rank}: {Action('F', *missing[0])} has no {Action(kind, *missing[0])}")


def _needs(rank: int, action: Action, ranks: int, virtual: int) -> Iterator[Action]:
    """A rank alone takes from its own neighbouring chunk what it would receive."""
    kind, i, chunk = action
    stage = chunk * ranks + rank
    match kind:
        case "F" if stage > 0:
            yield Action("RF", i, chunk) if ranks > 1 else Action("F", i, chunk - 1)
        case "B":
            yield Action("F", i, chunk)
            if stage < ranks * virtual - 1:
                yield Action("RB", i, chunk) if ranks > 1 else Action("B", i, chunk + 1)
        case "W" | "SB":
            yield Action("B", i, chunk)
        case "SF":
            yield Action("F", i, chunk)


def grid(schedule: Schedule, position: Sequence[int] | None = None) -> str:
    """Ranks as rows, steps as columns; with `position`, `<` follows the action at which each rank stands."""
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
