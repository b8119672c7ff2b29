"""Layer norms and root-mean-square norms that a model spells out, as torch's ops.

    rms_norm     y = x · rsqrt(mean(x²) + eps)                           y · w
    layer_norm   y = (x - mean(x)) · rsqrt(mean((x - mean(x))²) + eps)   y · w + b

over the last dims. For bf16 and fp16, torch computes rms_norm in float32 and rounds the result once, as a model does
whose norm begins with a cast to float32 and ends with one back (bitwise so on a CPU, gradients included):

    x.to(float32) ─► y ─► y.to(x.dtype) · w          rms_norm(x, eps) · w      the product is rounded by itself
    x.to(float32) ─► y ─► (y · w).to(x.dtype)        rms_norm(x, w, eps)       w in the type of x
    x.to(float32) ─► y ─► (y · (1 + w)).to(x.dtype)  rms_norm(x.to(float32), 1 + w, eps).to(x.dtype)

A layer norm keeps such casts: torch's sums gradients of bf16 weights in bf16 on a CPU (5 % off for 2,000 rows).
A norm computed in bf16 or fp16 itself is rounded after each op, which torch's is not: it stays spelled out. So does one
that casts x twice (T5), whose gradients are rounded before they are added, one with another eps than a number below the
root, and one with statistics that take no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoptd.passes.graph import info, write_op
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
_WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)


def write_norms(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite spelled-out norms over the last dims to `rms_norm` and `layer_norm`."""
    for node in list(graph.nodes):
        found = _norm(node)
        if found is not None:
            _write(graph, found)


@dataclass(frozen=True)
class SpelledNorm:
    """The normalised `result` of the last `dims` dims of x, before weight and bias, computed in the type of `wide`."""

    result: fx.Node
    wide: fx.Node  # x in the type in which it is normalised
    dims: int
    eps: float
    centred: bool  # a layer norm


def _norm(node: fx.Node) -> SpelledNorm | None:
    """Return the norm that a node is the result of, or None."""
    if node.op != "call_function" or node.target not in _SCALES or info(node).dtype not in _WIDE:
        return None
    for numerator, scale in _pairs(node):
        spread = _spread(scale, _SCALES[node.target])
        if spread is None:
            continue
        (squared, dims), eps = spread
        for centred in (False, True):
            wide = _source(numerator, squared, dims, centred)
            if wide is not None and _is_whole(node, wide, dims):
                return SpelledNorm(node, wide, dims, eps, centred)
    return None


def _pairs(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (what is scaled, the scale) of a product or quotient."""
    first, second = node.args
    if isinstance(first, fx.Node) and isinstance(second, fx.Node):
        yield first, second
        if node.target is aten.mul.Tensor:
            yield second, first


_SCALES: dict[Any, Any] = {aten.mul.Tensor: aten.rsqrt.default, aten.div.Tensor: aten.sqrt.default}
_Mean = tuple[fx.Node, int]  # what is averaged, over how many of its last dims


def _spread(scale: fx.Node, root: Any) -> tuple[_Mean, float] | None:
    """Return the mean whose root, with eps added, a scale is, and eps."""
    total = scale.args[0] if scale.target is root else None
    if not isinstance(total, fx.Node) or total.target not in (aten.add.Tensor, aten.add.Scalar) or total.kwargs:
        return None
    before, eps = total.args
    found = _mean(before) if isinstance(before, fx.Node) else None
    return None if found is None or not isinstance(eps, (int, float)) else (found, float(eps))


def _mean(node: fx.Node) -> _Mean | None:
    """Return what a node is the mean of, over the last dims, which it keeps with size 1."""
    if node.target is not aten.mean.dim or node.kwargs or len(node.args) != 3 or node.args[2] is not True:
        return None
    source, dims = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(dims, (list, tuple))
    ndim = info(source).ndim
    last = sorted(d % ndim for d in dims) == list(range(ndim - len(dims), ndim))  # type: ignore[operator]
    same = info(source).dtype == info(node).dtype
    return (source, len(dims)) if dims and last and same else None


def _source(numerator: fx.Node, squared: fx.Node, dims: int, centred: bool) -> fx.Node | None:
    """Return x, if the numerator is x or x - mean(x), and `squared` its square."""
    root = _root(squared)
    if root is None:
        return None
    if not centred:
        return root if root is numerator else None
    x = _centred(root, dims)
    return x if x is not None and _centred(numerator, dims) is x else None


def _root(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a node is the square of."""
    x = node.args[0] if node.args else None
    squares = (
        (node.target is aten.pow.Tensor_Scalar and node.args[1] == 2)
        or node.target is aten.square.default
        or (node.target is aten.mul.Tensor and node.args[1] is x)
    )
    return x if squares and isinstance(x, fx.Node) else None


def _centred(node: fx.Node, dims: int) -> fx.Node | None:
    """Return x of `x - mean(x)`."""
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    x, mean = node.args
    found = _mean(mean) if isinstance(mean, fx.Node) else None
    return x if isinstance(x, fx.Node) and found == (x, dims) else None


def _is_whole(node: fx.Node, wide: fx.Node, dims: int) -> bool:
    """Return whether a result has the shape and type of what it normalises, whose last dims are numbers."""
    given, made = info(wide), info(node)
    return (
        given.shape == made.shape and given.dtype == made.dtype and all(isinstance(n, int) for n in given.shape[-dims:])
    )


def _narrow(node: fx.Node) -> fx.Node:
    """Return the bf16 or fp16 tensor that a float32 one was cast from, else the tensor itself."""
    source: Any = node.args[0] if node.target is aten.to.dtype else node
    return source if source is node or (info(source).dtype in _HALF and info(node).dtype in _WIDE) else node


def _write(graph: fx.Graph, norm: SpelledNorm) -> None:
    """Write the norm with the weight, bias and cast that follow."""
    shape = info(norm.result).shape[-norm.dims :]
    half = _narrow(norm.wide)
    last, weights = norm.result, list[fx.Node]()
    for op in (aten.mul.Tensor, aten.add.Tensor)[: 1 + norm.centred]:
        following = _combined(last, op, shape)
        if following is None:
            break
        last, weight = following
        weights.append(weight)
    cast = None if norm.centred else _only_user(last)
    if cast is not None and cast.target is aten.to.dtype and info(cast).dtype == info(half).dtype in _HALF:
        given = [_narrow(w) for w in weights]
        if all(info(w).dtype == info(half).dtype for w in given):
            _replace(graph, norm, cast, half, given)
            return
    if any(info(w).dtype != info(norm.wide).dtype for w in weights):
        last, weights = norm.result, []
    _replace(graph, norm, last, norm.wide, weights)


def _combined(node: fx.Node, op: Any, shape: tuple[Any, ...]) -> tuple[fx.Node, fx.Node] | None:
    """Return the only reader of a node and its other operand, if it is this op with a tensor of the last dims."""
    reader = _only_user(node)
    if reader is None or reader.target is not op or reader.kwargs or info(reader).dtype != info(node).dtype:
        return None
    others = [a for a in reader.args if a is not node]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or info(others[0]).shape != shape:
        return None
    return reader, others[0]


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _replace(graph: fx.Graph, norm: SpelledNorm, old: fx.Node, x: fx.Node, weights: list[fx.Node]) -> None:
    op, most = (aten.layer_norm.default, 2) if norm.centred else (aten.rms_norm.default, 1)
    given = (*weights, *[None] * (most - len(weights)))
    shape = info(old).shape
    with graph.inserting_before(old):
        made = write_op(graph, old, op, (x, list(shape[-norm.dims :]), *given, norm.eps), shape)
    old.replace_all_uses_with(made)
