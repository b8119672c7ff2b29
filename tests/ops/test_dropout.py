"""Dropout masks depend on the element only, not on slice, microbatch or chunk; and they are good random numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from autoptd.ops import dropout as randomness
from autoptd.ops.axis.slices import Slice, own_slice
from autoptd.ops.dropout import FIRST_DIM, MICROBATCH, DimSlice, DropoutKey, SamplePosition, Samples
from autoptd.ops.group import SingleRankGroup
from autoptd.ops.tp_axis import Axis

CPU = torch.device("cpu")


def mask(
    shape: Sequence[int],
    p: float = 0.3,
    rng: DropoutKey | None = None,
    samples: SamplePosition = FIRST_DIM,
    parts: Sequence[DimSlice] = (),
    key: str = "0.1",
) -> Tensor:
    return (rng or DropoutKey(1)).elements(shape, key, samples, parts, CPU).keep(p)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slice_is_the_whole_s(dim: int, groups: int, ranks: int) -> None:
    whole = mask((5, 24, 12))
    for rank in range(ranks):
        local = own_slice(whole, dim, groups, ranks, rank)
        assert torch.equal(mask(local.shape, parts=[Slice(dim, groups, ranks, rank)]), local)
        assert torch.equal(mask(local.shape, parts=[Slice(dim - 3, groups, ranks, rank)]), local)


def test_a_slice_of_a_slice_is_the_whole_s() -> None:
    """A sequence split over two axes: the inner split is listed first."""
    whole = mask((2, 24, 5))
    for outer, inner in itertools.product(range(3), range(2)):
        local = own_slice(own_slice(whole, 1, 2, 3, outer), 1, 1, 2, inner)
        assert torch.equal(mask(local.shape, parts=[Slice(1, 1, 2, inner), Slice(1, 2, 3, outer)]), local)


def test_an_axis_says_which_slice_is_its_own() -> None:
    assert Axis(SingleRankGroup()).part(2, groups=3) == Slice(2, 3, 1, 0)


@pytest.mark.parametrize(("dim", "outer", "inner"), [(0, 1, 1), (0, 1, 3), (1, 4, 1), (1, 4, 3), (2, 1, 2)])
def test_a_microbatch_is_part_of_the_batch(dim: int, outer: int, inner: int) -> None:
    """Samples may be at the head of a dim, at its end, or between other factors."""
    shape = [4, 5, 6]
    shape[dim] = outer * 8 * inner
    where, at = Samples(dim, outer, inner), dim + 1

    def apart(x: Tensor) -> Tensor:
        return x.unflatten(dim, (outer, -1, inner))

    whole = apart(mask(shape, samples=where))
    for first, count in ((0, 3), (3, 4), (7, 1)):
        shape[dim] = outer * count * inner
        for rng in (
            DropoutKey(1, sample=first),
            DropoutKey(1, share=torch.tensor(first)),
            DropoutKey(1, 0, 3, first - 3),
        ):
            assert torch.equal(apart(mask(shape, rng=rng, samples=where)), whole.narrow(at, first, count))


def test_samples_and_a_slice_in_one_dim() -> None:
    """A dim (s b), of which each rank has a part of s."""
    whole = mask((8 * 3, 5), samples=Samples(0, outer=8))
    local = mask((4 * 3, 5), samples=Samples(0, outer=8), parts=[Slice(0, 1, 2, 1)])
    assert torch.equal(local, whole[12:])


def test_where_no_dim_counts_samples() -> None:
    later = DropoutKey(1, sample=8)
    assert torch.equal(mask((40, 7), samples=None), mask((40, 7), samples=None, rng=later))
    assert not torch.equal(mask((40, 7), samples=MICROBATCH), mask((40, 7), samples=MICROBATCH, rng=later))
    assert mask(()).shape == () and mask((3, 0)).shape == (3, 0)


def test_work_in_pieces_is_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mask((7, 11, 13))
    elements = DropoutKey(1).elements((7, 11, 13), "0.1", FIRST_DIM, (), CPU)
    assert torch.equal(elements.narrow(-2, 3, 9).keep(0.3), whole[:, 3:9])
    for at_once in (1, 40):
        monkeypatch.setitem(randomness._ELEMENTS_AT_ONCE, "cpu", at_once)
        assert torch.equal(mask((7, 11, 13)), whole)


def test_the_arithmetic_is_that_of_the_published_generators() -> None:
    """First outputs of SplitMix64 from state 0 (its authors' test value); both mixers against plain integers."""
    zero = torch.zeros((), dtype=torch.int64)
    first = randomness._fold(zero, zero)
    assert int(first) & (2**64 - 1) == 0xE220A8397B1DCDAF

    def lowbias(x: int, high: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D + high & 0xFFFFFFFF
        return (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF

    rows, columns = (torch.randint(-(2**31), 2**31, (2, 50), dtype=torch.int32) for _ in range(2))
    found = randomness._mixed(rows[0].unsqueeze(1), rows[1].unsqueeze(1), columns[0])
    for i, j in itertools.product(range(50), range(0, 50, 7)):
        x = (int(rows[0, i]) ^ int(columns[0, j])) & 0xFFFFFFFF
        assert int(found[i, j]) & 0xFFFFFFFF == lowbias(x, int(rows[1, i]) & 0xFFFFFFFF)


# ---- statistics; the bounds are five standard deviations ----

BIG = (64, 128, 64)
SIGNS = math.prod(BIG)


def signs(**given: object) -> Tensor:
    """Return the mask as ±1 with mean 0, in float64."""
    return mask(BIG, 0.5, **given).double() * 2 - 1  # type: ignore[arg-type]


def correlation(a: Tensor, b: Tensor) -> float:
    """Return the correlation in standard deviations."""
    return abs(float((a * b).sum())) / math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(p: float) -> None:
    kept = mask(BIG, p).double()
    deviation = math.sqrt(p * (1 - p))
    assert abs(float(kept.mean()) - (1 - p)) < 5 * deviation / math.sqrt(SIGNS)
    for dim in range(3):  # and along every dim
        means = kept.movedim(dim, 0).flatten(1).mean(1)
        assert float((means - (1 - p)).abs().max()) < 5.5 * deviation / math.sqrt(SIGNS / BIG[dim])


def test_neighbours_samples_steps_ops_and_seeds_are_unrelated() -> None:
    x = signs()
    for dim in range(3):
        for apart in (1, 2, 3, 32):
            assert correlation(x.narrow(dim, apart, BIG[dim] - apart), x.narrow(dim, 0, BIG[dim] - apart)) < 5
    others = [DropoutKey(1, step=1), DropoutKey(1, step=2), DropoutKey(2), DropoutKey(1, sample=64)]
    for other in [*(signs(rng=rng) for rng in others), signs(key="0.2"), signs(key="1.1"), signs(samples=None)]:
        assert correlation(x, other) < 5


def test_no_dim_is_a_pattern_laid_over_another() -> None:
    """The product of four signs at the corners of a rectangle is 1 if the mask of one row is another row's, shifted."""
    x = signs()
    for a, b in ((0, 1), (0, 2), (1, 2)):
        for step in (1, 16):
            moved = x.roll(step, a)
            assert correlation(x * moved, (x * moved).roll(1, b)) < 5


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_runs_of_eight_are_all_equally_frequent(dim: int) -> None:
    bits = mask(BIG, 0.5).movedim(dim, 2).unflatten(2, (-1, 8)).long()
    counts = (bits * 2 ** torch.arange(8)).sum(-1).flatten().bincount(minlength=256).double()
    expected = SIGNS / 8 / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def test_masks_of_different_probabilities_are_nested() -> None:
    """One number per element is compared with p: elements dropped at 0.1 are dropped at 0.2."""
    assert not (mask(BIG, 0.2) & ~mask(BIG, 0.1)).any()
    assert mask(BIG, 1e-12).all()
