"""Simulation: pictures drawn by hand, the closed form, and schedules that cannot finish."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.cost_models import simulate as simulate_module
from autoptd.cost_models.simulate import StageTimes, Timeline, makespan_bound, simulate
from autoptd.errors import PlanError


@dataclass(frozen=True)
class Act:
    kind: str
    microbatch: int | None = None


def lists(*lines: str) -> list[list[Act]]:
    """`lists("F0 SF0", "RF0 F0")`: one line of actions per stage."""

    def act(word: str) -> Act:
        kind = word.rstrip("0123456789")
        return Act(kind, int(word[len(kind) :]) if word != kind else None)

    return [[act(word) for word in line.split()] for line in lines]


def one_f_one_b(stages: int, microbatches: int) -> list[list[Act]]:
    def around(stage: int, kind: str, i: int) -> str:
        first, last = stage == 0, stage == stages - 1
        receive, send = (not first, not last) if kind == "F" else (not last, not first)
        return f"R{kind}{i} " * receive + f"{kind}{i} " + f"S{kind}{i} " * send

    def line(stage: int) -> str:
        warm_up = min(stages - stage - 1, microbatches)
        order = [("F", i) for i in range(warm_up)]
        for i in range(microbatches):
            order += [("F", i + warm_up)] * (i + warm_up < microbatches) + [("B", i)]
        return "".join(around(stage, kind, i) for kind, i in order)

    return lists(*(line(stage) for stage in range(stages)))


def picture(timeline: Timeline, stages: int) -> list[str]:
    """A row per stage, a column per second."""
    grid = [["."] * round(timeline.makespan_s) for _ in range(stages)]
    for stage, action, start_s, end_s in timeline.events:
        if action.kind in ("F", "B"):
            for second in range(round(start_s), round(end_s)):
                grid[stage][second] = f"{action.kind}{action.microbatch}"
    return [" ".join(f"{cell:2}" for cell in row).rstrip() for row in grid]


PICTURE = [
    "F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3",
    ".  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .",
    ".  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .",
]


def test_picture_drawn_by_hand():
    timeline = simulate(one_f_one_b(3, 4), [StageTimes(1, 2)] * 3)
    assert picture(timeline, 3) == PICTURE
    assert timeline.busy_s == (12, 12, 12) and timeline.idle_s == (6, 6, 6)
    assert timeline.bubble == pytest.approx(2 / 6), "(p - 1) / (m + p - 1)"


def test_the_docstring_shows_that_picture():
    assert all(row in (simulate_module.__doc__ or "") for row in PICTURE)


def test_messages_take_time_by_hand():
    # F0 [0, 1], message until 4, F0 [4, 5] B0 [5, 7], message until 8, B0 [8, 10]
    schedule = lists("F0 SF0 RB0 B0", "RF0 F0 B0 SB0")
    timeline = simulate(schedule, [StageTimes(1, 2, send_forward_s=3), StageTimes(1, 2, send_backward_s=1)])
    assert timeline.makespan_s == 10 and timeline.idle_s == (7, 7)
    assert timeline.busy_by_kind_s(0) == {"F": 1, "SF": 0, "RB": 7, "B": 2}


def test_an_edge_carries_one_message_at_a_time():
    # F0 F1 end at 1 and 2; the first message is there at 6, the second only at 11
    timeline = simulate(lists("F0 SF0 F1 SF1", "RF0 F0 RF1 F1"), [StageTimes(1, 1, send_forward_s=5), StageTimes(1, 1)])
    assert [(e.start_s, e.end_s) for e in timeline.events if e.action.kind == "F"] == [(0, 1), (1, 2), (6, 7), (11, 12)]


def test_the_two_directions_of_an_edge_do_not_wait_for_each_other():
    schedule = lists("SF0 RB0", "SB0 RF0")
    assert simulate(schedule, [StageTimes(0, 0, send_forward_s=5), StageTimes(0, 0, send_backward_s=5)]).makespan_s == 5


def test_sends_do_not_block():
    timeline = simulate(lists("F0 SF0 F1 SF1", "RF0 F0 RF1 F1"), [StageTimes(1, 1, send_forward_s=50)] * 2)
    assert timeline.events[2].start_s == 1, "the second forward starts while the first message is under way"


def test_end_of_step():
    times = [StageTimes(1, 2, reduce_s=3, step_s=4, gather_s=5), StageTimes(1, 2)]
    timeline = simulate(lists("F0 SF0 RB0 B0 REDUCE STEP GATHER", "RF0 F0 B0 SB0 REDUCE STEP GATHER"), times)
    assert timeline.makespan_s == 6 + 12 and timeline.busy_s == (15, 3)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_equal_stages_take_the_closed_form(stages: int, microbatches: int):
    f, b = 0.75, 1.5
    timeline = simulate(one_f_one_b(stages, microbatches), [StageTimes(f, b)] * stages)
    assert timeline.makespan_s == pytest.approx((microbatches + stages - 1) * (f + b))
    assert timeline.makespan_s == pytest.approx(makespan_bound([f + b] * stages, microbatches))
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


FORWARDS = st.lists(st.floats(0.01, 10), min_size=1, max_size=6)


@settings(deadline=None)
@given(FORWARDS, st.integers(1, 12), st.floats(0, 4), st.floats(0, 20))
def test_bound_holds_where_stages_share_a_ratio(forwards: list[float], microbatches: int, ratio: float, p2p: float):
    times = [StageTimes(f, f * ratio, p2p, p2p) for f in forwards]
    stage_s = [t.forward_s + t.backward_s for t in times]
    makespan = simulate(one_f_one_b(len(times), microbatches), times).makespan_s
    assert makespan <= makespan_bound(stage_s, microbatches, p2p) * (1 + 1e-9)
    assert makespan >= max(microbatches * max(stage_s), sum(stage_s) + 2 * (len(times) - 1) * p2p) * (1 - 1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6), st.integers(1, 12))
def test_bound_of_slowest_forward_and_backward(stages: list[tuple[float, float]], microbatches: int):
    makespan = simulate(one_f_one_b(len(stages), microbatches), [StageTimes(f, b) for f, b in stages]).makespan_s
    steady = max(f for f, _ in stages) + max(b for _, b in stages)
    assert makespan <= (microbatches - 1) * steady + sum(f + b for f, b in stages) + 1e-9


@settings(deadline=None)
@given(FORWARDS, st.integers(1, 8), st.floats(0, 5), st.integers(0, 5), st.floats(0, 5))
def test_nothing_gets_quicker_by_slowing_a_stage(
    forwards: list[float], microbatches: int, p2p: float, which: int, more: float
):
    schedule = one_f_one_b(len(forwards), microbatches)
    times = [StageTimes(f, 2 * f, p2p, p2p) for f in forwards]
    slower = list(times)
    slower[which % len(times)] = StageTimes(forwards[which % len(times)] + more, 2 * forwards[which % len(times)], p2p)
    base = [StageTimes(t.forward_s, t.backward_s, t.send_forward_s) for t in times]
    slower = [StageTimes(t.forward_s, t.backward_s, t.send_forward_s) for t in slower]
    assert simulate(schedule, slower).makespan_s >= simulate(schedule, base).makespan_s - 1e-9
    assert simulate(schedule, times).makespan_s >= simulate(schedule, base).makespan_s - 1e-9


def test_deadlock_names_the_blocked_actions():
    with pytest.raises(PlanError) as caught:
        simulate(lists("F0 RB0 SF0", "RF0 F0 B0 SB0", "F0"), [StageTimes(1, 1)] * 3)
    told = str(caught.value)
    assert "2 of 3 stages" in told and "stage 0 at RB0, action 1 of 3" in told and "stage 1 at RF0, action 0" in told
    assert "stage 2" not in told


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (("SF0 SF1", "RF1 RF0"), "RF1: the message that arrives is that of microbatch 0"),
        (("SB0",), "SB0: there is no stage on that side"),
        (("F0 W0",), "W0: known kinds: F, B"),
    ],
)
def test_wrong_schedules_are_refused(schedule: tuple[str, ...], told: str):
    with pytest.raises(PlanError, match=told):
        simulate(lists(*schedule), [StageTimes(1, 1)] * len(schedule))


def test_times_for_every_stage():
    with pytest.raises(ValueError, match="2 stages, but times for 1"):
        simulate(lists("F0", "F0"), [StageTimes(1, 1)])
    with pytest.raises(ValueError):
        makespan_bound([], 1)


def test_64_stages_of_512_microbatches_in_about_a_second():
    schedule, times = one_f_one_b(64, 512), [StageTimes(1, 2)] * 64
    begin = time.process_time()
    assert simulate(schedule, times).makespan_s == (512 + 63) * 3
    assert time.process_time() - begin < 2
