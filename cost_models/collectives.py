"""Time of collectives and messages, as NCCL would run them on the links of a cluster.

`paths` says what groups and messages cross, `nccl` what each algorithm and protocol costs there; here the quickest is
taken, and where groups of one kind differ, the slowest of them.

`nbytes` is everywhere V, the bytes of the whole tensor of this group: what all_gather ends with, reduce_scatter starts
from, each rank of an all_reduce or broadcast holds, and all ranks of an all_to_all hold together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.nccl import COLLECTIVES, Algorithm, common_protocols
from autoptd.cost_models.paths import Lane, Path, crossings, crossings_between, message_lanes

__all__ = [
    "COLLECTIVES",
    "algorithm",
    "all_reduce_between_s",
    "collective_s",
    "lanes_between",
    "message_s",
    "p2p_s",
    "sum_in_shards_s",
    "ways",
]
Ways = tuple[Algorithm, ...]


def collective_s(name: str, nbytes: float, cluster: Cluster, ranks: int, stride: int = 1, world: int = 0) -> float:
    """Seconds of one collective of `nbytes` (the whole tensor) in a group of `ranks` members, `stride` apart.

    Groups of the same kind are taken to fill the world and to work at the same time; where they lie unevenly over
    nodes, it is that of the slowest of them. `world`: left out, that of one group for each rank of a stride. Never
    falls as `nbytes` grows. One rank alone takes no time. Raises ValueError for an unknown name, ClusterError for a
    group that the cluster cannot hold.
    """
    if nbytes < 0:
        raise ValueError(f"{name} of {nbytes} bytes: cannot be negative")
    return _slowest_s(ways(name, cluster, ranks, stride, world), nbytes)


def _slowest_s(groups: Sequence[Ways], nbytes: float) -> float:
    """Of groups that differ, each by the quickest of its ways."""
    return max([min([way.seconds(nbytes) for way in found]) for found in groups if found], default=0.0)


def sum_in_shards_s(nbytes: float, cluster: Cluster, ranks: int, shards: int, stride: int = 1, world: int = 0) -> float:
    """Seconds to sum `nbytes` over `ranks`, so that each of `shards` neighbours has its part of the sum.

    A reduce-scatter among the neighbours, then an all-reduce of a shard with the counterparts (HSDP: Zhao et al. 2023,
    section 3.2.2); with one shard an all-reduce, with as many as ranks a reduce-scatter.
    """
    found = collective_s("reduce_scatter", nbytes, cluster, shards, stride, world) if shards > 1 else 0.0
    if ranks > shards:
        found += collective_s("all_reduce", nbytes / shards, cluster, ranks // shards, stride * shards, world)
    return found


def all_reduce_between_s(nbytes: float, cluster: Cluster, firsts: tuple[int, ...], width: int) -> float:
    """Seconds of `width` all-reduces at once: the i-th is among the i-th ranks from each of `firsts` on, ascending."""
    return _slowest_s(_ways_between(cluster, firsts, width), nbytes)


def algorithm(name: str, nbytes: float, cluster: Cluster, ranks: int, stride: int = 1) -> str:
    """How `collective_s` takes it to run: "ring Simple", "tree LL128", "nvls" …; "none" for one rank alone."""
    each = [min(found, key=lambda way: way.seconds(nbytes)) for found in ways(name, cluster, ranks, stride) if found]
    return max(each, key=lambda way: way.seconds(nbytes)).name if each else "none"


def p2p_s(nbytes: float, cluster: Cluster, distance_ranks: int, first_rank: int = 0) -> float:
    """Seconds of one message from `first_rank` to the rank `distance_ranks` on, over their innermost common level.

    Every rank of its node is taken to send as far at the same time. Raises ValueError, ClusterError.
    """
    if nbytes < 0 or distance_ranks < 0 or first_rank < 0:
        raise ValueError(f"cannot be negative: nbytes={nbytes}, distance={distance_ranks}, first_rank={first_rank}")
    if distance_ranks == 0:
        return 0.0
    unit = max([level.ranks for level in cluster.levels[:-1] if level.ranks], default=1)
    senders = np.arange((first_rank // unit + 1) * unit)
    if (last := cluster.levels[-1].ranks) and first_rank + distance_ranks < last:
        senders = senders[senders + distance_ranks < last]
    lanes, which = message_lanes(cluster, senders, senders + distance_ranks)
    return message_s(nbytes, cluster, (lanes[which[first_rank]],))


def lanes_between(cluster: Cluster, ends: Sequence[tuple[int, int]], width: int) -> list[tuple[Lane, ...]]:
    """The lanes between each two of so many ends, as first ranks of `width` neighbours, while all of them send."""
    if not ends:
        return []
    side = np.arange(width)
    senders, receivers = ((np.array(firsts)[:, None] + side).ravel() for firsts in zip(*ends, strict=True))
    lanes, which = message_lanes(cluster, senders, receivers)
    return [tuple(lanes[i] for i in np.unique(row)) for row in which.reshape(len(ends), width)]


def message_s(nbytes: float, cluster: Cluster, lanes: Sequence[Lane]) -> float:
    """Seconds of messages side by side, until the slowest is there."""
    return _slowest_s([_message_ways(cluster, lane) for lane in lanes], nbytes)


@lru_cache(maxsize=4096)
def ways(name: str, cluster: Cluster, ranks: int, stride: int, world: int = 0) -> tuple[Ways, ...]:
    """Every way to run a collective that is the quickest for some size, of each group that differs from the others.

    Raises ValueError for an unknown name, ClusterError for a group larger than the cluster.
    """
    if name not in COLLECTIVES:
        raise ValueError(f"unknown collective {name!r}; known: {', '.join(COLLECTIVES)}")
    return tuple(_ways_of(name, path, ranks) for path in crossings(cluster, ranks, stride, world))


@lru_cache(maxsize=1024)
def _ways_between(cluster: Cluster, firsts: tuple[int, ...], width: int) -> tuple[Ways, ...]:
    return tuple(_ways_of("all_reduce", path, len(firsts)) for path in crossings_between(cluster, firsts, width))


def _ways_of(name: str, path: Path, ranks: int) -> Ways:
    links = tuple(crossing.link for crossing in path)
    return _worth_a_look(COLLECTIVES[name](path, ranks, common_protocols(links))) if path else ()


@lru_cache(maxsize=4096)
def _message_ways(cluster: Cluster, lane: Lane) -> Ways:
    link = lane.link
    return _worth_a_look(
        Algorithm(
            protocol.name,
            protocol.base_s + link.latency_s * (protocol.hop_inside if lane.innermost else protocol.hop_between),
            1 / lane.bytes_per_s / protocol.bandwidth,
        )
        for protocol in common_protocols((link,))
    )


def _worth_a_look(candidates: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    kept: list[Algorithm] = []
    for way in candidates:
        if not any(way.never_quicker(other) for other in kept):
            kept = [other for other in kept if not other.never_quicker(way)] + [way]
    return tuple(kept)
