"""Seconds that a segment's rows take to the ranks of their experts and back, in one pass over a microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s
from autoptd.cost_models.dispatch import dispatch_s, fullest
from autoptd.cost_models.op_time import memory_s
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.meshes import Candidate
from autoptd.search.sharding.kind_cost import KindWork, Moved
from autoptd.search.sharding.tensors import Sharded


def spread_over(sharded: Sharded, c: Candidate, method: SearchOptions, cluster: Cluster) -> Sharded:
    """Return a sharding with the work of a candidate's fullest rank."""
    ratio = fullest(c.ep, *experts_of(sharded), method.routing)
    return sharded.spread(c.ep, cluster, c.world, method.dispatch == "merged", ratio)


def experts_of(sharded: Sharded) -> tuple[int, float]:
    """Return the least number of experts that a layer has, and how many of them a token takes."""
    moved = (moved for _, cost in sharded.every_kind for moved in cost.work.moved)
    return min(((m.experts, m.chosen) for m in moved), default=(1, 1.0))


def dispatched_s(works: Iterable[KindWork], c: Candidate, method: SearchOptions, cluster: Cluster) -> float:
    """Return the seconds of one pass's exchanges of rows, all of them exposed."""
    how = method.dispatch, method.routing
    return sum(exchange_s(moved, *how, cluster, c) for work in works for moved in work.moved) if c.ep > 1 else 0.0


def exchange_s(moved: Moved, how: str, routing: str, cluster: Cluster, c: Candidate) -> float:
    """Return the seconds of sending a tensor's rows to experts, or back, over the ep ranks of a candidate.

    As slices, each tp rank sends its own part of the rows, and the tp ranks of an expert gather them. Rows that arrive
    sorted by rank are sorted by expert by one copy more; a merged dispatch writes them in order. All ranks wait for the
    fullest.
    """
    return sum(_parts_s(moved, how, cluster, c)) * fullest(c.ep, moved.experts, moved.chosen, routing)


def _parts_s(moved: Moved, how: str, cluster: Cluster, c: Candidate) -> Iterator[float]:
    parts = c.sharers if how != "rows" else 1
    tokens = moved.rows / moved.chosen / parts
    if moved.copied:
        yield collective_s("all_to_all", moved.rows * moved.row_bytes * c.ep**2, cluster, c.ep, c.sharers, c.world)
        return
    yield dispatch_s(how, tokens, moved.row_bytes, moved.experts, moved.chosen, cluster, c.ep, c.sharers, c.world)
    nbytes = moved.rows * moved.row_bytes
    if parts > 1:
        yield collective_s("all_gather", nbytes, cluster, parts, 1, c.world)
    if how != "merged" and moved.experts > c.ep:
        yield memory_s(cluster.device, 2 * nbytes) + cluster.device.launch_s
