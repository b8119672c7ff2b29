"""Steps of many microbatches, of which few are simulated: equal to a full simulation, up to rounding."""

from __future__ import annotations

import random

import pytest

from autoptd.cost_models import steady
from autoptd.cost_models.simulate import simulate
from autoptd.cost_models.steady import makespan_s
from autoptd.cost_models.step_times import ChunkTimes, Overlap, StageTimes
from autoptd.schedule import period_of, route_of, row_of, step_lists

KINDS = ("1f1b", "interleaved", "zero-bubble", "gpipe", "zero-bubble-v")
EQUAL = 1e-10


def step_of(seed: int) -> tuple[str, int, int, int, list[StageTimes], Overlap]:
    """Make (kind, ranks, chunks, microbatches, times, overlap): equal, nearly equal and unequal stages, cheap and
    expensive messages, gathers of parameters that outlast many rounds."""
    rng = random.Random(seed)
    kind, ranks = rng.choice(KINDS), rng.choice([2, 3, 4, 6])
    virtual = row_of(kind).chunks or rng.choice([2, 3])
    microbatches = ranks * rng.randint(10, 40) if kind == "interleaved" else rng.randint(1, 200)
    spread, message_s = rng.choice([0, 0.001, 1]), rng.choice([0, 0.1, 3.5])

    def chunk() -> ChunkTimes:
        forward_s, backward_s = 1 + spread * rng.random(), 2 + spread * rng.random()
        weight_s = backward_s / 2 if row_of(kind).splits_backward else 0.0
        return ChunkTimes(forward_s, backward_s, weight_s, 0.1, 0.2, message_s, rng.choice([0, message_s]))

    def rank() -> StageTimes:
        chunks = tuple(chunk() for _ in range(virtual))
        return StageTimes(chunks, rng.choice([0, 50]), 1.0, rng.choice([0, 5, 300]), rng.choice([None, 1, 4]))

    overlap = Overlap(dp=rng.random() < 0.5, p2p=rng.random() < 0.5)
    return kind, ranks, virtual, microbatches, [rank() for _ in range(ranks)], overlap


def compared(seed: int) -> tuple[float, float]:
    """Return the seconds by extrapolation, and by full simulation."""
    kind, ranks, virtual, microbatches, times, overlap = step_of(seed)
    route, period = route_of(kind, ranks, virtual), period_of(kind, ranks)
    played = simulate(step_lists(kind, ranks, microbatches, virtual, overlap.early), times, overlap, route).makespan_s
    lists = lambda n: step_lists(kind, ranks, n, virtual, overlap.early)  # noqa: E731
    return makespan_s(lists, microbatches, times, overlap, period, route), played


@pytest.mark.parametrize("start", range(0, 120, 30))
def test_it_is_what_playing_all_of_it_gives(start: int) -> None:
    for seed in range(start, start + 30):
        reckoned, played = compared(seed)
        assert reckoned == pytest.approx(played, rel=EQUAL), seed


@pytest.mark.parametrize("kind", ["1f1b", "zero-bubble", "interleaved", "zero-bubble-v"])
def test_few_microbatches_are_played(kind: str) -> None:
    asked: list[int] = []
    virtual = row_of(kind).chunks or 2

    def lists(n: int):  # type: ignore[no-untyped-def]
        asked.append(n)
        return step_lists(kind, 8, n, virtual)

    splits_backward = row_of(kind).splits_backward
    chunk, slowest = ChunkTimes(1.0, 2.0, 1.0 * splits_backward), ChunkTimes(1.1, 2.2, 1.1 * splits_backward)
    times = [StageTimes((chunk,) * virtual)] * 7 + [StageTimes((slowest,) * virtual)]
    makespan_s(lists, 80000, times, Overlap(), period_of(kind, 8), route_of(kind, 8, virtual))
    assert sum(asked) < 500


def test_a_cycle_of_several_microbatches_is_found() -> None:
    """Four ranks, messages of 5 s: one in four microbatches makes the round trip alone."""
    times = [StageTimes(forward_s=1.0, backward_s=2.0, send_forward_s=5.0, send_backward_s=5.0)] * 4
    asked: list[int] = []
    for microbatches in (1000, 1001, 1002, 1003):
        lists = [asked.append(microbatches)] and (lambda n: asked.append(n) or step_lists("1f1b", 4, n))  # type: ignore[func-returns-value]
        played = simulate(step_lists("1f1b", 4, microbatches), times).makespan_s
        assert makespan_s(lists, microbatches, times) == pytest.approx(played, rel=EQUAL)
    assert sorted(asked)[-4:] == [1000, 1001, 1002, 1003], "only as the questions"


# ---- planted bugs ----


def _wrong() -> int:
    return sum(reckoned != pytest.approx(played, rel=EQUAL) for reckoned, played in map(compared, range(120)))


def test_a_pipeline_that_has_not_settled_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "_EQUAL", 1.0)
    assert _wrong()


def test_rounds_without_backwards_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "_is_whole", lambda shape, actions: True)
    assert _wrong()
