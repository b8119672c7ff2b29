"""Boxes of a shard cover every element once, at its place, for any shape, range and split."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.layout.placements import B, Split
from autoptd.layout.regions import regions
from autoptd.ops.axis.slices import own_slice


@st.composite
def shards(draw: st.DrawFn) -> tuple[tuple[int, ...], Split | None, int, int, list[int]]:
    """Draw a whole shape, its split, and the borders of the shards of its local tensor."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    ranks, rank, split = 1, 0, None
    if shape and draw(st.booleans()):
        dim, groups = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
        ranks = draw(st.integers(2, 3))
        rank = draw(st.integers(0, ranks - 1))
        shape[dim] *= groups * ranks
        split = Split(dim, groups)
    elements = math.prod(shape) // ranks
    borders = sorted(draw(st.lists(st.integers(0, elements), max_size=3)))
    return tuple(shape), split, ranks, rank, [0, *borders, elements]


@given(shards())
def test_shards_put_every_element_in_its_place(case: tuple[tuple[int, ...], Split | None, int, int, list[int]]) -> None:
    shape, split, ranks, rank, borders = case
    whole = torch.arange(math.prod(shape)).view(shape)
    local = own_slice(whole, split.dim, split.groups, ranks, rank) if split else whole
    flat = local.reshape(-1)
    found = torch.full(shape, -1)
    for start, stop in pairwise(borders):
        mine = regions(shape, split or B, ranks, rank, start, stop)
        assert len(mine) <= max(1, 2 * len(shape) - 1) * (split.groups if split else 1)
        for region in mine:
            place = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
            assert (found[place] == -1).all()
            found[place] = region.of(flat[start:stop])
    expected = torch.where(torch.isin(whole, flat), whole, -1)
    assert torch.equal(found, expected)


def test_the_picture_of_the_docstring() -> None:
    mine = regions((4, 3), B, 1, 0, 2, 11)
    assert [(r.offsets, r.sizes) for r in mine] == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
