"""Schedules: golden text, the text form read back, the proof and what it catches."""

from __future__ import annotations

import pytest

from autoptd.schedule import (
    SCHEDULES,
    Action,
    StuckSchedule,
    forward_only,
    in_flight,
    one_f_one_b,
    parse,
    parse_action,
    prove,
    text,
    training_step,
    with_communication,
)


def test_one_f_one_b_golden() -> None:
    assert text(one_f_one_b(stages=3, microbatches=4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_warm_up_is_clamped_to_the_microbatches() -> None:
    assert text(one_f_one_b(stages=4, microbatches=2)) == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]


def test_whole_step_golden() -> None:
    assert text(training_step("1f1b", 2, 2)) == [
        "F0 SF0 F1 SF1 RB0 B0 RB1 B1 REDUCE STEP GATHER",
        "RF0 F0 B0 SB0 RF1 F1 B1 SB1 REDUCE STEP GATHER",
    ]


def test_text_reads_back() -> None:
    schedule = training_step("1f1b", 4, 5)
    assert parse(text(schedule)) == schedule
    assert parse_action("RF0") == Action("RF", 0)
    with pytest.raises(ValueError, match="'X1' is not an action"):
        parse_action("X1")


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_schedule_is_proved(kind: str, stages: int) -> None:
    for microbatches in range(1, 13):
        schedule = training_step(kind, stages, microbatches)
        for stage, actions in enumerate(schedule):
            for compute in "FB":
                done = [a.microbatch for a in actions if a.kind == compute]
                assert sorted(map(int, map(str, done))) == list(range(microbatches))
            assert in_flight(actions) == min(stages - stage, microbatches)


def test_forward_only_is_proved() -> None:
    prove(with_communication(forward_only(3, 5)))


def test_one_communicator_for_both_directions_is_stuck() -> None:
    """Rendezvous sends in order on a shared communicator: the classic deadlock of the steady state."""
    schedule = with_communication(one_f_one_b(2, 4))
    with pytest.raises(StuckSchedule, match=r"stage 0  .*RB0<"):
        prove(schedule, channel=lambda stage, a: stage if a.kind in ("SF", "RB") else stage - 1)


def test_a_send_waits_for_the_oldest_one_under_way() -> None:
    """Stage 0 holds at SF3 for SF2, stage 1 at SB1 for SB0: stuck with one message under way, fine with two."""
    crossed = parse(
        [
            "F0 SF0 F1 SF1 F2 SF2 F3 SF3 RB0 B0 RB1 B1 RB2 B2 RB3 B3",
            "RF0 F0 RF1 F1 B0 SB0 B1 SB1 RF2 F2 RF3 F3 B2 SB2 B3 SB3",
        ]
    )
    prove(crossed, under_way=2)
    with pytest.raises(StuckSchedule, match=r"(?s)SF3<.*SB1<"):
        prove(crossed, under_way=1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["F0 SF0 F1 SF1 RB0 B0 RB1 B1", "RF1 F1 B1 SB1 RF0 F0 B0 SB0"], "RF1<"),
        (["RB0 F0 SF0 B0", "RF0 F0 B0 SB0"], "RB0<"),
        (["F0 SF0 RB0 B0", "RF0 F0 SB0 B0"], "SB0 comes before B0"),
        (["F0 SF0 RB0 B0", "RF0 F0 B0"], "RB0<"),
        (["F0 SF0 RB0 B0 SF0", "RF0 F0 B0 SB0"], "SF0 is never received"),
        (["F0 B0 B0"], "B0 is repeated"),
        (["SB0"], "has no neighbour"),
    ],
)
def test_faulty_schedules_are_caught(lines: list[str], message: str) -> None:
    with pytest.raises(StuckSchedule, match=message):
        prove(parse(lines))
