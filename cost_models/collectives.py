"""Time of collectives and messages, as NCCL runs them on the links of a cluster.

`paths` has the levels that groups and messages cross, and `nccl` the cost of each algorithm and protocol there. A group
takes the time of its fastest algorithm; if groups of one kind differ, the slowest group counts.

`nbytes` is always V, the bytes of the group's whole tensor: the output of an all_gather, the input of a reduce_scatter,
the tensor on each rank of an all_reduce or broadcast, and the sum over all ranks of an all_to_all.
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
    "candidate_algorithms",
    "collective_s",
    "lanes_between",
    "message_s",
    "p2p_s",
    "sum_in_shards_s",
]
Algorithms = tuple[Algorithm, ...]


def collective_s(name: str, nbytes: float, cluster: Cluster, ranks: int, stride: int = 1, world: int = 0) -> float:
    """Return the seconds of one collective of `nbytes` (the whole tensor) in a group of `ranks`, `stride` apart.

    Groups of the same kind are assumed to fill the world and to communicate at the same time; if they are spread
    unevenly over nodes, the slowest counts. `world`: by default ranks × stride. Monotonic in `nbytes`. Zero for one
    rank. Raises ValueError for an unknown name, ClusterError for a group larger than the cluster.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes of {name} cannot be negative: {nbytes}")
    return _slowest_s(candidate_algorithms(name, cluster, ranks, stride, world), nbytes)


def _slowest_s(groups: Sequence[Algorithms], nbytes: float) -> float:
    """Return the time of the slowest group, each with its fastest algorithm."""
    return max([min([candidate.seconds(nbytes) for candidate in found]) for found in groups if found], default=0.0)


def sum_in_shards_s(nbytes: float, cluster: Cluster, ranks: int, shards: int, stride: int = 1, world: int = 0) -> float:
    """Return the seconds to sum `nbytes` over `ranks` so that each of `shards` neighbours has its shard of the sum.

    A reduce-scatter among the neighbours, then an all-reduce of each shard over its replicas (HSDP: Zhao et al. 2023,
    section 3.2.2). With one shard that is an all-reduce, with as many as ranks a reduce-scatter.
    """
    found = collective_s("reduce_scatter", nbytes, cluster, shards, stride, world) if shards > 1 else 0.0
    if ranks > shards:
        found += collective_s("all_reduce", nbytes / shards, cluster, ranks // shards, stride * shards, world)
    return found


def all_reduce_between_s(nbytes: float, cluster: Cluster, firsts: tuple[int, ...], width: int) -> float:
    """Return the seconds of `width` concurrent all-reduces, the i-th over ranks `first + i` of ascending `firsts`."""
    return _slowest_s(_candidates_between(cluster, firsts, width), nbytes)


def algorithm(name: str, nbytes: float, cluster: Cluster, ranks: int, stride: int = 1) -> str:
    """Return the algorithm that `collective_s` chooses: "ring Simple", "tree LL128", "nvls" …; "none" for one rank."""
    groups = candidate_algorithms(name, cluster, ranks, stride)
    fastest = [min(found, key=lambda candidate: candidate.seconds(nbytes)) for found in groups if found]
    return max(fastest, key=lambda candidate: candidate.seconds(nbytes)).name if fastest else "none"


def p2p_s(nbytes: float, cluster: Cluster, distance_ranks: int, first_rank: int = 0) -> float:
    """Return the seconds of a message from `first_rank` to the rank `distance_ranks` later, over their common level.

    All ranks of its node are assumed to send over the same distance at the same time. Raises ValueError, ClusterError.
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
    """Return the lanes of each (sender, receiver) pair while all send; each end is the first of `width` neighbours."""
    if not ends:
        return []
    side = np.arange(width)
    senders, receivers = ((np.array(firsts)[:, None] + side).ravel() for firsts in zip(*ends, strict=True))
    lanes, which = message_lanes(cluster, senders, receivers)
    return [tuple(lanes[i] for i in np.unique(row)) for row in which.reshape(len(ends), width)]


def message_s(nbytes: float, cluster: Cluster, lanes: Sequence[Lane]) -> float:
    """Return the seconds until the slowest of concurrent messages arrives."""
    return _slowest_s([_message_candidates(cluster, lane) for lane in lanes], nbytes)


@lru_cache(maxsize=4096)
def candidate_algorithms(
    name: str, cluster: Cluster, ranks: int, stride: int, world: int = 0
) -> tuple[Algorithms, ...]:
    """Return, for each distinct path that groups take, the undominated algorithms of a collective.

    Raises ValueError for an unknown name, ClusterError for a group larger than the cluster.
    """
    if name not in COLLECTIVES:
        raise ValueError(f"unknown collective {name!r}; known: {', '.join(COLLECTIVES)}")
    return tuple(_candidates_on(name, path, ranks) for path in crossings(cluster, ranks, stride, world))


@lru_cache(maxsize=1024)
def _candidates_between(cluster: Cluster, firsts: tuple[int, ...], width: int) -> tuple[Algorithms, ...]:
    return tuple(_candidates_on("all_reduce", path, len(firsts)) for path in crossings_between(cluster, firsts, width))


def _candidates_on(name: str, path: Path, ranks: int) -> Algorithms:
    links = tuple(crossing.link for crossing in path)
    return _undominated(COLLECTIVES[name](path, ranks, common_protocols(links))) if path else ()


@lru_cache(maxsize=4096)
def _message_candidates(cluster: Cluster, lane: Lane) -> Algorithms:
    link = lane.link
    return _undominated(
        Algorithm(
            protocol.name,
            protocol.base_s + link.latency_s * (protocol.hop_inside if lane.innermost else protocol.hop_between),
            1 / lane.bytes_per_s / protocol.bandwidth,
        )
        for protocol in common_protocols((link,))
    )


def _undominated(candidates: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    found: list[Algorithm] = []
    for candidate in candidates:
        if not any(candidate.dominated_by(other) for other in found):
            found = [other for other in found if not other.dominated_by(candidate)] + [candidate]
    return tuple(found)
