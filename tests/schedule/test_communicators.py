"""Communicators of all schedules never wait in a circle; planted circles are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from autoptd.schedule import (
    EARLY,
    RUNNABLE,
    Communicates,
    Queued,
    RankQueues,
    StageMap,
    StuckCommunicators,
    forward_only,
    most_kernels,
    parse_queued,
    prove_communicators,
    rank_queues,
    route_of,
    row_of,
    training_step,
    with_communication,
)
from autoptd.schedule.stage_map import Shape

BOTH = {"tp": (0, 1), "dp": (0, 1), "edge": (0, 1)}
WAYS: Mapping[str, Communicates] = {
    "messages": Communicates(),
    "dp, zero 0": Communicates(data=True, zero=0, counts=True),
    "dp, tp": Communicates(("tp",), data=True, counts=True),
    "zero 2, cp": Communicates(("tp",), rings=("cp", "tp"), data=True, zero=2, counts=True),
    "zero 3, ep": Communicates(("tp", "ep"), data=True, zero=3, host=True, counts=True),
    "sums over dp": Communicates(("dp",), data=True, counts=True),
}


def lists(*lines: str) -> dict[int, list[Queued]]:
    return {rank: [parse_queued(word) for word in line.split()] for rank, line in enumerate(lines)}


def queues(kind: str, pp: int, count: int, virtual: int, how: Communicates, early: tuple[str, ...] = ()) -> RankQueues:
    how = replace(how, tied=((0, pp - 1),) if pp > 1 else ())
    return rank_queues(training_step(kind, pp, count, virtual, early), route_of(kind, pp, virtual), how, steps=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", RUNNABLE)
def test_no_schedule_has_a_circle(kind: str, way: str) -> None:
    row = row_of(kind)
    for pp in (1, 2, 3, 5):
        for count in (1, 2, 3, 5, 10):
            for virtual in (row.chunks,) if row.chunks else (1, 2, 3):
                if row.groups and virtual > 1 and count % pp:
                    continue
                for early in ((), EARLY):
                    found = queues(kind, pp, count, virtual, WAYS[way], early)
                    found.prove()
                    assert most_kernels(found.lists, found.channels) <= (9 if row.shape == "v" else 5)


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("shape", ["loop", "v"])
def test_no_evaluation_has_a_circle(shape: Shape, virtual: int) -> None:
    for pp in (1, 2, 3, 5):
        for count in (1, 2, 3, 5, 10):
            route = StageMap(pp, virtual, shape)
            lists = with_communication(forward_only(pp, count, virtual), route)
            for how in WAYS.values():
                rank_queues(lists, route, how, steps=2).prove()


def test_the_text_reads_back() -> None:
    found = queues("zero-bubble-v", 2, 2, 2, WAYS["zero 3, ep"], EARLY).lists[0]
    assert [parse_queued(str(queued)) for queued in found] == found
    for wrong in ("", "tp", "+:sum", "-dp:sum"):
        with pytest.raises(ValueError, match="is nothing that a rank queues"):
            parse_queued(wrong)


def test_a_step_as_text() -> None:
    lists = training_step("1f1b", 2, 2, 1, ("SUM",))
    found = rank_queues(lists, route_of("1f1b", 2), Communicates(data=True, tied=((0, 1),)))
    assert " ".join(map(str, found.lists[1])) == (
        "+edge0forward:F0.0 +edge0forward:F1.0 -edge0forward:0 device :F0 :F0 device :B0 :B0 +edge0backward:B0.0 "
        "-edge0forward:1 :F1 :F1 :B1 +dp@1:sum.0 :B1 +edge0backward:B1.0 -dp@1:0 stages0+1:sum world:finish host "
        "+dp@1:gather -dp@1:1 -edge0backward:0 -edge0backward:1"
    )


@pytest.mark.fault("communicators in a circle")
@pytest.mark.parametrize(
    ("first", "second", "circle"),
    [
        ("tp:sum dp:sum", "dp:sum tp:sum", "rank 0 tp:sum -> rank 1 dp:sum -> rank 0"),
        # both start, each on its own stream, but a GPU may not hold both kernels
        ("+tp:sum +dp:sum -tp:0 -dp:0", "+dp:sum +tp:sum -tp:0 -dp:0", "rank 0 tp:sum -> rank 1 dp:sum -> rank 0"),
        ("+edge:F0 tp:sum -edge:0", "tp:sum +edge:F0 -edge:0", ""),
        ("+edge:F0 -edge:0 tp:sum", "tp:sum +edge:F0 -edge:0", "rank 0 edge:F0 -> rank 1 tp:sum -> rank 0"),
        # the host of rank 0 waits for a message that rank 1 sends after the sum
        ("+edge:F0 device tp:sum -edge:0", "tp:sum +edge:F0 -edge:0", "rank 0 edge:F0 -> rank 1 tp:sum -> rank 0"),
        ("+edge:F0 host tp:sum -edge:0", "tp:sum +edge:F0 -edge:0", ""),
        # in one hardware queue the second message keeps the sum from starting
        ("+edge:F0 +edge:F1 tp:sum", "+edge:F0 -edge:0 tp:sum +edge:F1", ""),
        ("+edge:F0 +edge:F1 tp:sum", "tp:sum +edge:F0 +edge:F1", "rank 0 edge:F0 -> rank 1 tp:sum -> rank 0"),
        ("tp:sum", ":F0", "rank 0 tp:sum -> rank 1, which does not come to it"),
    ],
)
def test_circles_of_two_ranks(first: str, second: str, circle: str) -> None:
    if not circle:
        prove_communicators(lists(first, second), BOTH, ("edge",))
        return
    with pytest.raises(StuckCommunicators) as caught:
        prove_communicators(lists(first, second), BOTH, ("edge",))
    assert str(caught.value).splitlines()[1] == circle


@pytest.mark.fault("communicators in a circle")
def test_ops_in_another_order() -> None:
    with pytest.raises(StuckCommunicators, match="op 0 of dp is sum on rank 0, but gather on rank 1"):
        prove_communicators(lists("+dp:sum +dp:gather", "+dp:gather +dp:sum"), BOTH)


def _waits_everywhere(queued: Queued) -> list[Queued]:
    return [Queued("device"), queued] if not queued.communicator and not queued.sign else [queued]


def _gradients_with_activations(queued: Queued) -> list[Queued]:
    return [queued._replace(communicator=queued.communicator.replace("backward", "forward"))]


@pytest.mark.fault("communicators in a circle")
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("1f1b", _waits_everywhere),
        ("zero-bubble-v", _waits_everywhere),
        ("1f1b", _gradients_with_activations),
        ("interleaved", _gradients_with_activations),
    ],
)
def test_circles_of_schedules(kind: str, change: Callable[[Queued], list[Queued]]) -> None:
    """A host that waits for the GPU before any pass, and one communicator for both directions of an edge."""
    whole = queues(kind, 2, 4, row_of(kind).chunks or 2, Communicates())
    changed = {rank: [new for old in each for new in change(old)] for rank, each in whole.lists.items()}
    with pytest.raises(StuckCommunicators):
        prove_communicators(changed, whole.members, whole.channels)


@pytest.mark.fault("communicators in a circle")
def test_a_rank_that_sums_tied_gradients_too_early() -> None:
    whole = queues("gpipe", 2, 2, 1, Communicates())
    tied = Queued("", "stages0+1", "sum")
    early = [tied, *(queued for queued in whole.lists[0] if queued != tied)]
    with pytest.raises(StuckCommunicators, match=r"rank 0 stages0\+1:sum -> rank 1 edge0forward"):
        prove_communicators(whole.lists | {0: early}, whole.members, whole.channels)


@pytest.mark.fault("communicators in a circle")
def test_an_evaluation_that_posts_receives_which_depend_on_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 loads a kernel for its first chunk, and waits for a message that rank 0 makes of its result."""
    monkeypatch.setitem(rank_queues.__globals__, "receives_posted", lambda _: 2)
    route = StageMap(2, 2)
    lists = with_communication(forward_only(2, 1, 2), route)
    with pytest.raises(StuckCommunicators, match=r"rank 0 edge1forward:F0\.1 -> rank 1 edge0forward:F0\.2 -> rank 0"):
        rank_queues(lists, route, Communicates()).prove()
