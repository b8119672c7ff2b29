"""Schedules: golden text, the text form read back, the proof and the faults it detects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoptd.errors import PlanError
from autoptd.schedule import (
    RUNNABLE,
    SCHEDULES,
    Action,
    Actions,
    StageMap,
    StuckSchedule,
    channel_of,
    forward_only,
    in_flight,
    interleaved,
    one_f_one_b,
    parse,
    parse_action,
    peer_of,
    prove,
    row_of,
    step_lists,
    text,
    training_step,
    with_communication,
    zero_bubble,
    zero_bubble_v,
)
from autoptd.schedule import schedules as schedule_rows

LOOP = StageMap(2, 2)


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


def test_gpipe_golden() -> None:
    assert text(step_lists("gpipe", 2, 3)) == [
        "F0 SF0 F1 SF1 F2 SF2 RB0 B0 RB1 B1 RB2 B2 REDUCE STEP GATHER",
        "RF0 F0 RF1 F1 RF2 F2 B0 SB0 B1 SB1 B2 SB2 REDUCE STEP GATHER",
    ]


def test_interleaved_golden() -> None:
    """Microbatches in pairs, chunk by chunk; backward passes from the last chunk to the first."""
    assert text(interleaved(2, 4, 2)) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


def test_the_last_rank_sends_to_the_first() -> None:
    """Stages 0 to 3 are chunk 0 of ranks 0 and 1, chunk 1 of ranks 0 and 1."""
    assert text(step_lists("interleaved", 2, 2, 2)) == [
        "F0 SF0 F1 SF1 RF0.1 F0.1 SF0.1 RF1.1 F1.1 SF1.1 RB0.1 B0.1 SB0.1 RB1.1 B1.1 SB1.1 RB0 B0 RB1 B1"
        " REDUCE STEP GATHER",
        "RF0 F0 SF0 RF1 F1 SF1 RF0.1 F0.1 B0.1 SB0.1 RF1.1 F1.1 B1.1 SB1.1 RB0 B0 SB0 RB1 B1 SB1 REDUCE STEP GATHER",
    ]
    assert peer_of(1, Action("SF", 5, 0), LOOP) == (0, Action("RF", 5, 1))
    assert peer_of(0, Action("SB", 5, 1), LOOP) == (1, Action("RB", 5, 0))
    assert peer_of(1, Action("SF", 5, 1), LOOP) is None and peer_of(0, Action("RF", 5, 0), LOOP) is None
    assert channel_of(1, Action("SF", 5), LOOP) == channel_of(0, Action("RF", 5, 1), LOOP) == (1, "forward")
    assert channel_of(0, Action("SB", 5, 1), LOOP) == channel_of(1, Action("RB", 5), LOOP) == (1, "backward")


def test_interleaved_warms_up_as_megatron_does() -> None:
    """2 (p - r - 1) + (v - 1) p forwards, then one more before the first backward; with one chunk, 1F1B."""
    for rank, actions in enumerate(interleaved(4, 16, 3)):
        first_backward = next(at for at, action in enumerate(actions) if action.kind == "B")
        assert first_backward == 2 * (4 - rank - 1) + 2 * 4 + 1
    assert interleaved(4, 7, 1) == one_f_one_b(4, 7)


def test_zero_bubble_golden() -> None:
    """W lags behind by as many microbatches as the stage's number."""
    assert text(zero_bubble(3, 4)) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert text(zero_bubble(3, 1)) == ["F0 B0 W0"] * 3


@pytest.mark.parametrize("kind", SCHEDULES)
def test_text_reads_back(kind: str) -> None:
    schedule = training_step(kind, 4, 8, row_of(kind).chunks or 3)
    assert parse(text(schedule)) == schedule


def test_an_action_reads_back() -> None:
    assert parse_action("RF0") == Action("RF", 0)
    assert parse_action("SB12.3") == Action("SB", 12, 3)
    for wrong in ("X1", "F3.0", "F3.", "REDUCE.1", "F.1"):
        with pytest.raises(ValueError, match=f"'{wrong}' is not an action"):
            parse_action(wrong)


@pytest.mark.fault("microbatches that leave a rest")
def test_numbers_that_a_schedule_cannot_take() -> None:
    with pytest.raises(PlanError, match="6 microbatches over 4 ranks leave a group of 2"):
        step_lists("interleaved", 4, 6, 2)
    with pytest.raises(PlanError, match="zero-bubble has one chunk per rank, not 2"):
        step_lists("zero-bubble", 4, 8, 2)
    with pytest.raises(PlanError, match="zero-bubble-v has 2 chunks per rank, not 1"):
        step_lists("zero-bubble-v", 4, 8)
    with pytest.raises(PlanError, match=r"unknown schedule 'gpip'(.|\n)*did you mean 'gpipe'"):
        step_lists("gpip", 4, 8)


CASES = [(kind, row_of(kind).chunks or 1) for kind in SCHEDULES] + [("interleaved", v) for v in (2, 3, 4)]


@pytest.mark.parametrize(("kind", "virtual"), CASES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_schedule_is_proved(kind: str, virtual: int, stages: int) -> None:
    for microbatches in range(1, 17):
        if kind == "interleaved" and virtual > 1 and microbatches % stages:
            continue
        schedule = training_step(kind, stages, microbatches, virtual)
        everything = {(i, chunk) for i in range(microbatches) for chunk in range(virtual)}
        for stage, actions in enumerate(schedule):
            for compute in "FBW" if row_of(kind).splits_backward else "FB":
                done = [(a.microbatch, a.chunk) for a in actions if a.kind == compute]
                assert len(done) == len(everything)
                assert set(done) == everything
            assert sum(in_flight(actions)) == held(kind, stage, stages, microbatches, virtual)


def held(kind: str, stage: int, stages: int, microbatches: int, virtual: int) -> int:
    """Return the maximum number of activations alive, in closed form."""
    if kind == "zero-bubble-v":  # 2 p - r - 1 of chunk 0 and r + 1 of chunk 1, if there are so many
        return min(microbatches, 2 * stages - stage - 1) + min(microbatches, stage + 1)
    if virtual > 1:  # the warm-up, and the forward before the first backward
        return min(2 * (stages - stage - 1) + (virtual - 1) * stages + 1, virtual * microbatches)
    return min({"gpipe": microbatches, "zero-bubble": stages}.get(kind, stages - stage), microbatches)


def test_zero_bubble_holds_what_the_first_stage_of_1f1b_holds() -> None:
    assert [in_flight(actions) for actions in one_f_one_b(4, 8)] == [(4,), (3,), (2,), (1,)]
    assert [in_flight(actions) for actions in zero_bubble(4, 8)] == [(4,)] * 4


def test_in_flight_by_chunk() -> None:
    first, *_, last = interleaved(4, 8, 2)
    assert in_flight(first) == (7, 4)
    assert in_flight(last) == (4, 1)
    # F0 F1 F0.1 F1.1 F2: five alive; of chunk 1 alone two, before B0.1
    actions: Actions = parse(["F0 F1 F0.1 B0.1 B0 F2 F3"])[0]
    assert in_flight(actions) == (2, 1)
    assert in_flight(actions, chunk_bytes=[10, 1]) == (3, 0)


def test_forward_only_is_proved() -> None:
    prove(with_communication(forward_only(3, 5)))


@pytest.mark.fault("both directions on one communicator")
def test_one_communicator_for_both_directions_is_stuck() -> None:
    """Rendezvous sends in order on a shared communicator: the classic deadlock of the steady state."""
    schedule = with_communication(one_f_one_b(2, 4))
    with pytest.raises(StuckSchedule, match=r"stage 0  .*RB0<"):
        prove(schedule, channel=lambda stage, a: stage if a.kind in ("SF", "RB") else stage - 1)


def test_a_send_waits_for_the_oldest_one_under_way() -> None:
    """Stage 0 blocks at SF3 for SF2, stage 1 at SB1 for SB0: a deadlock with one send in flight, none with two."""
    crossed = parse(
        [
            "F0 SF0 F1 SF1 F2 SF2 F3 SF3 RB0 B0 RB1 B1 RB2 B2 RB3 B3",
            "RF0 F0 RF1 F1 B0 SB0 B1 SB1 RF2 F2 RF3 F3 B2 SB2 B3 SB3",
        ]
    )
    prove(crossed, under_way=2)
    with pytest.raises(StuckSchedule, match=r"(?s)SF3<.*SB1<"):
        prove(crossed, under_way=1)


@pytest.mark.fault("crossed waits")
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
        (["F0 F0.1 SF0.1 B0.1 B0"], "SF0.1 has no neighbour"),
        (["F0 W0 B0"], "W0 comes before B0"),
        (["F0 F1 B0 W0 B1"], "F1 has no W1"),
        (["F0.1 F0 B0.1 B0"], "F0.1 comes before F0"),
        (["F0 F0.1 B0 B0.1"], "B0 comes before B0.1"),
        (["F0 SF0 RF0 F0.1 SF0.1", "RF0 F0 SF0 RF0.1 F0.1"], "has no neighbour"),
        (["F0 SF0 RF0.1 F0.1 SF0.1", "RF0 F0 RF0.1 F0.1 SF0"], "RF0.1<"),
    ],
)
def test_faulty_schedules_are_caught(lines: list[str], message: str) -> None:
    with pytest.raises(StuckSchedule, match=message):
        prove(parse(lines))


@pytest.mark.fault("a warm-up of too many")
@pytest.mark.parametrize("kind", ["1f1b", "zero-bubble"])
def test_a_warm_up_that_is_not_clamped_is_stuck(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clamped = schedule_rows._warm_up_and_alternate

    def unclamped(forwards: Any, backwards: Any, warm_up: int) -> Any:
        if warm_up <= len(forwards):
            yield from clamped(forwards, backwards, warm_up)
        else:
            yield from (Action("F", *at) for at in forwards)
            yield from (Action("B", *at) for at in backwards[len(forwards) - warm_up :])

    training_step(kind, 4, 2)
    monkeypatch.setattr(schedule_rows, "_warm_up_and_alternate", unclamped)
    training_step(kind, 4, 4)
    with pytest.raises(StuckSchedule):
        training_step(kind, 4, 2)


def test_the_page_shows_these_schedules() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text("utf-8")
    for line in text(interleaved(2, 4, 2)) + text(zero_bubble(3, 4)) + text(zero_bubble_v(2, 4)):
        assert f"    {line}\n" in page
    assert all(f"| `{kind}`" in page for kind in SCHEDULES)
    assert {kind for kind in SCHEDULES if f"| `{kind}`" in page and row(page, kind).endswith("| yes |")} == set(
        RUNNABLE
    )


def row(page: str, kind: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(f"| `{kind}`"))
