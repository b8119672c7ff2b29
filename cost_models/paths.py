"""Paths of groups and messages through a cluster: the levels they cross, with hops and parallel links on each.

A group's ring visits the members of a node one after the other, so on each level it crosses between neighbouring units.
With k members in each unit, k such rings run at once, each leaving over its own member's link: 8 GPUs of a node leave
over its 8 NICs together. All groups of one kind communicate at the same time and share the links of a unit (under
tp 4: four data-parallel groups with two members per node each).

If a group's members are spread unevenly over units, the unit with the fewest members is the bottleneck, since it has
the fewest links out: six members on nodes of four are 4 + 2, so that two rings leave. Groups of one kind may differ: of
groups of three on nodes of four, the first is within a node and the second is 1 + 2. Each distinct path is returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoptd.cost_models.cluster import Cluster, Link
from autoptd.cost_models.wiring import links_per_gpu, parallel_rings
from autoptd.errors import ClusterError

Ints: TypeAlias = NDArray[np.int64]
_Row: TypeAlias = tuple[int, int, int, int, float]  # a crossing's hops, lanes, partners, units, bytes/s per lane


@dataclass(frozen=True)
class Crossing:
    """A level that a group communicates over."""

    link: Link
    innermost: bool  # the cluster's first level, within a node
    hops: int  # edges of the ring on this level; over all levels they add up to the number of ranks
    lanes: int  # parallel links out of one unit of the level below, one per member: of the slowest unit
    partners: int  # largest number of ranks that a member reaches over this level
    units: int  # largest number of units of the level below that this level joins
    lane_bytes_per_s: float  # sustained rate of one lane while all groups of this kind communicate

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth out of one unit, over all lanes."""
        return self.lanes * self.lane_bytes_per_s


Path: TypeAlias = tuple[Crossing, ...]  # innermost first; empty for one rank alone


def is_even(cluster: Cluster, ranks: int, stride: int) -> bool:
    """Return whether all groups of `ranks` members, `stride` apart, that fill a world take the same path."""
    span = ranks * stride
    return all(
        level.ranks is None or (_divide(span, level.ranks) and _divide(stride, level.ranks)) for level in cluster.levels
    )


def _divide(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


@lru_cache(maxsize=4096)
def crossings(cluster: Cluster, ranks: int, stride: int, world: int = 0) -> tuple[Path, ...]:
    """Return every distinct path of groups of `ranks` members, `stride` apart, that fill a world.

    `world`: by default ranks × stride; it matters if groups are spread unevenly. Raises ValueError for fewer than one
    rank, ClusterError for a group larger than the cluster.
    """
    if ranks < 1 or stride < 1:
        raise ValueError(f"a group needs ranks >= 1 and stride >= 1, got ranks={ranks}, stride={stride}")
    if ranks == 1:
        return ((),)
    even = is_even(cluster, ranks, stride)
    blocks = 1 if even else max(1, world // (ranks * stride))
    members = np.arange(blocks * ranks * stride).reshape(blocks, ranks, stride).transpose(0, 2, 1).reshape(-1, ranks)
    size = cluster.levels[-1].ranks
    if size is not None and members[-1, -1] >= size:
        raise ClusterError(
            f"a group of {ranks} ranks with stride {stride} is larger than cluster {cluster.name!r} ({size} ranks)",
            fix="use fewer ranks, or leave out `ranks` of the cluster's last level",
        )
    return paths_of(cluster, members, 1 if even else None)


@lru_cache(maxsize=1024)
def crossings_between(cluster: Cluster, firsts: tuple[int, ...], width: int) -> tuple[Path, ...]:
    """Return every distinct path of `width` groups: the i-th is made of ranks `first + i` of ascending `firsts`."""
    return paths_of(cluster, np.arange(width)[:, None] + np.array(firsts)[None, :])


def paths_of(cluster: Cluster, members: Ints, count: int | None = None) -> tuple[Path, ...]:
    """Return every distinct path of these groups, [group, member] with ascending ranks, while all communicate.

    `count`: look only at the first groups, which represent all.
    """
    rows, below = [], 1
    for level in cluster.levels:
        rows.append(_rows(level, members, below)[:count])
        below = level.ranks or below
    return tuple(
        tuple(
            Crossing(level, depth == 0, *row)
            for depth, (level, row) in enumerate(zip(cluster.levels, path, strict=True))
            if row is not None
        )
        for path in dict.fromkeys(zip(*rows, strict=True))
    )


def _rows(level: Link, members: Ints, below: int) -> list[_Row | None]:
    """Return each group's crossing of one level, whose units consist of units of `below` ranks; None if it has none."""
    groups, ranks = members.shape
    lower, upper = members // below, members // level.ranks if level.ranks else np.zeros_like(members)
    part, whole = _starts(lower), _starts(upper)  # first members of a group in each unit below, and in each unit
    inside, around = np.bincount(part // ranks), np.bincount(whole // ranks)
    if (inside == around).all():
        return [None] * groups
    group, unit = part // ranks, np.searchsorted(whole, part, side="right") - 1
    size = np.diff(part, append=members.size)
    joined = np.bincount(unit)[unit]  # parts in the same unit
    place = lower.ravel()[part]
    leaving = np.where(inside[group] > 1, size if below > 1 else 1, 0)
    busy = np.bincount(place, weights=leaving)[place].astype(int)  # ranks of a unit below that leave it
    lane = np.array([level.lane_bytes_per_s(below, max(1, n)) for n in range(int(busy.max()) + 1)])[busy]
    partners = np.diff(whole, append=members.size)[unit] - size

    first = np.searchsorted(group, np.arange(groups))  # part of each group
    least = np.minimum.reduceat(np.where(joined > 1, size * lane, np.inf), first)
    slowest = (joined > 1) & (size * lane == least[group])
    lanes = np.minimum.reduceat(np.where(slowest, size, ranks), first)
    rates = np.maximum.reduceat(np.where(slowest & (size == lanes[group]), lane, 0.0), first)
    rates *= _wired_shares(level, members)
    most = (np.maximum.reduceat(n, first).tolist() for n in (partners, joined))
    hops = inside - np.where(around > 1, around, 0)
    found = zip(hops.tolist(), lanes.tolist(), *most, rates.tolist(), strict=True)
    return [row if crosses else None for row, crosses in zip(found, inside != around, strict=True)]


def _starts(units: Ints) -> Ints:
    """Return the positions in the flattened members at which the unit or the group changes."""
    changes = np.ones(units.shape, dtype=bool)
    changes[:, 1:] = units[:, 1:] != units[:, :-1]
    return np.flatnonzero(changes)


def _wired_shares(level: Link, members: Ints) -> NDArray[np.float64]:
    """Return the fraction of a GPU's links that each group's rings use; 1 with a switch."""
    shares = np.ones(len(members))
    if level.wiring is None:
        return shares
    for g, group in enumerate(members.tolist()):
        units: dict[int, list[int]] = {}
        for rank in group:
            units.setdefault(rank // len(level.wiring), []).append(rank % len(level.wiring))
        rings = [parallel_rings(level.wiring, tuple(unit)) or 1.0 for unit in units.values() if len(unit) > 1]
        shares[g] = min(rings, default=links_per_gpu(level.wiring)) / links_per_gpu(level.wiring)
    return shares


@dataclass(frozen=True)
class Lane:
    """The path of a message: the innermost level common to its two ends, and the sustained rate there."""

    link: Link
    innermost: bool
    bytes_per_s: float


def message_lanes(cluster: Cluster, senders: Ints, receivers: Ints) -> tuple[list[Lane], Ints]:
    """Return the distinct lanes of concurrent messages, and the index of each message's lane.

    The messages that leave a unit share its links, or those that enter it if they are more: at most one per rank.
    Gradients take the same lane in the other direction. Raises ClusterError for a rank outside the cluster.
    """
    sizes = [level.ranks for level in cluster.levels]
    depth = sum((senders // n != receivers // n for n in sizes if n is not None), np.zeros_like(senders))
    if (depth == len(sizes)).any():
        raise ClusterError(
            f"rank {max(senders.max(), receivers.max())} is outside cluster {cluster.name!r} ({sizes[-1]} ranks)",
            fix="use fewer ranks, or leave out `ranks` of the cluster's last level",
        )
    busy = np.ones_like(senders)
    for level, below in enumerate(sizes[:-1], 1):
        leaving = depth >= level
        units = [ends // (below or 1) for ends in (senders, receivers)]
        counts = [np.bincount(unit, weights=leaving)[unit] for unit in units]
        busy = np.where(depth == level, np.maximum(*counts).astype(int), busy)
    wired = len(cluster.levels[0].wiring or (0,))
    which = np.stack([depth, busy, senders % wired, receivers % wired])
    codes = np.ravel_multi_index(tuple(which), tuple(which.max(axis=1) + 1))
    _, first, at = np.unique(codes, return_index=True, return_inverse=True)
    return [_lane(cluster, *map(int, which[:, i])) for i in first], at


def _lane(cluster: Cluster, depth: int, busy: int, sender: int, receiver: int) -> Lane:
    """Return the lane of one of `busy` concurrent messages over a level, between these positions in a node."""
    level = cluster.levels[depth]
    rate = level.lane_bytes_per_s((cluster.levels[depth - 1].ranks or 1) if depth else 1, busy)
    if level.wiring is not None:
        rate *= (parallel_rings(level.wiring, (sender, receiver)) or 1.0) / links_per_gpu(level.wiring)
    return Lane(level, depth == 0, rate)
