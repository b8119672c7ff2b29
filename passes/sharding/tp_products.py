"""Products with weights that are computed beside communication of tp (`ops.axis.products`), in a sharded segment.

    gather     all that reads a tensor with a partial gradient are products with weights: the gradient's sum travels
               beside their gradients; if the tensor is split by rows, it can also be gathered around the ring of tp
    scatter    the partial result of a product is only read as slices of its rows: it can be summed around the ring

A head that may be computed in chunks of its vocabulary is left out, and so is whatever another collective follows:
those communicate as they always do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import fx

from autoptd.layout.placements import BP, B, P, Placement, Split
from autoptd.passes.analysis.collectives import given_placements
from autoptd.passes.analysis.heads import heads_of
from autoptd.passes.fold import Segment
from autoptd.passes.graph import info, infos, operands
from autoptd.passes.sharding.sharding import KindSharding, ops_of

aten = torch.ops.aten
Read = tuple[fx.Node, int, Placement]  # reader, the operand's position, the placement needed


@dataclass(frozen=True)
class SharedOperand:
    """The products of a tensor that is whole, or gathered for them. `again`: backward re-gathers it; `ring`: by the
    ring."""

    tensor: fx.Node
    source: Placement
    products: tuple[fx.Node, ...]
    again: bool = False
    ring: bool = False


@dataclass(frozen=True)
class RingScatter:
    """A product whose partial result is summed into slices."""

    product: fx.Node
    target: Split


@dataclass(frozen=True)
class TpProducts:
    """The products of a segment beside communication of tp."""

    operands: tuple[SharedOperand, ...]
    scatters: tuple[RingScatter, ...]

    @property
    def gathers(self) -> tuple[SharedOperand, ...]:
        """Those of tensors that can be gathered around the ring."""
        return tuple(each for each in self.operands if isinstance(each.source, Split))


def tp_products(segment: Segment, decided: KindSharding) -> TpProducts:
    """Find the products of a segment beside communication of tp."""
    strategies = {segment.nodes[i]: strategy for i, strategy in decided.strategies.items()}
    heads = {head.linear for head in heads_of(segment, decided)}
    products = {
        node
        for _, node in ops_of(segment)
        if node.target is aten.linear.default
        and not (strategies[node].implementation or node in heads)
        and all(_is_weight(o, node, segment) for o in operands(node)[1:])
    }
    given, reads = given_placements(segment, decided), _reads(segment, decided)
    sent = dict(zip(segment.sends, decided.sends, strict=True))
    shared, scatters = [], []
    for tensor, source in given.items():
        whole = [(node, at) for node, at, needed in reads.get(tensor, ()) if needed == BP]
        if not (whole and (source == B or _of_rows(source, tensor)) and info(tensor).requires_grad):
            continue
        readers = tuple(node for node, _ in whole)
        alone = sent.get(tensor) != BP and all(node in products and at == 0 for node, at in whole)
        # one function would give zeros to a weight that has no gradient
        alone = alone and len({any(x.requires_grad for x in infos(node)) for node in readers}) == 1
        if alone and all(_is_weight(o, readers[0], segment) for node in readers for o in operands(node)[1:]):
            shared.append(SharedOperand(tensor, source, readers))
    for node in (n for n in segment.nodes if n in products and given[n] == P):
        wanted = {needed for _, _, needed in reads.get(node, ())} | ({sent[node]} if node in sent else set())
        (target,) = wanted if len(wanted) == 1 else (B,)
        if _of_rows(target, node):
            scatters.append(RingScatter(node, target))
    return TpProducts(tuple(shared), tuple(scatters))


def _reads(segment: Segment, decided: KindSharding) -> Mapping[fx.Node, list[Read]]:
    found: dict[fx.Node, list[Read]] = {}
    for i, node in ops_of(segment):
        for at, (operand, needed) in enumerate(zip(operands(node), decided.strategies[i].needs, strict=True)):
            found.setdefault(operand, []).append((node, at, needed))
    return found


def _of_rows(placement: Placement, tensor: fx.Node) -> TypeGuard[Split]:
    """Return whether a tensor is split by rows: not by the dim that a product sums over or makes."""
    return isinstance(placement, Split) and placement.dim < len(info(tensor).shape) - 1


def _is_weight(operand: fx.Node, node: fx.Node, segment: Segment) -> bool:
    """Return whether an operand is computed from parameters alone, before `node` is.

    A split backward pass computes gradients of weights in W, so nothing that arrives from other ranks may need them."""
    if operand in segment.parameters:
        return True
    if operand not in segment.nodes or segment.nodes.index(operand) > segment.nodes.index(node):
        return False
    return all(_is_weight(o, node, segment) for o in operands(operand))
