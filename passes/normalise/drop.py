"""Drop redundant nodes: assertions, identities, repeated computations without gradient."""

from __future__ import annotations

from typing import Any

import sympy
from torch import fx

from autoptd.passes.graph import info, infos, op_name, operands
from autoptd.passes.opcall import is_random
from autoptd.passes.trace.traced import Traced


def drop_asserts(graph: fx.Graph, traced: Traced) -> None:
    """Remove the tracer's run-time assertions: shapes are proved at planning time, not checked on every step."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and op_name(node) in _ASSERTS:
            graph.erase_node(node)


_ASSERTS = frozenset(
    [
        "_assert_tensor_metadata",
        "_assert_scalar",
        "_assert_async",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    ]
)


def drop_identities(graph: fx.Graph, traced: Traced) -> None:
    """Remove ops that return their operand: casts to the same dtype, whole slices, views to the same shape, `+ 0` …"""
    for node in list(graph.nodes):
        if node.op != "call_function" or isinstance(node.meta["info"], tuple):
            continue
        source = _identity(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _identity(node: fx.Node) -> fx.Node | None:
    """Return the operand that the node equals, or None."""
    name, args = op_name(node), node.args
    if name == "cat":
        return _only_part(node)
    if name == "slice_scatter":  # of as many rows as there are
        new: Any = args[1]
        return new if info(new).shape == info(node).shape and info(new).dtype == info(node).dtype else None
    first = args[0] if args and isinstance(args[0], fx.Node) else None
    if first is None or isinstance(first.meta["info"], tuple):
        return None
    before, after = info(first), info(node)
    same = before.shape == after.shape and before.dtype == after.dtype
    match name:
        case "alias" | "lift_fresh_copy" | "lift_fresh" | "clone" | "contiguous":
            return first
        case "detach":
            return first if not before.requires_grad else None
        case "to" | "_to_copy" | "type_as" | "view" | "reshape" | "_unsafe_view" | "flatten" | "unflatten":
            return first if same else None
        case "slice" | "expand" | "expand_as" | "squeeze" | "unsqueeze":
            return first if same else None
        case "add" | "sub":
            return first if same and args[1] in (0, 0.0) and not isinstance(args[1], fx.Node) else None
        case "mul" | "div":
            return first if same and not isinstance(args[1], fx.Node) and args[1] in (1, 1.0) else None
        case "dropout" | "feature_dropout" | "alpha_dropout" | "feature_alpha_dropout":
            return first if args[1] == 0 or args[2] is False else None
        case _:
            return None


def _only_part(node: fx.Node) -> fx.Node | None:
    """Drop the empty tensors of a `cat`. Return the remaining operand if there is exactly one."""
    parts = operands(node)
    full = [x for x in parts if 0 not in info(x).shape]
    if len(full) == 1:
        return full[0]
    if len(full) < len(parts):
        node.args = (full, *node.args[1:])
    return None


def drop_devices(graph: fx.Graph, traced: Traced) -> None:
    """Take the device from `zeros_like(x, device=x.device)` and the like: results are on that of their operand."""
    for node in graph.nodes:
        if node.op == "call_function" and "device" in node.kwargs and op_name(node).endswith(_LIKE) and operands(node):
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}


_LIKE = "_like", "new_zeros", "new_ones", "new_full", "new_empty"


def share_repeated(graph: fx.Graph, traced: Traced) -> None:
    """Merge equal nodes without gradient: position ids, rotary tables, masks that every layer computes."""
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or any(t.requires_grad for t in infos(node)) or is_random(node.target):
            continue
        key = (node.target, _key(node.args), _key(tuple(sorted(node.kwargs.items()))))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _key(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_key, value))
    return value if isinstance(value, (fx.Node, sympy.Basic)) else (type(value).__name__, str(value))
