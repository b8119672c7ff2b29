"""Rewrite a convolution with a group for each sample to `ops.sample_conv`, which keeps samples in a dim of their own.

    x [b, c, …] as [1, b c, …], weight [b, o, c / g, …] as [b o, c / g, …], groups b g  ──►  [1, b o, …]

So do layers whose filters are computed for each sample: modulated and dynamic convolutions, hypernetworks.
"""

from __future__ import annotations

import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import grows
from autoptd.passes.graph import info, write_op
from autoptd.passes.random.draws import given_of
from autoptd.passes.rules.views import quotient
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


def write_convolutions_by_sample(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite every convolution whose number of groups is a multiple of the number of samples."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _CONVOLUTIONS:
            continue
        given = given_of(node.target, node.args, node.kwargs)
        x, weight, bias, groups = given["input"], given["weight"], given["bias"], given["groups"]
        each = quotient(groups, BATCH) if grows(groups) else None
        if not isinstance(each, int) or info(x).shape[0] != 1:
            continue
        with graph.inserting_before(node):
            parts = [
                None if t is None else _by_sample(graph, node, t, dim) for t, dim in ((x, 1), (weight, 0), (bias, 0))
            ]
            shape = (BATCH, quotient(info(node).shape[1], BATCH), *info(node).shape[2:])
            options = [given[name] for name in ("stride", "padding", "dilation")]
            made = write_op(graph, node, ops.sample_conv, (*parts, *options, each), shape)
            flat = write_op(graph, node, aten.reshape.default, (made, list(info(node).shape)), info(node).shape)
        node.replace_all_uses_with(flat)


def _by_sample(graph: fx.Graph, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    """Write a tensor with its dim (samples, rest) as two dims, and without those before."""
    shape = (BATCH, quotient(info(x).shape[dim], BATCH), *info(x).shape[dim + 1 :])
    return write_op(graph, node, aten.reshape.default, (x, list(shape)), shape, info(x).dtype)
