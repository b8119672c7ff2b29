"""Recognise causal attention masks by their values, however the model computes them.

Models pass a dense mask to `scaled_dot_product_attention`, computed by some thirty integer ops. A mask that depends on
no input is evaluated at two sizes. If each query attends to itself and earlier positions, the op gets `is_causal=True`
and can use its flash kernel; if all attend to all, the mask is dropped. A mask that depends on an input is not changed.
"""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autoptd.passes.graph import ancestors, concrete, info, substitute
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten
_LARGEST = 1 << 13  # a mask with a longer window or table is not evaluated and stays dense
_ENDLESS = (1 << 31) - 1  # "to the end" in slices and ranges


def name_causal_masks(graph: fx.Graph, traced: Traced) -> None:
    """Replace dense masks that are causal or mask nothing, in every attention op."""
    verdicts: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not aten.scaled_dot_product_attention.default:
            continue
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        if mask not in verdicts:
            verdicts[mask] = _judge(mask, traced)
        if verdicts[mask] != "dense":
            _without_mask(node, causal=verdicts[mask] == "causal")


def _without_mask(node: fx.Node, *, causal: bool) -> None:
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    node.args = (*node.args[:3], None, dropout, causal)
    node.kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}


def _judge(mask: fx.Node, traced: Traced) -> str:
    """Classify a mask as "causal", "nothing" (masks nothing) or "dense"."""
    sources = [n for n in ancestors([mask]) if n.op == "placeholder"]
    if info(mask).requires_grad or any(n.name in traced.inputs or n.name in traced.parameters for n in sources):
        return "dense"
    if any(_value(n, traced) is None for n in sources):
        return "dense"
    numbers = [x for n in ancestors([mask]) for x in _literals(n) if x < _ENDLESS]
    numbers += [int(n) for source in sources for n in info(source).shape if isinstance(n, int)]
    if max(numbers, default=0) > _LARGEST:
        return "dense"
    verdicts = {_judge_at(mask, traced, length) for length in (7, max(numbers, default=0) + 9)}
    return verdicts.pop() if len(verdicts) == 1 else "dense"


def _literals(node: fx.Node) -> list[int]:
    """Return the numbers among the arguments, rounded up, such as a window or the length of a table."""
    found: list[int] = []

    def look(value: object) -> None:
        if isinstance(value, (tuple, list)):
            for v in value:
                look(v)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _ENDLESS:
            found.append(math.ceil(abs(value)))

    if node.op == "call_function":
        look((node.args, tuple(node.kwargs.values())))
    return found


def _judge_at(mask: fx.Node, traced: Traced, length: int) -> str:
    sizes = {symbol: 2 if symbol == BATCH else length for symbol in traced.sizes}
    try:
        value = evaluate(mask, traced, sizes)
    except (RuntimeError, IndexError):  # sizes for which the model itself does not run
        return "dense"
    allowed = value if value.dtype == torch.bool else value > -1e4
    if value.dtype != torch.bool and not bool(((value == 0) | (value <= -1e4)).all()):
        return "dense"
    if bool(allowed.all()):
        return "nothing"
    rows, columns = allowed.shape[-2:]
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if rows == columns and bool((allowed == causal).all()) else "dense"


def evaluate(node: fx.Node, traced: Traced, sizes: dict[sympy.Symbol, int]) -> Tensor:
    """Return the value, on the CPU, of a node that depends only on sizes and known buffers."""
    values: dict[fx.Node, object] = {}
    wanted = ancestors([node])
    for n in node.graph.nodes:
        if n not in wanted:
            continue
        if n.op == "placeholder":
            values[n] = _value(n, traced)
            continue
        args: Any = concrete(substitute(n.args, values.__getitem__), sizes)
        kwargs = {k: concrete(substitute(v, values.__getitem__), sizes) for k, v in n.kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        values[n] = n.target(*args, **kwargs)  # type: ignore[operator]
    result = values[node]
    assert isinstance(result, Tensor)
    return result


def _value(node: fx.Node, traced: Traced) -> Tensor | None:
    value = traced.constants.get(node.name)
    return None if value is None or value.device.type == "meta" else value
