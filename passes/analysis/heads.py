"""Heads of a model: a product whose logits only a cross entropy reads, so that no rank needs them whole at once.

    linear(x, W) ─► casts to wider types ─► cross_entropy(logits, labels)

The policy "logits" (`activations.py`) computes a head as one op, `ops.linear_cross_entropy`. Where any op besides reads
the logits, where ranks exchange them (partial values), or where they go to another segment, they are needed whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.fold import Segment
from autoptd.passes.graph import info, operands
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.sharding.sharding import KindSharding, ops_of

aten = torch.ops.aten
LOSSES = {ops.cross_entropy: ops.linear_cross_entropy, ops.row_cross_entropy: ops.linear_row_cross_entropy}


@dataclass(frozen=True)
class Head:
    """A head's `linear`, the casts `between`, and its `loss`."""

    linear: fx.Node
    between: tuple[fx.Node, ...]
    loss: fx.Node

    @property
    def inner(self) -> tuple[fx.Node, ...]:
        """The nodes whose results never exist whole."""
        return self.linear, *self.between

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
    while set(node.users) == {reader} and node in segment.nodes and node not in segment.sends:
        if node.target is aten.linear.default:
            return Head(node, tuple(between), loss) if operands(loss)[1] is not operands(loss)[0] else None
        if node.target is not aten.to.dtype or not _widens(info(operands(node)[0]), info(node)):
            return None
        between.insert(0, node)
        node, reader = operands(node)[0], node
    return None


def _widens(before: TensorInfo, after: TensorInfo) -> bool:
    return torch.promote_types(before.dtype, after.dtype) == after.dtype and before.dtype.is_floating_point


def _stays(head: Head, segment: Segment, decided: KindSharding) -> bool:
    """Return whether logits go from the product to the loss without a conversion."""
    at = {node: decided.strategies[i] for i, node in ops_of(segment) if node in (*head.inner, head.loss)}
    placed = at[head.linear].gives[0]
    return all(at[node].needs[0] == placed == at[node].gives[0] for node in head.between) and (
        at[head.loss].needs[0] == placed
    )
