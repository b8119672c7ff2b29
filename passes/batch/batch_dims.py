"""Batch dim of every tensor, also if merged with other dims, as after a reshape of (b, s, h) to (b s, h).

A dim of size b counts samples only. If b is one factor of a size, the notations of the ops that led there order the
factors: `d0 d1 -> (d0 d1)` maps the factor b of one shape to its position in the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from autoptd.passes.graph import infos, is_getitem, op_call, op_name, operands
from autoptd.passes.opcall import OpCall, Size, TensorInfo, is_random
from autoptd.passes.rules.factor_notation import FactorPlace, Loops
from autoptd.passes.rules.lookup import resolve
from autoptd.passes.rules.views import quotient
from autoptd.passes.trace.traced import BATCH


@dataclass(frozen=True)
class SamplePlace:
    """Position of the samples in a tensor: dim `dim` is (outer, samples, inner)."""

    dim: int
    outer: Size = 1
    inner: Size = 1


Found = SamplePlace | None
_KEY = "sample_place"  # in a node's meta
_WHOLE = "whole_batch"  # likewise


def sample_place(node: fx.Node, output: int = 0) -> Found:
    """Return the position of the samples in an output of a node; None if no dim counts them or it is unknown which."""
    if is_getitem(node):
        owner, index = node.args
        assert isinstance(owner, fx.Node) and isinstance(index, int)
        return sample_place(owner, index)
    key = f"{_KEY} {output}"
    if key not in node.meta:
        node.meta[key] = place_by_shape(infos(node)[output]) or _place_by_op(node, output)
    found: Found = node.meta[key]
    return found


def forget_place(node: fx.Node, output: int) -> None:
    """Record that the samples of an output are not in batch order, so that its shape does not give their position."""
    node.meta[f"{_KEY} {output}"] = None


def mark_whole(node: fx.Node, whole: bool = True) -> None:
    """Record whether a node belongs to the end of a loss, which is computed from all samples of the batch together."""
    node.meta[_WHOLE] = whole


def is_whole(node: fx.Node) -> bool:
    """Return whether a node is computed once per step, from all samples of the batch together."""
    return bool(node.meta.get(_WHOLE))


def counts_samples(tensor: TensorInfo) -> bool:
    """Return whether a tensor's size depends on the batch."""
    return any(grows(size) for size in tensor.shape)


def grows(size: Size) -> bool:
    """Return whether a size depends on the batch."""
    return not isinstance(size, int) and BATCH in size.free_symbols


def proportional(size: sympy.Expr) -> bool:
    """Return whether a size is proportional to the number of samples."""
    return not grows(sympy.expand(size / BATCH)) or not grows(sympy.simplify(size / BATCH))


_COUNTS = (1, 2, 3, 4, 8, 60, 1009, 10**6 + 3)  # numbers of samples for which a size may differ: max(b, 4), b % 12


def counts_in(value: object) -> bool:
    """Return whether a number among an op's arguments changes with the number of samples."""
    if isinstance(value, (tuple, list)):
        return any(map(counts_in, value))
    return isinstance(value, sympy.Basic) and len({value.subs(BATCH, n) for n in _COUNTS}) > 1


def symbols_in(value: object) -> set[sympy.Symbol]:
    """Return the sizes that the numbers among an op's arguments are computed from."""
    if isinstance(value, (tuple, list)):
        return {symbol for item in value for symbol in symbols_in(item)}
    return {s for s in value.free_symbols if isinstance(s, sympy.Symbol)} if isinstance(value, sympy.Basic) else set()


def makes_new(node: fx.Node) -> bool:
    """Return whether an op reads only shapes and dtypes of its operands, no values: `new_zeros`, `ones_like`."""
    making = ("new_", "zeros", "ones", "full", "empty", "scalar_tensor")
    return node.op == "call_function" and op_name(node).startswith(making)


def place_by_shape(tensor: TensorInfo, unit: Size = BATCH) -> Found:
    """Return the only dim that depends on the batch, if its size is exactly `unit`."""
    dims = [dim for dim, size in enumerate(tensor.shape) if grows(size)]
    return SamplePlace(dims[0]) if len(dims) == 1 and tensor.shape[dims[0]] == unit else None


def place_anywhere(tensor: TensorInfo, slower: Size = 1) -> Found:
    """Return a position for samples in the batch dim of a tensor to which any fits: it holds one value, or counts up.

    `slower`: a factor of the dim that is outside the samples, if it has it; the other factors are inside.
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if grows(size)]
    inner = quotient(tensor.shape[dims[0]], BATCH) if len(dims) == 1 else None
    if inner is None or grows(inner):
        return None
    rest = quotient(inner, slower)
    return SamplePlace(dims[0], 1, inner) if rest is None else SamplePlace(dims[0], slower, rest)


def _place_by_op(node: fx.Node, output: int) -> Found:
    if node.op != "call_function" or not counts_samples(infos(node)[output]):
        return None
    if is_random(node.target) and not operands(node):  # as if the samples were the outermost rows
        return place_anywhere(infos(node)[output])
    places = {i: place for i, o in enumerate(operands(node)) if (place := sample_place(o)) is not None}
    call = op_call(node)
    loops = resolve(call).loops if places else None
    return None if loops is None else place_in(call, loops, output, places)


def place_in(call: OpCall, loops: Loops, output: int, places: Mapping[int, SamplePlace], unit: Size = BATCH) -> Found:
    """Return where an output has the samples, or another factor of size `unit`, that are at `places` in operands."""
    for position, place in places.items():
        for factor, where in loops.places.items():
            source, target = where[position], where[len(call.operands) + output]
            if source is not None and target is not None:
                length = call.outputs[output].shape[target.dim]
                found = _moved(place, loops.sizes[factor], source, target, length, unit)
                if found is not None:
                    return found
    return None


def _moved(place: SamplePlace, size: Size, before: FactorPlace, after: FactorPlace, length: Size, unit: Size) -> Found:
    """Return the new place of samples in a factor, of `size`, that moves to `after`, in a dim of `length`."""
    if before.dim != place.dim or not grows(size):
        return None
    outside = quotient(place.outer, before.outer)  # the part of the factor that is outside the samples
    inside = None if outside is None else quotient(size, outside * unit)
    if outside is None or inside is None:
        return None
    outer = sympy.sympify(after.outer * outside)
    inner = quotient(length, outer * unit)
    if inner is None or grows(outer) or grows(inner):
        return None
    return SamplePlace(after.dim, _plain(outer), _plain(inner))


def _plain(size: Size) -> Size:
    return int(size) if not isinstance(size, int) and size.is_Integer else size
