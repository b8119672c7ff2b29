"""Dispatch of rows to experts: merged copies by hand, the fullest rank, and measured times."""

from __future__ import annotations

import json
from math import sqrt

import pytest

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.dispatch import BIAS, MEDIAN, QUANTILE, dispatch_s, fullest, merged_s, reached, spread
from benchmarks.dispatch import BAR, DATA, errors

H100 = Cluster.load("dgx-h100")


def test_a_token_reaches_the_ranks_of_its_experts() -> None:
    """Two of 4 experts on 2 ranks, by hand. The second expert is on the first one's rank with probability 1/3."""
    assert reached(2, 4, 2) == pytest.approx(1 + 2 / 3)
    assert reached(4, 4, 2) == pytest.approx(2)  # an expert a rank
    assert reached(1, 4, 2) == 1
    assert reached(2, 4, 1.5) == pytest.approx((1 + 5 / 3) / 2)


def test_merged_rows_within_a_node_and_between_nodes() -> None:
    """All 8 experts of 8 ranks by hand, so that each token goes to each rank: 7 of 8 copies leave it over NVLink."""
    tokens, nbytes = 4096, 14336.0
    inner, outer = H100.levels
    alone = merged_s(tokens, nbytes, 8, 8, H100, 8)
    assert alone == pytest.approx(tokens * nbytes * 7 / inner.sustained_bytes_per_s, rel=0.02)
    between = merged_s(tokens, nbytes, 16, 16, H100, 16)  # one copy crosses to the other node
    sent = {level: n * tokens * nbytes / level.sustained_bytes_per_s for level, n in ((inner, 14), (outer, 1))}
    assert between == pytest.approx(max(sent.values()), rel=0.02)


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_merged_rows_never_take_longer_than_all_rows(ranks: int) -> None:
    merged, rows = (dispatch_s(how, 4096, 14336, 256, 8, H100, ranks) for how in ("merged", "rows"))
    assert merged < rows
    assert dispatch_s("merged", 8192, 14336, 256, 8, H100, ranks) > merged


def test_measured_dispatch() -> None:
    for curve in json.loads(DATA.read_text("utf-8")):
        found = sorted(map(abs, errors(curve).values()))
        assert found[len(found) // 2 - 1] <= BAR, curve["dispatcher"]


def test_the_spread_of_experts() -> None:
    """The hazards from a table of the normal distribution: 2 of 8 lie beyond 0.6745, where its density is 0.3178; 8 of
    128 beyond 1.5341, where it is 0.1230."""
    assert spread(8, 2) == pytest.approx(BIAS * 0.3178 / 0.25, rel=1e-3)
    assert spread(128, 8) == pytest.approx(BIAS * 0.1230 / 0.0625, rel=1e-3)
    assert spread(8, 8) == 0


def test_the_fullest_rank() -> None:
    """The median by hand: that of the larger of two normal variables is the quantile sqrt(1/2) of one: 0.545."""
    assert fullest(8, 64, 8, "balanced") == fullest(1, 64, 8, "natural") == fullest(2, 2, 2, "natural") == 1
    assert fullest(2, 2, 1, "natural") == pytest.approx(1 + 0.545 * BIAS * 0.3989 / 0.5, rel=1e-3)
    assert fullest(2, 8, 4, "natural") - 1 == pytest.approx((fullest(2, 2, 1, "natural") - 1) / sqrt(4))
    order = (fullest(8, 64, 8, "natural", QUANTILE), fullest(8, 64, 8, "natural", MEDIAN), fullest(4, 32, 4, "natural"))
    assert order[0] > order[1] > order[2]
