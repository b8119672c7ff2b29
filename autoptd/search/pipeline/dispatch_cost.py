"""Seconds that a segment's rows take to the ranks of their experts and back, in one pass over a microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s
from autoptd.cost_models.dispatch import dispatch_s
from autoptd.cost_models.op_time import memory_s
from autoptd.cost_models.imbalance import fullest
from autoptd.layout.placements import Placement
from autoptd.passes.fold import Segment
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.sharding.expert_parallel_graph import dispatched
from autoptd.passes.sharding.expert_regions import expert_regions
from autoptd.passes.sharding.sharding import KindSharding
from autoptd.passes.graph import info
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.meshes import Candidate
from autoptd.search.sharding.tensors import Sharded, Tensors


@dataclass(frozen=True)
class Moved:
    """A tensor of rows that is dispatched or combined. `rows`: of one tp rank; `chosen`: rows of a token."""

    row_bytes: float
    rows: int
    chosen: float
    experts: int


def moved_rows(tensors: Tensors, segment: Segment, decided: KindSharding) -> tuple[Moved, ...]:
    """Return the tensors that a segment dispatches to experts or combines."""
    regions = expert_regions(segment)
    if not regions:
        return ()
    experts = min(int(info(region.ends).shape[0]) for region in regions)
    tokens = tensors.number(BATCH) * (tensors.number(SEQUENCE) if SEQUENCE in tensors.values else 1)
    return tuple(_moved(tensors, tensor, placement, experts, tokens) for tensor, placement in dispatched(segment, decided))


def _moved(tensors: Tensors, tensor: TensorInfo, placement: Placement, experts: int, tokens: int) -> Moved:
    whole = tensors.number(tensor.shape[0])
    row_bytes = tensors.nbytes(tensor) / whole
    rows = round(tensors.nbytes(tensor, placement) / row_bytes)
    return Moved(row_bytes, rows, min(experts, max(1.0, whole / tokens)), experts)


def spread_over(sharded: Sharded, c: Candidate, method: SearchOptions, cluster: Cluster) -> Sharded:
    """Return a sharding with the work of a candidate's fullest rank."""
    ratio = fullest(c.ep, experts_of(sharded), method.routing)
    return sharded.spread(c.ep, cluster, c.world, method.dispatch == "merged", ratio)


def experts_of(sharded: Sharded) -> int:
    """Return the least number of experts that a grouped product has."""
    return min((w.batch for _, cost in sharded.every_kind for w in cost.work.forward if w.groups), default=1)


def exchange_s(moved: Moved, how: str, routing: str, cluster: Cluster, c: Candidate) -> float:
    """Return the seconds of sending a tensor's rows to experts, or back, over the ep ranks of a candidate.

    As slices, each tp rank sends its own part of the rows, and the tp ranks of an expert gather them. Rows that arrive
    sorted by rank are sorted by expert by one copy more; a merged dispatch writes them in order. All ranks wait for the
    fullest.
    """
    return sum(_parts_s(moved, how, cluster, c)) * fullest(c.ep, moved.experts, routing)


def _parts_s(moved: Moved, how: str, cluster: Cluster, c: Candidate) -> Iterator[float]:
    parts = c.sharers if how != "rows" else 1
    tokens = moved.rows / moved.chosen / parts
    yield dispatch_s(
        how, tokens, moved.row_bytes, moved.experts, moved.chosen, cluster, c.ep, c.sharers, c.world
    )
    nbytes = moved.rows * moved.row_bytes
    if parts > 1:
        yield collective_s("all_gather", nbytes, cluster, parts, 1, c.world)
    if how != "merged" and moved.experts > c.ep:
        yield memory_s(cluster.device, 2 * nbytes) + cluster.device.launch_s
