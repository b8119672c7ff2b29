"""Collectives: costs by hand, measured curves, NCCL's choices, and properties that hold for any cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.cost_models.cluster import Cluster, InSwitch, Link
from autoptd.cost_models.collectives import (
    COLLECTIVES,
    algorithm,
    all_reduce_between_s,
    candidate_algorithms,
    collective_s,
    lanes_between,
    message_s,
    p2p_s,
    sum_in_shards_s,
)
from autoptd.cost_models.nccl import Algorithm
from autoptd.cost_models.paths import crossings, is_even
from autoptd.cost_models.wiring import parallel_rings
from autoptd.errors import ClusterError
from benchmarks.collectives import DATA, Curve, cluster_of, read

DEVICE = Cluster.load("dgx-h100").device
MB = 1_000_000


def two_levels(node: int = 8, intra: float = 300e9, inter: float = 25e9, world: int | None = None) -> Cluster:
    levels = (
        Link(name="in", ranks=node, bytes_per_s=intra, latency_s=2e-6, protocols=("plain",)),
        Link(name="out", ranks=world, bytes_per_s=inter, latency_s=10e-6, protocols=("plain",)),
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
    ((inside, between),) = crossings(TWO, 12, 1)
    assert (inside.hops, between.hops, between.lanes) == (10, 2, 4)
    assert collective_s("all_gather", 120 * MB, TWO, 12, 1) == pytest.approx(9 * 2e-6 + 20e-6 + 110 * MB / 100e9)


def test_groups_spread_unevenly_over_nodes():
    four = two_levels(node=4)
    # 6 ranks are 4 and 2: 4 hops inside, 2 between, less one inside; 2 NICs = 50 GB/s
    six = pytest.approx(3 * 2e-6 + 20e-6 + 100 * MB / 50e9)
    assert collective_s("all_gather", 120 * MB, four, 6, 1) == six
    # the next six ranks are 2 and 4: the same
    assert collective_s("all_gather", 120 * MB, four, 6, 1, world=12) == six
    # all_to_all: one of the two sends 20 / 6 MB to each of four partners by its own NIC
    assert collective_s("all_to_all", 120 * MB, four, 6, 1) == pytest.approx(
        3 * 2e-6 + 4 * 10e-6 + 4 * 20 / 6 * MB / 25e9
    )
    # 3 ranks: the first three are in a node, of the next three one is alone: 2 hops between, 1 NIC
    inside, across = pytest.approx(2 * 2e-6 + 20 * MB / 300e9), pytest.approx(20e-6 + 20 * MB / 25e9)
    assert (
        collective_s("all_gather", 30 * MB, four, 3, 1) == collective_s("all_gather", 30 * MB, four, 3, 1, 3) == inside
    )
    assert collective_s("all_gather", 30 * MB, four, 3, 1, world=6) == across
    # every third rank: 0 3 | 6 of the first node, 1 | 4 7, 2 | 5 8 ... over nodes of 4: one member is alone at times
    assert collective_s("all_gather", 30 * MB, four, 3, 3) == pytest.approx(2 * 10e-6 + 20 * MB / 25e9)


def test_uneven_groups_share_nics():
    # nodes of 4 with one NIC of 20 GB/s: of 6 ranks in a node and a half, 2 leave the second node, 10 GB/s each
    inner, outer = two_levels(node=4).levels
    outer = outer.model_copy(update={"bytes_per_s": 5e9, "port_bytes_per_s": 20e9})
    nodes = TWO.model_copy(update={"name": "one NIC", "levels": (inner, outer)})
    assert collective_s("all_gather", 120 * MB, nodes, 6, 1) == pytest.approx(3 * 2e-6 + 20e-6 + 100 * MB / 20e9)
    # two groups of 3 side by side, 2 apart: 0 2 | 4 and 1 3 | 5, so that each node has two members that leave it
    # through a NIC: four share it in the first node, two in the second, 10 GB/s a group in either
    (path,) = crossings(nodes, 3, 2)
    assert [(c.hops, c.lanes, c.partners, c.lane_bytes_per_s) for c in path] == [
        (1, 1, 1, 300e9),
        (2, 1, 2, 10e9),
    ]


def test_sums_among_ranks_that_are_named():
    # first and last of four stages of two ranks, on nodes of 4: 0 6 and 1 7, two all-reduces by NICs of their own
    four = two_levels(node=4)
    assert all_reduce_between_s(25 * MB, four, (0, 6), 2) == pytest.approx(2 * 10e-6 + 1e-3)
    # three holders: 0 2 | 6
    assert all_reduce_between_s(30 * MB, four, (0, 2, 6), 2) == pytest.approx(2 * 20e-6 + 40 * MB / 25e9)
    assert all_reduce_between_s(30 * MB, four, (0, 2), 2) == pytest.approx(2 * 2e-6 + 30 * MB / 300e9)


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
    levels = (*two_levels(world=32).levels, Link(name="far", bytes_per_s=5e9, latency_s=50e-6, protocols=("plain",)))
    cluster = Cluster(name="three", device=DEVICE, levels=levels)
    # 64 ranks: 64 - 8 hops inside nodes, 8 - 2 between nodes, 2 far; 32 members leave by 5 GB/s each = 160 GB/s
    assert [crossing.hops for crossing in crossings(cluster, 64, 1)[0]] == [56, 6, 2]
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


CURVES = read(DATA / "collectives.json")


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_measured_curves(curve: Curve):
    assert median(map(abs, curve.errors())) <= 0.12


def test_curves_are_those_published():
    assert len({curve.name.partition(" [")[0] for curve in CURVES}) == 37
    by_name = {curve.name: curve for curve in CURVES}
    # 16 GiB among 8 at 480 GB/s of bus bandwidth, 7/4 of the algorithm's
    nvls = by_name["all_reduce NVLS 8x H200 16GiB"].points[0]
    assert nvls.least_s == nvls.most_s == pytest.approx(2**34 * 1.75 / 480e9)
    poor = by_name["all_reduce_bench Jean Zay A100 4 nodes Omni-Path"].points[0]
    assert poor.error(poor.most_s * 1.5) == pytest.approx(0.5) and poor.error(poor.least_s / 2) == pytest.approx(-0.5)
    assert poor.error((poor.least_s + poor.most_s) / 2) == 0


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ValueError, match=r"MI300.*known: V100"):
        cluster_of({"name": "x", "gpu": "MI300"})


def test_a_curve_finds_its_network():
    def found(name: str, gpu: str = "H100-SXM5-80GB") -> tuple[str, float]:
        cluster = cluster_of({"name": name, "gpu": gpu})
        return cluster.name, cluster.levels[-1].bytes_per_s

    assert found("all_reduce 16x H100 2 nodes") == ("dgx-h100", 50e9)
    assert found("all_reduce 16x H100 on p5") == found("all_reduce 16x H100, 32x100Gb EFA") == ("p5", 50e9)
    assert found("all_reduce 16x H100, 8x200Gb") == ("dgx-h100, 8x200Gb", 25e9)
    assert found("all_reduce 144x GB200", "GB200-NVL72")[0] == "gb200-nvl72"


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("cluster", [name for name in Cluster.names() if name != "local"])
def test_time_never_falls_with_size(name: str, cluster: str):
    loaded = Cluster.load(cluster)
    for ranks, stride in ((2, 1), (8, 1), (64, 1), (144, 1), (4, 4), (16, 8)):
        times = [collective_s(name, 1.3**i, loaded, ranks, stride) for i in range(90)]
        assert all(a <= b for a, b in pairwise(times))


def test_quickest_of_the_ways():
    h100 = Cluster.load("dgx-h100")
    for nbytes in (1e3, 1e6, 1e8, 1e10):
        (found,) = candidate_algorithms("all_reduce", h100, 64, 1)
        quickest = min(found, key=lambda way: way.seconds(nbytes))
        assert collective_s("all_reduce", nbytes, h100, 64) == quickest.seconds(nbytes)
        assert algorithm("all_reduce", nbytes, h100, 64) == quickest.name
    assert algorithm("all_reduce", 1e6, h100, 1) == "none"
    assert algorithm("all_reduce", 1e6, TWO, 8) == "ring", "plain links have no protocols"


def test_what_nccl_would_choose():
    a100, h100 = Cluster.load("dgx-a100-80gb"), Cluster.load("dgx-h100")
    assert algorithm("all_reduce", 2**30, h100, 8) == "nvls"
    assert algorithm("all_reduce", 2**30, h100, 2) == "ring Simple", "two GPUs do not sum in the switch"
    assert algorithm("all_reduce", 2**30, a100, 8) == "ring Simple", "NVSwitch of A100 does not sum"
    assert algorithm("all_reduce", 2**14, h100, 8) == "ring LL"
    assert algorithm("all_reduce", 2**16, h100, 256).startswith("tree"), "a ring's hops grow with ranks"
    assert algorithm("all_reduce", 2**30, h100, 16) == "nvls_tree", "two nodes: half of the traffic leaves"
    assert algorithm("all_reduce", 2**33, h100, 32) == "ring Simple", "a tree sends 2 V from each of more nodes"
    assert algorithm("all_gather", 2**20, h100, 64, 8) == "pat", "one member a node: log2 n hops"
    assert algorithm("all_gather", 2**30, h100, 64, 8).startswith("ring")
    assert {way.name for way in candidate_algorithms("all_reduce", Cluster.load("p5"), 16, 1)[0]} <= {
        "ring Simple",
        "tree Simple",
        "nvls_tree",
    }


def test_who_may_sum_in_the_switch():
    def offered(ranks: int, stride: int = 1) -> set[str]:
        return {way.name for way in candidate_algorithms("all_reduce", Cluster.load("dgx-h100"), ranks, stride)[0]}

    assert "nvls" in offered(4) and "nvls_tree" in offered(16) and "nvls_tree" in offered(16, 2)
    assert "nvls_tree" not in offered(12), "a node with fewer members than the others"
    assert "nvls_tree" not in offered(8, 4), "two members a node"
    assert not {"nvls", "nvls_tree"} & offered(8, 8), "one member a node"


def test_who_gathers_by_pat():
    h100 = Cluster.load("dgx-h100")
    assert "pat" in {way.name for way in candidate_algorithms("all_gather", h100, 64, 8)[0]}
    assert "pat" not in {way.name for way in candidate_algorithms("all_gather", h100, 64, 1)[0]}, (
        "several members a node"
    )


def test_sum_in_the_switch_by_hand():
    # 8 H100: 9/8 of 8 GB at 0.705 of 450 GB/s, 8.4 + 17 us, and 2 sqrt(0.45 * 17 us * transfer) of chunks
    transfer = 9 / 8 * 8e9 / (0.705 * 450e9)
    expected = transfer + 25.4e-6 + 2 * (0.45 * 17e-6 * transfer) ** 0.5
    assert collective_s("all_reduce", 8e9, Cluster.load("dgx-h100"), 8) == pytest.approx(expected)
    # a domain of 72 is one unit: 73/72 of the bytes
    nvl72 = Cluster.load("gb200-nvl72")
    transfer = 73 / 72 * 8e9 / (0.618 * 900e9)
    expected = transfer + 40.4e-6 + 2 * (0.45 * 32e-6 * transfer) ** 0.5
    assert collective_s("all_reduce", 8e9, nvl72, 72) == pytest.approx(expected)


def shared_nics(**changes: float) -> Cluster:
    """Make nodes of 8 GPUs with 4 NICs of 12.5 GB/s."""
    inner, outer = TWO.levels
    outer = outer.model_copy(update={"bytes_per_s": 6.25e9, "port_bytes_per_s": 12.5e9, **changes})
    return TWO.model_copy(update={"name": "shared", "levels": (inner, outer)})


def test_shared_nics_by_hand():
    nodes = shared_nics()
    # 8 data-parallel groups with one member a node: every NIC has two of them
    assert collective_s("all_gather", 100 * MB, nodes, 4, 8) == pytest.approx(30e-6 + 75 * MB / 6.25e9)
    # two members a node: 4 groups of 2 lanes share 4 NICs
    assert collective_s("all_gather", 100 * MB, nodes, 4, 4) == pytest.approx(2e-6 + 20e-6 + 75 * MB / 12.5e9)
    # a group over whole nodes has all 4 NICs, 50 GB/s
    assert collective_s("all_gather", 160 * MB, nodes, 16, 1) == pytest.approx(13 * 2e-6 + 20e-6 + 150 * MB / 50e9)
    # half of the last node: 4 members alone there reach all 4 NICs
    assert collective_s("all_gather", 120 * MB, nodes, 12, 1) == pytest.approx(9 * 2e-6 + 20e-6 + 110 * MB / 50e9)


def test_messages_share_nics():
    nodes = shared_nics()
    # stages a rank apart: only the last rank of a node sends out of it, and has a NIC of its own
    assert p2p_s(25 * MB, nodes, 1, first_rank=7) == pytest.approx(10e-6 + 25 * MB / 12.5e9)
    # four of them have one each; eight have half of one
    assert p2p_s(25 * MB, nodes, 4, first_rank=4) == pytest.approx(10e-6 + 25 * MB / 12.5e9)
    assert p2p_s(25 * MB, nodes, 8) == p2p_s(25 * MB, nodes, 16) == pytest.approx(10e-6 + 25 * MB / 6.25e9)


def test_edges_of_a_pipeline_by_the_ranks_that_talk():
    nodes = shared_nics()

    def seconds(ends: list[tuple[int, int]], width: int) -> list[float]:
        return [message_s(25 * MB, nodes, lanes) for lanes in lanes_between(nodes, ends, width)]

    nvlink = 2e-6 + 25 * MB / 300e9
    # 16 stages of a rank: rank 7 alone sends out of its node, by a whole NIC
    chain = [(k, k + 1) for k in range(15)]
    alone = 10e-6 + 25 * MB / 12.5e9
    assert seconds(chain, 1) == pytest.approx([alone if k == 7 else nvlink for k in range(15)])
    # and round again: rank 15 to rank 0, each alone on its node's way out
    assert seconds([*chain, (15, 0)], 1)[-1] == pytest.approx(alone)
    # stages of 6 ranks, 0-5, 6-11, 12-17: 0 and 1 send within the first node, 2 to 5 out of it and beside them 6 and 7
    # of the next stage, six messages on 4 NICs; 8 and 9 within the second, 10 and 11 out of it
    six = lanes_between(nodes, [(0, 6), (6, 12)], 6)
    assert [len(lanes) for lanes in six] == [2, 3]
    assert seconds([(0, 6), (6, 12)], 6) == pytest.approx([10e-6 + 25 * MB * 6 / 50e9] * 2)
    # whole nodes: all eight at once
    assert seconds([(0, 8)], 8) == pytest.approx([10e-6 + 25 * MB / 6.25e9])


# links between the GPUs of a DGX-1 with V100, as `nvidia-smi topo -m` shows them
CUBE_MESH = Cluster.load(DATA / "dgx-1-v100.toml").levels[0].wiring


@pytest.mark.parametrize(("gpus", "rings"), [(2, 1), (3, 2), (4, 4), (5, 1.64), (6, 2), (7, 4), (8, 6)])
def test_rings_of_a_cube_mesh(gpus: int, rings: float):
    # vTrain's all-reduces reach 22.5, 45, 85, 37, 46, 87, 135 GB/s: these multiples of a link's 22.5
    assert CUBE_MESH is not None
    assert parallel_rings(CUBE_MESH, tuple(range(gpus))) == pytest.approx(rings)


def test_pairs_of_a_cube_mesh():
    assert CUBE_MESH is not None
    assert parallel_rings(CUBE_MESH, (0, 3)) == 2
    assert parallel_rings(CUBE_MESH, (0, 5)) == pytest.approx(0.82), "through 4 or 1, on one link"


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (((0, 1), (1, 0), (0, 0)), "2 by 2"),
        (((0, 1), (2, 0)), "symmetric"),
        (((1, 1), (1, 0)), "symmetric"),
        (((0, 0), (0, 0)), "no links"),
    ],
)
def test_impossible_wiring(table: tuple[tuple[int, ...], ...], told: str):
    with pytest.raises(ValueError, match=told):
        Link(name="x", ranks=2, bytes_per_s=1, latency_s=0, wiring=table)


def test_impossible_links():
    with pytest.raises(ValueError, match="less than bytes_per_s"):
        Link(name="x", bytes_per_s=2, port_bytes_per_s=1, latency_s=0)
    switch = InSwitch(fraction=0.7, latency_s=0)
    with pytest.raises(ValueError, match="only the first"):
        Cluster(name="x", device=DEVICE, levels=(TWO.levels[0], TWO.levels[1].model_copy(update={"in_switch": switch})))


def test_a_way_that_is_never_quicker_is_left_out():
    way = Algorithm("a", 1e-6, 1e-9, 4e-6)
    assert not way.dominated_by(replace(way, latency_s=2e-6, s_per_byte=0.5e-9))
    assert way.dominated_by(replace(way, s_per_byte=0.5e-9))
    assert not way.dominated_by(replace(way, s_per_byte=0.5e-9, fill_s=9e-6)), "its chunks cost more in between"


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
    path = crossings(TWO, ranks, stride)[0]
    assert sum(crossing.hops for crossing in path) == (ranks if ranks > 1 else 0)
    partners = sum(crossing.partners for crossing in path)
    assert partners == ranks - 1 or (partners >= ranks and not is_even(TWO, *group))


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


@pytest.mark.parametrize("name", ["dgx-h100", "jean-zay-a100", "gb200-nvl72"])
@pytest.mark.parametrize(("ranks", "stride"), [(2, 1), (8, 1), (16, 4), (256, 1)])
def test_a_byte_of_a_smaller_message_takes_no_less(name: str, ranks: int, stride: int) -> None:
    """Bounds count the gradients of any bucket at the rate of a full one (`search/step_end/costs.py`)."""
    cluster = Cluster.load(name)
    for shards in {1, 2, ranks}:
        sizes = [10 ** (3 + i / 20) for i in range(140)]
        rates = [sum_in_shards_s(n, cluster, ranks, shards, stride) / n for n in sizes]
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(rates)), shards
