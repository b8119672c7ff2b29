"""Whole steps: the F, B and W of a schedule with the messages between ranks and the end of the step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from autoptd.errors import PlanError
from autoptd.schedule.actions import STEP_END, Action, Schedule, chunks_of
from autoptd.schedule.proof import prove
from autoptd.schedule.schedules import compute_lists, route_of
from autoptd.schedule.stage_map import StageMap, peer_of

MOST_PASSES = 300_000  # forward passes of a step: lists of a gigabyte, simulated in some seconds


def with_communication(schedule: Schedule, route: StageMap | None = None) -> Schedule:
    """Insert the receive before and the send after every F and B that has a neighbour, as near as can be.

    `route`: that of the schedule's kind; left out, a loop.
    """
    route = route or StageMap(len(schedule), chunks_of(schedule))
    one = cache(Action)  # shared by all ranks: schedules of millions of actions are made

    def around(rank: int) -> Iterator[Action]:
        has = {
            (kind, chunk): peer_of(rank, Action(kind, 0, chunk), route) is not None
            for kind in ("RF", "SF", "RB", "SB")
            for chunk in range(route.virtual)
        }
        for kind, i, chunk in schedule[rank]:
            if kind != "W" and has["R" + kind, chunk]:
                yield one("R" + kind, i, chunk)
            yield one(kind, i, chunk)
            if kind != "W" and has["S" + kind, chunk]:
                yield one("S" + kind, i, chunk)

    return tuple(tuple(around(rank)) for rank in range(route.ranks))


def with_step_end(schedule: Schedule) -> Schedule:
    """Append REDUCE, STEP, GATHER to every rank."""
    end = tuple(Action(kind) for kind in STEP_END)
    return tuple(actions + end for actions in schedule)


def training_step(kind: str, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """`step_lists`, proved to finish. Raises what that does, and StuckSchedule for a schedule that blocks."""
    schedule = step_lists(kind, stages, microbatches, virtual)
    prove(schedule, route_of(kind, stages, virtual))
    return schedule


def step_lists(kind: str, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The whole step of a row of `SCHEDULES`: compute, communication, step end; not yet proved.

    `stages` is the number of pipeline ranks, `virtual` the chunks that each holds. Raises PlanError for an unknown kind
    and for numbers that the kind cannot take, or that are too many to write out.
    """
    if (passes := stages * virtual * microbatches) > MOST_PASSES:
        chunks = f" of {virtual:,} chunks" if virtual > 1 else ""
        raise PlanError(
            f"a step of {microbatches:,} microbatches on {stages:,} pipeline ranks{chunks} is {passes:,} forward "
            f"passes, more than {MOST_PASSES:,}: its actions are not written out one by one",
            where="schedule.microbatches",
            fix="plan with larger microbatches, or a smaller batch",
        )
    lists = compute_lists(kind, stages, microbatches, virtual)
    return with_step_end(with_communication(lists, route_of(kind, stages, virtual)))
