"""Ops of torch that return an operand itself if nothing is to be changed: a cast to the type that a tensor has.

torch.export lets all later readers of the operand read the result of such an op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.graph import is_getitem

aten = torch.ops.aten


def returned_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand that a node's result is, None if the result is a tensor of its own."""
    if node.op != "call_function" or not node.args:
        return None
    source: Any = node.args[0]
    if is_getitem(node) and source.target in _OF_SEVERAL:
        source = source.args[0][node.args[1]]
    elif node.target not in _RETURNING or not _RETURNING[node.target](node):
        return None
    if not isinstance(source, fx.Node):
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    alike = before.dtype == after.dtype and before.device == after.device and before.shape == after.shape
    return source if alike else None


def _argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an op by its name in the schema."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    return given.get(name, next((a.default_value for a in arguments if a.name == name), None))


def _is_no_copy(node: fx.Node) -> bool:
    kept = _argument(node, "memory_format") in (None, torch.preserve_format)
    return not _argument(node, "copy") and (kept or _is_contiguous(node))


def _is_contiguous(node: fx.Node) -> bool:
    before: Any = node.args[0]
    layout = _argument(node, "memory_format") or torch.contiguous_format
    return bool(before.meta["val"].is_contiguous(memory_format=layout))


def _is_real(node: fx.Node) -> bool:
    before: Any = node.args[0]
    return not before.meta["val"].is_complex()


def _drops_nothing(node: fx.Node) -> bool:
    return not _argument(node, "train") or _argument(node, "p") == 0


def _always(node: fx.Node) -> bool:
    return True


_RETURNING: dict[Any, Callable[[fx.Node], bool]] = {
    **dict.fromkeys((aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout), _is_no_copy),
    aten.contiguous.default: _is_contiguous,
    **dict.fromkeys((aten.real.default, aten.conj.default, aten.conj_physical.default), _is_real),
    **dict.fromkeys((aten.resolve_conj.default, aten.resolve_neg.default), _is_real),
    **dict.fromkeys((aten.dropout.default, aten.feature_dropout.default), _drops_nothing),
    **dict.fromkeys((aten.alpha_dropout.default, aten.feature_alpha_dropout.default), _drops_nothing),
    **dict.fromkeys((aten.type_as.default, aten.positive.default, aten.sum_to_size.default), _always),
    **dict.fromkeys((aten.flatten.using_ints, aten.to_dense.default, aten.lift_fresh.default), _always),
    **dict.fromkeys((aten.atleast_1d.default, aten.atleast_2d.default, aten.atleast_3d.default), _always),
}
_OF_SEVERAL = (  # each of whose results may be the operand of its place
    aten.broadcast_tensors.default,
    *(aten.atleast_1d.Sequence, aten.atleast_2d.Sequence, aten.atleast_3d.Sequence),
)
