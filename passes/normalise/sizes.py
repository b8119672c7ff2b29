"""Replace sizes in arguments by sympy expressions of b, s and further symbols, and remove size arithmetic."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import op_name, plain, source_line
from autoptd.passes.normalise.size_functions import in_sympy, unknown_function
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.trace.trace_errors import KEEP_TENSORS, NUMBER_READ
from autoptd.passes.trace.traced import Traced

_FIXED = "use a fixed-capacity form such as torch.topk, or a mask with torch.where"
_WAYS_OUT = {
    "bincount": "count a fixed number n of values: F.one_hot(x, n).sum(0), times weights[:, None] before the sum"
}


def fold_sizes(graph: fx.Graph, traced: Traced) -> None:
    """Replace sizes in arguments by expressions of our symbols, which leaves size nodes dead; set `meta["shapes"]`."""
    known: dict[int, object] = {}  # id of a value, which the copies of a node share -> its shapes
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "output":
            continue
        if (
            isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
            and node.op != "placeholder"
        ):
            size = in_our_symbols(value, traced, node)
            for user in list(node.users):
                user.args = _replace(user.args, node, size)
                user.kwargs = {k: _replace(v, node, size) for k, v in user.kwargs.items()}
        elif value is not None:
            if id(value) not in known:
                known[id(value)] = _shapes(value, traced, node)
            node.meta["shapes"] = known[id(value)]
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = _numbers(node.args, traced, node)
            node.kwargs = {k: _numbers(v, traced, node) for k, v in node.kwargs.items()}


def in_our_symbols(value: object, traced: Traced, node: fx.Node) -> Any:
    """Return a size of torch's as an expression of our symbols; any other value unchanged."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    expr = sympy.sympify(value.node.expr)
    if expr in traced.resolved:
        return traced.resolved[expr]
    unknown = [s for s in expr.free_symbols if s not in traced.symbol]
    if unknown:
        reads = op_name(node) in ("item", "_local_scalar_dense")
        raise UnsupportedOp(
            NUMBER_READ if reads else f"{node.target} has a size that depends on data ({', '.join(map(str, unknown))})",
            where=source_line(node),
            fix=KEEP_TENSORS if reads else _WAYS_OUT.get(op_name(node), _FIXED),
        )
    ours = in_sympy(expr.xreplace(traced.symbol))
    if isinstance(value, torch.SymBool) and not isinstance(ours, sympy.logic.boolalg.BooleanAtom):
        raise UnsupportedOp(
            f"{op_name(node)} takes a comparison of sizes, {ours}, for a number",
            where=source_line(node),
            fix="branch on it, as in 2.0 if x.size(0) > 4 else 1.0",
        )
    if name := unknown_function(ours):
        raise UnsupportedOp(
            f"a size is computed by {name}", where=source_line(node), fix="compute sizes by +, -, *, //, %, min and max"
        )
    return traced.resolved.setdefault(expr, plain(ours))


def _shapes(value: object, traced: Traced, node: fx.Node) -> object:
    if isinstance(value, torch.Tensor):
        return TensorInfo(tuple(in_our_symbols(s, traced, node) for s in value.shape), value.dtype, False)  # type: ignore[misc]
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(v, traced, node) for v in value)
    return None


def _replace(value: object, node: fx.Node, size: object) -> object:
    if value is node:
        return size
    if isinstance(value, (tuple, list)):
        return type(value)(_replace(v, node, size) for v in value)
    return value


def _numbers(value: object, traced: Traced, node: fx.Node) -> object:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return in_our_symbols(value, traced, node)
    if isinstance(value, tuple):
        return tuple(_numbers(v, traced, node) for v in value)
    if isinstance(value, list):
        return [_numbers(v, traced, node) for v in value]
    return value
