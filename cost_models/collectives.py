"""Time of collectives and messages: latency and bandwidth over the levels of a cluster.

A group is `ranks` members, `stride` ranks apart. Its ring visits the members of a node one after the other, so on each
level it crosses between neighbouring units; with k members in each unit, k such rings run at once, each leaving through
its own member's link. A group therefore moves data at

    bus = min over crossed levels of  k(level - 1) * bytes_per_s(level)        k(-1) = 1, k = members in one unit

(8 of 8 GPUs of a node: NVLink, then 8 NICs together; tp 8 and dp across nodes: each dp group has its own NIC.) With n
ranks, V bytes in the whole tensor and h the latency of n - 1 hops around the ring:

    all_gather, reduce_scatter   h + (n - 1)/n V / bus          (Thakur et al. 2005)
    all_reduce                   both, one after the other
    broadcast                    h + V / bus                    (pipelined)
    all_to_all                   h over the n - 1 partners + the slowest level's share of V/n / bytes_per_s

`nbytes` is everywhere V, the bytes of the whole tensor of this group: what all_gather ends with, reduce_scatter starts
from, each rank of an all_reduce or broadcast holds, and all ranks of an all_to_all hold together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoptd.cost_models.cluster import Cluster, Link
from autoptd.errors import ClusterError


@dataclass(frozen=True)
class Crossing:
    """A level that a group communicates over."""

    link: Link
    hops: int  # edges of the ring on this level; over all levels they add up to the number of ranks
    lanes: int  # members that leave one unit of the level below side by side
    partners: int  # ranks that a member reaches over this level


def crossings(cluster: Cluster, ranks: int, stride: int) -> tuple[Crossing, ...]:
    """The levels that a group of `ranks` members, `stride` apart, communicates over, innermost first."""
    if ranks < 1 or stride < 1:
        raise ValueError(f"a group needs ranks >= 1 and stride >= 1, got ranks={ranks}, stride={stride}")
    found = []
    inside = 1  # members in one unit of the level below
    for level in cluster.levels:
        here = ranks if level.ranks is None else min(ranks, max(inside, level.ranks // stride))
        if here > inside:
            units = -(-ranks // inside)
            outer = -(-ranks // here)
            hops = units - (outer if outer > 1 else 0)
            found.append(Crossing(level, hops, ranks % inside or inside, here - inside))
        inside = here
    if inside < ranks:
        raise ClusterError(
            f"a group of {ranks} ranks with stride {stride} is larger than cluster {cluster.name!r} "
            f"({cluster.levels[-1].ranks} ranks)",
            fix="use fewer ranks, or leave out `ranks` of the cluster's last level",
        )
    return tuple(found)


def ring_bytes_per_s(path: tuple[Crossing, ...]) -> float:
    """The bandwidth at which the group's rings pass data on together."""
    return min(crossing.lanes * crossing.link.sustained_bytes_per_s for crossing in path)


def ring_latency_s(path: tuple[Crossing, ...]) -> float:
    """Latency of n - 1 hops, leaving out the quickest of the ring's n."""
    around_s = sum(crossing.hops * crossing.link.latency_s for crossing in path)
    return around_s - min(crossing.link.latency_s for crossing in path)


def _one_pass_s(nbytes: float, path: tuple[Crossing, ...], ranks: int) -> float:
    return ring_latency_s(path) + nbytes * (ranks - 1) / ranks / ring_bytes_per_s(path)


def _two_passes_s(nbytes: float, path: tuple[Crossing, ...], ranks: int) -> float:
    return 2 * _one_pass_s(nbytes, path, ranks)


def _pipelined_s(nbytes: float, path: tuple[Crossing, ...], ranks: int) -> float:
    return ring_latency_s(path) + nbytes / ring_bytes_per_s(path)


def _pairwise_s(nbytes: float, path: tuple[Crossing, ...], ranks: int) -> float:
    """Each rank sends every partner 1/n of its slice; levels work side by side, each GPU on its own links."""
    per_pair = nbytes / ranks / ranks
    latency_s = sum(crossing.partners * crossing.link.latency_s for crossing in path)
    return latency_s + max(crossing.partners * per_pair / crossing.link.sustained_bytes_per_s for crossing in path)


COLLECTIVES: dict[str, Callable[[float, tuple[Crossing, ...], int], float]] = {
    "all_gather": _one_pass_s,
    "all_reduce": _two_passes_s,
    "all_to_all": _pairwise_s,
    "broadcast": _pipelined_s,
    "reduce_scatter": _one_pass_s,
}


def collective_s(name: str, nbytes: float, cluster: Cluster, ranks: int, stride: int = 1) -> float:
    """Seconds of one collective of `nbytes` (the whole tensor) in a group of `ranks` members, `stride` apart.

    Raises ValueError for an unknown name, or a group that the cluster cannot hold. One rank alone takes no time.
    """
    if name not in COLLECTIVES:
        raise ValueError(f"unknown collective {name!r}; known: {', '.join(COLLECTIVES)}")
    if nbytes < 0:
        raise ValueError(f"{name} of {nbytes} bytes: cannot be negative")
    path = crossings(cluster, ranks, stride)
    return COLLECTIVES[name](nbytes, path, ranks) if ranks > 1 else 0.0


def p2p_s(nbytes: float, cluster: Cluster, distance_ranks: int, first_rank: int = 0) -> float:
    """Seconds of one message from `first_rank` to the rank `distance_ranks` on, over their innermost common level."""
    if nbytes < 0 or distance_ranks < 0 or first_rank < 0:
        raise ValueError(f"cannot be negative: nbytes={nbytes}, distance={distance_ranks}, first_rank={first_rank}")
    if distance_ranks == 0:
        return 0.0
    for level in cluster.levels:
        if level.ranks is None or first_rank % level.ranks + distance_ranks < level.ranks:
            return level.latency_s + nbytes / level.sustained_bytes_per_s
    raise ClusterError(
        f"rank {first_rank + distance_ranks} is outside cluster {cluster.name!r} ({cluster.levels[-1].ranks} ranks)",
        fix="use fewer ranks, or leave out `ranks` of the cluster's last level",
    )
