"""Valid values of a model's inputs, inferred from its graph.

    bound       of indices: the length of the shortest table, or the smallest number of classes, that they index
    marks       integers that the model treats specially: the label that a loss ignores, padding (`ids != 0`)
    role        of floating-point inputs: "share", between 0 and 1 (a probability, the operand of a logarithm or root);
                "mask"; "weight" (the loss is divided by its sum); else "value"

The graph does not determine everything: whether a guess was right shows when the plain model runs (`inputs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoptd.compile.traced import TracedModel
from autoptd.ops import library as ops
from autoptd.passes.analysis.flops import work
from autoptd.passes.graph import ancestors, info, infos, is_getitem, op_call, op_name, operands

aten = torch.ops.aten
Sizes = Mapping[Any, int]

# op -> position of the argument that holds indices, and how to find the dim of the first argument that they index
_INDICES: dict[str, tuple[int, str]] = {
    "embedding": (1, "rows"),
    "gather": (2, "dim"),
    "index_select": (2, "dim"),
    "index_add": (2, "dim"),
    "index_copy": (2, "dim"),
    "scatter": (2, "dim"),
    "scatter_add": (2, "dim"),
    "take_along_dim": (1, "third"),
    "cross_entropy_loss": (1, "classes"),
    "nll_loss_nd": (1, "classes"),
    "cross_entropy": (1, "last"),
    "one_hot": (0, "count"),
}
_LISTS = ("index", "index_put")  # their second argument is a list with the indices of each dim, or None
_BELOW = {"eq": 0, "ne": 0, "ge": -1, "lt": -1, "gt": 0, "le": 0}  # a comparison with c distinguishes c + this
_LOOKUPS = ("embedding", "gather", "index", "index_select", "take_along_dim")
_CARRIERS = (
    "to",
    "_to_copy",
    "clone",
    "detach",
    "where",
    "cat",
    "masked_fill",
    "pad",
    "constant_pad_nd",
    "roll",
    "flip",
)
_PROPER = ("log", "log2", "log10", "sqrt", "rsqrt", "pow", "xlogy", "logit")
_TARGETS = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "cross_entropy_loss")


@dataclass(frozen=True)
class Domain:
    """The valid values of one input. `shape` is concrete; dim 0 counts samples, if it has some."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bound: int | None = None
    marks: tuple[int, ...] = ()
    role: str = "value"


def domains_of(source: TracedModel, sizes: Sizes) -> list[Domain]:
    """Return the domain of each input. `sizes`: the value of every symbol; `b` is the samples of the whole batch."""
    traced = source.folded.traced
    nodes = [n for n in traced.graph.graph.nodes if n.op != "output"]
    whole, held = _reached(nodes, traced.inputs, through=_integers), _reached(nodes, traced.inputs, through=_carries)
    bounds, marks, roles = dict[str, int](), dict[str, list[int]](), dict[str, str]()
    for node in [n for n in nodes if n.op == "call_function"]:
        for index, bound in _indexed(node, sizes):
            for name in whole.get(index, ()):
                bounds[name] = min(bounds.get(name, bound), bound)
        for operand, mark in _ignored(node, sizes):
            for name in whole.get(operand, ()):
                marks.setdefault(name, []).append(mark)
        for operand, mark in _compared(node):
            for name in held.get(operand, ()):
                marks.setdefault(name, []).append(mark)
        for operand, role in _roles(node):
            for name in held.get(operand, ()):
                roles.setdefault(name, role)
    found = []
    for name, shape, dtype in inputs_of(source, sizes):
        role = "mask" if "mask" in name.lower() else roles.get(name, "value")
        found.append(Domain(name, shape, dtype, bounds.get(name), tuple(dict.fromkeys(marks.get(name, ()))), role))
    return found


def inputs_of(source: TracedModel, values: Sizes) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return the name, shape and dtype of each input at the given sizes."""
    traced, found = source.folded.traced, []
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder" and node.name in traced.inputs:
            shape = tuple(_number(n, values) for n in info(node).shape)
            found.append((traced.inputs[node.name], shape, info(node).dtype))
    return found


def _number(size: Any, values: Sizes) -> int:
    return size if isinstance(size, int) else int(size.subs(dict(values)))


def _reached(nodes: Sequence[fx.Node], inputs: Mapping[str, str], through: Any) -> dict[fx.Node, frozenset[str]]:
    """Return node -> the inputs that reach it through nodes where `through` is true; a lookup passes on its table."""
    found: dict[fx.Node, frozenset[str]] = {}
    for node in nodes:
        if node.op == "placeholder":
            found[node] = frozenset([inputs[node.name]] if node.name in inputs else ())
        elif through(node):
            given = operands(node)[:1] if op_name(node) in _LOOKUPS else operands(node)
            found[node] = frozenset().union(*(found.get(o, frozenset()) for o in given))
    return found


def _integers(node: fx.Node) -> bool:
    return not any(t.dtype.is_floating_point or t.dtype == torch.bool for t in infos(node))


def _carries(node: fx.Node) -> bool:
    """Return whether a node's result holds the elements of its operand, in another shape or type."""
    if is_getitem(node) or op_name(node) in _CARRIERS:
        return True
    return work(op_call(node)).kind == "view"


def _indexed(node: fx.Node, sizes: Sizes) -> Iterator[tuple[fx.Node, int]]:
    """Yield the operands of a node that are indices, with the number of entries that they index."""
    name = op_name(node)
    if name in _LISTS:
        given = node.args[1]
        for dim, index in enumerate(given if isinstance(given, (list, tuple)) else ()):
            if isinstance(index, fx.Node):
                yield index, _number(info(node.args[0]).shape[dim], sizes)  # type: ignore[arg-type]
    if name not in _INDICES:
        return
    at, how = _INDICES[name]
    index = node.args[at] if at < len(node.args) else None
    if not isinstance(index, fx.Node) or info(index).dtype.is_floating_point:
        return
    if how == "count":
        count = node.args[1] if len(node.args) > 1 else -1
        if isinstance(count, int) and count > 0:
            yield index, count
        return
    shape = info(node.args[0]).shape  # type: ignore[arg-type]
    said = node.args[1] if how == "dim" else node.args[2] if len(node.args) > 2 else None
    at_dim = {"rows": 0, "last": -1, "classes": 1 if len(shape) > 1 else 0}.get(how, said)  # type: ignore[arg-type]
    if isinstance(at_dim, int):
        yield index, _number(shape[at_dim], sizes)


def _compared(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield the operand of a comparison of integers, with the number that the comparison distinguishes."""
    name = op_name(node)
    if name in _BELOW and len(node.args) > 1 and isinstance(node.args[0], fx.Node):
        number, whole = node.args[1], not info(node.args[0]).dtype.is_floating_point
        if whole and isinstance(number, (int, float)) and float(number).is_integer():
            yield node.args[0], int(number) + _BELOW[name]


def _ignored(node: fx.Node, sizes: Sizes) -> Iterator[tuple[fx.Node, int]]:
    """Yield the labels of a loss, with the label that the loss ignores."""
    if op_name(node) in ("cross_entropy_loss", "nll_loss_nd"):
        ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
        yield node.args[1], _number(ignored, sizes)  # type: ignore[misc]
    elif node.target is ops.cross_entropy:
        yield node.args[1], _number(node.args[2], sizes)  # type: ignore[misc]


def _roles(node: fx.Node) -> Iterator[tuple[fx.Node, str]]:
    name = op_name(node)
    if name in _PROPER and node.all_input_nodes:
        yield node.all_input_nodes[0], "share"
    if name in _TARGETS and isinstance(node.args[1], fx.Node) and info(node.args[1]).dtype.is_floating_point:
        yield node.args[1], "share"
    if name in ("eq", "ne", "gt", "ge", "lt", "le") and isinstance(node.args[0], fx.Node):
        yield node.args[0], "mask"
    if name == "div" and isinstance(node.args[1], fx.Node):
        for reached in ancestors([node.args[1]]):
            if reached.op == "call_function" and op_name(reached) in ("sum", "mean") and reached.all_input_nodes:
                yield reached.all_input_nodes[0], "weight"
