"""Expert regions as data: ops that may run on the ranks that hold the experts, and the dims of their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from autoptd.passes.fold import Segment
from autoptd.passes.graph import is_getitem, op_name, operands
from autoptd.passes.rules.factor_notation import FactorPlace
from autoptd.passes.rules.lookup import op_of


@dataclass(frozen=True)
class RowDims:
    """The dims of a tensor that count rows and experts.

    `experts` is None where rows are sorted by expert, and where `copied`: all experts read the same rows.
    """

    rows: int = 0
    experts: int | None = None
    copied: bool = False


@dataclass(frozen=True, eq=False)
class ExpertRegion:
    """Ops on the rows of experts. `count`: the number of experts; `ends`: those of each expert's rows, or None if the
    experts have a dim of their own; `rows`: its row tensors; `reads`: those that it takes from outside; `weights`: the
    experts' parameters and what is computed from them alone, with the dim that counts experts, 0 in a parameter;
    `product`: one of its products, whose line errors show."""

    product: fx.Node
    count: int
    ends: fx.Node | None
    ops: frozenset[fx.Node]
    rows: Mapping[fx.Node, RowDims]
    reads: Mapping[fx.Node, RowDims]
    weights: Mapping[fx.Node, int]


def leaving(region: ExpertRegion, segment: Segment) -> list[fx.Node]:
    """Return the tensors of a region that others read, whose rows are combined."""
    return [
        node
        for node in segment.nodes
        if node in region.rows
        and not isinstance(node.meta["info"], tuple)
        and (node in segment.sends or any(user not in region.ops for user in node.users))
    ]


def outermost(place: FactorPlace | None) -> bool:
    """Return whether a factor is the outermost of a dim: equal slices of the dim are slices of the factor."""
    return place is not None and place.outer == 1


def counts_rows(value: Any) -> bool:
    """Return whether an argument is a size that depends on the batch, which would be another for dispatched rows."""
    if isinstance(value, (tuple, list)):
        return any(map(counts_rows, value))
    return isinstance(value, sympy.Basic) and bool(value.free_symbols)


def has_sizes(node: fx.Node) -> bool:
    return any(map(counts_rows, (*node.args, *node.kwargs.values())))


@dataclass(frozen=True)
class NoWeight:
    """The reason for which a tensor is not computed from one parameter of experts alone, and its node."""

    node: fx.Node
    why: str


def weight_chain(segment: Segment, weight: fx.Node, dim: int) -> dict[fx.Node, int] | NoWeight:
    """Return the nodes from a parameter [experts, …] to a tensor, each with the dim that counts experts."""
    found, node = {weight: dim}, weight
    while node not in segment.parameters:
        if node.op != "call_function":
            return NoWeight(node, f"{node.name} is no parameter of this part of the model")
        loops = None if is_getitem(node) or len(operands(node)) != 1 or has_sizes(node) else op_of(node).loops
        source = next(_sources(() if loops is None else loops.places.values(), dim), None)
        if source is None:
            return NoWeight(node, f"{op_name(node)} mixes them")
        (node,), dim = operands(node), source
        found[node] = dim
    return found if dim == 0 else NoWeight(node, f"dim {dim} of {node.name} counts experts, not dim 0")


def _sources(places: Any, dim: int) -> Iterator[int]:
    """Yield the dims of an op's only operand that dim `dim` of its only result is made of."""
    for place in places:
        if len(place) == 2 and all(map(outermost, place)) and place[1].dim == dim:
            yield place[0].dim


def other_readers(weights: Mapping[fx.Node, int], ops: frozenset[fx.Node] | set[fx.Node]) -> set[fx.Node]:
    """Return the ops outside a region that read its weights."""
    return {user for n in weights for user in n.users} - weights.keys() - ops
