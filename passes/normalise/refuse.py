"""Refuse random draws that are not keyed, and sparse gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import op_name, source_line
from autoptd.passes.trace.traced import Traced


def is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def refuse_random(graph: fx.Graph, traced: Traced) -> None:
    """Only dropout may be random: its numbers are drawn by place in the model, the same under any plan."""
    for node in graph.nodes:
        if node.op == "call_function" and is_random(node) and _draws(node) and op_name(node) not in _KEYED:
            raise UnsupportedOp(
                f"{node.target} draws random numbers",
                where=source_line(node),
                fix="draw them outside the model and pass them as an input; nn.Dropout is supported, and may take the "
                "place of a dropout= between the layers of an LSTM or GRU",
            )


_DRAWS_NOTHING = {"dropout": 0, "p": 0, "train": False, "training": False, "num_layers": 1}  # dropout is between layers


def _draws(node: fx.Node) -> bool:
    """Whether a call of a random op draws: an LSTM without dropout has the op of one with dropout."""
    given = _given(node)
    return not any(name in given and given[name] == value for name, value in _DRAWS_NOTHING.items())


_KEYED = ("dropout", "scaled_dot_product_attention")  # their numbers are keyed by place


def refuse_sparse(graph: fx.Graph, traced: Traced) -> None:
    """Flat buffers, their reduction and the global norm are of dense gradients."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and _given(node).get("sparse"):
            raise UnsupportedOp(
                f"{node.target} with sparse=True gives its weight a sparse gradient",
                where=source_line(node),
                fix="leave out sparse=True: the same values, as a dense gradient",
            )


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op's call by name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    names = [a.name for a in schema]
    return {a.name: a.default_value for a in schema} | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
