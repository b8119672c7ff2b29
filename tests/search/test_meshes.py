"""Every mesh of a world, and every way to run it, is listed once; impossible constraints are refused by name."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.errors import PlanError
from autoptd.search.meshes import Candidate, MeshLimits, candidates, divisors

LIMITS = MeshLimits(world=64, batch=512, segments=98, tp_sizes=(1, 2, 4, 8), recomputes=("auto",))


def test_every_mesh_is_listed_once() -> None:
    limits = MeshLimits(world=12, batch=24, segments=3, tp_sizes=(1, 2, 4), zeros=(0, 1), recomputes=("none", "full"))
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


def test_samples_that_need_each_other_are_in_one_microbatch() -> None:
    alone = replace(LIMITS, one_microbatch=True, max_micro=4)
    found = candidates(alone)
    assert {c.microbatches for c in found} == {1} and {c.dp * c.micro for c in found} == {512}
    assert {(c.dp, c.tp, c.pp) for c in found} == {(c.dp, c.tp, c.pp) for c in candidates(LIMITS)}
    with pytest.raises(PlanError):
        candidates(alone, {"dp": 8, "micro": 2})


def test_a_fix_is_honoured() -> None:
    found = candidates(LIMITS, {"tp": 8, "pp": 4, "micro": 2, "zero": 1, "recompute": "auto"})
    assert found == (Candidate(dp=2, tp=8, pp=4, micro=2, microbatches=128, zero=1, recompute="auto"),)


def test_the_largest_microbatch_binds_unless_fixed() -> None:
    limits = MeshLimits(world=1, batch=64, segments=1, tp_sizes=(1,), recomputes=("auto",), max_micro=4)
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
        (
            {"tp": 1, "pp": 4, "micro": 31, "dp": 16},
            "batch 500 is not divisible by dp 16 x micro 31 = 496\n  where  batch\n  fix    use a batch of 496 or 992",
        ),
        ({"tp": 1, "pp": 2, "micro": 32}, "batch 512 is smaller than dp 32 x micro 32 = 1024"),
        ({"dp": 0}, "dp is 0"),
        ({"tp": "8"}, "tp is '8'"),
        ({"zero": 3}, "zero 3 is not possible\n  where  fix['zero']\n  fix    possible: 0, 1"),
        ({"recompute": "some"}, "recompute 'some' is not possible"),
        ({"tq": 8}, "'tq' cannot be fixed\n  where  fix['tq']\n  fix    did you mean 'tp'"),
    ],
)
def test_an_impossible_constraint_names_what_is_wrong(fix: dict[str, int | str], message: str) -> None:
    with pytest.raises(PlanError) as error:
        candidates(replace(LIMITS, batch=500) if "batch 500" in message else LIMITS, fix)
    assert message in str(error.value)


def test_microbatches_of_averaged_losses_are_equal() -> None:
    equal = replace(LIMITS, uneven=False)
    with pytest.raises(PlanError, match="batch 512 is not divisible by micro 3"):
        candidates(equal, {"micro": 3})
    assert all(c.dp * c.micro * c.microbatches == 30 for c in candidates(replace(equal, batch=30)))


@given(st.integers(1, 200), st.sampled_from([1, 2, 3, 6, 12]), st.integers(1, 16))
def test_all_ranks_have_as_many_microbatches(batch: int, dp: int, most: int) -> None:
    """The runtime cuts shares in the same way, and no microbatch is larger than their number asks for."""
    limits = MeshLimits(world=12, batch=batch, segments=12, tp_sizes=(1,), recomputes=("auto",), max_micro=most)
    if batch < dp:
        return
    found = [c for c in candidates(limits) if c.dp == dp]
    assert found or dp > 1
    for c in found:
        shares = [len(share) for share in torch.arange(batch).tensor_split(dp)]
        assert {-(-share // c.micro) for share in shares} == {c.microbatches}
        assert c.micro == -(-max(shares) // c.microbatches) <= most
    sizes = {c.micro for c in found}
    if batch % dp == 0:
        assert sizes >= {n for n in divisors(batch // dp) if n <= most}


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="pp 32 is more than the 10 segments"):
        candidates(MeshLimits(64, 512, 10, (1, 8)), {"pp": 32})


def test_a_batch_that_no_mesh_divides_is_refused() -> None:
    limits = MeshLimits(world=8, batch=5, segments=2, tp_sizes=(1, 2), uneven=False)
    with pytest.raises(PlanError, match="batch 5 is not divisible by dp x micro of any mesh of world 8") as error:
        candidates(limits)
    assert "dp x micro may be 2, 4, 8" in str(error.value)
    assert "use a batch of 4 or 6" in str(error.value)
    found = candidates(replace(limits, uneven=True))
    assert {(c.dp, c.micro, c.microbatches) for c in found} == {(2, 3, 1), (4, 2, 1)}


@pytest.mark.parametrize(
    ("options", "fix", "said"),
    [
        (
            {"schedules": ("zero-bubble-v",)},
            {"pp": 2},
            "4 stages or more, but it can be cut into 3",
        ),
        ({"schedules": ("interleaved",), "virtuals": (2, 3)}, {}, "interleaved cuts the model into 4 stages or more"),
        ({"schedules": ("interleaved",), "virtuals": (2, 3), "segments": 8, "batch": 1}, {"pp": 2}, "in groups of pp"),
        ({"eps": (3,)}, {}, "ep 3 fits no mesh"),
        ({"pool_ranks": (1, 1)}, {"tp": 2}, "no mesh with tp 2 has stages of one type of device each"),
    ],
)
def test_what_no_schedule_allows_is_not_blamed_on_the_batch(
    options: dict[str, Any], fix: dict[str, int | str], said: str
) -> None:
    limits = replace(MeshLimits(world=2, batch=8, segments=3, tp_sizes=(1, 2)), **options)
    with pytest.raises(PlanError, match=said):
        candidates(limits, fix)


def test_a_world_that_no_mesh_fills_is_refused() -> None:
    with pytest.raises(PlanError, match="no dp x tp x pp gives a world of 8"):
        candidates(MeshLimits(world=8, batch=8, segments=2, tp_sizes=(1, 2)), {"dp": 1})


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


# ---- requested dimensions ----

WIDE = MeshLimits(world=16, batch=32, segments=7, tp_sizes=(1, 2, 4), zeros=(1, 0, 2, 3), recomputes=("auto",))


def test_every_way_is_listed_once() -> None:
    """All dimensions together, against the definition."""
    limits = replace(
        WIDE,
        cps=(1, 2, 4),
        schedules=("1f1b", "interleaved", "zero-bubble"),
        virtuals=(1, 2, 3),
        shards=(0, 2, 4),
        max_micro=4,
    )
    expected = set()
    counts = itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16))
    for cp, tp, pp, dp, micro in counts:
        if cp * tp * pp * dp != 16 or 32 % (dp * micro) or micro > 4 * cp:
            continue
        m = 32 // dp // micro
        for zero, shards in itertools.product((0, 1, 2, 3), (0, 2, 4)):
            if dp * cp == 1 and zero != 1:
                continue  # the first level represents all
            if shards and (zero == 0 or shards >= dp * cp or dp * cp % shards):
                continue
            ways = [("1f1b", 1)]
            if pp > 1:
                ways += [("zero-bubble", 1)]
                ways += [("interleaved", v) for v in (2, 3) if pp * v <= 7 and m % pp == 0]
            expected |= {(cp, tp, pp, dp, micro, zero, shards, *way) for way in ways}
    found = candidates(limits)
    ways = [(c.cp, c.tp, c.pp, c.dp, c.micro, c.zero, c.shards, c.schedule, c.virtual) for c in found]
    assert len(ways) == len(set(ways)) and set(ways) == expected
    assert all(c.dp * c.micro * c.microbatches == 32 and c.recompute == "auto" for c in found)
    assert {c.virtual for c in found} == {1, 2, 3} and {c.cp for c in found} == {1, 2, 4}


def test_fixed_groups_of_shards_are_obeyed_or_refused() -> None:
    found = candidates(replace(WIDE, cps=(1, 2, 4), shards=(4,)))
    assert found and all(c.shards == 4 and c.zero and c.dp * c.cp % 4 == 0 for c in found)
    assert {c.dp * c.cp for c in found} == {4, 8, 16} and any(c.dp < 4 for c in found)
    for choices in ({"dp": 2}, {"dp": 4, "zero": 0}, {"dp": 1, "zero": 1}):
        with pytest.raises(PlanError, match="groups of 4 shards fit no mesh with"):
            candidates(replace(WIDE, shards=(4,)), choices)
    with pytest.raises(PlanError, match="groups of 3 shards fit no mesh with dp 4"):
        candidates(replace(WIDE, shards=(3,)), {"dp": 4})


def test_a_fixed_schedule_is_kept_without_a_pipeline() -> None:
    found = candidates(replace(WIDE, schedules=("zero-bubble",)), {"pp": 1})
    assert found and {c.schedule for c in found} == {"zero-bubble"}
    both = candidates(replace(WIDE, schedules=("1f1b", "zero-bubble")), {"pp": 1})
    assert {c.schedule for c in both} == {"1f1b"}, "they are one where there is one stage"


def test_fixed_chunks_are_listed_whatever_the_microbatches() -> None:
    """The schedule raises the refusal itself if `micro` is fixed."""
    chunked = replace(WIDE, schedules=("interleaved",), virtuals=(2,))
    assert {c.microbatches for c in candidates(chunked, {"pp": 2, "tp": 4, "micro": 16})} == {1}
    assert all(c.microbatches % c.pp == 0 for c in candidates(chunked))
    assert all(2 * c.pp <= 7 for c in candidates(chunked))


def test_the_largest_microbatch_grows_with_cp() -> None:
    found = candidates(replace(WIDE, cps=(1, 2), max_micro=2))
    assert {cp: max(c.micro for c in found if c.cp == cp) for cp in (1, 2)} == {1: 2, 2: 4}


def test_types_of_device_are_whole_ranks_in_any_order() -> None:
    found = candidates(replace(WIDE, pool_ranks=(12, 4)))
    assert all(len(c.pools) == c.pp for c in found)
    stage = {c: c.dp * c.tp * c.cp for c in found}
    assert all((c.pools.count(0) * stage[c], c.pools.count(1) * stage[c]) == (12, 4) for c in found)
    assert {c.pools for c in found if c.pp == 4} == {(0, 0, 0, 1), (1, 0, 0, 0)}
    assert {c.pp for c in found} == {4}, "two ranks of 8 would be on both types; 8 and 16 are more than the segments"


def test_what_is_unusual_is_in_the_name() -> None:
    usual = Candidate(2, 4, 2, 1, 16, 1, "auto")
    assert str(usual) == "dp2 tp4 pp2 micro1 zero1 recompute=auto"
    other = usual._replace(cp=2, schedule="zero-bubble", shards=4, pools=(1, 0))
    assert str(other) == f"{usual} cp2 shards4 pools1,0 zero-bubble"
    assert str(usual._replace(schedule="interleaved", virtual=3)) == f"{usual} virtual3"
