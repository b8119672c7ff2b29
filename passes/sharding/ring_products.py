"""Products with weights that can be taken apart around the ring of tp (`ops.axis.products`), in a sharded segment.

    gather     a tensor split by rows is gathered, and all that reads it whole are products with weights
    scatter    the partial result of a product is only read as slices of its rows

A head that may be computed in chunks of its vocabulary is left out, and so is whatever an all-reduce or another
collective follows: those communicate as they always do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autoptd.layout.placements import BP, B, P, Placement, Split
from autoptd.passes.analysis.collectives import given_placements
from autoptd.passes.analysis.heads import heads_of
from autoptd.passes.fold import Segment
from autoptd.passes.graph import info, operands
from autoptd.passes.sharding.sharding import KindSharding, ops_of

aten = torch.ops.aten
Read = tuple[fx.Node, int, Placement]  # reader, the operand's position, the placement needed


@dataclass(frozen=True)
class RingGather:
    """The products of a gathered tensor. `again`: backward re-gathers it."""

    tensor: fx.Node
    source: Split
    products: tuple[fx.Node, ...]
    again: bool = False


@dataclass(frozen=True)
class RingScatter:
    """A product whose partial result is summed into slices."""

    product: fx.Node
    target: Split


@dataclass(frozen=True)
class RingProducts:
    """The products of a segment that can be taken apart."""

    gathers: tuple[RingGather, ...]
    scatters: tuple[RingScatter, ...]


def ring_products(segment: Segment, decided: KindSharding) -> RingProducts:
    """Find the products of a segment that can be taken apart."""
    strategies = {segment.nodes[i]: strategy for i, strategy in decided.strategies.items()}
    heads = {node for head in heads_of(segment, decided) for node in (head.linear, *head.inner)}
    products = {
        node
        for _, node in ops_of(segment)
        if node.target is aten.linear.default and not strategies[node].implementation and node not in heads
    }
    given, reads = given_placements(segment, decided), _reads(segment, decided)
    sent = dict(zip(segment.sends, decided.sends, strict=True))
    gathers, scatters = [], []
    for tensor, source in given.items():
        whole = [(node, at) for node, at, needed in reads.get(tensor, ()) if needed == BP]
        if not (whole and isinstance(source, Split) and _of_rows(source, tensor) and info(tensor).requires_grad):
            continue
        readers = tuple(node for node, _ in whole)
        alone = sent.get(tensor) != BP and all(node in products and at == 0 for node, at in whole)
        if alone and all(_is_before(o, readers[0], segment) for node in readers for o in operands(node)[1:]):
            gathers.append(RingGather(tensor, source, readers))
    for node in (n for n in segment.nodes if n in products and given[n] == P):
        wanted = {needed for _, _, needed in reads.get(node, ())} | ({sent[node]} if node in sent else set())
        (target,) = wanted if len(wanted) == 1 else (B,)
        if isinstance(target, Split) and _of_rows(target, node):
            scatters.append(RingScatter(node, target))
    return RingProducts(tuple(gathers), tuple(scatters))


def _reads(segment: Segment, decided: KindSharding) -> Mapping[fx.Node, list[Read]]:
    found: dict[fx.Node, list[Read]] = {}
    for i, node in ops_of(segment):
        for at, (operand, needed) in enumerate(zip(operands(node), decided.strategies[i].needs, strict=True)):
            found.setdefault(operand, []).append((node, at, needed))
    return found


def _of_rows(split: Split, tensor: fx.Node) -> bool:
    """Return whether slices are of rows: not of the dim that a product sums over or makes."""
    return split.dim < len(info(tensor).shape) - 1


def _is_before(operand: fx.Node, node: fx.Node, segment: Segment) -> bool:
    """Return whether a weight or bias is there when `node` is computed."""
    return operand not in segment.nodes or segment.nodes.index(operand) < segment.nodes.index(node)
