"""NCCL's algorithms and protocols for collectives, and their costs on a path.

An algorithm is modelled by a latency L, seconds g per byte of the whole tensor V, and an overhead o per chunk. Data
moves in chunks: k of them cost k o and leave 1/k of the transfer exposed at the ends, so that the best k gives

    t = L + V g + 2 sqrt(o V g) = L + V g + min over k of (V g / k + k o)

With n ranks in N units on the outermost level, bandwidth B through a GPU and bandwidth E out of a unit:

    ring       all_reduce 2 (n - 1) hops, 2 (n - 1)/n V / min(B, E); all_gather and reduce_scatter half of each;
               broadcast V / min(B, E) (Thakur et al. 2005, "Optimization of collective communication operations in
               MPICH")
    tree       two binary trees of units with half of V each, a chain in each unit: an inner unit sends its half up and
               to two children and is a leaf of the other tree, so that 2 V leave it (V if there are two units), and 2 V
               pass a GPU of the chain (Sanders, Speck, Traeff 2009, "Two-tree algorithms"; in NCCL since 2.4)
    nvls       the switch sums and multicasts: a GPU sends V to be summed and the n-th of the sum that it broadcasts,
               (n + 1)/n V in all (Klenk et al. 2020, "An in-network architecture for accelerating shared-memory
               multiprocessor collectives")
    nvls_tree  nvls in each unit, two trees between units over all of their NICs
    pat        all_gather and reduce_scatter with one member per node: log2 n hops (NCCL 2.23)
    pairwise   all_to_all: each rank sends every partner 1/n of its slice; levels transfer concurrently

The fastest is taken, as NCCL's tuner does with its own constants (src/graph/tuning.cc, ncclTopoGetAlgoTime).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, log2, sqrt

from autoptd.cost_models.cluster import Link
from autoptd.cost_models.paths import Crossing

Path = tuple[Crossing, ...]


@dataclass(frozen=True)
class Algorithm:
    """Cost of one algorithm with one protocol; `fill_s` is four times the overhead of a chunk."""

    name: str
    latency_s: float
    s_per_byte: float
    fill_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for `nbytes`, the whole tensor."""
        transfer_s = nbytes * self.s_per_byte
        return self.latency_s + transfer_s + sqrt(self.fill_s * transfer_s)

    def dominated_by(self, other: Algorithm) -> bool:
        """Return whether the other algorithm is at least as fast at every size."""
        return (
            self.latency_s >= other.latency_s
            and self.s_per_byte >= other.s_per_byte
            and self.fill_s * self.s_per_byte >= other.fill_s * other.s_per_byte
        )


@dataclass(frozen=True)
class Protocol:
    """An NCCL protocol: start-up time, fraction of the bandwidth, and latency of a hop relative to that of Simple."""

    name: str
    base_s: float
    bandwidth: float
    hop_inside: float  # within a node
    hop_between: float  # over the network
    chunks: bool  # whether it forwards whole chunks, rather than words with their flags


# A loop of an all-reduce ring has 2 n - 1 steps of which 2 (n - 1) cross a link. The odd one is a GPU's own work on its
# n-th of the data; this fraction of it, at the rate of all its links, is not overlapped. Fitted on 2 to 8 A100, whose
# bus bandwidth is 197 GB/s at 2 and 229 at 8 (VIA-Research/vTrain, trace/a100).
ODD_STEP = 0.3
# Overhead of a chunk, in hops of its protocol, and in passes through the switch. Fitted on the bend of the curves from
# 8 MB to 1 GB: rings on A100 (vTrain), NVLink SHARP on H100 and H200 (dgxc-benchmarking; Bekman, network).
CHUNK_HOPS = 0.15
SWITCH_CHUNK_PASSES = 0.45
# NCCL 2.19, src/graph/tuning.cc: baseLat, and hwLat of rings (NVLink 0.6, 1.9, 3.4 us; network 2.7, 4.0, 14 us). LL
# sends 4 bytes of flags with 4 of data and gets half of the rest (busBw / 4), LL128 8 with 120 (busBw * 0.92).
PROTOCOLS = (
    Protocol("LL", 6.6e-6, 0.25, 0.6 / 3.4, 2.7 / 14, chunks=False),
    Protocol("LL128", 14e-6, 0.92, 1.9 / 3.4, 4.0 / 14, chunks=True),
    Protocol("Simple", 8.4e-6, 1.0, 1.0, 1.0, chunks=True),
)
PLAIN = Protocol("plain", 0.0, 1.0, 1.0, 1.0, chunks=False)
TREE_BANDWIDTH = 0.92  # of the ring's: NCCL 2.19, src/graph/tuning.cc, "busBw*.92"
PAT_BANDWIDTH = 0.75  # of the ring's: NCCL 2.23, src/graph/tuning.cc (quoted from memory)


def common_protocols(links: tuple[Link, ...]) -> tuple[Protocol, ...]:
    """Return the protocols that every link supports, else the plain ring."""
    return tuple(p for p in PROTOCOLS if all(p.name in link.protocols for link in links)) or (PLAIN,)


def ring_bytes_per_s(path: Path) -> float:
    """Return the total bandwidth of the group's rings."""
    return min(crossing.bytes_per_s for crossing in path)


def hop_s(crossing: Crossing, protocol: Protocol) -> float:
    """Return the latency of one hop over a level."""
    return crossing.link.latency_s * (protocol.hop_inside if crossing.innermost else protocol.hop_between)


def ring_latency_s(path: Path, protocol: Protocol = PLAIN) -> float:
    """Return the latency of n - 1 hops, all of the ring's n but the fastest."""
    around_s = sum(crossing.hops * hop_s(crossing, protocol) for crossing in path)
    return around_s - min(hop_s(crossing, protocol) for crossing in path)


def _ring(path: Path, ranks: int, protocol: Protocol, passes: int) -> Algorithm:
    latency_s = protocol.base_s + passes * ring_latency_s(path, protocol)
    s_per_byte = passes * (ranks - 1) / ranks / ring_bytes_per_s(path) / protocol.bandwidth
    if protocol.chunks and passes == 2 and path[0].innermost:
        s_per_byte += ODD_STEP / ranks / path[0].link.sustained_bytes_per_s
    chunk_s = CHUNK_HOPS * max(hop_s(crossing, protocol) for crossing in path) if protocol.chunks else 0.0
    return Algorithm(_called("ring", protocol), latency_s, s_per_byte, 4 * chunk_s)


def _up_and_down(path: Path, protocol: Protocol) -> tuple[float, float]:
    """Return (seconds from leaf to root, seconds per byte) of chains in units and trees over them."""
    depth_s, s_per_byte = 0.0, 0.0
    for crossing in path:
        hops = crossing.units - 1 if crossing.innermost else ceil(log2(crossing.units))
        leaving = 1 if crossing.units == 2 and not crossing.innermost else 2
        depth_s += hops * hop_s(crossing, protocol)
        s_per_byte = max(s_per_byte, leaving / crossing.bytes_per_s)
    return depth_s, s_per_byte


def _tree(path: Path, protocol: Protocol) -> Algorithm:
    depth_s, s_per_byte = _up_and_down(path, protocol)
    fill_s = 4 * CHUNK_HOPS * depth_s if protocol.chunks else 0.0
    latency_s = protocol.base_s + 2 * depth_s
    return Algorithm(_called("tree", protocol), latency_s, s_per_byte / protocol.bandwidth / TREE_BANDWIDTH, fill_s)


def _in_switch(path: Path, protocol: Protocol) -> Iterator[Algorithm]:
    inner, *outer = path
    switch, members = inner.link.in_switch, inner.units
    whole = all(crossing.lanes % members == 0 for crossing in outer)
    if switch is None or not inner.innermost or not whole:
        return
    s_per_byte = (members + 1) / members / (inner.link.bytes_per_s * switch.fraction)
    latency_s, chunk_s = protocol.base_s + switch.latency_s, SWITCH_CHUNK_PASSES * switch.latency_s
    if outer:
        depth_s, between = _up_and_down(path[1:], protocol)
        name, latency_s, chunk_s = "nvls_tree", latency_s + 2 * depth_s, chunk_s + CHUNK_HOPS * depth_s
        s_per_byte = max(s_per_byte, between / TREE_BANDWIDTH)
    else:
        name = "nvls"
    yield Algorithm(name, latency_s, s_per_byte, 4 * chunk_s)


def _called(algorithm: str, protocol: Protocol) -> str:
    return algorithm if protocol is PLAIN else f"{algorithm} {protocol.name}"


def _all_reduce(path: Path, ranks: int, protocols: tuple[Protocol, ...]) -> Iterator[Algorithm]:
    for protocol in protocols:
        yield _ring(path, ranks, protocol, 2)
        if protocol is not PLAIN:
            yield _tree(path, protocol)
        if protocol.name == "Simple":
            yield from _in_switch(path, protocol)


def _one_pass(path: Path, ranks: int, protocols: tuple[Protocol, ...]) -> Iterator[Algorithm]:
    for protocol in protocols:
        ring = _ring(path, ranks, protocol, 1)
        yield ring
        if protocol.name == "Simple" and not path[0].innermost:
            depth_s = sum(ceil(log2(crossing.units)) * hop_s(crossing, protocol) for crossing in path)
            yield Algorithm("pat", protocol.base_s + depth_s, ring.s_per_byte / PAT_BANDWIDTH, ring.fill_s)


def _broadcast(path: Path, ranks: int, protocols: tuple[Protocol, ...]) -> Iterator[Algorithm]:
    for protocol in protocols:
        depth_s = ring_latency_s(path, protocol)
        s_per_byte = 1 / ring_bytes_per_s(path) / protocol.bandwidth
        fill_s = 4 * CHUNK_HOPS * depth_s if protocol.chunks else 0.0
        yield Algorithm(_called("ring", protocol), protocol.base_s + depth_s, s_per_byte, fill_s)


def _all_to_all(path: Path, ranks: int, protocols: tuple[Protocol, ...]) -> Iterator[Algorithm]:
    for protocol in protocols:
        latency_s = sum(crossing.partners * hop_s(crossing, protocol) for crossing in path)
        s_per_byte = max(crossing.partners / crossing.lane_bytes_per_s for crossing in path) / ranks**2
        yield Algorithm(_called("pairwise", protocol), protocol.base_s + latency_s, s_per_byte / protocol.bandwidth)


COLLECTIVES: dict[str, Callable[[Path, int, tuple[Protocol, ...]], Iterator[Algorithm]]] = {
    "all_gather": _one_pass,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce_scatter": _one_pass,
}
