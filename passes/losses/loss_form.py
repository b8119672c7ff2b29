"""What a rewritten loss computes: counts of the global batch, sums over it, and a function of both.

    counts    known before the first forward pass: sums (or maxima) over the batch of what inputs and constants give
    partial sums   what a microbatch adds to sums over the batch that depend on parameters
    outer     the loss as a function of those sums and the counts, where it is not linear in the sums

A loss that is linear in its sums is itself their only partial sum, a scalar, and has no outer function. Otherwise the
graph's first output holds all partial sums, flattened and side by side, and the gradient of each is the outer
function's derivative at the sums over the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import fx

from autoptd.errors import AutoptdError
from autoptd.passes.graph import info

COUNT = "loss_count"  # names of the placeholders: loss_count_0, loss_count_1 …
PARTIAL = "loss_partial"  # and in the outer function
Combine = Literal["sum", "max", "min"]
_KEY = "loss_form"  # in the graph's meta


@dataclass
class LossForm:
    """`combines`, `rounds`: of each count, how microbatches combine, and when it is known (0: from inputs alone).

    `outer`: its placeholders are `loss_partial_i`, `loss_count_i` and buffers, its output the loss. `notes`: what is
    averaged otherwise than over the global batch, as the user asked. `refused`: what holds of a whole batch in one
    microbatch alone, as errors to raise where there are several.
    """

    combines: list[Combine] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    outer: fx.Graph | None = None
    partial_sums: tuple[fx.Node, ...] = ()  # placeholders of `outer`, in order
    notes: list[str] = field(default_factory=list)
    refused: list[AutoptdError] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Elements of the partial values, side by side; 0 for a loss that is its only partial value."""
        return sum(prod(map(int, info(n).shape)) for n in self.partial_sums)


def loss_form(graph: fx.GraphModule) -> LossForm:
    """The form that `rewrite_loss` gave the loss of a normalised graph."""
    found = graph.meta.setdefault(_KEY, LossForm())
    assert isinstance(found, LossForm)
    return found


def loss_node(graph: fx.Graph) -> fx.Node:
    """What the graph gives first."""
    total = next(n for n in graph.nodes if n.op == "output").args[0]
    while isinstance(total, (tuple, list)):
        total = total[0]
    assert isinstance(total, fx.Node)
    return total


def is_count(node: fx.Node) -> bool:
    """Whether a placeholder is a global count."""
    return node.op == "placeholder" and node.name.startswith(COUNT)


def count_index(node: fx.Node) -> int:
    """Which count a placeholder is."""
    return int(node.name.rpartition("_")[2])


def partial_slices(partial_sums: Sequence[fx.Node]) -> list[tuple[int, int, tuple[int, ...], torch.dtype]]:
    """(start, stop, shape, dtype) of each partial value in the flat vector."""
    found, at = [], 0
    for node in partial_sums:
        shape = tuple(map(int, info(node).shape))
        found.append((at, at + prod(shape), shape, info(node).dtype))
        at += prod(shape)
    return found
