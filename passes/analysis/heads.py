"""Heads of a model: a product whose logits only a cross entropy reads, so that no rank needs them whole at once.

    linear(x, W) ─► casts to wider types, slices of rows, rows of all dims as one ─► cross_entropy(logits, labels)

The policy "logits" (`activations.py`) computes a head as one op, `ops.linear_cross_entropy`. Where any op besides reads
the logits, where ranks exchange them (partial values), or where they go to another segment, they are needed whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.fold import Segment
from autoptd.passes.graph import info, op_call, operands
from autoptd.passes.sharding.sharding import KindSharding, ops_of

aten = torch.ops.aten
LOSSES: dict[Any, Any] = {
    ops.cross_entropy: ops.linear_cross_entropy,
    ops.row_cross_entropy: ops.linear_row_cross_entropy,
}


@dataclass(frozen=True)
class Head:
    """A head's `linear`, the casts, slices and reshapes `between`, and its `loss`."""

    linear: fx.Node
    between: tuple[fx.Node, ...]
    loss: fx.Node

    @property
    def inner(self) -> tuple[fx.Node, ...]:
        """The nodes whose results never exist whole."""
        return self.linear, *self.between

    @property
    def slices(self) -> tuple[fx.Node, ...]:
        """The slices of rows, as that of all tokens but the last, which may as well be taken before the product."""
        return tuple(node for node in self.between if node.target is aten.slice.Tensor)

    @property
    def computed_in(self) -> torch.dtype:
        """The type in which the loss is computed."""
        return torch.promote_types(info(operands(self.loss)[0]).dtype, torch.float32)


def heads_of(segment: Segment, decided: KindSharding) -> tuple[Head, ...]:
    """Return the heads in a segment under its sharding."""
    found = (_head(node, segment) for node in segment.nodes if node.target in LOSSES)
    return tuple(head for head in found if head is not None and _stays(head, segment, decided))


def _head(loss: fx.Node, segment: Segment) -> Head | None:
    between: list[fx.Node] = []
    node, reader = operands(loss)[0], loss
    while _reads_alone(node, reader, segment):
        if node.target is aten.linear.default:
            return Head(node, tuple(between), loss)
        sliced = any(map(_takes_rows, between))  # of rows as they are after a reshape
        if not (_widens(node) or _takes_rows(node) or (_merges_rows(node) and not sliced)):
            return None
        between.insert(0, node)
        node, reader = operands(node)[0], node
    return None


def _reads_alone(node: fx.Node, reader: fx.Node, segment: Segment) -> bool:
    return set(node.users) == {reader} and node in segment.nodes and node not in segment.sends


def _widens(node: fx.Node) -> bool:
    if node.target is not aten.to.dtype:
        return False
    before, after = info(operands(node)[0]).dtype, info(node).dtype
    return before.is_floating_point and torch.promote_types(before, after) == after


def _takes_rows(node: fx.Node) -> bool:
    if node.target is not aten.slice.Tensor:
        return False
    dim = op_call(node).arg(1, "dim", 0)
    return isinstance(dim, int) and dim % info(node).ndim != info(node).ndim - 1


def _merges_rows(node: fx.Node) -> bool:
    if node.target is not aten.reshape.default:
        return False
    return info(node).shape[-1] == info(operands(node)[0]).shape[-1]


def _stays(head: Head, segment: Segment, decided: KindSharding) -> bool:
    """Return whether logits go from the product to the loss without a conversion."""
    at = {node: decided.strategies[i] for i, node in ops_of(segment) if node in (*head.inner, head.loss)}
    return all(at[a].gives[0] == at[b].needs[0] for a, b in pairwise((*head.inner, head.loss)))
