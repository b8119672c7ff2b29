"""Expert regions: the ops of a graph that may run on the ranks that hold the experts.

A region is the grouped products that share their ends, or a chain of batched products (`batched_experts.py`), and every
op between them and after them that works row by row on their results: whatever the model calls it, it gives the same
rows wherever they are computed. What a region reads of
other rows (its input, the weights of the router) is dispatched, what others read of it is combined. The experts'
parameters are split over ep along their first dim, and so is what is computed from them alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn
from weakref import WeakKeyDictionary

from torch import fx

from autoptd.errors import PlanError
from autoptd.ops import library as ops
from autoptd.passes.analysis.saved_tensors import DROPOUT
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import info, infos, is_getitem, op_name, operands, source_line
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.batched_experts import batched_regions
from autoptd.passes.sharding.expert_rows import (
    ExpertRegion,
    NoWeight,
    RowDims,
    has_sizes,
    other_readers,
    outermost,
    weight_chain,
)

_FOUND: WeakKeyDictionary[Segment, tuple[ExpertRegion, ...]] = WeakKeyDictionary()  # asked thousands of times


def expert_regions(segment: Segment) -> tuple[ExpertRegion, ...]:
    """Return the expert regions of a segment, in program order. Raises PlanError for weights that cannot be split."""
    if segment not in _FOUND:
        _FOUND[segment] = _regions(segment)
    return _FOUND[segment]


def _regions(segment: Segment) -> tuple[ExpertRegion, ...]:
    products: dict[fx.Node, list[fx.Node]] = {}
    for node in segment.nodes:
        if node.target is ops.grouped_mm:
            products.setdefault(operands(node)[2], []).append(node)
    grouped = (_grouped_region(segment, ends, found) for ends, found in products.items())
    return (*grouped, *batched_regions(segment))


def expert_parameters(folded: Folded) -> frozenset[str]:
    """Return the names of the experts' parameters. Raises PlanError for weights that cannot be split."""
    names = folded.traced.parameters
    return frozenset(
        names[p.name] for s in folded.segments for r in expert_regions(s) for p in s.parameters if p in r.weights
    )


def expert_dims(segment: Segment) -> dict[fx.Node, int]:
    """Return the tensors of a segment that have a dim for experts, with that dim."""
    found: dict[fx.Node, int] = {}
    for region in expert_regions(segment):
        found |= region.weights
        tensors = {**region.reads, **region.rows}.items()
        found |= {node: dims.experts for node, dims in tensors if dims.experts is not None}
    return found


def experts_of(folded: Folded) -> int:
    """Return the greatest number of ranks that a model's experts can be split over; 1 if they cannot be."""
    try:
        expert_parameters(folded)
    except PlanError:
        return 1
    regions = (region for s in folded.segments for region in expert_regions(s))
    return math.gcd(*(region.count for region in regions)) or 1


def check_experts(folded: Folded, ep: int) -> None:
    """Raise PlanError unless a model's experts can be split over `ep` ranks."""
    counts = {region.count: region for s in reversed(folded.segments) for region in expert_regions(s)}
    if not counts:
        raise PlanError(
            f"ep {ep}: no experts are found in the model",
            where="fix['ep']",
            fix="leave ep out, or keep the weights of all experts of a layer in parameters [experts, …] and multiply "
            "by torch's grouped matrix product (rows sorted by expert), or in batches (torch.bmm, einsum)",
        )
    for count, region in sorted(counts.items()):
        if count % ep:
            fits = math.gcd(*counts)
            raise PlanError(
                f"{count} experts are not divisible by ep {ep}",
                where=source_line(region.product),
                fix=f"use a divisor of {fits}" if fits > 1 else "leave ep out",
            )


def _grouped_region(segment: Segment, ends: fx.Node, products: Sequence[fx.Node]) -> ExpertRegion:
    rows, inside, reads = set[fx.Node](products), set[fx.Node](products), set[fx.Node]()
    for node in segment.nodes[segment.nodes.index(products[0]) :]:
        if is_getitem(node):
            if node.all_input_nodes[0] in inside:
                rows.add(node)
                inside.add(node)
        elif node not in inside and not rows.isdisjoint(operands(node)) and (taken := _by_rows(node, rows)) is not None:
            inside.add(node)
            rows.add(node)
            reads |= taken
    reads |= {operands(node)[0] for node in products} - rows
    weights: dict[fx.Node, int] = {}
    for node in products:
        chain = weight_chain(segment, operands(node)[1], 0)
        if isinstance(chain, NoWeight):
            _refuse(chain.node, chain.why)
        if others := other_readers(chain, inside):
            _refuse(list(chain)[-1], f"{op_name(min(others, key=str))} reads them too")
        weights |= chain
    dims = RowDims()
    taken_in = dict.fromkeys(sorted(reads - rows, key=str), dims)
    return ExpertRegion(
        products[0], int(info(ends).shape[0]), ends, frozenset(inside), dict.fromkeys(rows, dims), taken_in, weights
    )


def _by_rows(node: fx.Node, rows: set[fx.Node]) -> set[fx.Node] | None:
    """Return the operands that an op reads row by row along with `rows`; None if it does not work row by row.

    Dropout does not: its mask is keyed by the positions of rows.
    """
    op = op_of(node)
    if node.target in DROPOUT or op.loops is None or has_sizes(node):
        return None
    given = operands(node)
    for places in op.loops.places.values():
        along = [outermost(place) and place.dim == 0 for place in places]  # type: ignore[union-attr]
        if not all(along[len(given) :]) or not all(along[i] for i, o in enumerate(given) if o in rows):
            continue
        taken = {o for i, o in enumerate(given) if along[i]}
        length = info(next(o for o in given if o in rows)).shape[0]
        if all(t.shape[0] == length for o in taken for t in infos(o)) and all(
            t.shape[0] == length for t in infos(node)
        ):
            return taken - rows
    return None


def _refuse(node: fx.Node, why: str) -> NoReturn:
    raise PlanError(
        f"the weights of the experts cannot be split over ep ranks: {why}",
        where=source_line(node),
        fix="leave ep out, or keep a parameter [experts, …] for the weights of all experts",
    )
