"""Functions of the rows of the rule table: operands that may be partial sums, arguments that are sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoptd.passes.opcall import OpCall, Size, TensorInfo
from autoptd.passes.rules.factors import Strategy, local_shape

# Operands that may be partial sums.


def first(call: OpCall) -> Sequence[frozenset[int]]:
    """Return the first operand alone, if it is the first argument (a number divided by a tensor is not linear)."""
    return (frozenset({0}),) if isinstance(call.args[0], TensorInfo) else ()


def together(call: OpCall) -> Sequence[frozenset[int]]:
    """Return all operands at once, as for a concatenation."""
    return (frozenset(range(len(call.operands))),)


def both(call: OpCall) -> Sequence[frozenset[int]]:
    """Return both operands at once, unless one of the two is a number."""
    return together(call) if len(call.operands) == 2 else ()


def each(call: OpCall) -> Sequence[frozenset[int]]:
    """Return one operand at a time, as for a product."""
    return tuple(frozenset({i}) for i in range(len(call.operands)))


def product_and_bias(call: OpCall) -> Sequence[frozenset[int]]:
    """Return either factor of x w + b, with the bias (third)."""
    bias = {2} & {len(call.operands) - 1}
    return frozenset({0} | bias), frozenset({1} | bias)


def bias_and_product(call: OpCall) -> Sequence[frozenset[int]]:
    """Return either factor of b + x w, with the bias (first)."""
    return frozenset({0, 1}), frozenset({0, 2})


def branches(call: OpCall) -> Sequence[frozenset[int]]:
    """Return both branches of `where` at once."""
    return (frozenset({1, 2}),) if len(call.operands) == 3 else ()


def first_and_third(call: OpCall) -> Sequence[frozenset[int]]:
    """Return the tensor that an indexed write changes and the source, at once."""
    return (frozenset({0, 2}),)


def if_zero(index: int, name: str) -> Callable[[OpCall], Sequence[frozenset[int]]]:
    """Return `linear` of ops that fill in a value: the first operand if that value is zero."""

    def linear(call: OpCall) -> Sequence[frozenset[int]]:
        zero = call.arg(index, name, None) in (None, 0) and call.args[2:3] not in (("reflect",), ("replicate",))
        return first(call) if zero else ()

    return linear


# Arguments that are sizes.


def shape(index: int) -> Callable[[OpCall, Strategy, int], Mapping[int | str, Any]]:
    """Return `local` for an argument that is the shape of the result; -1 stays -1."""

    def local(call: OpCall, strategy: Strategy, ranks: int) -> Mapping[int | str, Any]:
        sizes = local_shape(call.outputs[0], strategy.gives[0], ranks)
        return {index: [w if w == -1 else size for w, size in zip(call.args[index], sizes, strict=True)]}

    return local


def inner_shape(call: OpCall, strategy: Strategy, ranks: int) -> Mapping[int | str, Any]:
    """Return the local `sizes` of unflatten; -1 stays -1."""
    dim = call.args[1] % call.operands[0].ndim
    sizes = local_shape(call.outputs[0], strategy.gives[0], ranks)[dim : dim + len(call.args[2])]
    return {2: [w if w == -1 else size for w, size in zip(call.args[2], sizes, strict=True)]}


def part_sizes(call: OpCall, strategy: Strategy, ranks: int) -> Mapping[int | str, Any]:
    """Return the local sizes of split's parts: one for all or one each."""
    dim = call.arg(2, "dim", 0) % call.operands[0].ndim
    placements = zip(call.outputs, strategy.gives, strict=True)
    sizes: list[Size] = [local_shape(t, p, ranks)[dim] for t, p in placements]
    return {1: sizes if isinstance(call.args[1], (list, tuple)) else sizes[0]}


def length(call: OpCall, strategy: Strategy, ranks: int) -> Mapping[int | str, Any]:
    """Return the local `length` of narrow."""
    dim = call.args[1] % call.operands[0].ndim
    return {3: local_shape(call.outputs[0], strategy.gives[0], ranks)[dim]}
