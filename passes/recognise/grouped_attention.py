"""Attention whose keys and values are copied for the query heads that share them, as attention of grouped heads.

    k [b, h, s, d] ─ g copies of each head ─► [b, h g, s, d] ─► attention(q, k, v)
    k [b, h, s, d] ─────────────────────────────────────────► attention(q, k, v, enable_gqa=True)

Copies of a head are consecutive: a `repeat_interleave`, or a dim after the heads that `expand` or `repeat` fills and a
reshape merges. Heads may move and types may change between the copies and the attention.

Where torch has no kernel for grouped heads (`AttentionForm.takes_groups`) the copies stay: it would write the scores
out instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoptd.passes.analysis.attention import form_of
from autoptd.passes.graph import info, op_call
from autoptd.passes.opcall import Size
from autoptd.passes.rules.op_notations import swap
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default


def share_copied_keys(graph: fx.Graph, traced: Traced) -> None:
    """Give attention the keys and values that were copied, where a kernel takes them so."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not _ATTENTION or node.kwargs.get("enable_gqa"):
            continue
        query, key, value = node.args[:3]
        found = [_copies(x, info(x).ndim - 3) for x in (key, value)] if info(query).ndim == 4 else []
        heads = {info(x).shape[-3] for x in (query, key, value)}
        counts = {copies.count for copies in found if copies is not None}
        if None in found or len(heads) > 1 or len(counts) != 1 or not form_of(op_call(node)).takes_groups():
            continue
        with graph.inserting_before(node):
            shared = [copies.without(graph) for copies in found if copies is not None]
        node.args = (query, *shared, *node.args[3:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}


@dataclass(frozen=True)
class _Copies:
    """`count` consecutive copies of each entry of a dim of `source`, and the ops after that keep the entries apart."""

    source: fx.Node
    dim: int  # of the source
    count: int
    later: tuple[fx.Node, ...] = ()

    def without(self, graph: fx.Graph) -> fx.Node:
        """Write the later ops on the source itself, and return the result."""
        made = self.source
        for node in self.later:
            shape = list(info(made).shape)
            if node.target is not aten.to.dtype:
                shape = [shape[i] for i in _order(node)]
            new = graph.call_function(node.target, (made, *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]
            new.meta = {**node.meta, "info": replace(info(node), shape=tuple(shape))}
            made = new
        return made


def _copies(node: fx.Node, dim: int) -> _Copies | None:
    """Return the copies that a dim of a tensor consists of, or None."""
    if node.op != "call_function":
        return None
    args: Any = node.args
    if node.target is aten.repeat_interleave.self_int:
        along = (*args, node.kwargs.get("dim"))[2]
        if isinstance(args[1], int) and along is not None and along % info(node).ndim == dim:
            return _Copies(args[0], dim, args[1])
        return None
    if node.target is aten.to.dtype or node.target in (aten.transpose.int, aten.permute.default):
        before = _copies(args[0], dim if node.target is aten.to.dtype else _order(node)[dim])
        return None if before is None else replace(before, later=(*before.later, node))
    if node.target is aten.reshape.default:
        return _merged(node, dim)
    return _spread(node, dim)


def _order(node: fx.Node) -> Sequence[int]:
    """Return the dim of the operand that each dim of a transposed tensor is."""
    if node.target is aten.transpose.int:
        return swap(op_call(node), info(node).ndim)
    given: Any = node.args[1]
    return [d % info(node).ndim for d in given]


def _merged(node: fx.Node, dim: int) -> _Copies | None:
    """Return the copies in a dim that a reshape merged of the heads and a dim that was spread."""
    wide: Any = node.args[0]
    before, after = info(wide).shape, info(node).shape
    if len(before) != len(after) + 1 or before[:dim] != after[:dim] or before[dim + 2 :] != after[dim + 1 :]:
        return None
    spread = _spread(wide, dim + 1)
    if spread is None:
        return None
    source: Any = spread.source  # [b, h, 1, s, d]
    narrow = (*before[: dim + 1], *before[dim + 2 :])
    given: Any = source.args[0] if source.target in (aten.unsqueeze.default, aten.reshape.default) else None
    return _Copies(given, dim, spread.count) if given is not None and info(given).shape == narrow else None


def _spread(node: fx.Node, dim: int) -> _Copies | None:
    """Return the copies that a dim of size 1 becomes, by `expand` or `repeat`, while other dims stay as they are."""
    if node.op != "call_function" or node.target not in (aten.expand.default, aten.repeat.default):
        return None
    source: Any = node.args[0]
    narrow: list[Size] = list(info(node).shape)
    count, narrow[dim] = narrow[dim], 1
    whole = isinstance(count, int) and count > 1 and list(info(source).shape) == narrow
    return _Copies(source, dim, int(count)) if whole else None
