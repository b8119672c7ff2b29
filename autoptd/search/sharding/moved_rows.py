"""The rows of a segment that travel if its experts are on ranks of their own."""

from __future__ import annotations

from autoptd.errors import PlanError
from autoptd.layout.placements import Placement
from autoptd.passes.fold import Segment
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.sharding.expert_parallel_graph import dispatched
from autoptd.passes.sharding.expert_regions import expert_regions
from autoptd.passes.sharding.sharding import KindSharding
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.search.sharding.cost import Prices
from autoptd.search.sharding.kind_cost import Moved


def moved_rows(prices: Prices, segment: Segment, decided: KindSharding) -> tuple[Moved, ...]:
    """Return the tensors that a segment dispatches to experts or combines; () if its experts cannot be spread."""
    try:
        regions = expert_regions(segment)
    except PlanError:
        return ()
    if not regions:
        return ()
    experts = min(region.count for region in regions)
    tokens = prices.number(BATCH) * (prices.number(SEQUENCE) if SEQUENCE in prices.values else 1)
    return tuple(_moved(prices, *each, experts, tokens) for each in dispatched(segment, decided))


def _moved(prices: Prices, tensor: TensorInfo, placement: Placement, copied: bool, experts: int, tokens: int) -> Moved:
    width = prices.number(tensor.shape[-1]) if tensor.ndim > 1 else 1
    row_bytes = float(width * tensor.dtype.itemsize)
    whole, rows = (round(n / row_bytes) for n in (prices.nbytes(tensor), prices.nbytes(tensor, placement)))
    return Moved(row_bytes, rows, min(experts, max(1.0, whole / tokens)), experts, copied)
