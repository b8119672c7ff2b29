"""Refuse random ops that have no keyed form, sparse tensors and sparse gradients."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autoptd.errors import UnsupportedOp
from autoptd.ops import library as ops
from autoptd.passes.graph import op_name, source_line
from autoptd.passes.random.draws import draws, given_of
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten


def refuse_random(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp for random ops whose numbers are not keyed, so that they would depend on the plan."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target not in _KEYED and draws(node.target, node.args, node.kwargs):
            raise UnsupportedOp(
                f"{node.target} draws random numbers in a way that is not written as draws for each element",
                where=source_line(node),
                fix=_WAYS_OUT.get(op_name(node), _AS_INPUT),
            )


_KEYED = frozenset({aten.dropout.default, aten.scaled_dot_product_attention.default, *ops.DRAWS})
_AS_INPUT = "draw them outside the model and pass them as an input"
_MODULES = "use nn.LSTM, nn.GRU or nn.RNN, whose dropout between layers is drawn by key"
_WAYS_OUT = dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _MODULES)


def refuse_sparse(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp for sparse gradients: flat buffers, their reduction and the global norm are dense."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if given_of(node.target, node.args, node.kwargs).get("sparse"):
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
