"""Time of collectives and messages, as NCCL would run them on the links of a cluster.

`paths` says what a group crosses, `nccl` what each algorithm and protocol costs there; here the quickest is taken.

`nbytes` is everywhere V, the bytes of the whole tensor of this group: what all_gather ends with, reduce_scatter starts
from, each rank of an all_reduce or broadcast holds, and all ranks of an all_to_all hold together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.nccl import COLLECTIVES, Way, common_protocols
from autoptd.cost_models.paths import crossings, message_lane

__all__ = ["COLLECTIVES", "algorithm", "collective_s", "p2p_s", "sum_in_shards_s", "ways"]


def collective_s(name: str, nbytes: float, cluster: Cluster, ranks: int, stride: int = 1) -> float:
    """Seconds of one collective of `nbytes` (the whole tensor) in a group of `ranks` members, `stride` apart.

    Groups of the same kind are taken to fill the cluster and to work at the same time. Never falls as `nbytes` grows.
    One rank alone takes no time. Raises ValueError for an unknown name, ClusterError for a group that the cluster
    cannot hold.
    """
    if nbytes < 0:
        raise ValueError(f"{name} of {nbytes} bytes: cannot be negative")
    found = ways(name, cluster, ranks, stride)
    return min([way.seconds(nbytes) for way in found]) if found else 0.0


def sum_in_shards_s(nbytes: float, cluster: Cluster, ranks: int, shards: int, stride: int = 1) -> float:
    """Seconds to sum `nbytes` over `ranks`, so that each of `shards` neighbours has its part of the sum.

    A reduce-scatter among the neighbours, then an all-reduce of a shard with the counterparts (HSDP: Zhao et al. 2023,
    section 3.2.2); with one shard an all-reduce, with as many as ranks a reduce-scatter.
    """
    found = collective_s("reduce_scatter", nbytes, cluster, shards, stride) if shards > 1 else 0.0
    if ranks > shards:
        found += collective_s("all_reduce", nbytes / shards, cluster, ranks // shards, stride * shards)
    return found


def algorithm(name: str, nbytes: float, cluster: Cluster, ranks: int, stride: int = 1) -> str:
    """How `collective_s` takes it to run: "ring Simple", "tree LL128", "nvls" …; "none" for one rank alone."""
    found = ways(name, cluster, ranks, stride)
    return min(found, key=lambda way: way.seconds(nbytes)).name if found else "none"


def p2p_s(nbytes: float, cluster: Cluster, distance_ranks: int, first_rank: int = 0) -> float:
    """Seconds of one message from `first_rank` to the rank `distance_ranks` on, over their innermost common level.

    Every rank is taken to send as far at the same time, as in a pipeline. Raises ValueError, ClusterError.
    """
    if nbytes < 0 or distance_ranks < 0 or first_rank < 0:
        raise ValueError(f"cannot be negative: nbytes={nbytes}, distance={distance_ranks}, first_rank={first_rank}")
    if distance_ranks == 0:
        return 0.0
    return min([way.seconds(nbytes) for way in _message_ways(cluster, distance_ranks, first_rank)])


@lru_cache(maxsize=4096)
def ways(name: str, cluster: Cluster, ranks: int, stride: int) -> tuple[Way, ...]:
    """Every way to run a collective that is the quickest for some size; none for one rank alone.

    Raises ValueError for an unknown name, ClusterError for a group larger than the cluster.
    """
    if name not in COLLECTIVES:
        raise ValueError(f"unknown collective {name!r}; known: {', '.join(COLLECTIVES)}")
    path = crossings(cluster, ranks, stride)
    if not path:
        return ()
    return _worth_a_look(COLLECTIVES[name](path, ranks, common_protocols(tuple(crossing.link for crossing in path))))


@lru_cache(maxsize=4096)
def _message_ways(cluster: Cluster, distance_ranks: int, first_rank: int) -> tuple[Way, ...]:
    link, bytes_per_s = message_lane(cluster, distance_ranks, first_rank)
    inside = link == cluster.levels[0]
    return _worth_a_look(
        Way(
            protocol.name,
            protocol.base_s + link.latency_s * (protocol.hop_inside if inside else protocol.hop_between),
            1 / bytes_per_s / protocol.bandwidth,
        )
        for protocol in common_protocols((link,))
    )


def _worth_a_look(candidates: Iterable[Way]) -> tuple[Way, ...]:
    kept: list[Way] = []
    for way in candidates:
        if not any(way.never_quicker(other) for other in kept):
            kept = [other for other in kept if not other.never_quicker(way)] + [way]
    return tuple(kept)
