"""Expert regions: the ops of a graph that may run on the ranks that hold the experts.

A region is the grouped products that share their ends, and every op between them and after them that works row by row
on their results: whatever the model calls it, it gives the same rows wherever they are computed. What a region reads of
other rows (its input, the weights of the router) is dispatched, what others read of it is combined. The experts'
parameters are split over ep along their first dim, and so is what is computed from them alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from autoptd.errors import PlanError
from autoptd.ops import library as ops
from autoptd.passes.analysis.saved_tensors import DROPOUT
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import info, infos, is_getitem, op_name, operands, source_line
from autoptd.passes.rules.lookup import op_of


@dataclass(frozen=True)
class ExpertRegion:
    """Ops on the rows of experts. `rows`: its row tensors; `reads`: those that it takes from outside; `weights`: the
    experts' parameters and what is computed from them alone, each with the experts in its first dim."""

    ends: fx.Node
    ops: frozenset[fx.Node]
    rows: frozenset[fx.Node]
    reads: frozenset[fx.Node]
    weights: frozenset[fx.Node]


def expert_regions(segment: Segment) -> tuple[ExpertRegion, ...]:
    """Return the expert regions of a segment, in program order. Raises PlanError for weights that cannot be split."""
    products: dict[fx.Node, list[fx.Node]] = {}
    for node in segment.nodes:
        if node.target is ops.grouped_mm:
            products.setdefault(operands(node)[2], []).append(node)
    return tuple(_region(segment, ends, found) for ends, found in products.items())


def expert_parameters(folded: Folded) -> frozenset[str]:
    """Return the names of the experts' parameters. Raises PlanError for weights that cannot be split."""
    names = folded.traced.parameters
    return frozenset(
        names[p.name] for s in folded.segments for r in expert_regions(s) for p in s.parameters if p in r.weights
    )


def experts_of(folded: Folded) -> int:
    """Return the greatest number of ranks that a model's experts can be split over; 1 if they cannot be."""
    try:
        expert_parameters(folded)
    except PlanError:
        return 1
    regions = (region for s in folded.segments for region in expert_regions(s))
    return math.gcd(*(int(info(region.ends).shape[0]) for region in regions)) or 1


def check_experts(folded: Folded, ep: int) -> None:
    """Raise PlanError unless a model's experts can be split over `ep` ranks."""
    counts = {int(info(region.ends).shape[0]): region for s in folded.segments for region in expert_regions(s)}
    if not counts:
        raise PlanError(
            f"ep {ep}: the model has no grouped products of experts",
            where="fix['ep']",
            fix="leave ep out; experts are found where rows sorted by expert meet torch's grouped matrix product",
        )
    for count, region in sorted(counts.items()):
        if count % ep:
            raise PlanError(
                f"{count} experts are not divisible by ep {ep}", where=source_line(region.ends), fix="use a divisor"
            )


def leaving(region: ExpertRegion, segment: Segment) -> list[fx.Node]:
    """Return the tensors of a region that others read, whose rows are combined."""
    return [
        node
        for node in segment.nodes
        if node in region.rows
        and not isinstance(node.meta["info"], tuple)
        and (node in segment.sends or any(user not in region.ops for user in node.users))
    ]


def _region(segment: Segment, ends: fx.Node, products: Sequence[fx.Node]) -> ExpertRegion:
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
    weights = set[fx.Node]()
    for node in products:
        weights |= _weights(segment, operands(node)[1], inside)
    return ExpertRegion(ends, frozenset(inside), frozenset(rows), frozenset(reads - rows), frozenset(weights))


def _by_rows(node: fx.Node, rows: set[fx.Node]) -> set[fx.Node] | None:
    """Return the operands that an op reads row by row along with `rows`; None if it does not work row by row.

    Dropout does not: its mask is keyed by the positions of rows.
    """
    op = op_of(node)
    if node.target in DROPOUT or op.loops is None or any(_counts_rows(a) for a in (*node.args, *node.kwargs.values())):
        return None
    given = operands(node)
    for places in op.loops.places.values():
        along = [place is not None and place.dim == 0 and place.outer == 1 for place in places]
        if not all(along[len(given) :]) or not all(along[i] for i, o in enumerate(given) if o in rows):
            continue
        taken = {o for i, o in enumerate(given) if along[i]}
        length = info(next(o for o in given if o in rows)).shape[0]
        if all(t.shape[0] == length for o in taken for t in infos(o)) and all(
            t.shape[0] == length for t in infos(node)
        ):
            return taken - rows
    return None


def _counts_rows(value: Any) -> bool:
    """Return whether an argument is a size that depends on the batch, which would be another for dispatched rows."""
    if isinstance(value, (tuple, list)):
        return any(map(_counts_rows, value))
    return isinstance(value, sympy.Basic) and bool(value.free_symbols)


def _weights(segment: Segment, weight: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes from a parameter to the weight of a product, each with the experts in its first dim."""
    found, node = {weight}, weight
    while node not in segment.parameters:
        loops = op_of(node).loops if node.op == "call_function" and not is_getitem(node) else None
        places = () if loops is None else loops.places.values()
        first = any(all(p is not None and p.dim == 0 and p.outer == 1 for p in place) for place in places)
        if len(operands(node)) != 1 or not first:
            _refuse(node, f"{op_name(node) if node.op == 'call_function' else node.name} mixes them")
        (node,) = operands(node)
        found.add(node)
    others = {user for n in found for user in n.users} - found - inside
    if others:
        _refuse(node, f"{op_name(min(others, key=str))} reads them too")
    return found


def _refuse(node: fx.Node, why: str) -> None:
    raise PlanError(
        f"the weights of the experts cannot be split over ep ranks: {why}",
        where=source_line(node),
        fix="leave ep out, or keep a parameter [experts, …] for the weights of all experts",
    )
