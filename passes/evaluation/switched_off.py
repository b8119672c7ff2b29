"""A traced graph as an evaluation step runs it: nothing is dropped, and running statistics stand in for a batch's.

dropout, alpha_dropout, …       x
attention with dropout          without
stochastic depth                x · mask, of which x is left
layers skipped at random        where(mask == 0, before, after), of which after is left
batch norm                      with its running statistics, if it has any
"""

from __future__ import annotations

import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.normalise.canonicalize import write_native_dropout_as_dropout
from autoptd.passes.random.draws import given_of
from autoptd.passes.random.drop_path import write_drop_path_as_mask
from autoptd.passes.rewrites.batch_norm import take_running_statistics
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
_DROPOUTS = frozenset(
    getattr(aten, name).default for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
)
_ATTENTION = aten.scaled_dot_product_attention.default


def switch_off(graph: fx.Graph, traced: Traced) -> None:
    """Write an annotated graph of training as an evaluation step runs it."""
    write_native_dropout_as_dropout(graph, traced)
    take_running_statistics(graph)
    write_drop_path_as_mask(graph, traced)
    for node in list(graph.nodes):
        if node.target in _DROPOUTS:
            _replace(node, node.args[0])
        elif node.target is _ATTENTION:
            given = given_of(node.target, node.args, node.kwargs) | {"dropout_p": 0.0}
            node.args, node.kwargs = (), given
    for mask in graph.find_nodes(op="call_function", target=ops.dropout_mask):
        for user in list(mask.users):
            _without(user, mask)


def _without(node: fx.Node, mask: fx.Node) -> None:
    """Put in place of what reads a mask what it is where nothing is dropped."""
    if node.target is aten.mul.Tensor:  # the product of a value and its mask
        _replace(node, node.args[1] if node.args[0] is mask else node.args[0])
    elif node.target is aten.eq.Scalar:  # whether a layer is skipped
        for choice in list(node.users):
            if choice.target is aten.where.self:
                _replace(choice, choice.args[2])


def _replace(node: fx.Node, by: object) -> None:
    assert isinstance(by, fx.Node)
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
