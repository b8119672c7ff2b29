"""Insertion of calls with the values that a trace records of them, in graphs whose sizes are still those of torch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # private; seen in 2.13.0


def written(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call with its value."""
    made = graph.call_function(target, args, kwargs)
    made.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")}
    made.meta["val"] = _run(made)
    return made


def _run(node: fx.Node) -> Any:
    """Compute the value that a trace records of a call."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with fake_mode_of(node.graph):
        return cast(Any, node.target)(*args, **kwargs)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """Return the mode in which the tensors of a trace were made."""
    values = (n.meta.get("val") for n in graph.nodes)
    return next(x.fake_mode for x in values if isinstance(x, FakeTensor))


def refresh(old: fx.Node, new: fx.Node) -> None:
    """Give what is made of `old` the sizes that it has if made of `new`."""
    stale = {old: new}
    for node in old.graph.nodes:
        if any(n in stale for n in node.all_input_nodes) and any(map(unknown, _sizes(node))):
            kept = node.args, node.kwargs
            node.args, node.kwargs = fx.map_arg(kept, lambda n: stale.get(n, n))
            node.meta["val"] = _run(node)
            node.args, node.kwargs = kept
            stale[node] = node


def unknown(size: torch.SymInt) -> bool:
    """Return whether a size depends on data."""
    return any(str(s).startswith("u") for s in size.node.expr.free_symbols)


def _sizes(node: fx.Node) -> list[torch.SymInt]:
    """Return the sizes of a tensor, or of a size."""
    value = node.meta.get("val")
    return [n for n in getattr(value, "shape", (value,)) if isinstance(n, torch.SymInt)]
