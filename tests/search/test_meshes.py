"""Every mesh of a world is listed once, wishes that cannot be met are refused by name, and pruning loses nothing."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoptd.errors import DoesNotFit, PlanError
from autoptd.search.meshes import Candidate, Limits, Searched, candidates, divisors, search

LIMITS = Limits(world=64, batch=512, segments=98, tp_sizes=(1, 2, 4, 8), recomputes=("auto",))


def test_every_mesh_is_listed_once() -> None:
    limits = Limits(world=12, batch=24, segments=3, tp_sizes=(1, 2, 4), zeros=(0, 1), recomputes=("none", "full"))
    expected = {
        (dp, tp, pp, micro, zero, recompute)
        for dp, tp, pp, micro in itertools.product(range(1, 13), (1, 2, 4), (1, 2, 3), range(1, 25))
        if dp * tp * pp == 12 and 24 % (dp * micro) == 0
        for zero in ((0, 1) if dp > 1 else (0,))
        for recompute in ("none", "full")
    }
    found = candidates(limits)
    assert len(found) == len(set(found)) == len(expected)
    assert {(c.dp, c.tp, c.pp, c.micro, c.zero, c.recompute) for c in found} == expected
    assert all(c.dp * c.micro * c.microbatches == 24 for c in found)


def test_the_order_is_fixed() -> None:
    found = candidates(LIMITS)
    assert list(found) == sorted(found, key=lambda c: (c.tp, c.pp, c.micro, c.zero))
    assert str(found[0]) == "dp64 tp1 pp1 micro1 zero0 recompute=auto"


def test_a_fix_is_honoured() -> None:
    found = candidates(LIMITS, {"tp": 8, "pp": 4, "micro": 2, "zero": 1, "recompute": "auto"})
    assert found == (Candidate(dp=2, tp=8, pp=4, micro=2, microbatches=128, zero=1, recompute="auto"),)


def test_the_largest_microbatch_binds_unless_fixed() -> None:
    limits = Limits(world=1, batch=64, segments=1, tp_sizes=(1,), recomputes=("auto",), max_micro=4)
    assert [c.micro for c in candidates(limits)] == [1, 2, 4]
    assert [c.micro for c in candidates(limits, {"micro": 16})] == [16]


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        ({"tp": 5}, "world 64 is not divisible by tp 5\n  where  fix['tp']\n  fix    use tp 4 or 8"),
        ({"pp": 48}, "world 64 is not divisible by pp 48\n  where  fix['pp']\n  fix    use pp 32 or 64"),
        ({"tp": 16}, "the model cannot be split by tp 16\n  where  fix['tp']\n  fix    use tp 8"),
        (
            {"tp": 8, "pp": 16},
            "world 64 is not divisible by tp 8 x pp 16 = 128\n  where  fix\n  fix    use a world of 128, ",
        ),
        ({"dp": 2, "tp": 2, "pp": 2}, "dp 2 x tp 2 x pp 2 is 8, not the world of 64"),
        ({"micro": 3}, "batch 512 is not divisible by micro 3\n  where  batch\n  fix    use a batch of 510 or 513"),
        ({"tp": 1, "pp": 2, "micro": 32}, "batch 512 is smaller than dp 32 x micro 32 = 1024"),
        ({"dp": 0}, "dp is 0"),
        ({"tp": "8"}, "tp is '8'"),
        ({"zero": 3}, "zero 3 is not possible\n  where  fix['zero']\n  fix    possible: 0, 1"),
        ({"recompute": "some"}, "recompute 'some' is not possible"),
        ({"tq": 8}, "'tq' cannot be fixed\n  where  fix['tq']\n  fix    did you mean 'tp'"),
    ],
)
def test_a_wish_that_cannot_be_met_names_what_is_wrong(fix: dict[str, int | str], message: str) -> None:
    with pytest.raises(PlanError) as error:
        candidates(LIMITS, fix)
    assert message in str(error.value)


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="pp 32 is more than the 10 pieces"):
        candidates(Limits(64, 512, 10, (1, 8)), {"pp": 32})


def test_a_batch_that_no_mesh_divides_is_refused() -> None:
    with pytest.raises(PlanError, match="batch 5 is not divisible by dp x micro of any mesh of world 8") as error:
        candidates(Limits(world=8, batch=5, segments=2, tp_sizes=(1, 2)))
    assert "dp x micro may be 2, 4, 8" in str(error.value)
    assert "use a batch of 4 or 6" in str(error.value)


def test_a_world_that_no_mesh_fills_is_refused() -> None:
    with pytest.raises(PlanError, match="no dp x tp x pp gives a world of 8"):
        candidates(Limits(world=8, batch=8, segments=2, tp_sizes=(1, 2)), {"dp": 1})


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


# ---- search ----

OPTIONS = candidates(Limits(world=16, batch=16, segments=8, tp_sizes=(1, 2, 4), recomputes=("auto",)))


def run(seconds: dict[Candidate, float], looseness: float = 0.8, **extra: object) -> Searched[str]:
    def evaluate(option: Candidate) -> tuple[float, str]:
        if seconds[option] == math.inf:
            raise DoesNotFit(f"{option} does not fit")
        return seconds[option], str(option)

    def bound(option: Candidate) -> float:
        return looseness * (seconds[option] if seconds[option] < math.inf else 1.0)

    return search(OPTIONS, bound, evaluate, **extra)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 9) | st.just(math.inf), min_size=len(OPTIONS), max_size=len(OPTIONS)), st.floats(0, 1))
def test_pruning_finds_what_visiting_all_finds(values: list[float], looseness: float) -> None:
    seconds = dict(zip(OPTIONS, map(float, values), strict=True))
    found = run(seconds, looseness)
    assert found.visited + found.pruned == len(OPTIONS)
    assert len(found.best) + len(found.rejected) <= found.visited
    if min(values) == math.inf:
        assert not found.best
        assert len(found.rejected) == len(OPTIONS)
        return
    best = found.best[0]
    assert best.seconds == min(values)
    assert best.result == str(best.candidate)
    assert found.gap == 0
    assert [f.seconds for f in found.best] == sorted(f.seconds for f in found.best)


def test_a_good_bound_saves_visits() -> None:
    seconds = {option: float(index + 1) for index, option in enumerate(reversed(OPTIONS))}
    found = run(seconds, looseness=1.0)
    assert (found.visited, found.pruned) == (1, len(OPTIONS) - 1)
    assert run(seconds, looseness=1.0, slack=2.5).visited == 3
    assert [f.seconds for f in run(seconds, looseness=1.0, slack=2.5, keep=2).best] == [1.0, 2.0]


def test_equal_times_go_to_the_first() -> None:
    found = run(dict.fromkeys(OPTIONS, 2.0))
    assert [f.candidate for f in found.best] == list(OPTIONS[:3])


def test_a_time_limit_returns_the_best_so_far_with_its_gap() -> None:
    seconds = {option: 100.0 - index for index, option in enumerate(OPTIONS)}
    ticks = itertools.count()
    found = search(
        OPTIONS,
        lambda option: OPTIONS.index(option) / 10,
        lambda option: (seconds[option], None),
        time_limit_s=4.5,
        clock=lambda: float(next(ticks)),
    )
    assert found.visited == 5
    assert found.best[0].seconds == 96.0
    assert found.gap == pytest.approx(1 - 0.5 / 96)


def test_a_bound_that_is_not_optimistic_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="below its bound"):
        run(dict.fromkeys(OPTIONS, 2.0), looseness=1.1)
