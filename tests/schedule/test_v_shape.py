"""The V-shaped schedule: golden text, in-flight microbatches, the proof, bubble and memory; planted faults."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from autoptd.cost_models.simulate import simulate
from autoptd.cost_models.step_times import ChunkTimes, StageTimes
from autoptd.schedule import (
    Action,
    Schedule,
    StageMap,
    StuckSchedule,
    channel_of,
    chunks_of,
    forward_only,
    in_flight,
    one_f_one_b,
    parse,
    peer_of,
    prove,
    route_of,
    step_lists,
    text,
    with_communication,
    zero_bubble,
    zero_bubble_v,
)
from autoptd.schedule.actions import RECEIVES, SENDS

KIND = "zero-bubble-v"
GRID = list(product(range(1, 9), range(1, 17)))
# forward, backward for the input, gradients of the parameters
PASSES = [(1, 1, 1), (1, 1.5, 0.5), (1, 2, 1), (1, 0.75, 1.25), (2, 1, 1), (1, 3, 0.25)]


def test_golden() -> None:
    assert text(zero_bubble_v(2, 4)) == [
        "F0 F1 F2 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F3 B0 W0 F2.1 B2.1 W2.1 B1 W1 F3.1 B3.1 W3.1 B2 W2 B3 W3",
        "F0 F0.1 F1 F1.1 B0.1 W0.1 F2 B0 W0 F2.1 B1.1 W1.1 F3 B1 W1 F3.1 B2.1 W2.1 B2 B3.1 B3 W2 W3.1 W3",
    ]
    assert text(zero_bubble_v(3, 1)) == ["F0 F0.1 B0.1 W0.1 B0 W0"] * 3


def test_the_turning_rank_hands_on_to_itself() -> None:
    """Stages 0 and 3 are on rank 0, 1 and 2 on rank 1."""
    assert text(step_lists(KIND, 2, 1, 2)) == [
        "F0 SF0 RF0.1 F0.1 B0.1 SB0.1 W0.1 RB0 B0 W0 REDUCE STEP GATHER",
        "RF0 F0 F0.1 SF0.1 RB0.1 B0.1 W0.1 B0 SB0 W0 REDUCE STEP GATHER",
    ]
    assert text(step_lists(KIND, 1, 1, 2)) == ["F0 F0.1 B0.1 W0.1 B0 W0 REDUCE STEP GATHER"]


def test_who_holds_what() -> None:
    route = route_of(KIND, 3, 2)
    assert [route.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [route.place(stage) for stage in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert route.of("abcdef", 1) == ("b", "e") and route.of("abcd", 1) == ("b",)
    assert route.edges() == {0: (0, 1), 1: (1, 2), 3: (2, 1), 4: (1, 0)}
    assert StageMap(3, 3, "v").stages_of(0) == (0, 5, 6)
    assert StageMap(3, 2).edges() == {0: (0, 1), 1: (1, 2), 2: (2, 0)} and StageMap(3).edges() == {0: (0, 1), 1: (1, 2)}
    assert StageMap(1, 4).edges() == route_of(KIND, 1, 2).edges() == {}


@pytest.mark.parametrize("route", [StageMap(p, v, w) for p in (1, 2, 3, 5) for v in (1, 2, 3) for w in ("loop", "v")])
def test_both_ends_agree(route: StageMap) -> None:
    """Every stage is on one rank; each send has its receive, on a channel used by these two ranks only."""
    assert sorted(k for rank in range(route.ranks) for k in route.stages_of(rank)) == list(range(route.stages))
    users: dict[object, set[int]] = {}
    for rank, chunk, kind in product(range(route.ranks), range(route.virtual), (*SENDS, *RECEIVES)):
        action = Action(kind, 7, chunk)
        if (peer := peer_of(rank, action, route)) is not None:
            assert peer_of(*peer, route) == (rank, action)
            assert channel_of(rank, action, route) == channel_of(*peer, route)
            users.setdefault(channel_of(rank, action, route), set()).update((rank, peer[0]))
    assert {frozenset(pair) for pair in users.values()} <= {frozenset(ends) for ends in route.edges().values()}
    assert users.keys() == {(edge, way) for edge in route.edges() for way in ("forward", "backward")}


def test_evaluation_is_proved() -> None:
    for stages, microbatches in GRID:
        route = route_of(KIND, stages, 2)
        prove(with_communication(forward_only(stages, microbatches, 2), route), route)


def test_memory_is_at_most_that_of_1f1b() -> None:
    """2 p chunks of half a stage: rank r holds 2 p - r - 1 and r + 1 of its two at first, later one more and one
    less."""
    for stages, microbatches in GRID:
        most = 2 * max(sum(in_flight(actions)) for actions in one_f_one_b(stages, microbatches))
        for rank, actions in enumerate(zero_bubble_v(stages, microbatches)):
            held = in_flight(actions)
            assert held == (min(microbatches, 2 * stages - rank - 1), min(microbatches, rank + 1))
            assert sum(held) <= min(2 * stages, most)
            assert in_flight(actions, chunk_bytes=[1, 0])[0] == min(microbatches, 2 * stages - rank)
            assert in_flight(actions, chunk_bytes=[0, 1])[1] == held[1]


def step_s(schedule: Schedule, passes: tuple[float, float, float]) -> float:
    """Return the simulated step time for equal stages."""
    chunks = chunks_of(schedule)
    f, b, w = (seconds / chunks for seconds in passes)
    times = [StageTimes((ChunkTimes(f, b + w, w),) * chunks)] * len(schedule)
    return simulate(schedule, times, route=StageMap(len(schedule), chunks, "v" if chunks > 1 else "loop")).makespan_s


def test_the_bubble_is_no_larger_than_zero_bubbles() -> None:
    for stages, microbatches, passes in product(range(1, 9), (1, 2, 3, 5, 9, 16), PASSES):
        vee, other = (
            step_s(with_communication(lists, route_of(kind, stages, chunks)), passes)
            for lists, kind, chunks in (
                (zero_bubble_v(stages, microbatches), KIND, 2),
                (zero_bubble(stages, microbatches), "zero-bubble", 1),
            )
        )
        assert vee <= other * (1 + 1e-12), (stages, microbatches, passes)


def test_equal_passes_leave_only_the_way_down() -> None:
    """The bubble is p - 1 passes of a chunk; no rank idles between its first and its last action."""
    for stages, microbatches in GRID:
        if microbatches >= 2 * stages - 1:
            schedule = step_lists(KIND, stages, microbatches, 2)
            assert step_s(schedule, (2, 2, 2)) == 6 * microbatches + stages - 1


# ---- planted faults ----


def found(schedule: Schedule, route: StageMap) -> bool:
    try:
        prove(schedule, route)
    except StuckSchedule:
        return True
    return False


def test_the_other_placement_is_caught() -> None:
    schedule = step_lists(KIND, 4, 8, 2)
    assert not found(schedule, route_of(KIND, 4, 2))
    assert found(schedule, StageMap(4, 2))
    lists = zero_bubble_v(4, 8)
    assert found(with_communication(lists, StageMap(4, 2)), route_of(KIND, 4, 2))
    with pytest.raises(Exception, match=r"no stage on that side|cannot finish|message that arrives"):
        simulate(schedule, [StageTimes((ChunkTimes(1, 2),) * 2)] * 4)


def test_channels_of_two_streams_in_one_are_caught() -> None:
    """Activations and gradients that go down are each in order, but not together on one channel."""
    route = route_of(KIND, 4, 2)

    def shared(rank: int, action: Action) -> object:
        peer = peer_of(rank, action, route)
        assert peer is not None
        return (rank, peer[0]) if action.kind in SENDS else (peer[0], rank)

    with pytest.raises(StuckSchedule, match=r"(?m)^rank \d .* -> rank \d .* -> rank \d"):
        prove(step_lists(KIND, 4, 8, 2), route, channel=shared)


def test_swapped_channels_are_caught() -> None:
    """Messages that go down are put on the channel of those that come up, at one end."""
    route = route_of(KIND, 3, 2)

    def swapped(rank: int, action: Action) -> object:
        edge, way = channel_of(rank, action, route)
        return ({0: 4, 4: 0}.get(edge, edge) if rank == 0 else edge), way

    with pytest.raises(StuckSchedule, match="cannot finish"):
        prove(step_lists(KIND, 3, 5, 2), route, channel=swapped)


def exchanged(schedule: Schedule, wanted: tuple[str, str]) -> Iterator[Schedule]:
    """Yield the schedule with one pair of neighbouring actions of these kinds exchanged, for every such pair."""
    for rank, actions in enumerate(schedule):
        for at in range(len(actions) - 1):
            if (actions[at].kind, actions[at + 1].kind) == wanted:
                other = (*actions[:at], actions[at + 1], actions[at], *actions[at + 2 :])
                yield (*schedule[:rank], other, *schedule[rank + 1 :])


def test_weights_before_their_backward_are_caught() -> None:
    route = route_of(KIND, 3, 2)
    wrong = list(exchanged(with_communication(zero_bubble_v(3, 6), route), ("B", "W")))
    of_one = [s for s in wrong if any(w[1:] == b[1:] and (w[0], b[0]) == ("W", "B") for a in s for w, b in pairwise(a))]
    assert of_one and all(found(s, route) for s in of_one)


def test_sends_in_another_order_are_caught() -> None:
    """Exchange two messages of a channel at the sender."""
    route, schedule = route_of(KIND, 3, 2), [list(actions) for actions in step_lists(KIND, 3, 6, 2)]
    for rank, actions in enumerate(schedule):
        by_channel: dict[object, list[int]] = {}
        for at, action in enumerate(actions):
            if action.kind in SENDS:
                by_channel.setdefault(channel_of(rank, action, route), []).append(at)
        for sends in by_channel.values():
            a, b = sends[1:3]
            wrong = [list(row) for row in schedule]
            wrong[rank][a], wrong[rank][b] = wrong[rank][b], wrong[rank][a]
            assert found(tuple(map(tuple, wrong)), route)


# ---- deadlock reports ----


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        # rank 0 blocks at its third send, rank 1 waits for a later microbatch
        (
            [
                "F0 SF0 F1 SF1 F2 SF2 F3 SF3 RB0 B0 RB1 B1 RB2 B2 RB3 B3",
                "RF0 F0 B0 SB0 RF2 F2 RF1 F1 B1 SB1 B2 SB2 RF3 F3 B3 SB3",
            ],
            "rank 0 SF3 -> rank 1 RF2 -> rank 0",
        ),
        (["F0 SF0 RB1 B1 RB0 B0 F1 SF1", "RF0 F0 B0 SB0 RF1 F1 B1 SB1"], "rank 0 RB1 -> rank 1 RF1 -> rank 0"),
        (
            ["RB0 F0 SF0 B0", "RF0 F0 SF0 RB0 B0 SB0", "RF0 F0 B0 SB0"],
            "rank 0 RB0 -> rank 1 RF0 -> rank 0",
        ),
        (["F0 SF0 RB0 B0", "RF0 F0 B0"], "rank 0 RB0 -> rank 1, which is done"),
    ],
)
def test_the_cycle_is_reported(lines: list[str], said: str) -> None:
    with pytest.raises(StuckSchedule) as error:
        prove(parse(lines))
    assert said in str(error.value).splitlines()
    assert sum(" -> " in line for line in str(error.value).splitlines()) == 1


def test_every_cycle_and_every_endless_wait_is_reported_once() -> None:
    """Rank 4 waits for a rank of a reported cycle and is not reported itself; rank 5 waits for a rank that is done."""
    lines = ["RB0 F0 SF0 B0", "RF0 F0 B0 SB0", "RB0 F0 SF0", "RF0 F0 SB0", "RF0", "RB0", "F0"]
    with pytest.raises(StuckSchedule) as error:
        prove(parse(lines))
    assert [line for line in str(error.value).splitlines() if " -> " in line] == [
        "rank 0 RB0 -> rank 1 RF0 -> rank 0",
        "rank 2 RB0 -> rank 3 RF0 -> rank 2",
        "rank 5 RB0 -> rank 6, which is done",
    ]


def test_a_cycle_over_all_ranks() -> None:
    """A loop of three ranks: each waits for a message that the previous one sends only afterwards."""
    route = StageMap(3, 2)
    lines = ["RF0.1 F0 SF0", "RF0 F0.1 F0 SF0", "RF0 F0 SF0"]
    with pytest.raises(StuckSchedule) as error:
        prove(parse(lines), route)
    assert "rank 0 RF0.1 -> rank 2 RF0 -> rank 1 RF0 -> rank 0" in str(error.value).splitlines()
