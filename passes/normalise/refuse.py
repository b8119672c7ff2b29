"""Refuse random ops other than dropout, sparse tensors and sparse gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import op_name, source_line
from autoptd.passes.opcall import is_random
from autoptd.passes.trace.traced import Traced


def refuse_random(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp for random ops other than dropout, whose keyed numbers are the same under every plan."""
    for node in graph.nodes:
        if node.op == "call_function" and is_random(node.target) and _draws(node) and op_name(node) not in _KEYED:
            raise UnsupportedOp(
                f"{node.target} draws random numbers",
                where=source_line(node),
                fix="draw them outside the model and pass them as an input; nn.Dropout is supported, and can replace "
                "the dropout= argument of an LSTM or GRU",
            )


_DRAWS_NOTHING = {"dropout": 0, "p": 0, "train": False, "training": False, "num_layers": 1}  # LSTM: between layers only


def _draws(node: fx.Node) -> bool:
    """Return whether a call of a random op draws numbers: an LSTM without dropout is the same op as one with it."""
    given = _given(node)
    return not any(name in given and given[name] == value for name, value in _DRAWS_NOTHING.items())


_KEYED = ("dropout", "scaled_dot_product_attention")  # ops whose numbers are keyed by position


def refuse_sparse(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp for sparse gradients: flat buffers, their reduction and the global norm are dense."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and _given(node).get("sparse"):
            raise UnsupportedOp(
                f"{node.target} with sparse=True gives its weight a sparse gradient",
                where=source_line(node),
                fix="remove sparse=True: the dense gradient has the same values",
            )


def refuse_sparse_tensors(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp for a sparse tensor: rules, prices and proofs are those of dense ones."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise UnsupportedOp(
                f"{node.target} makes a tensor of the layout {value.layout}",
                where=source_line(node),
                fix="write the values into a dense tensor: torch.zeros(…).index_put(indices, values, accumulate=True)",
            )


def _given(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an op's call by name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    names = [a.name for a in schema]
    return {a.name: a.default_value for a in schema} | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
