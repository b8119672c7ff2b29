"""The schedules: pure functions of (ranks, microbatches, chunks) that give F, B and W of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoptd.errors import PlanError, nearest
from autoptd.schedule.actions import Action, Schedule
from autoptd.schedule.stage_map import Shape, StageMap


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


def zero_bubble_v(stages: int, microbatches: int) -> Schedule:
    """ZB-V: two chunks per rank on a vee, in closed form; for m >= 2 p - 1 microbatches, on rank r

        F              2 (p - r) - 1 times                         until chunk 1 has its first microbatch
        F.1 F          r times                                     until the first one is back
        F.1 B.1 W.1    p - r times                                 until its gradient is back
        F B W F.1 B.1 W.1, without F once there is none            until there are no forwards
        B B.1          r times, then B W p - r times, then the W   that are left: first those of chunk 1

    where each word takes its next microbatch. Fewer microbatches do as if there were 2 p - 1, without those that there
    are not. The order that takes no rank's turn away where F, B and W of a chunk take equally long (Qi et al. 2023,
    section 6, says what it is like; these counts were worked out here from when the first microbatch comes by): no rank
    idles between its first and its last action then, and the step's bubble is p - 1 passes of a chunk. A rank holds
    2 p chunks at the most, counted from F to W, as much as p stages.
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
    """Evaluation: every rank runs the forwards in the order of `interleaved`, whose last group may be smaller here."""
    order = [
        Action("F", i, chunk)
        for first in range(0, microbatches, stages)
        for chunk in range(virtual)
        for i in range(first, min(first + stages, microbatches))
    ]
    return (tuple(order),) * stages


@dataclass(frozen=True)
class ScheduleKind:
    """A kind of schedule. `lists`: of (ranks, microbatches, chunks); `chunks` per rank, None: any number.

    `shape`: how the model lies on the ranks. `halves`: whether gradients of parameters are made apart, in W.
    `groups`: whether microbatches go in groups of as many as there are ranks.
    """

    lists: Callable[[int, int, int], Schedule]
    chunks: int | None = 1
    shape: Shape = "loop"
    halves: bool = False
    groups: bool = False


def _fixed(rows: Callable[[int, int], Schedule]) -> Callable[[int, int, int], Schedule]:
    """Of a kind that has no choice of chunks."""
    return lambda stages, microbatches, _: rows(stages, microbatches)


SCHEDULES: dict[str, ScheduleKind] = {
    "1f1b": ScheduleKind(_fixed(one_f_one_b)),
    "gpipe": ScheduleKind(_fixed(gpipe)),
    "interleaved": ScheduleKind(interleaved, chunks=None, groups=True),
    "zero-bubble": ScheduleKind(_fixed(zero_bubble), halves=True),
    "zero-bubble-v": ScheduleKind(_fixed(zero_bubble_v), chunks=2, shape="vee", halves=True),
}
RUNNABLE = tuple(SCHEDULES)  # what the executor has actions for


def row_of(kind: str, virtual: int | None = None) -> ScheduleKind:
    """Raises PlanError for an unknown kind, and for a number of chunks per rank that it does not have."""
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
    """How the model lies on the ranks. Raises what `row_of` raises for the kind."""
    return StageMap(ranks, virtual, row_of(kind).shape)


def period_of(kind: str, stages: int) -> int:
    """After how many microbatches the rounds of a kind are alike: interleaved takes them in groups of p."""
    return stages if row_of(kind).groups else 1


def compute_lists(kind: str, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """F, B and W alone. Raises what `row_of` raises, and PlanError for numbers that the kind cannot take."""
    return row_of(kind, virtual).lists(stages, microbatches, virtual)
