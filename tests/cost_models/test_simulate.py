"""Simulation: timelines drawn by hand, closed forms, and schedules that cannot finish."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.cost_models import simulate as simulate_module
from autoptd.cost_models.simulate import makespan_bound, simulate
from autoptd.cost_models.step_times import ChunkTimes, Overlap, StageTimes
from autoptd.cost_models.timeline import Timeline
from autoptd.errors import PlanError
from autoptd.schedule import EARLY, Action, step_lists


def one(
    forward_s: float, backward_s: float, send_forward_s: float = 0, send_backward_s: float = 0, **end: float
) -> StageTimes:
    """Make the times of a rank with one chunk."""
    chunk = ChunkTimes(forward_s, backward_s, send_forward_s=send_forward_s, send_backward_s=send_backward_s)
    return StageTimes((chunk,), **end)


@dataclass(frozen=True)
class Act:
    kind: str
    microbatch: int | None = None
    chunk: int = 0


def lists(*lines: str) -> list[list[Act]]:
    """Parse one line of actions per stage: `lists("F0 SF0", "RF0 F0")`."""

    def act(word: str) -> Act:
        if found := re.fullmatch(r"([A-Z]+)(\d+)?(?:\.(\d+))?", word):
            return Act(found[1], int(found[2]) if found[2] else None, int(found[3] or 0))
        return Act(word)

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
    """Draw a row per stage, a column per second."""
    grid = [["."] * round(timeline.makespan_s) for _ in range(stages)]
    for stage, action, start_s, end_s, _ in timeline.events:
        if action.kind in ("F", "B", "W"):
            for second in range(round(start_s), round(end_s)):
                grid[stage][second] = f"{action.kind}{action.microbatch}"
    return [" ".join(f"{cell:2}" for cell in row).rstrip() for row in grid]


PICTURE = [
    "F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3",
    ".  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .",
    ".  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .",
]


def test_picture_drawn_by_hand():
    timeline = simulate(one_f_one_b(3, 4), [one(1, 2)] * 3)
    assert picture(timeline, 3) == PICTURE
    assert timeline.busy_s == (12, 12, 12) and timeline.idle_s == (6, 6, 6)
    assert timeline.bubble == pytest.approx(2 / 6), "(p - 1) / (m + p - 1)"


def test_the_docstring_shows_that_picture():
    assert all(row in (simulate_module.__doc__ or "") for row in PICTURE)


def test_messages_take_time_by_hand():
    # F0 [0, 1], message until 4, F0 [4, 5] B0 [5, 7], message until 8, B0 [8, 10]
    schedule = lists("F0 SF0 RB0 B0", "RF0 F0 B0 SB0")
    timeline = simulate(schedule, [one(1, 2, send_forward_s=3), one(1, 2, send_backward_s=1)])
    assert timeline.makespan_s == 10 and timeline.idle_s == (7, 7)
    assert timeline.busy_by_kind_s(0) == {"F": 1, "SF": 0, "RB": 7, "B": 2}


def test_an_edge_carries_one_message_at_a_time():
    # F0 F1 end at 1 and 2; the first message is there at 6, the second only at 11
    timeline = simulate(lists("F0 SF0 F1 SF1", "RF0 F0 RF1 F1"), [one(1, 1, send_forward_s=5), one(1, 1)])
    assert [(e.start_s, e.end_s) for e in timeline.events if e.action.kind == "F"] == [(0, 1), (1, 2), (6, 7), (11, 12)]


def test_the_two_directions_of_an_edge_do_not_wait_for_each_other():
    schedule = lists("SF0 RB0", "SB0 RF0")
    assert simulate(schedule, [one(0, 0, send_forward_s=5), one(0, 0, send_backward_s=5)]).makespan_s == 5


def test_sends_do_not_block():
    timeline = simulate(lists("F0 SF0 F1 SF1", "RF0 F0 RF1 F1"), [one(1, 1, send_forward_s=50)] * 2)
    assert timeline.events[2].start_s == 1, "the second forward starts while the first message is under way"


def test_end_of_step():
    times = [one(1, 2, reduce_s=3, step_s=4, gather_s=5), one(1, 2)]
    timeline = simulate(lists("F0 SF0 RB0 B0 REDUCE STEP GATHER", "RF0 F0 B0 SB0 REDUCE STEP GATHER"), times)
    assert timeline.makespan_s == 6 + 12 and timeline.busy_s == (15, 3)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_equal_stages_take_the_closed_form(stages: int, microbatches: int):
    f, b = 0.75, 1.5
    timeline = simulate(one_f_one_b(stages, microbatches), [one(f, b)] * stages)
    assert timeline.makespan_s == pytest.approx((microbatches + stages - 1) * (f + b))
    assert timeline.makespan_s == pytest.approx(makespan_bound([f + b] * stages, microbatches))
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


FORWARDS = st.lists(st.floats(0.01, 10), min_size=1, max_size=6)


@settings(deadline=None)
@given(FORWARDS, st.integers(1, 12), st.floats(0, 4), st.floats(0, 20))
def test_bound_holds_where_stages_share_a_ratio(forwards: list[float], microbatches: int, ratio: float, p2p: float):
    times = [one(f, f * ratio, p2p, p2p) for f in forwards]
    stage_s = [t.chunks[0].forward_s + t.chunks[0].backward_s for t in times]
    makespan = simulate(one_f_one_b(len(times), microbatches), times).makespan_s
    assert makespan <= makespan_bound(stage_s, microbatches, p2p) * (1 + 1e-9)
    assert makespan >= max(microbatches * max(stage_s), sum(stage_s) + 2 * (len(times) - 1) * p2p) * (1 - 1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6), st.integers(1, 12))
def test_bound_of_slowest_forward_and_backward(stages: list[tuple[float, float]], microbatches: int):
    makespan = simulate(one_f_one_b(len(stages), microbatches), [one(f, b) for f, b in stages]).makespan_s
    steady = max(f for f, _ in stages) + max(b for _, b in stages)
    assert makespan <= (microbatches - 1) * steady + sum(f + b for f, b in stages) + 1e-9


@settings(deadline=None)
@given(FORWARDS, st.integers(1, 8), st.floats(0, 5), st.integers(0, 5), st.floats(0, 5))
def test_nothing_gets_quicker_by_slowing_a_stage(
    forwards: list[float], microbatches: int, p2p: float, which: int, more: float
):
    schedule = one_f_one_b(len(forwards), microbatches)
    times = [one(f, 2 * f, p2p, p2p) for f in forwards]
    slower = list(times)
    slower[which % len(times)] = one(forwards[which % len(times)] + more, 2 * forwards[which % len(times)], p2p)
    base = [one(t.chunks[0].forward_s, t.chunks[0].backward_s, t.chunks[0].send_forward_s) for t in times]
    slower = [one(t.chunks[0].forward_s, t.chunks[0].backward_s, t.chunks[0].send_forward_s) for t in slower]
    assert simulate(schedule, slower).makespan_s >= simulate(schedule, base).makespan_s - 1e-9
    assert simulate(schedule, times).makespan_s >= simulate(schedule, base).makespan_s - 1e-9


def test_deadlock_names_the_blocked_actions():
    with pytest.raises(PlanError) as caught:
        simulate(lists("F0 RB0 SF0", "RF0 F0 B0 SB0", "F0"), [one(1, 1)] * 3)
    told = str(caught.value)
    assert "2 of 3 stages" in told and "stage 0 at RB0, action 1 of 3" in told and "stage 1 at RF0, action 0" in told
    assert "stage 2" not in told


def test_a_rank_that_steps_too_early_is_not_the_culprit():
    with pytest.raises(PlanError, match=r"1 of 3 stages wait(.|\n)*stage 1 at RB0, action 0 of 2") as caught:
        simulate(lists("F0 STEP", "RB0 STEP", "F0"), [one(1, 1)] * 3)
    assert "stage 0" not in str(caught.value)
    with pytest.raises(PlanError, match="stage 0 at RB0, action 2 of 3"):
        simulate(lists("F0 STEP RB0", "F0"), [one(1, 1)] * 2)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (("SF0 SF1", "RF1 RF0"), "RF1: the message that arrives is for microbatch 0"),
        (("SB0",), "SB0: there is no stage on that side"),
        (("F0 X0",), "X0: known kinds: F, B"),
    ],
)
def test_wrong_schedules_are_refused(schedule: tuple[str, ...], told: str):
    with pytest.raises(PlanError, match=told):
        simulate(lists(*schedule), [one(1, 1)] * len(schedule))


def test_times_for_every_stage():
    with pytest.raises(ValueError, match="2 stages, but times for 1"):
        simulate(lists("F0", "F0"), [one(1, 1)])
    with pytest.raises(ValueError):
        makespan_bound([], 1)


# --- schedules ----------------------------------------------------------------------------------------------------


def steps(kind: str, stages: int, microbatches: int, virtual: int = 1) -> list[list[Action]]:
    return [list(actions) for actions in step_lists(kind, stages, microbatches, virtual)]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 8), (4, 32)])
def test_bubbles_in_closed_form(stages: int, microbatches: int):
    """(p - 1)(F + B) for 1F1B and GPipe, 1/v of it interleaved, (p - 1)(F + B - 2 W) for zero-bubble, B including W.

    (Narayanan et al. 2021, section 2.2; Qi et al. 2023, table 2, where B excludes W.)
    """
    f, b, w = 1.0, 2.0, 1.0
    work = microbatches * (f + b)
    whole = StageTimes((ChunkTimes(f, b, w),))
    bubbles = {"1f1b": f + b, "gpipe": f + b, "zero-bubble": f + b - 2 * w}
    for kind, bubble in bubbles.items():
        timeline = simulate(steps(kind, stages, microbatches), [whole] * stages)
        assert timeline.makespan_s == pytest.approx(work + (stages - 1) * bubble), kind
    for virtual in (2, 4):
        part = StageTimes((ChunkTimes(f / virtual, b / virtual),) * virtual)
        timeline = simulate(steps("interleaved", stages, microbatches, virtual), [part] * stages)
        assert timeline.makespan_s == pytest.approx(work + (stages - 1) * (f + b) / virtual)


def test_zero_bubble_drawn_by_hand():
    """F, B and W of 1 s each, 2 stages: only W0 of the last stage is delayed, to after F1 and B1."""
    timeline = simulate(steps("zero-bubble", 2, 3), [StageTimes((ChunkTimes(1, 2, 1),))] * 2)
    assert picture(timeline, 2) == [
        "F0 F1 .  B0 W0 F2 B1 W1 B2 W2",
        ".  F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]


def test_weight_gradients_stay_in_the_backward_of_other_schedules():
    timeline = simulate(steps("1f1b", 2, 3), [StageTimes((ChunkTimes(1, 2, 1),))] * 2)
    assert timeline.busy_by_kind_s(0)["B"] == 6
    with pytest.raises(ValueError, match="weight_s is part of backward_s, but 3 > 2"):
        ChunkTimes(1, 2, 3)


def test_interleaved_by_hand():
    """Stages 0 and 2 on rank 0, 1 and 3 on rank 1, so a microbatch goes 0 1 0 1; chunk 1 takes 2 s forward."""
    chunks = (ChunkTimes(1, 1, send_forward_s=3), ChunkTimes(2, 1, send_backward_s=5))
    timeline = simulate(
        lists("F0 SF0 RF0.1 F0.1 SF0.1", "RF0 F0 SF0 RF0.1 F0.1"), [StageTimes(chunks), StageTimes(chunks)]
    )
    # F0 to 1, there at 4, F0 to 5, there at 8, F0.1 to 10, chunk 1 sends at once, F0.1 to 12
    assert timeline.makespan_s == 12
    assert [(e.source, str(e.received.chunk), e.start_s, e.end_s) for e in timeline.messages] == [
        (0, "0", 1, 4),
        (0, "1", 10, 10),
        (1, "1", 5, 8),
    ]
    with pytest.raises(PlanError, match=r"RF0.1: the message that arrives is for microbatch 0(.|\n)*stage 1, action 0"):
        simulate(lists("SF0", "RF0.1"), [StageTimes(chunks)] * 2)
    with pytest.raises(ValueError, match="stage 0: 2 chunks, but times for 1"):
        simulate(steps("interleaved", 2, 2, 2), [one(1, 1)] * 2)


# --- streams ------------------------------------------------------------------------------------------------------


def test_tp_is_added_or_hidden():
    times = [StageTimes((ChunkTimes(3, 4, forward_tp_s=1, backward_tp_s=6),))]
    after = simulate(lists("F0 B0"), times, Overlap(tp=False))
    beside = simulate(lists("F0 B0"), times, Overlap(tp=True))
    assert (after.makespan_s, beside.makespan_s) == (3 + 1 + 4 + 6, 3 + 6)
    assert (after.exposed_s["tp"], beside.exposed_s["tp"]) == (7, 2)
    assert [(e.start_s, e.end_s) for e in after.communication] == [(3, 4), (8, 14)]
    assert [(e.start_s, e.end_s) for e in beside.communication] == [(0, 1), (3, 9)]


def test_a_message_that_does_not_overlap_holds_the_sender():
    schedule, times = lists("F0 SF0 F1 SF1", "RF0 F0 RF1 F1"), [one(1, 1, send_forward_s=5), one(1, 1)]
    timeline = simulate(schedule, times, Overlap(p2p=False))
    # F0 to 1, message to 6, F1 to 7, message to 12
    assert [e.start_s for e in timeline.events if e.action.kind == "F"] == [0, 6, 6, 12]
    assert timeline.busy_s == (12, 2)
    assert timeline.exposed_s["p2p"] == 10
    assert timeline.breakdown_s(1)["p2p"] == 10, "it waits while both messages are under way"
    assert timeline.breakdown_s(1)["bubble"] == 1


def test_a_wait_is_communication_only_while_the_message_is_under_way():
    # the second stage waits from 0, the message leaves at 4 and is there at 7
    timeline = simulate(lists("F0 SF0", "RF0 F0"), [one(4, 1, send_forward_s=3), one(1, 1)])
    assert timeline.breakdown_s(1) == {"compute": 1, "tp": 0, "p2p": 3, "dp": 0, "optimizer": 0, "bubble": 4}


END = "REDUCE STEP GATHER"


def last_backward(reduce_s: float, buckets: int | None, sums: bool) -> Timeline:
    """Simulate F and B of 2 and 4 s, twice: the last backward runs from 8 to 12."""
    times = StageTimes((ChunkTimes(2, 4),), reduce_s=reduce_s, step_s=1, buckets=buckets)
    return simulate(lists(f"F0 B0 F1 {'SUM ' if sums else ''}B1 {END}"), [times])


@pytest.mark.parametrize(
    ("reduce_s", "buckets", "end_s"),
    [
        (3, None, 12),  # hidden
        (6, None, 14),  # from 8 on
        (6, 1, 18),  # starts after all computation
        (6, 2, 16),  # first half at 10 to 13, second to 16
        (2, 2, 13),  # first half at 10 to 11, second at 12
        (6, 4, 15),  # from 9 on
    ],
)
def test_reduction_beside_the_last_backward(reduce_s: float, buckets: int | None, end_s: float):
    timeline = last_backward(reduce_s, buckets, sums=True)
    assert timeline.makespan_s == end_s + 1
    assert timeline.exposed_s["dp"] == end_s - 12
    assert last_backward(reduce_s, buckets, sums=False).makespan_s == 12 + reduce_s + 1


def test_chunks_reduce_one_after_the_other():
    """The reduction is split 3 : 1 like the backward passes; chunk 1 is reduced while chunk 0 still computes."""
    times = StageTimes((ChunkTimes(1, 3), ChunkTimes(1, 1)), reduce_s=8)
    timeline = simulate(lists("F0 F0.1 SUM.1 B0.1 SUM B0 REDUCE"), [times])
    # B0.1 from 2 to 3, its part of 2 s from 2 to 4; B0 from 3 to 6, its part of 6 s from 4 to 10
    assert [(e.action.chunk, e.start_s, e.end_s) for e in timeline.communication] == [(1, 2, 4), (0, 4, 10)]
    assert timeline.makespan_s == 10


def test_reduction_waits_for_the_weight_gradients():
    times = StageTimes((ChunkTimes(1, 2, 1),), reduce_s=1)
    timeline = simulate(lists("F0 B0 SUM W0 REDUCE"), [times])
    assert [(e.start_s, e.end_s) for e in timeline.communication] == [(2, 3)]


@pytest.mark.parametrize(
    ("gather_s", "buckets", "forward_ends_s"),
    [(1, None, 2), (5, None, 5), (5, 1, 7), (4, 2, 5), (1, 2, 2.5)],
)
def test_gather_beside_the_first_forward(gather_s: float, buckets: int | None, forward_ends_s: float):
    times = StageTimes((ChunkTimes(2, 4),), gather_s=gather_s, buckets=buckets)
    timeline = simulate(lists("GATHER F0 B0 F1 B1 REDUCE STEP"), [times])
    assert timeline.events[1].end_s == forward_ends_s
    assert timeline.makespan_s == forward_ends_s + 10
    assert timeline.exposed_s["dp"] == forward_ends_s - 2
    apart = simulate(lists(f"F0 B0 F1 B1 {END}"), [times])
    assert apart.makespan_s == 12 + gather_s


def test_sums_and_gathers_slow_the_passes_beside_them():
    """Half of the device is theirs: a pass takes half as long again as they last beside it."""
    times, beside = StageTimes((ChunkTimes(2, 4),), reduce_s=2, gather_s=1), Overlap(dp=True, slowdown=0.5)
    timeline = simulate(lists("GATHER F0 B0 F1 SUM B1 REDUCE STEP"), [times], beside)
    assert [e.end_s for e in timeline.events[1:]][:5] == [2.5, 6.5, 8.5, 8.5, 13.5]  # SUM beside B1, from 8.5 to 10.5
    assert timeline.makespan_s == 13.5
    assert timeline.exposed_s["dp"] == 1.5
    alone = simulate(lists("F0 B0 F1 B1 REDUCE STEP GATHER"), [times], beside)
    assert alone.makespan_s == 12 + 2 + 1


def test_a_pipeline_hides_the_gather_while_it_fills():
    times = [one(2, 4, gather_s=3)] * 3
    apart, beside = (simulate(step_lists("1f1b", 3, 4, early=early), times) for early in ((), ("GATHER",)))
    assert apart.makespan_s - beside.makespan_s == 2, "the first stage waits for 1 of 3 s; the others are later anyway"
    assert beside.breakdown_s(2)["dp"] == 0


def test_no_rank_steps_before_all_have_reduced():
    timeline = simulate(lists(f"F0 {END}", f"F0 {END}"), [one(1, 1, step_s=2, gather_s=7), one(5, 1, step_s=2)])
    assert [e.start_s for e in timeline.events if e.action.kind == "STEP"] == [5, 5]
    assert timeline.makespan_s == 14


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.floats(0, 3), min_size=10, max_size=10),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_parts_sum_to_the_makespan_and_overlap_never_hurts(
    kind: tuple[str, int], stages: int, groups: int, numbers: list[float], on: tuple[bool, bool, bool]
):
    f, b, w, ftp, btp, sf, sb, *end = numbers
    times = [StageTimes((ChunkTimes(f, b + w, w, ftp, btp, sf, sb),) * kind[1], *end)] * stages
    schedule = step_lists(kind[0], stages, stages * groups, kind[1], Overlap(*on).early)
    timeline = simulate(schedule, times, Overlap(*on))
    for stage in range(stages):
        parts = timeline.breakdown_s(stage)
        assert sum(parts.values()) == pytest.approx(timeline.makespan_s)
        assert min(parts.values()) >= -1e-9
        assert parts["compute"] == pytest.approx(kind[1] * stages * groups * (f + b + w))
    with_tp, with_p2p = replace(Overlap(*on), tp=True), replace(Overlap(*on), p2p=True)
    for more in (with_tp, with_p2p):
        assert simulate(schedule, times, more).makespan_s <= timeline.makespan_s + 1e-9
    assert timeline.makespan_s == max(event.end_s for event in timeline.events)


# --- speed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_64_stages_of_512_microbatches_in_a_second(kind: str, virtual: int):
    chunk = ChunkTimes(1, 2, 1, 0.1, 0.1, 0.01, 0.01)
    times = [StageTimes((chunk,) * virtual, 1, 1, 1)] * 64
    schedule = step_lists(kind, 64, 512, virtual, EARLY)
    begin = time.process_time()
    timeline = simulate(schedule, times, Overlap(tp=True))
    assert time.process_time() - begin < 1
    assert timeline.makespan_s > 512 * 3 * virtual
