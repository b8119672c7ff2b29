"""Grouped products of experts: proof that each row, sorted by expert, is multiplied by the expert of its own key.

    keys ── sort ──► i, sorted keys         x[i // k]  ─┐
    keys ── histc, cumsum ──► ends          weights    ─┴► grouped_mm ──► rows in the order of i

The ends depend on the keys of all samples, but only say where the sorted keys change. As group ends of rows sorted by
those keys they mix nothing; any other reader of them mixes samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import SamplePlace
from autoptd.passes.batch.row_numbers import EXACT, below
from autoptd.passes.batch.rows import Across, Rows, State, Tally
from autoptd.passes.graph import info, is_getitem, op_call, op_name, operands
from autoptd.passes.rules.views import same

_CASTS = ("to", "_to_copy")
_SAME_NUMBERS = (  # ops that keep all numbers, in any order
    *(*_CASTS, "alias", "clone", "contiguous", "flatten", "permute", "reshape", "squeeze", "t", "transpose"),
    *("unflatten", "unsqueeze", "view"),
)


def follow_group(node: fx.Node, states: Sequence[State]) -> State:
    """Return the rows of a grouped product; NotImplemented unless its ends come from the keys that sorted its rows."""
    if node.target is not ops.grouped_mm:
        return NotImplemented
    rows, weights, ends = states
    if not (isinstance(rows, Rows) and isinstance(ends, Across) and weights is None):
        return NotImplemented
    by, tally = rows.order.by, ends.tally
    if by is None or tally is None or not tally.ends or not same(tally.bins, op_call(node).operands[1].shape[0]):
        return NotImplemented
    descending = op_call(by).arg(2, "descending", False)
    if descending or _numbers(operands(by)[0]) is not tally.keys:
        return NotImplemented
    return Rows(rows.place, rows.order) if rows.place == SamplePlace(0) else NotImplemented


def counted(node: fx.Node, states: Sequence[State]) -> Tally | None:
    """Return the tally that an op computes, by counting keys or from an operand's tally; None if it computes none."""
    call, base = op_call(node), op_name(node)
    first = states[0] if states else None
    if isinstance(first, Across):
        if first.tally is None:
            return None
        if call.outputs[0].dtype not in EXACT:
            return None
        if base in _CASTS:
            return first.tally
        summed = base == "cumsum" and not first.tally.ends and call.operands[0].ndim == 1
        return replace(first.tally, ends=True) if summed else None
    match base:
        case "histc" if call.arg(2, "min", 0) == 0 and call.arg(3, "max", 0) == call.arg(1, "bins", 100) - 1:
            return _tally(node.all_input_nodes[0], call.arg(1, "bins"), signed=True)
        case "sum":
            return _of_one_hot(node)
        case "sum_by_index" if call.outputs[0].ndim == 1:
            source, index = operands(node)
            return _tally(index, call.outputs[0].shape[0]) if _is_ones(source) else None
    return None


def _of_one_hot(node: fx.Node) -> Tally | None:
    source = node.all_input_nodes[0]
    while source.op == "call_function" and op_name(source) in _CASTS:
        source = source.all_input_nodes[0]
    if source.op != "call_function" or op_name(source) != "one_hot" or info(node).ndim != 1:
        return None
    bins = info(source).shape[-1]
    others = {d % info(source).ndim for d in op_call(node).arg(1, "dim") or ()} == set(range(info(source).ndim - 1))
    return _tally(source.all_input_nodes[0], bins) if others else None


def _tally(keys: fx.Node, bins: object, *, signed: bool = False) -> Tally | None:
    """Return the tally of `keys` in `bins`. `signed`: the op ignores numbers below 0, which a sort would put first."""
    numbers = _numbers(keys)
    known = isinstance(bins, int) and not (signed and below(numbers) is None)
    return Tally(numbers, bins) if known else None  # type: ignore[arg-type]


def _is_ones(node: fx.Node) -> bool:
    while node.op == "call_function" and op_name(node) in _CASTS:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and op_name(node).removeprefix("new_").removesuffix("_like") == "ones"


def _numbers(node: fx.Node) -> fx.Node:
    """Return the first node that computed these numbers, before ops that only reorder, reshape or cast them."""
    while node.op == "call_function":
        if is_getitem(node):
            owner = node.all_input_nodes[0]
            if node.args[1] != 0 or op_name(owner) != "sort":
                return node
            node = owner.all_input_nodes[0]
            continue
        name = op_name(node)
        if name not in _SAME_NUMBERS or (name in _CASTS and info(node).dtype not in EXACT):
            return node
        node = node.all_input_nodes[0]
    return node
