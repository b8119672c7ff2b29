"""Fit of a cluster's link levels: bandwidth and latency from measured messages and collectives.

The level inside a node is fitted to groups within a node; then, with that level fixed, the outer level is fitted to
groups that span nodes. A level without measurements is taken from a shipped cluster.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoptd.cost_models.cluster import Cluster, Device, InSwitch, Link, Sustained
from autoptd.cost_models.collectives import collective_s, p2p_s
from autoptd.profile.record import Case, Measurement, ProfileRecord
from autoptd.profile.search import best_two, mean_error, rounded

_LATENCIES_S = (0.0, *(2.0**i * 1e-7 for i in range(18)))  # up to 13 ms


def fit_levels(record: ProfileRecord, device: Device, known: Cluster | None) -> tuple[Link, ...]:
    """Return the link levels of a record's machine. `known`: the shipped cluster with its GPUs, if there is one."""
    pattern = known or Cluster.load("dgx-h100" if record.kind == "cuda" else "local")
    points = record.of("collective", "p2p")
    inside = [point for point in points if _last_rank(point.case) < record.node_ranks]
    beyond = [point for point in points if _last_rank(point.case) >= record.node_ranks]
    if record.node_ranks == 1 and beyond:  # one rank per node: there is one level
        return (_fitted(record, device, (), beyond, None, pattern.levels[-1] if known else None),)
    if not inside:
        return tuple(_not_measured(link, pattern) for link in pattern.levels)
    end = None if record.kind == "cpu" and not beyond else record.node_ranks
    inner = _fitted(record, device, (), inside, end, pattern.levels[0] if known else None)
    if end is None:
        return (inner,)
    if not beyond:
        return inner, _not_measured(pattern.levels[-1], pattern)
    return inner, _fitted(record, device, (inner,), beyond, None, pattern.levels[-1] if known else None)


def exchange_s(cluster: Cluster, case: Case) -> float:
    """Return the predicted time of a collective or message."""
    if case.family == "p2p":
        return p2p_s(case.nbytes, cluster, case.stride)
    return collective_s(case.op, case.nbytes, cluster, case.ranks, case.stride)


def _last_rank(case: Case) -> int:
    return case.stride if case.family == "p2p" else (case.ranks - 1) * case.stride


def _fitted(
    record: ProfileRecord,
    device: Device,
    inner: tuple[Link, ...],
    points: list[Measurement],
    ranks: int | None,
    known: Link | None,
) -> Link:
    """Fit the level outside of `inner`. A `known` link keeps its peak; only its fraction and latency are fitted."""
    text = f"{record.origin}: {len(points)} messages and collectives"
    start = (known or _unknown(record, ranks)).model_copy(update={"ranks": ranks})
    most = max(point.case.nbytes / point.seconds for point in points)

    def like(rate: float, latency_s: float) -> Link:
        if known is None:
            return start.model_copy(update={"bytes_per_s": rate, "latency_s": latency_s, "source": text})
        # not validated: the search may try rates above the peak
        sustained = Sustained.model_construct(fraction=rate / start.bytes_per_s, source=text)
        return start.model_copy(update={"sustained": sustained, "latency_s": latency_s})

    def error(link: Link, of: list[Measurement]) -> float:
        cluster = Cluster.model_construct(name="fit", source="", device=device, levels=(*inner, link))
        return exchange_error(cluster, of)

    rate, latency_s = best_two(lambda *xy: error(like(*xy), points), most / 100, most * 10, _LATENCIES_S)
    rate = rounded(rate) if known is None else min(rounded(rate / start.bytes_per_s), 1.0) * start.bytes_per_s
    link = like(rate, rounded(latency_s))
    summed = [point for point in points if point.case.op == "all_reduce"]
    if link.in_switch is None or not summed:
        return link

    def switched(fraction: float, latency_s: float) -> Link:
        return link.model_copy(
            update={"in_switch": InSwitch(fraction=min(1.0, fraction), latency_s=latency_s, source=text)}
        )

    fraction, latency_s = best_two(lambda *xy: error(switched(*xy), summed), 0.01, 1.0, _LATENCIES_S)
    return switched(rounded(fraction), rounded(latency_s))


def _unknown(record: ProfileRecord, ranks: int | None) -> Link:
    """Return a link with unknown constants, named after its backend."""
    where = "inside a node" if ranks or record.world == record.node_ranks else "between nodes"
    if record.backend == "gloo":
        return Link(name=f"gloo, {where}", bytes_per_s=1.0, latency_s=0.0, protocols=("plain",))
    return Link(name=f"NCCL, {where}", bytes_per_s=1.0, latency_s=0.0)


def exchange_error(cluster: Cluster, points: Iterable[Measurement]) -> float:
    return mean_error((exchange_s(cluster, point.case), point.seconds) for point in points)


def _not_measured(link: Link, pattern: Cluster) -> Link:
    return link.model_copy(update={"source": f"not measured, taken from {pattern.name}: {link.source}"})
