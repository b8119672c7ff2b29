"""Whole steps: the F, B and W of a schedule, with sends, receives and the end of the step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache, lru_cache

from autoptd.errors import PlanError
from autoptd.schedule.actions import STEP_END, Action, Actions, Schedule, chunks_of
from autoptd.schedule.proof import prove
from autoptd.schedule.schedules import compute_lists, route_of
from autoptd.schedule.stage_map import StageMap, peer_of

MOST_PASSES = 300_000  # forward passes per step; the lists then take a gigabyte, and seconds to simulate


def with_communication(schedule: Schedule, route: StageMap | None = None) -> Schedule:
    """Insert a receive right before and a send right after every F and B with a neighbour on another rank.

    `route`: the stage map of the schedule's kind. Default: a loop.
    """
    route = route or StageMap(len(schedule), chunks_of(schedule))
    one = cache(Action)  # shared by all ranks: schedules have millions of actions

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


def with_step_end(schedule: Schedule, early: Collection[str] = ()) -> Schedule:
    """Append REDUCE, STEP, GATHER to every rank. `early`: of SUM and GATHER, what starts while passes run.

    A chunk's SUM is right before the pass that completes its gradients: its last W, or B if the rank has no W. An early
    GATHER is the first action of the next step.
    """
    first = (Action("GATHER"),) if "GATHER" in early else ()
    end = tuple(Action(kind) for kind in STEP_END if not (first and kind == "GATHER"))
    return tuple(first + (_with_sums(actions) if "SUM" in early else actions) + end for actions in schedule)


def _with_sums(actions: Actions) -> Actions:
    completing = "W" if any(action.kind == "W" for action in actions) else "B"
    last = {action.chunk: at for at, action in enumerate(actions) if action.kind == completing}
    found = list(actions)
    for chunk, at in sorted(last.items(), key=lambda item: -item[1]):
        found.insert(at, Action("SUM", None, chunk))
    return tuple(found)


@lru_cache(maxsize=1)  # ranks that are threads of one process have one schedule
def training_step(kind: str, stages: int, microbatches: int, virtual: int = 1, early: tuple[str, ...] = ()) -> Schedule:
    """Return `step_lists`, proved to finish. Raises PlanError as it does, and StuckSchedule for a deadlock."""
    schedule = step_lists(kind, stages, microbatches, virtual, early)
    prove(schedule, route_of(kind, stages, virtual))
    return schedule


def step_lists(kind: str, stages: int, microbatches: int, virtual: int = 1, early: Collection[str] = ()) -> Schedule:
    """Return the whole step of a row of `SCHEDULES`: compute, communication, step end; not yet proved.

    `stages` is the number of pipeline ranks, `virtual` the chunks that each holds; `early`: see `with_step_end`. Raises
    PlanError for an unknown kind, numbers that the kind does not allow, and a step of too many actions.
    """
    if (passes := stages * virtual * microbatches) > MOST_PASSES:
        chunks = f" of {virtual:,} chunks" if virtual > 1 else ""
        raise PlanError(
            f"a step of {microbatches:,} microbatches on {stages:,} pipeline ranks{chunks} is {passes:,} forward "
            f"passes, more than the limit of {MOST_PASSES:,}",
            where="schedule.microbatches",
            fix="plan with larger microbatches, or a smaller batch",
        )
    lists = compute_lists(kind, stages, microbatches, virtual)
    return with_step_end(with_communication(lists, route_of(kind, stages, virtual)), early)
