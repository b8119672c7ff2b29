"""Form of a rewritten loss: counts of the global batch, sums over it, and a function of both.

    counts         sums (or maxima) over the batch that depend on inputs only, known before the first forward pass
    partial sums   a microbatch's contributions to the sums over the batch that depend on parameters
    outer          the loss as a function of those sums and the counts, if it is not linear in the sums

A loss that is linear in its sums is itself their only partial sum, a scalar, and has no outer function. Otherwise the
graph's first output is all partial sums, flattened and concatenated, and the gradient of each is the outer function's
derivative at the sums over the global batch.

The outer function may also read rows: tensors with a part per sample, of all samples of the batch (`whole_batch.py`).
The graph's first output is then the partial sums, followed by the rows of the microbatch's samples, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import fx

from autoptd.errors import AutoptdError
from autoptd.passes.graph import info, output_of

COUNT = "loss_count"  # prefix of count placeholders: loss_count_0, loss_count_1 …
PARTIAL = "loss_partial"  # prefix of partial-sum placeholders in the outer function
SIZE = "size"  # in the meta of a count's placeholder in a function of sums: the size that it is
ROWS = "loss_rows"  # prefix of its placeholders for tensors with a row per sample of the batch
Combine = Literal["sum", "max", "min"]
_KEY = "loss_form"  # in the graph's meta


@dataclass
class LossForm:
    """The counts, partial sums and outer function of a loss.

    `combines`, `rounds`: per count, how microbatches combine, and when it is known (0: from inputs alone). `outer`: has
    placeholders `loss_partial_i`, `loss_count_i` and buffers, and the loss as output. `notes`: averages that are not
    over the global batch, as the user requested. `refused`: errors to raise if there is more than one microbatch.
    """

    combines: list[Combine] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    outer: fx.Graph | None = None
    partial_sums: tuple[fx.Node, ...] = ()  # placeholders of `outer`, in order
    rows: tuple[fx.Node, ...] = ()  # likewise, [b, …] with b the samples of the batch
    notes: list[str] = field(default_factory=list)
    refused: list[AutoptdError] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Number of elements of all partial sums; 0 for a loss that is its own partial sum."""
        return sum(prod(map(int, info(n).shape)) for n in self.partial_sums)

    @property
    def row_width(self) -> int:
        """Number of elements of a sample in all `rows`."""
        return sum(prod(map(int, info(n).shape[1:])) for n in self.rows)


def loss_form(graph: fx.GraphModule) -> LossForm:
    """Return the form that `rewrite_loss` gave the loss of a normalised graph."""
    found = graph.meta.setdefault(_KEY, LossForm())
    assert isinstance(found, LossForm)
    return found


def loss_node(graph: fx.Graph) -> fx.Node:
    """Return the graph's first output."""
    total = output_of(graph).args[0]
    while isinstance(total, (tuple, list)):
        total = total[0]
    assert isinstance(total, fx.Node)
    return total


def is_count(node: fx.Node) -> bool:
    """Return whether a node is the placeholder of a global count."""
    return node.op == "placeholder" and node.name.startswith(COUNT)


def count_index(node: fx.Node) -> int:
    """Return the index of a count from its placeholder."""
    return int(node.name.rpartition("_")[2])


def row_slices(rows: Sequence[fx.Node]) -> list[tuple[int, int, tuple[int, ...], torch.dtype]]:
    """Return (start, stop, shape, dtype) of each tensor's part of a sample in its row of all of them."""
    found, at = [], 0
    for node in rows:
        shape = tuple(map(int, info(node).shape[1:]))
        found.append((at, at + prod(shape), shape, info(node).dtype))
        at += prod(shape)
    return found


def partial_slices(partial_sums: Sequence[fx.Node]) -> list[tuple[int, int, tuple[int, ...], torch.dtype]]:
    """Return (start, stop, shape, dtype) of each partial sum in the flat vector."""
    found, at = [], 0
    for node in partial_sums:
        shape = tuple(map(int, info(node).shape))
        found.append((at, at + prod(shape), shape, info(node).dtype))
        at += prod(shape)
    return found
