"""Row indices: integers that point to rows, followed from the ops that create them through arithmetic.

    arange(n)                  indices of rows in batch order
    sort, argsort              indices of rows in the order of a key; argsort of these, the inverse permutation
    i // k, i * k + j          indices of coarser rows, of k rows each, and of finer ones, k per row (j below k)
    i % m                      the same indices without the outer dim, or its first factor, if m rows are left

Any other op on row indices computes with the positions of samples in their batch, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy
import torch
from torch import fx

from autoptd.passes.batch.batch_dims import SamplePlace, grows, place_anywhere
from autoptd.passes.batch.rows import Across, Order, Points, Rows, State, placed, pointing
from autoptd.passes.graph import info, infos, is_getitem, numel, op_call, op_name, operands
from autoptd.passes.opcall import Size, target_name
from autoptd.passes.rules.views import quotient, same

SAME_VALUES = frozenset(
    [
        *("alias", "clone", "contiguous", "detach", "expand", "expand_as", "flatten", "getitem", "movedim", "permute"),
        *("reshape", "squeeze", "t", "to", "_to_copy", "transpose", "type_as", "unflatten", "unsqueeze", "view"),
        *("narrow", "repeat", "repeat_interleave", "select", "slice", "chunk", "split", "split_with_sizes", "unbind"),
        *("lift_fresh_copy",),
    ]
)
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes that represent every row index exactly
_SORTS = ("sort", "argsort", "msort")
_FIX = (
    "use torch.arange(b) only as an index into the batch dim; pass a number per sample that must not depend on its "
    "microbatch as an input"
)


def follow_range(node: fx.Node, slower: Size = 1) -> State:
    """Return the state of `arange`: row indices if its size depends on the batch. `slower`: as in `place_anywhere`."""
    (tensor,) = infos(node)
    start, step = _range(node)
    place = place_anywhere(tensor, slower)
    if start == 0 and step == 1 and place is not None:
        return Rows(place, points=Points(Order(), place.outer, place.inner, each=True))
    if grows(tensor.shape[0]) or any(isinstance(a, sympy.Basic) and grows(a) for a in node.args):
        return misused(node)
    return None


def misused(node: fx.Node) -> Across:
    """Return the state of a node whose values depend on the positions of samples in their batch."""
    return Across(node, "computes with the positions of samples in their batch", _FIX, pairs=True)


def follow_sort(node: fx.Node, rows: Rows) -> tuple[State, ...]:
    """Return the states of values and row indices in the order of the keys; NotImplemented if no rows are sorted."""
    base = op_name(node)
    if base not in _SORTS:
        return NotImplemented
    call = op_call(node)
    (keys,) = call.operands
    if rows.place.dim != (0 if base == "msort" else call.arg(1, "dim", -1) % keys.ndim):
        return NotImplemented
    if keys.ndim > 1:
        return (Across(node, "works across samples"),) * len(call.outputs)
    points = Points(rows.order, rows.place.outer, rows.place.inner, each=True)
    order, place = Order(keys.shape[0], node), SamplePlace(0)
    own = rows.points
    undone = own is not None and own.each and same(keys.shape[0], own.order.size * own.outer * own.inner)
    if own is not None and undone and not call.arg(2, "descending", False):
        order, place = own.order, SamplePlace(0, own.outer, own.inner)
    values, numbers = Rows(place, order), Rows(place, order, points)
    if own is not None:
        values = pointing(values, replace(own, each=False)) or values
    return {"sort": (values, numbers), "argsort": (numbers,), "msort": (values,)}[base]


def follow_numbers(node: fx.Node, states: Sequence[State]) -> State:
    """Return the state of arithmetic on row indices; NotImplemented if no operand holds any."""
    indices = [(i, s) for i, s in enumerate(states) if isinstance(s, Rows) and s.points is not None]
    if not indices:
        return NotImplemented
    call = op_call(node)
    (at, rows), *more = indices
    points = rows.points
    assert points is not None
    base = target_name(call.target)
    if base in SAME_VALUES and call.outputs[0].dtype in EXACT:
        each = points.each and same(numel(call.outputs[0].shape), numel(call.operands[at].shape))
        return pointing(placed(call, {at: rows}), replace(points, each=each)) or misused(node)
    if base in ("cat", "concat", "stack") and len(indices) == len(states) and len(set(states)) == 1:
        return pointing(placed(call, dict(indices)), replace(points, each=False)) or misused(node)
    if more or len(call.args) != 2:
        return misused(node)
    number = call.args[1 - at] if at < 2 and len(states) == 1 else None
    result = _computed(node, base, points, number, at)
    if result is NotImplemented:
        return misused(node)
    others = {i: s for i, s in enumerate(states) if isinstance(s, Rows)}
    if any(not rows.aligned(call.operands[at].ndim, s, call.operands[i].ndim) for i, s in others.items()):
        return misused(node)
    return pointing(placed(call, others), result) or misused(node)


def _computed(node: fx.Node, base: str, points: Points, number: object, at: int) -> Points | None:
    """Return what row indices point to after an operation; None if the result only numbers parts of a sample."""
    whole = points.order.size * points.inner
    call = op_call(node)
    floored = base == "floor_divide" or (base == "div" and call.kwargs.get("rounding_mode") in ("floor", "trunc"))
    match base:
        case _ if at == 0 and floored and points.slack == 1 and _positive(number):
            inner = quotient(points.inner, number)  # type: ignore[arg-type]
            if inner is not None:
                return replace(points, inner=inner, each=False)
            if same(whole, number):  # type: ignore[arg-type]
                return None
        case "remainder" if at == 0 and points.slack == 1 and _positive(number):
            outer = quotient(number, whole)  # type: ignore[arg-type]
            if outer is not None and quotient(points.outer, outer) is not None:
                return replace(points, outer=outer, each=points.each and same(points.outer, outer))
            if quotient(points.inner, number) is not None:  # type: ignore[arg-type]
                return None
        case "mul" if _positive(number) and not grows(number):  # type: ignore[arg-type]
            inner, slack = points.inner * number, points.slack * number  # type: ignore[operator]
            return replace(points, inner=inner, slack=slack, each=False)
        case "add" if not call.kwargs:
            bound = number + 1 if isinstance(number, int) and number >= 0 else None
            if len(call.operands) == 2:
                bound = below(operands(node)[1 - at])
            if bound is not None and _fits(bound, points.slack):
                return replace(points, slack=1)
    return NotImplemented


def _positive(number: object) -> bool:
    return isinstance(number, (int, sympy.Basic)) and bool(sympy.sympify(number).is_positive)


def _fits(bound: Size, slack: Size) -> bool:
    return same(bound, slack) or bool(sympy.sympify(slack - bound).is_nonnegative)


def below(node: fx.Node) -> Size | None:
    """Return a size that a node's integers, which are at least 0, are known to be below; None if none is known."""
    if node.op != "call_function":
        return None
    if (bound := _as_index(node)) is not None:
        return bound
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if is_getitem(node) and node.args[1] == 1:
        assert source is not None
        call = op_call(source)
        picked = target_name(call.target) in ("sort", "topk", "max", "min")
        index, default = (2, -1) if target_name(call.target) == "topk" else (1, -1)
        return info(source.all_input_nodes[0]).shape[call.arg(index, "dim", default)] if picked else None
    call = op_call(node)
    match target_name(call.target):
        case "arange" if follow_range(node) is None and is_range(node):
            return info(node).shape[0]
        case "argmax" | "argmin" | "argsort" if call.arg(1, "dim") is not None:
            return call.operands[0].shape[call.arg(1, "dim")]
        case "remainder" if _positive(call.args[1]):
            return call.args[1]
        case "clamp" if call.arg(1, "min") is not None and call.arg(1, "min") >= 0 and call.arg(2, "max") is not None:
            return max(call.arg(1, "min"), call.arg(2, "max")) + 1
        case "cat" | "concat" | "stack":
            return _largest(operands(node))
        case "where" if len(node.args) == 3:
            return _largest(node.args[1:])
        case "masked_fill":
            return _largest(node.args[::2])
        case "index" | "gather" | "index_select":
            return None if source is None else below(source)
        case "to" | "_to_copy" if source is not None and info(source).dtype.is_floating_point:
            return None
        case base if base in SAME_VALUES and source is not None:
            return below(source)
    return None


def _as_index(node: fx.Node) -> Size | None:
    """Return the size that a node's integers index, by ops that take no other numbers; None if none does."""
    for user in node.users:
        source, *rest = user.args if user.op == "call_function" and user.args else (None,)
        if op_name(user) == "embedding" and rest[0] is node:
            return info(source).shape[0]  # type: ignore[arg-type]
        if op_name(user) == "gather" and rest[1] is node:
            return info(source).shape[rest[0]]  # type: ignore[arg-type,index]
    return None


def _largest(values: Sequence[object]) -> int | None:
    """Return the largest of the sizes that nodes and numbers are below; None unless all are known numbers."""
    bounds = [below(x) if isinstance(x, fx.Node) else x + 1 if isinstance(x, int) and x >= 0 else None for x in values]
    return max(bounds) if all(isinstance(n, int) for n in bounds) else None  # type: ignore[type-var]


def is_range(node: fx.Node) -> bool:
    """Return whether a tensor is 0, 1, 2 …, all numbers below its size."""
    while node.op == "call_function" and op_name(node) in ("to", "_to_copy", "alias", "clone"):
        node = node.all_input_nodes[0]
    if node.op != "call_function" or op_name(node) != "arange":
        return False
    start, step = _range(node)
    return start == 0 and step == 1


def _range(node: fx.Node) -> tuple[object, object]:
    """Return start and step of `arange`."""
    return (0, 1) if len(node.args) == 1 else (node.args[0], (*node.args, 1)[2])
