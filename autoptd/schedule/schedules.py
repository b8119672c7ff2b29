"""The schedules: pure functions of (ranks, microbatches, chunks) that return the F, B and W of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoptd.errors import PlanError, nearest
from autoptd.schedule.actions import Action, Schedule
from autoptd.schedule.stage_map import Shape, StageMap


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return all forwards, then all backwards, each in order; a rank holds the activations of every microbatch."""
    forwards, backwards = (tuple(Action(kind, i) for i in range(microbatches)) for kind in "FB")
    return (forwards + backwards,) * stages


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Return 1F1B: stage s warms up with `stages - s - 1` forwards (at most m), alternates F and B, drains."""
    order = [(i, 0) for i in range(microbatches)]
    return tuple(tuple(_warm_up_and_alternate(order, order, stages - stage - 1)) for stage in range(stages))


def interleaved(stages: int, microbatches: int, virtual: int) -> Schedule:
    """Return 1F1B over `virtual` chunks per rank: p microbatches on chunk 0, the same p on chunk 1, …, then the next p.

    The order is that of Megatron-LM (`schedules.py`, forward_backward_pipelining_with_interleaving, with its default
    group of p microbatches): backwards take the chunks from the last to the first; rank r warms up with
    2 (p - r - 1) + (v - 1) p forwards, at most v m. With one chunk it is 1F1B, as there.

    Raises PlanError unless p divides m. (Megatron-LM raises RuntimeError for a last group of fewer than p microbatches,
    which would wait in the middle of the pipeline; its releases of 2021–2024 require that p divides m.)
    """
    if virtual == 1:
        return one_f_one_b(stages, microbatches)
    if microbatches % stages:
        raise PlanError(
            f"interleaved runs microbatches in groups of one per pipeline rank: {microbatches} "
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
    """Yield `warm_up` forwards (at most all), then F and B alternating, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    yield from (Action("F", *at) for at in forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield Action("F", *forward)
        yield Action("B", *backward)
    yield from (Action("B", *at) for at in backwards[steady:])


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """Return ZB-H1: the F and B of 1F1B; stage s runs W of microbatch i - s after B of i, and the last s W at the end.

    Every stage then holds at most p microbatches, counted from F to W, as the first stage of 1F1B does. The bubble of a
    step is (p - 1)(F + B - W) instead of 1F1B's (p - 1)(F + B + W), where B is the time of the input's gradients alone.
    """

    def actions(stage: int) -> Iterator[Action]:
        order = [(i, 0) for i in range(microbatches)]
        for action in _warm_up_and_alternate(order, order, stages - stage - 1):
            yield action
            if action.kind == "B" and action.microbatch is not None and action.microbatch >= stage:
                yield Action("W", action.microbatch - stage)
        yield from (Action("W", i) for i in range(max(0, microbatches - stage), microbatches))

    return tuple(tuple(actions(stage)) for stage in range(stages))


def zero_bubble_v(stages: int, microbatches: int) -> Schedule:
    """Return ZB-V: two chunks per rank on a V, in closed form; for m >= 2 p - 1 microbatches, on rank r

        F                    2 (p - r) - 1 times     until chunk 1 receives its first microbatch
        F.1 F                r times                 until that microbatch returns
        F.1 B.1 W.1          p - r times             until its gradient returns
        F B W F.1 B.1 W.1    until no F.1 is left; F is dropped once there is none
        B B.1                r times
        B W                  p - r times
        W.1, then W          the remaining ones

    where each action takes its next microbatch. With fewer microbatches it is the order for 2 p - 1, without the
    missing ones. If F, B and W of a chunk take equally long, no rank idles between its first and its last action, and
    the bubble of a step is p - 1 passes of a chunk (Qi et al. 2023, section 6, describe the order; these counts are
    derived here from the arrival times of the first microbatch). A rank holds the activations of at most 2 p chunks,
    counted from F to W, as many bytes as p stages.
    """
    count = max(microbatches, 2 * stages - 1)

    def actions(rank: int) -> Iterator[Action]:
        done = {f"{kind}{chunk}": 0 for kind in "FBW" for chunk in (0, 1)}

        def do(times: int, *words: str) -> Iterator[Action]:
            for _ in range(times):
                for word in words:
                    yield Action(word[0], done[word], int(word[1]))
                    done[word] += 1

        yield from do(2 * (stages - rank) - 1, "F0")
        yield from do(rank, "F1", "F0")
        yield from do(stages - rank, "F1", "B1", "W1")
        yield from do(count - done["F0"], "F0", "B0", "W0", "F1", "B1", "W1")
        yield from do(count - done["F1"], "B0", "W0", "F1", "B1", "W1")
        yield from do(rank, "B0", "B1")
        yield from do(stages - rank, "B0", "W0")
        yield from do(count - done["W1"], "W1")
        yield from do(count - done["W0"], "W0")

    return tuple(
        tuple(a for a in actions(rank) if a.microbatch is not None and a.microbatch < microbatches)
        for rank in range(stages)
    )


def forward_only(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Return the forwards of evaluation, in the order of `interleaved`; the last group may be smaller here."""
    order = [
        Action("F", i, chunk)
        for first in range(0, microbatches, stages)
        for chunk in range(virtual)
        for i in range(first, min(first + stages, microbatches))
    ]
    return (tuple(order),) * stages


@dataclass(frozen=True)
class ScheduleKind:
    """A kind of schedule."""

    lists: Callable[[int, int, int], Schedule]  # of (ranks, microbatches, chunks)
    chunks: int | None = 1  # per rank; None: any number
    shape: Shape = "loop"  # placement of the stages on the ranks
    splits_backward: bool = False  # split backward: parameter gradients are computed apart from B, in W
    groups: bool = False  # microbatches run in groups of one per rank


def _fixed(rows: Callable[[int, int], Schedule]) -> Callable[[int, int, int], Schedule]:
    """Adapt a schedule with a fixed number of chunks to the signature of `ScheduleKind.lists`."""
    return lambda stages, microbatches, _: rows(stages, microbatches)


SCHEDULES: dict[str, ScheduleKind] = {
    "1f1b": ScheduleKind(_fixed(one_f_one_b)),
    "gpipe": ScheduleKind(_fixed(gpipe)),
    "interleaved": ScheduleKind(interleaved, chunks=None, groups=True),
    "zero-bubble": ScheduleKind(_fixed(zero_bubble), splits_backward=True),
    "zero-bubble-v": ScheduleKind(_fixed(zero_bubble_v), chunks=2, shape="v", splits_backward=True),
}
RUNNABLE = tuple(SCHEDULES)  # kinds that the executor implements


def row_of(kind: str, virtual: int | None = None) -> ScheduleKind:
    """Return the row of a kind. Raises PlanError for an unknown kind or a number of chunks that it does not allow."""
    if kind not in SCHEDULES:
        raise PlanError(f"unknown schedule {kind!r}", where="schedule", fix=nearest(kind, SCHEDULES))
    row = SCHEDULES[kind]
    if virtual is not None and row.chunks not in (None, virtual):
        chunks = "one chunk" if row.chunks == 1 else f"{row.chunks} chunks"
        raise PlanError(
            f"the schedule {kind} has {chunks} per rank, not {virtual}", where="schedule", fix="use interleaved"
        )
    return row


def route_of(kind: str, ranks: int, virtual: int = 1) -> StageMap:
    """Return the placement of stages on ranks. Raises PlanError for an unknown kind."""
    return StageMap(ranks, virtual, row_of(kind).shape)


def period_of(kind: str, stages: int) -> int:
    """Return the number of microbatches after which a kind's order repeats: p for interleaved, otherwise 1."""
    return stages if row_of(kind).groups else 1


def compute_lists(kind: str, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Return F, B and W alone. Raises PlanError for an unknown kind or numbers that it does not allow."""
    return row_of(kind, virtual).lists(stages, microbatches, virtual)
