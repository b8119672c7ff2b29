"""What a group of ranks crosses: which levels, by how many hops, side by side over how many links.

A group is `ranks` members, `stride` ranks apart. Its ring visits the members of a node one after the other, so on each
level it crosses between neighbouring units; with k members in each unit, k such rings run at once, each leaving through
its own member's link: 8 of 8 GPUs of a node leave through 8 NICs together. Where the stride leaves room between the
members of a unit, as many groups work side by side (tp 4: four data-parallel groups with two members a node each), and
share what the unit's ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoptd.cost_models.cluster import Cluster, Link
from autoptd.cost_models.wiring import Wiring, links_per_gpu, parallel_rings
from autoptd.errors import ClusterError


@dataclass(frozen=True)
class Crossing:
    """A level that a group communicates over."""

    link: Link
    innermost: bool  # the cluster's first level, within a node
    hops: int  # edges of the ring on this level; over all levels they add up to the number of ranks
    lanes: int  # members that leave one unit of the level below side by side
    partners: int  # ranks that a member reaches over this level
    units: int  # units of the level below that this level joins
    lane_bytes_per_s: float  # sustained, of one lane, while all groups of this kind are at work

    @property
    def bytes_per_s(self) -> float:
        """What leaves one unit, all lanes together."""
        return self.lanes * self.lane_bytes_per_s


def crossings(cluster: Cluster, ranks: int, stride: int) -> tuple[Crossing, ...]:
    """The levels that a group of `ranks` members, `stride` apart, communicates over, innermost first.

    Raises ValueError for fewer than one rank, ClusterError for a group larger than the cluster.
    """
    if ranks < 1 or stride < 1:
        raise ValueError(f"a group needs ranks >= 1 and stride >= 1, got ranks={ranks}, stride={stride}")
    found = []
    inside = 1  # members in one unit of the level below
    sharers = 1  # ranks in one unit of the level below
    for depth, level in enumerate(cluster.levels):
        here = ranks if level.ranks is None else min(ranks, max(inside, level.ranks // stride))
        if here > inside:
            units = -(-ranks // inside)
            outer = -(-ranks // here)
            hops = units - (outer if outer > 1 else 0)
            lanes = ranks % inside or inside
            active = min(sharers, lanes * min(stride, sharers))
            lane_bytes_per_s = level.lane_bytes_per_s(sharers, active) * _wired_share(level.wiring, here, stride)
            crossing = Crossing(level, depth == 0, hops, lanes, here - inside, -(-here // inside), lane_bytes_per_s)
            found.append(crossing)
        inside = here
        sharers = level.ranks or sharers
    if inside < ranks:
        raise ClusterError(
            f"a group of {ranks} ranks with stride {stride} is larger than cluster {cluster.name!r} "
            f"({cluster.levels[-1].ranks} ranks)",
            fix="use fewer ranks, or leave out `ranks` of the cluster's last level",
        )
    return tuple(found)


def _wired_share(wiring: Wiring | None, members: int, stride: int) -> float:
    """The fraction of a GPU's links that carries a ring of this group; all of them where there is a switch."""
    if wiring is None:
        return 1.0
    rings = parallel_rings(wiring, tuple(range(0, members * stride, stride)))
    return (rings or 1.0) / links_per_gpu(wiring)


def message_lane(cluster: Cluster, distance_ranks: int, first_rank: int) -> tuple[Link, float]:
    """The innermost level that two ranks have in common, and the sustained rate between them in bytes/s.

    Every rank of a unit is taken to send as far at once, as in a pipeline: of stages that are a rank apart only the
    last of a node leaves it, of stages a node apart all do. Raises ClusterError for a rank outside the cluster.
    """
    sharers = 1
    for level in cluster.levels:
        if level.ranks is None or first_rank % level.ranks + distance_ranks < level.ranks:
            rate = level.lane_bytes_per_s(sharers, min(distance_ranks, sharers))
            if level.wiring is not None:
                first = first_rank % len(level.wiring)
                rings = parallel_rings(level.wiring, (first, first + distance_ranks))
                rate *= (rings or 1.0) / links_per_gpu(level.wiring)
            return level, rate
        sharers = level.ranks
    raise ClusterError(
        f"rank {first_rank + distance_ranks} is outside cluster {cluster.name!r} ({cluster.levels[-1].ranks} ranks)",
        fix="use fewer ranks, or leave out `ranks` of the cluster's last level",
    )
