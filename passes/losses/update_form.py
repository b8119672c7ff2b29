"""Form of the updates of buffers: sums over the batch, and the new values as a function of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from torch import fx

from autoptd.passes.batch.batch_dims import symbols_in
from autoptd.passes.graph import ancestors, info, output_of
from autoptd.passes.losses.loss_form import SIZE

SUM = "batch_sum"  # prefix of the placeholders of sums: batch_sum_0, batch_sum_1 …
_KEY = "buffer_updates"  # in the graph's meta


@dataclass(frozen=True)
class BufferUpdates:
    """The buffers that a forward pass updates.

    `graph`: has placeholders `batch_sum_i`, `loss_count_i` and buffers. `values`: a buffer's placeholder -> the node of
    its new value in `graph`. `sums`: the placeholders of the sums, in the order of the main graph's results.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[str, fx.Node] = field(default_factory=dict)
    sums: tuple[fx.Node, ...] = ()

    @property
    def width(self) -> int:
        """Number of elements of all sums."""
        return sum(prod(map(int, info(n).shape)) for n in self.sums)

    def reads(self, buffer: str) -> set[fx.Node]:
        """Return the placeholders that the new value of a buffer is computed from, counts of sizes among them."""
        wanted = ancestors([self.values[buffer]])
        sizes = {symbol for n in wanted for symbol in symbols_in((n.args, tuple(n.kwargs.values())))}
        given = (n for n in self.graph.nodes if n.op == "placeholder")
        return {n for n in given if n in wanted or n.meta.get(SIZE) in sizes}


def buffer_updates(graph: fx.GraphModule) -> BufferUpdates:
    """Return the updates of a normalised graph."""
    found = graph.meta.get(_KEY)
    return found if isinstance(found, BufferUpdates) else BufferUpdates()


def store(graph: fx.GraphModule, updates: BufferUpdates) -> None:
    graph.meta[_KEY] = updates


def sums_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the sums over samples that a normalised graph computes for buffers."""
    return tuple(output_of(graph).kwargs.get("sums", ()))  # type: ignore[arg-type]
