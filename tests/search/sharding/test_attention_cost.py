"""Kernels of ring attention: how many there are, and the rows that are merged."""

from __future__ import annotations

import pytest
import torch

from autoptd.cost_models.cluster import Cluster
from autoptd.passes.analysis.attention import AttentionForm
from autoptd.search.sharding.attention_cost import Shape, attention_works

HEADS, QUERIES, WIDTH = 4, 512, 64


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_tiles_of_a_causal_ring(cp: int, backward: bool) -> None:
    """Count, for each rank, the tiles that hold scores below the diagonal; a rank has halves r and 2 cp - 1 - r.

    By hand, the keys of a rank are one tile: with all queries if its first half is not after the reader's, else with
    the second half of them.
    """
    form = AttentionForm(torch.bfloat16, WIDTH, WIDTH, causal=True, ring=True)
    shape = Shape(HEADS, QUERIES, QUERIES * cp, WIDTH, cp)
    device = Cluster.load("dgx-h100").device
    for by_hand in (False, True):
        works = list(attention_works(form, shape, 0, "bf16", device, "", backward, by_hand))
        tiles, rows = zip(*(_tiles(rank, cp, by_hand) for rank in range(cp)), strict=True)
        assert len(set(tiles)) == 1 and works[0].launches == tiles[0]
        if by_hand:  # an element is read in bf16 and added in float32; backward, to two results
            moved = sum(rows) / cp * HEADS * WIDTH * (2 + 4 + 4) * (2 if backward else 1)
            assert works[1].nbytes == pytest.approx(moved)


def _tiles(rank: int, cp: int, by_hand: bool) -> tuple[int, int]:
    """Return (number of tiles of a rank, queries in all of them)."""
    half, mine = QUERIES // 2, (rank, 2 * cp - 1 - rank)
    if by_hand:
        return cp, sum(QUERIES if other <= rank else half for other in range(cp))
    pairs = [(q, k) for q in mine for k in range(2 * cp) if k <= q]
    return len(pairs), half * len(pairs)
