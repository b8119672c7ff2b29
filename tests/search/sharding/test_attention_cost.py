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

    The keys of a rank are one tile: with all queries if its first half is not after the reader's, else with the second
    half of them.
    """
    form = AttentionForm(torch.bfloat16, WIDTH, WIDTH, causal=True, ring=True)
    shape = Shape(HEADS, QUERIES, QUERIES * cp, WIDTH, cp)
    device = Cluster.load("dgx-h100").device
    for by_hand in (False, True):
        works = list(attention_works(form, shape, 0, "bf16", device, "", backward, by_hand))
        rows = [_rows(rank, cp) for rank in range(cp)]
        assert works[0].launches == cp
        if by_hand:  # an element is read in bf16 and added in float32; backward, to two results
            moved = sum(rows) / cp * HEADS * WIDTH * (2 + 4 + 4) * (2 if backward else 1)
            assert works[1].nbytes == pytest.approx(moved)


def _rows(rank: int, cp: int) -> int:
    """Return the queries in all tiles of a rank."""
    return sum(QUERIES if other <= rank else QUERIES // 2 for other in range(cp))
