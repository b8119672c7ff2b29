"""Collectives: sums done by hand, published measurements, and what must hold for any cluster."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.cost_models.cluster import Cluster, Link
from autoptd.cost_models.collectives import COLLECTIVES, collective_s, crossings, p2p_s
from autoptd.errors import ClusterError

DEVICE = Cluster.load("dgx-h100").device
MB = 1_000_000


def two_levels(node: int = 8, intra: float = 300e9, inter: float = 25e9, world: int | None = None) -> Cluster:
    levels = (
        Link(name="in", ranks=node, bytes_per_s=intra, latency_s=2e-6),
        Link(name="out", ranks=world, bytes_per_s=inter, latency_s=10e-6),
    )
    return Cluster(name="two", device=DEVICE, levels=levels)


TWO = two_levels()


def test_all_reduce_by_hand():
    # 8 ranks, 300 MB: 14 steps of 2 us + 37.5 MB / 300 GB/s = 14 * (2 + 125) us
    assert collective_s("all_reduce", 300 * MB, TWO, 8, 1) == pytest.approx(14 * 127e-6)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_one_pass_by_hand(name: str):
    assert collective_s(name, 300 * MB, TWO, 8, 1) == pytest.approx(7 * 127e-6)
    # tp 2: one hop, half of it
    assert collective_s(name, 300 * MB, TWO, 2, 1) == pytest.approx(2e-6 + 150 * MB / 300e9)


def test_data_parallel_group_has_its_own_nic():
    # 4 members, one per node (stride 8): 3 hops of 10 us, 3/4 of 100 MB through one NIC of 25 GB/s
    assert collective_s("all_gather", 100 * MB, TWO, 4, 8) == pytest.approx(30e-6 + 75 * MB / 25e9)
    assert collective_s("all_gather", 100 * MB, TWO, 4, 64) == collective_s("all_gather", 100 * MB, TWO, 4, 8)


def test_whole_nodes_use_all_nics():
    # 16 ranks on 2 nodes: 14 hops inside and 2 between, less the quickest; 8 NICs = 200 GB/s < NVLink's 300
    assert collective_s("all_gather", 160 * MB, TWO, 16, 1) == pytest.approx(13 * 2e-6 + 2 * 10e-6 + 150 * MB / 200e9)
    # with NICs of 50 GB/s, 400 GB/s leave the node: NVLink is the slowest
    fast = two_levels(inter=50e9)
    assert collective_s("all_gather", 160 * MB, fast, 16, 1) == pytest.approx(46e-6 + 150 * MB / 300e9)


def test_two_members_per_node_use_two_nics():
    # dp 4 with stride 4: ranks 0 4 | 8 12, 2 hops inside, 2 between, less one inside; 2 NICs
    assert collective_s("all_gather", 100 * MB, TWO, 4, 4) == pytest.approx(2e-6 + 20e-6 + 75 * MB / 50e9)


def test_uneven_nodes_are_as_slow_as_the_emptiest():
    # 12 ranks: 8 on the first node, 4 on the second, so 4 NICs
    (inside, between) = crossings(TWO, 12, 1)
    assert (inside.hops, between.hops, between.lanes) == (10, 2, 4)
    assert collective_s("all_gather", 120 * MB, TWO, 12, 1) == pytest.approx(9 * 2e-6 + 20e-6 + 110 * MB / 100e9)


def test_all_to_all_by_hand():
    # 8 ranks hold 80 MB together: each sends 7 partners 1.25 MB
    assert collective_s("all_to_all", 80 * MB, TWO, 8, 1) == pytest.approx(7 * 2e-6 + 7 * 1.25 * MB / 300e9)
    # 16 ranks hold 256 MB: 16 MB each, 1 MB per partner, 8 partners over the rank's own NIC
    assert collective_s("all_to_all", 256 * MB, TWO, 16, 1) == pytest.approx(7 * 2e-6 + 8 * 10e-6 + 8 * MB / 25e9)


def test_broadcast_by_hand():
    assert collective_s("broadcast", 300 * MB, TWO, 8, 1) == pytest.approx(7 * 2e-6 + 1e-3)


def test_message_by_hand():
    assert p2p_s(25 * MB, TWO, 8) == pytest.approx(10e-6 + 1e-3)
    assert p2p_s(30 * MB, TWO, 4) == pytest.approx(2e-6 + 1e-4)
    assert p2p_s(30 * MB, TWO, 4, first_rank=4) == p2p_s(30 * MB, TWO, 8), "rank 4 to rank 8 leaves the node"
    assert p2p_s(30 * MB, TWO, 0) == 0


def test_three_levels():
    levels = (*two_levels(world=32).levels, Link(name="far", bytes_per_s=5e9, latency_s=50e-6))
    cluster = Cluster(name="three", device=DEVICE, levels=levels)
    # 64 ranks: 64 - 8 hops inside nodes, 8 - 2 between nodes, 2 far; 32 members leave by 5 GB/s each = 160 GB/s
    assert [crossing.hops for crossing in crossings(cluster, 64, 1)] == [56, 6, 2]
    expected = 55 * 2e-6 + 6 * 10e-6 + 2 * 50e-6 + 63 * MB / 160e9
    assert collective_s("all_gather", 64 * MB, cluster, 64, 1) == pytest.approx(expected)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_rank_is_free_and_nothing_falls_through(name: str):
    assert collective_s(name, 100 * MB, TWO, 1, 1) == 0
    assert collective_s(name, 0, TWO, 2, 1) == pytest.approx(4e-6 if name == "all_reduce" else 2e-6)
    with pytest.raises(ValueError):
        collective_s(name, -1, TWO, 2, 1)
    with pytest.raises(ValueError):
        collective_s(name, 1, TWO, 0, 1)


def test_unknown_collective():
    with pytest.raises(ValueError, match=r"'allreduce'.*all_reduce"):
        collective_s("allreduce", 1, TWO, 1, 1)


def test_group_larger_than_the_cluster():
    with pytest.raises(ClusterError, match="32 ranks"):
        collective_s("all_gather", MB, two_levels(world=16), 32, 1)
    with pytest.raises(ClusterError, match="outside"):
        p2p_s(MB, two_levels(world=16), 8, first_rank=8)


# Bekman, Machine Learning Engineering (at 744d01e), network: bus GB/s = (n - 1)/n (all-reduce: twice) V / t
PUBLISHED = [
    ("dgx-a100-80gb", "all_reduce", 8, 2**29, 222.72),
    ("dgx-a100-80gb", "all_reduce", 8, 2**31, 231.41),
    ("dgx-h200", "all_gather", 8, 2**34, 361.4),
    ("dgx-h200", "reduce_scatter", 8, 2**34, 362.9),
    ("dgx-h200", "all_reduce", 32, 2**32, 364.87),
    ("dgx-b200", "all_reduce", 32, 2**29, 326.9),
    ("dgx-b200", "all_reduce", 32, 2**31, 372.42),
]


@pytest.mark.parametrize(("cluster", "name", "ranks", "nbytes", "bus"), PUBLISHED)
def test_large_collectives_agree_with_published_ones(cluster: str, name: str, ranks: int, nbytes: int, bus: float):
    passes = 2 if name == "all_reduce" else 1
    predicted = passes * (ranks - 1) / ranks * nbytes / collective_s(name, nbytes, Cluster.load(cluster), ranks) / 1e9
    assert predicted == pytest.approx(bus, rel=0.08)


GROUPS = st.tuples(st.integers(1, 64), st.sampled_from([1, 2, 3, 4, 8, 16]))
RATES = st.floats(1e9, 1e12)


@settings(deadline=None)
@given(st.sampled_from(sorted(COLLECTIVES)), GROUPS, st.integers(0, 10**10), RATES, RATES, st.floats(1, 10))
def test_more_is_never_slower(
    name: str, group: tuple[int, int], nbytes: int, intra: float, inter: float, faster: float
):
    base = collective_s(name, nbytes, two_levels(intra=intra, inter=inter), *group)
    assert collective_s(name, nbytes, two_levels(intra=intra * faster, inter=inter), *group) <= base * (1 + 1e-12)
    assert collective_s(name, nbytes, two_levels(intra=intra, inter=inter * faster), *group) <= base * (1 + 1e-12)
    assert collective_s(name, nbytes * 2, two_levels(intra=intra, inter=inter), *group) >= base


@settings(deadline=None)
@given(GROUPS, st.integers(1, 10**10))
def test_all_reduce_is_reduce_scatter_then_all_gather(group: tuple[int, int], nbytes: int):
    both = collective_s("reduce_scatter", nbytes, TWO, *group) + collective_s("all_gather", nbytes, TWO, *group)
    assert collective_s("all_reduce", nbytes, TWO, *group) == pytest.approx(both)


@given(GROUPS)
def test_every_rank_has_one_edge_of_the_ring_and_reaches_all(group: tuple[int, int]):
    ranks, stride = group
    path = crossings(TWO, ranks, stride)
    assert sum(crossing.hops for crossing in path) == (ranks if ranks > 1 else 0)
    assert sum(crossing.partners for crossing in path) == ranks - 1
