"""Write stochastic depth as a dropout mask, in each way that models spell it.

    x / keep * floor(keep + rand(b, 1, 1))        transformers
    x * (empty(b, 1, 1).bernoulli_(keep) / keep)  timm, torchvision

As a mask it keeps each sample with exactly the probability `keep`, in any precision, and in an `eval_step`, which drops
nothing, it is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.graph import info
from autoptd.passes.random.draws import GraphWriter
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
_FRACTIONS = (aten.rand.default, aten.rand_like.default)


@dataclass(frozen=True)
class _Mask:
    """A tensor that is `scale` with probability `keep`, else 0, and the op that draws it."""

    draw: fx.Node
    keep: float
    scale: float = 1.0


def write_drop_path_as_mask(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite every product with a mask whose mean is 1."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.mul.Tensor:
            for x, mask in (node.args, node.args[::-1]):
                if _rewrite(graph, node, x, mask):
                    break


def _rewrite(graph: fx.Graph, node: fx.Node, x: object, mask: object) -> bool:
    found = _mask(mask)
    if found is None or not isinstance(x, fx.Node):
        return False
    for source, factor in _scaled(x):
        if math.isclose(found.keep * found.scale * factor, 1):
            with graph.inserting_before(node):
                writer, shape, dtype = GraphWriter(graph, found.draw), info(found.draw).shape, info(mask).dtype  # type: ignore[arg-type]
                drawn = writer.draw(ops.dropout_mask, shape, round(1 - found.keep, 12), dtype=dtype)
            node.args = (source, drawn)
            return True
    return False


def _scaled(x: fx.Node) -> list[tuple[fx.Node, float]]:
    """Return x as products of a tensor and a number: itself times 1, and what it divides."""
    number = _number(x, aten.div.Tensor)
    return [(x, 1.0)] + ([(x.args[0], 1 / number)] if number else [])  # type: ignore[list-item]


def _mask(x: object) -> _Mask | None:
    """Return what a tensor is a mask of; None if it is none, or if others read it too."""
    if not isinstance(x, fx.Node) or x.op != "call_function" or len(x.users) != 1:
        return None
    if number := _number(x, aten.div.Tensor):
        return _times(_mask(x.args[0]), 1 / number)
    if number := _number(x, aten.mul.Tensor):
        return _times(_mask(x.args[0]), number)
    if x.target is aten.to.dtype:
        return _mask(x.args[0])
    if x.target is aten.bernoulli.p:
        return _drawn(x, x.args[1])
    return _floor(x.args[0]) if x.target is aten.floor.default else None


def _floor(total: object) -> _Mask | None:
    """Return the mask that a sum of fractions and a number becomes when it is rounded down."""
    if not isinstance(total, fx.Node) or len(total.users) != 1 or not (number := _number(total, aten.add.Tensor)):
        return None
    drawn = total.args[0]
    assert isinstance(drawn, fx.Node)
    return _drawn(drawn, number) if drawn.target in _FRACTIONS and len(drawn.users) == 1 else None


def _drawn(draw: fx.Node, keep: object) -> _Mask | None:
    return _Mask(draw, keep) if isinstance(keep, float) and 0 < keep < 1 else None


def _times(mask: _Mask | None, number: float) -> _Mask | None:
    return None if mask is None else replace(mask, scale=mask.scale * number)


def _number(node: fx.Node, target: object) -> float | None:
    """Return the number c of `x / c` or another op of a tensor and a number; None for any other call."""
    if node.op != "call_function" or node.target is not target or node.kwargs or len(node.args) != 2:
        return None
    x, number = node.args
    return float(number) if isinstance(x, fx.Node) and isinstance(number, (int, float)) else None
