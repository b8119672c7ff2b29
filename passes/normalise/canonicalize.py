"""Rewrite equivalent ops to one canonical op: views to `reshape`, equal splits to `chunk`, `addmm` to `linear`.

Grouped matrix products (mixture of experts) become `ops.grouped_mm`, whichever kernel the model calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import counts_samples, grows
from autoptd.passes.graph import WRITTEN_FOR, info, infos, op_name, write_op
from autoptd.passes.opcall import Size, TensorInfo
from autoptd.passes.rules.views import quotient
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten


def write_native_dropout_as_dropout(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `native_dropout`, which functionalisation introduces, to `dropout`; its mask has no reader."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.native_dropout.default:
            picked = [u for u in node.users if u.args[1] == 0]
            with graph.inserting_before(node):
                plain = graph.call_function(
                    aten.dropout.default, (node.args[0], node.args[1], node.args[2] is not False)
                )
                plain.meta = {**node.meta, "info": infos(node)[0]}
            for user in picked:
                user.replace_all_uses_with(plain)


def write_starts_of_slices(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `x[:n]` to `x[0:n]`, as the same code is traced once the length of x is a number."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.slice.Tensor and node.args[2:3] == (None,):
            node.args = (*node.args[:2], 0, *node.args[3:])


def write_copy_as_source(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `copy`, the functional form of `y.copy_(x)`, to x in the dtype and shape of y."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.copy.default:
            source, like = node.args[1], info(node)
            assert isinstance(source, fx.Node)
            with graph.inserting_before(node):
                if info(source).dtype != like.dtype:
                    cast = graph.call_function(aten.to.dtype, (source, like.dtype))
                    cast.meta = {**node.meta, "info": TensorInfo(info(source).shape, like.dtype, like.requires_grad)}
                    source = cast
                spread = graph.call_function(aten.expand.default, (source, list(like.shape)))
                spread.meta = {**node.meta, "info": TensorInfo(like.shape, like.dtype, info(source).requires_grad)}
            node.replace_all_uses_with(spread)


def write_masked_put_as_where(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `x[mask] = y` to `where(mask, y, x)` if y has no dim for the selected elements."""
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or node.target is not aten.index_put.default
            or node.args[3:] not in ((), (False,))
        ):
            continue
        x, (mask, *others), value = node.args[:3]
        if others or mask is None or info(mask).dtype is not torch.bool or node.kwargs.get("accumulate"):
            continue
        picked, rest = info(mask).ndim, info(x).ndim - info(mask).ndim
        if info(mask).shape != info(x).shape[:picked] or info(value).ndim > rest:
            continue
        with graph.inserting_before(node):
            spread = (*info(mask).shape, *(1,) * rest)
            wide = write_op(graph, node, aten.reshape.default, (mask, list(spread)), spread, torch.bool)
            if info(value).dtype != info(x).dtype:
                value = write_op(graph, node, aten.to.dtype, (value, info(x).dtype), info(value).shape, info(x).dtype)
            made = write_op(graph, node, aten.where.self, (wide, value, x), info(node).shape, info(x).dtype)
        node.replace_all_uses_with(made)


def write_sums_by_index(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `scatter_add`, `index_add` and accumulating `index_put` on zeros of a fixed size to `ops.sum_by_index`.

    On another tensor without samples, such as a buffer, it is added to that. These count, or sum, what belongs to each
    of a few classes, such as tokens to experts.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _ADDS_BY_INDEX:
            continue
        found = _ADDS_BY_INDEX[node.target](*node.args, **node.kwargs)
        if found is None:
            continue
        (source, index), x = found, node.args[0]
        on_zeros = op_name(x).removeprefix("new_").removesuffix("_like") == "zeros"
        if not on_zeros and (counts_samples(info(node)) or not counts_samples(info(source))):
            continue
        like = info(node)
        rows = node.target is aten.index_add.default and like.ndim == 2  # of a matrix: columns of its transpose
        if rows:
            source, index = _columns(graph, node, source, index)
            like = replace(like, shape=like.shape[::-1])
        size = like.shape[-1]
        if not isinstance(size, int) or info(source).shape != info(index).shape or info(source).dtype != like.dtype:
            continue
        if info(source).shape[:-1] == like.shape[:-1]:
            with graph.inserting_before(node):
                made = write_op(graph, node, ops.sum_by_index, (source, index, size), like.shape, like.dtype)
                made.meta[WRITTEN_FOR] = op_name(node)
                if rows:
                    made = write_op(graph, node, aten.transpose.int, (made, 0, 1), info(node).shape, like.dtype)
                if not on_zeros:
                    made = write_op(graph, node, aten.add.Tensor, (x, made), info(node).shape, like.dtype)
            node.replace_all_uses_with(made)


def write_bincount_as_sum(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `bincount` to `ops.sum_by_index` if its size is fixed: the model adds its result to such a tensor."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.bincount.default:
            continue
        index, weights, (size,) = node.args[0], (*node.args, None)[1], info(node).shape
        assert isinstance(index, fx.Node)
        if isinstance(size, int):
            with graph.inserting_before(node):
                shape, dtype = info(index).shape, info(node).dtype
                if not isinstance(weights, fx.Node):
                    weights = write_op(graph, node, aten.ones_like.default, (index,), shape, info(index).dtype)
                if info(weights).dtype != dtype:
                    weights = write_op(graph, node, aten.to.dtype, (weights, dtype), shape, dtype)
                made = write_op(graph, node, ops.sum_by_index, (weights, index, size), (size,), dtype)
                made.meta[WRITTEN_FOR] = op_name(node)
            node.replace_all_uses_with(made)


def _scatter_add(x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    return (source, index) if dim % info(x).ndim == info(x).ndim - 1 else None


def _index_add(x: fx.Node, dim: int, index: fx.Node, source: fx.Node, **options: Any) -> tuple[fx.Node, fx.Node] | None:
    fits = info(x).ndim == 1 or (info(x).ndim == 2 and dim % 2 == 0 and isinstance(info(x).shape[0], int))
    return (source, index) if fits and not options else None


def _columns(graph: fx.Graph, node: fx.Node, source: fx.Node, index: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the transpose of rows that are added by index, and the index of each of its elements."""
    shape = info(source).shape[::-1]
    with graph.inserting_before(node):
        columns = write_op(graph, node, aten.transpose.int, (source, 0, 1), shape, info(source).dtype)
        index = write_op(graph, node, aten.expand.default, (index, shape), shape, info(index).dtype)
    return columns, index


def _index_put(x: fx.Node, index: list[Any], source: fx.Node, add: bool = False) -> tuple[fx.Node, fx.Node] | None:
    return (source, index[0]) if info(x).ndim == 1 and add and isinstance(index[0], fx.Node) else None


_ADDS_BY_INDEX: Mapping[Any, Callable[..., tuple[fx.Node, fx.Node] | None]] = {
    aten.scatter_add.default: _scatter_add,
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
}


def write_equal_bags_as_embedding(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `embedding_bag` over bags of one length, as of a matrix of ids: a lookup and a sum, mean or maximum."""
    for node in list(graph.nodes):
        if node.op != "call_function" or op_name(node) != "embedding_bag" or {u.args[1] for u in node.users} != {0}:
            continue
        weight, ids, offsets, scaled, mode, sparse, scores, last, padding = node.args + _BAG[len(node.args) :]
        (bags, width), length = infos(node)[0].shape, _bag_length(offsets)
        padded = padding is not None and padding >= 0
        if length is None or sparse or last or (padded and mode == _MAXIMUM):
            continue
        with graph.inserting_before(node):
            ids = write_op(graph, node, aten.reshape.default, (ids, [bags, length]), (bags, length), info(ids).dtype)
            made = write_op(graph, node, aten.embedding.default, (weight, ids, -1, scaled), (bags, length, width))
            real = _real_rows(graph, node, ids, padding, info(made).dtype) if padded else None
            if scores is not None:
                column = (bags, length, 1)
                scores = write_op(graph, node, aten.reshape.default, (scores, list(column)), column)
                made = write_op(graph, node, aten.mul.Tensor, (made, scores), info(made).shape)
            made = _of_bag(graph, node, made, mode, real)
        for user in list(node.users):
            user.replace_all_uses_with(made)


_SUM, _MEAN, _MAXIMUM = 0, 1, 2  # torch's modes of embedding_bag
_BAG: tuple[Any, ...] = (None, None, None, False, 0, False, None, False, None)  # defaults of embedding_bag


def _real_rows(graph: fx.Graph, node: fx.Node, ids: fx.Node, padding: int, dtype: torch.dtype) -> fx.Node:
    """Write 0 for ids of padding and 1 for others: [bags, length, 1]."""
    shape = info(ids).shape
    real = write_op(graph, node, aten.ne.Scalar, (ids, padding), shape, torch.bool)
    real = write_op(graph, node, aten.unsqueeze.default, (real, 2), (*shape, 1), torch.bool)
    return write_op(graph, node, aten.to.dtype, (real, dtype), (*shape, 1), dtype)


def _of_bag(graph: fx.Graph, node: fx.Node, rows: fx.Node, mode: int, real: fx.Node | None) -> fx.Node:
    """Write the sum, mean or maximum of each bag's rows, those of padding left out where `real` is 0.

    The gradient of a maximum goes to one row, as in torch.
    """
    bags, length, width = info(rows).shape
    if mode == _MAXIMUM:
        chosen = write_op(graph, node, aten.argmax.default, (rows, 1, True), (bags, 1, width), torch.int64)
        found = write_op(graph, node, aten.gather.default, (rows, 1, chosen), (bags, 1, width))
        return write_op(graph, node, aten.select.int, (found, 1, 0), (bags, width))
    if real is None:
        op = aten.sum.dim_IntList if mode == _SUM else aten.mean.dim
        return write_op(graph, node, op, (rows, [1]), (bags, width))
    rows = write_op(graph, node, aten.mul.Tensor, (rows, real), (bags, length, width))
    total = write_op(graph, node, aten.sum.dim_IntList, (rows, [1]), (bags, width))
    if mode == _SUM:
        return total
    count = write_op(graph, node, aten.sum.dim_IntList, (real, [1]), (bags, 1), info(real).dtype)
    count = write_op(graph, node, aten.clamp.default, (count, 1), (bags, 1), info(real).dtype)
    return write_op(graph, node, aten.div.Tensor, (total, count), (bags, width))


def _bag_length(offsets: Any) -> int | None:
    """Return the step of offsets 0, n, 2 n … that a model computes."""
    if not isinstance(offsets, fx.Node) or offsets.target is not aten.arange.start_step or offsets.args[0] != 0:
        return None
    step = offsets.args[2] if len(offsets.args) > 2 else 1
    return step if isinstance(step, int) else None


def write_convolution_padding_as_numbers(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite the padding "same" or "valid" of a convolution to numbers; where sides differ, `pad` comes first."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _NAMED_PADDING:
            continue
        x, weight, bias, stride, padding, dilation, groups = node.args + _CONVOLUTION[len(node.args) :]
        dims = info(weight).ndim - 2
        stride, dilation = (list(v) * (dims // len(v)) for v in (stride, dilation))
        kernel = info(weight).shape[2:] if padding == "same" else (1,) * dims
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(t % 2 for t in total):
            sides = [n for t in reversed(total) for n in (t // 2, t - t // 2)]
            shape = (*info(x).shape[:-dims], *(n + t for n, t in zip(info(x).shape[-dims:], total, strict=True)))
            with graph.inserting_before(node):
                x = write_op(graph, node, aten.pad.default, (x, sides), shape)
            total = [0] * dims
        node.target = _NAMED_PADDING[node.target]
        node.args, node.kwargs = (x, weight, bias, stride, [t // 2 for t in total], dilation, groups), {}


_CONVOLUTION: tuple[Any, ...] = (None, None, None, [1], "valid", [1], 1)  # defaults of a convolution
_NAMED_PADDING = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


def write_casts_with_their_type(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `x.type_as(y)` and `x.to(y)`, which read no value of y, to `x.to(dtype)`, and casts of numbers.

    torch's decomposition of `20 * x` under vmap casts the number itself, which is no tensor outside of it.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in (aten.type_as.default, aten.to.other):
            node.target = aten.to.dtype
            node.args, node.kwargs = (node.args[0], info(node).dtype), {}
        elif node.target is aten._to_copy.default and not isinstance(node.args[0], fx.Node):
            node.target = aten.scalar_tensor.default
            node.args, node.kwargs = (node.args[0],), {"dtype": info(node).dtype}


def write_views_as_reshape(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `view`, `flatten`, `unflatten` to `reshape` with the whole output shape; give `expand` every size."""
    for node in graph.nodes:
        name = op_name(node) if node.op == "call_function" else ""
        if name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"):
            if not isinstance(node.meta["info"], tuple) and node.target is not aten.view.dtype:
                node.target = aten.reshape.default
                node.args, node.kwargs = (node.args[0], list(info(node).shape)), {}
        elif name in ("expand", "expand_as", "broadcast_to"):
            node.target = aten.expand.default
            node.args, node.kwargs = (node.args[0], list(info(node).shape)), {}


def write_tile_as_repeat(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `tile`, which may name fewer dims than the tensor has, to `repeat`."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.tile.default:
            x, times = node.args
            node.target, node.args = aten.repeat.default, (x, [1] * (info(x).ndim - len(times)) + list(times))


def write_equal_splits_as_chunk(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `split` into equal parts to `chunk(x, n, dim)`, which has no size argument to adapt to a rank's share."""
    for node in graph.nodes:
        if node.op != "call_function" or op_name(node) not in ("split", "split_with_sizes", "tensor_split"):
            continue
        parts = infos(node)
        if len({p.shape for p in parts}) == 1 and isinstance(node.args[1], (int, list, tuple)):
            dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
            node.target = aten.chunk.default
            node.args, node.kwargs = (node.args[0], len(parts), dim), {}


def write_slices_of_samples_as_chunk(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite a slice that is one of several equal parts of a dim that counts samples to a part of `chunk`.

    So are halves of `cat([chosen, rejected])`, by `x[:n]` and `x[n:]`.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.slice.Tensor:
            continue
        x, dim, start, _, step = node.args + _SLICE[len(node.args) :]
        whole, part = info(x).shape[dim], info(node).shape[dim]
        if step != 1 or not (grows(whole) and grows(part)):
            continue
        start = sympy.sympify(start or 0)
        count, before = quotient(whole, part), quotient(whole + start if (-start).is_positive else start, part)
        if not isinstance(count, int) or not isinstance(before, int) or count < 2 or not 0 <= before < count:
            continue
        with graph.inserting_before(node):
            parts = graph.call_function(aten.chunk.default, (x, count, dim))
            picked = graph.call_function(operator.getitem, (parts, before))
        parts.meta, picked.meta = {**node.meta, "info": (node.meta["info"],) * count}, dict(node.meta)
        node.replace_all_uses_with(picked)


_SLICE: tuple[Any, ...] = (None, 0, None, None, 1)  # defaults of slice


def write_addmm_as_linear(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `reshape(addmm(b, reshape(x, [-1, k]), w))` to `linear(x, w.t(), b)`, with leading dims unmerged.

    The sequence stays a separate dim, which can be split, and the emitted code reads like hand-written code.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (aten.addmm.default, aten.mm.default):
            continue
        bias, x, weight = node.args if node.target is aten.addmm.default else (None, *node.args)
        if node.kwargs or not isinstance(weight, fx.Node) or not isinstance(x, fx.Node):
            continue
        if bias is not None and info(bias).ndim != 1:  # type: ignore[arg-type]
            continue
        source = _unflattened(x)
        with graph.inserting_before(node):
            turned = graph.call_function(aten.t.default, (weight,))
            turned.meta = {**weight.meta, "info": _like(weight, info(weight).shape[::-1])}
            turned.meta.update({k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta})
            args = (source, turned) if bias is None else (source, turned, bias)
            linear = graph.call_function(aten.linear.default, args)
            linear.meta = {**node.meta, "info": _like(node, (*info(source).shape[:-1], info(node).shape[-1]))}
            flat = graph.call_function(aten.reshape.default, (linear, list(info(node).shape)))
            flat.meta = dict(node.meta)
        node.replace_all_uses_with(flat)
        graph.erase_node(node)


def write_grouped_mm(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite torch's grouped matrix product and the fallback op of transformers to `ops.grouped_mm`."""
    for node in graph.nodes:
        if node.op != "call_function" or op_name(node) not in ("_grouped_mm", "grouped_mm_fallback"):
            continue
        values = [value for value in (*node.args, *node.kwargs.values()) if value is not None]
        found = [value for value in values if isinstance(value, fx.Node)]
        if len(found) == len(values) == 3 and [info(found[0]).ndim, info(found[1]).ndim] == [2, 3]:
            node.target, node.args, node.kwargs = ops.grouped_mm, tuple(found), {}


def _unflattened(x: fx.Node) -> fx.Node:
    """Return the tensor that a reshape to 2 dims flattened, if it merged only leading dims; else `x`."""
    if x.op == "call_function" and x.target is aten.reshape.default:
        source = x.args[0]
        assert isinstance(source, fx.Node)
        if info(source).ndim > 2 and info(source).shape[-1] == info(x).shape[-1]:
            return source
    return x


def _like(node: fx.Node, shape: tuple[Size, ...]) -> TensorInfo:
    return TensorInfo(shape, info(node).dtype, info(node).requires_grad)


def merge_reshapes(graph: fx.Graph, traced: Traced) -> None:
    """Merge consecutive reshapes into one."""
    for node in graph.nodes:
        while node.op == "call_function" and node.target is aten.reshape.default:
            source = node.args[0]
            if source.op != "call_function" or source.target is not aten.reshape.default:
                break
            node.args = (source.args[0], node.args[1])
