"""Pipeline schedules as data: for every stage the list of actions that one training step executes in order.

    text    action                                                   channel
    F0      forward of microbatch 0
    B0      backward of microbatch 0
    RF0     receive its activation from the previous stage           (s-1, forward)
    SF0     send its activation to the next stage                    (s, forward)
    RB0     receive its gradient from the next stage                 (s, backward)
    SB0     send its gradient to the previous stage                  (s-1, backward)
    REDUCE  finish the reduction of the parameters' gradients
    STEP    clip and run the optimizer on this rank's share
    GATHER  collect the updated parameters

The simulator, the picture and the executor read the same lists. A schedule is one row of `SCHEDULES`: a pure function
of (stages, microbatches) that gives the F and B of each stage; `with_communication` adds the rest mechanically.
(1F1B: Narayanan et al. 2019, PipeDream-flush.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

SENDS = ("SF", "SB")
RECEIVES = ("RF", "RB")
STEP_END = ("REDUCE", "STEP", "GATHER")
SENDS_UNDER_WAY = (
    2  # microbatches per channel: a further send waits for the oldest, so that sent tensors do not pile up
)


@dataclass(frozen=True)
class Action:
    """One thing that a stage does; `microbatch` is None for the actions at the end of a step."""

    kind: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return self.kind if self.microbatch is None else f"{self.kind}{self.microbatch}"


Actions: TypeAlias = tuple[Action, ...]
Schedule: TypeAlias = tuple[Actions, ...]  # one entry per stage
Channel: TypeAlias = tuple[int, str]  # (lower stage of the edge, "forward" | "backward")


class StuckSchedule(ValueError):
    """A schedule that cannot finish; the message holds the grid of what each rank did and where it stands."""


def parse_action(text: str) -> Action:
    """Read back what `str` wrote. Raises ValueError naming the text."""
    if text in STEP_END:
        return Action(text)
    if match := re.fullmatch(r"(F|B|SF|RF|SB|RB)(\d+)", text):
        return Action(match[1], int(match[2]))
    raise ValueError(f"{text!r} is not an action; write F0, B0, SF0, RF0, SB0, RB0, REDUCE, STEP or GATHER")


def text(schedule: Schedule) -> list[str]:
    """One line per stage, actions separated by blanks."""
    return [" ".join(map(str, actions)) for actions in schedule]


def parse(lines: Iterable[str]) -> Schedule:
    """`parse(text(schedule)) == schedule`."""
    return tuple(tuple(parse_action(word) for word in line.split()) for line in lines)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward: stage s warms up with `stages - s - 1` forwards (at most m), alternates, drains."""

    def actions(stage: int) -> Actions:
        warm_up = min(stages - stage - 1, microbatches)
        steady = range(microbatches - warm_up)
        return (
            *(Action("F", i) for i in range(warm_up)),
            *(action for i in steady for action in (Action("F", warm_up + i), Action("B", i))),
            *(Action("B", i) for i in range(microbatches - warm_up, microbatches)),
        )

    return tuple(actions(stage) for stage in range(stages))


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Evaluation: every stage runs the forwards in order."""
    return tuple(tuple(Action("F", i) for i in range(microbatches)) for _ in range(stages))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
}


def with_communication(schedule: Schedule) -> Schedule:
    """Insert the receive before and the send after every F and B that has a neighbour, as near as can be."""
    last = len(schedule) - 1

    def around(stage: int, action: Action) -> list[Action]:
        i = action.microbatch
        before, after = (stage > 0, stage < last) if action.kind == "F" else (stage < last, stage > 0)
        receive, send = Action(f"R{action.kind}", i), Action(f"S{action.kind}", i)
        return [receive] * before + [action] + [send] * after

    return tuple(
        tuple(new for action in actions for new in around(stage, action)) for stage, actions in enumerate(schedule)
    )


def with_step_end(schedule: Schedule) -> Schedule:
    """Append REDUCE, STEP, GATHER to every stage."""
    end = tuple(Action(kind) for kind in STEP_END)
    return tuple(actions + end for actions in schedule)


def training_step(kind: str, stages: int, microbatches: int) -> Schedule:
    """`step_lists`, proved to finish. KeyError for an unknown kind, StuckSchedule for one that blocks."""
    schedule = step_lists(kind, stages, microbatches)
    prove(schedule)
    return schedule


def step_lists(kind: str, stages: int, microbatches: int) -> Schedule:
    """The whole step of a row of `SCHEDULES`: compute, communication, step end; not yet proved."""
    return with_step_end(with_communication(SCHEDULES[kind](stages, microbatches)))


def in_flight(actions: Sequence[Action]) -> int:
    """The most microbatches whose activations a stage holds at once."""
    alive = most = 0
    for action in actions:
        alive += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, alive)
    return most


def channel_of(stage: int, action: Action) -> Channel:
    """The communicator that a send or receive uses: one per edge and direction."""
    match action.kind:
        case "SF" | "RB":
            lower = stage
        case "RF" | "SB":
            lower = stage - 1
        case _:
            raise ValueError(f"{action} uses no channel")
    return lower, "forward" if action.kind in ("SF", "RF") else "backward"


def prove(
    schedule: Schedule, channel: Callable[[int, Action], object] = channel_of, under_way: int = SENDS_UNDER_WAY
) -> None:
    """Show that the schedule finishes and every F and B has what it needs, whatever the durations.

    Model: a rank runs its list in order. A send or receive is queued on its (rank, channel), a FIFO; the heads of the
    two queues of a channel complete together when one sends what the other receives (rendezvous). A receive holds its
    rank until complete; a send holds it while `under_way` earlier ones of the channel are not complete. Run to a
    fixpoint: since completing one pair never disables another, the fixpoint does not depend on the order. `channel`
    maps (stage, action) to a communicator.

    Raises StuckSchedule with a rank × step grid, `<` marking where a rank stands.
    """
    ranks = range(len(schedule))
    position = [0] * len(schedule)
    queues: dict[tuple[int, object], list[Action]] = {}
    received: list[set[Action]] = [set() for _ in ranks]

    def peer(rank: int, action: Action) -> int:
        return rank + 1 if action.kind in ("SF", "RB") else rank - 1

    def match(rank: int, key: object) -> bool:
        """Complete the head of one FIFO together with the head of its peer's."""
        mine = queues[rank, key][0]
        theirs = queues.get((peer(rank, mine), key), [])
        if not theirs or theirs[0] != _counterpart(mine):
            return False
        other = peer(rank, mine)
        for owner in (rank, other):
            done = queues[owner, key].pop(0)
            received[owner] |= {done} if done.kind in RECEIVES else set()
        return True

    def advance(rank: int) -> bool:
        if position[rank] == len(schedule[rank]):
            return False
        action = schedule[rank][position[rank]]
        if action.kind in SENDS + RECEIVES:
            if not 0 <= peer(rank, action) < len(schedule):
                raise StuckSchedule(f"stage {rank}: {action} has no neighbour to talk to")
            queue = queues.setdefault((rank, channel(rank, action)), [])
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
        for rank in ranks:
            while advance(rank):
                moved = True
        for owner, key in list(queues):
            while queues[owner, key] and match(owner, key):
                moved = True
    stuck = [rank for rank in ranks if position[rank] < len(schedule[rank])]
    unsent = [f"stage {rank}: {queue[0]} is never received" for (rank, _), queue in queues.items() if queue]
    if stuck or unsent:
        raise StuckSchedule("\n".join(["the schedule cannot finish", grid(schedule, position), *unsent]))
    for rank, actions in enumerate(schedule):
        _prove_data_flow(rank, len(schedule), actions)


def _counterpart(action: Action) -> Action:
    return Action(("R" if action.kind[0] == "S" else "S") + action.kind[1], action.microbatch)


def _prove_data_flow(stage: int, stages: int, actions: Actions) -> None:
    """What an action needs must stand before it: F before B, receive before compute before send, each once."""
    seen: set[Action] = set()
    for action in actions:
        i = action.microbatch
        needs = {
            "F": [Action("RF", i)] * (stage > 0),
            "B": [Action("F", i)] + [Action("RB", i)] * (stage < stages - 1),
            "SF": [Action("F", i)],
            "SB": [Action("B", i)],
        }.get(action.kind, [])
        missing = [str(need) for need in needs if need not in seen]
        if missing or action in seen:
            wrong = f"comes before {missing[0]}" if missing else "is repeated"
            raise StuckSchedule(f"stage {stage}: {action} {wrong}")
        seen.add(action)


def grid(schedule: Schedule, position: Sequence[int] | None = None) -> str:
    """Stages as rows, steps as columns; with `position`, `<` follows the action at which each stage stands."""
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
