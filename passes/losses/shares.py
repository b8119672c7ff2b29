"""A microbatch's share of the batch: b / Σ b, by which values that are the same for all microbatches count once."""

from __future__ import annotations

import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.graph import info, output_of, write_op
from autoptd.passes.losses.batch_counts import take_count
from autoptd.passes.losses.batch_sums import Over, States
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten


class Shares:
    """Writer of shares. `states`: those of the graph's nodes, to which new ones are added."""

    def __init__(self, graph: fx.Graph, traced: Traced, states: States) -> None:
        self.graph, self.traced, self.states = graph, traced, states
        self.share: fx.Node | None = None

    def of(self, value: fx.Node, before: fx.Node | None = None) -> fx.Node:
        """Write a microbatch's share of a value that is the same for all."""
        output = output_of(self.graph)
        with self.graph.inserting_before(before or output):
            share = self.of_samples(value)
            part = write_op(self.graph, value, aten.mul.Tensor, (value, share), info(value).shape, info(value).dtype)
        self.states[part] = Over.ADDED
        return part

    def of_samples(self, like: fx.Node) -> fx.Node:
        """Write b / Σ b, once, before the first op of the graph."""
        if self.share is None:
            first = next(n for n in self.graph.nodes if n.op == "call_function")
            with self.graph.inserting_before(first):
                own = write_op(self.graph, like, ops.element_count, (BATCH,), (), torch.float64)
            whole = take_count(self.graph, self.traced, own)
            with self.graph.inserting_after(own):
                self.share = write_op(self.graph, like, aten.div.Tensor, (own, whole), (), torch.float64)
            self.states |= {own: Over.ADDED, whole: Over.SAME, self.share: Over.ADDED}
        return self.share
