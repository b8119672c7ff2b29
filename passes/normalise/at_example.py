"""Copy of a graph in which all sizes but the number of samples are those of the example inputs.

`x.view(-1, 128, h)` of (b, s, h) has floor(b s / 128) rows; whether a row holds one sample only depends on s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from torch import fx

from autoptd.passes.graph import infos, plain
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.trace.traced import BATCH, Traced


def needs_example(graph: fx.Graph) -> bool:
    """Return whether a size depends on the number of samples through a division that may leave a remainder."""
    sizes = {n for node in graph.nodes if "info" in node.meta for t in infos(node) for n in t.shape}
    return any(isinstance(n, sympy.Basic) and BATCH in n.free_symbols and n.has(sympy.floor) for n in sizes)


def at_example(graph: fx.Graph, traced: Traced) -> fx.Graph:
    """Return a copy of the graph with every size symbol but the batch replaced by its example value."""
    sizes = {symbol: value for symbol, value in traced.example.items() if symbol != BATCH}
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, made))
    for node, new in made.items():
        new.meta = dict(node.meta)
        if "info" in node.meta:
            new.meta["info"] = _sized(node.meta["info"], sizes)
        new.args = _sized(tuple(new.args), sizes)
        new.kwargs = {name: _sized(value, sizes) for name, value in new.kwargs.items()}
    return copy


def _sized(value: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    match value:
        case TensorInfo(shape, dtype, requires_grad):
            return TensorInfo(_sized(shape, sizes), dtype, requires_grad)
        case tuple() | list():
            return type(value)(_sized(v, sizes) for v in value)
        case sympy.Basic():
            return plain(value.subs(sizes))
    return value
