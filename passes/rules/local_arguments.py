"""Arguments of ops that are sizes: their values on one rank, by position or name (`Rule.local`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoptd.passes.opcall import OpCall, Size
from autoptd.passes.rules.factors import Strategy, local_shape


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


def copies(call: OpCall, strategy: Strategy, ranks: int) -> Mapping[int | str, Any]:
    """Return the local number of copies of one element, and the local `output_size`, of repeat_interleave."""
    dim = call.arg(2, "dim", 0) or 0
    whole, mine = call.outputs[0].shape[dim], local_shape(call.outputs[0], strategy.gives[0], ranks)[dim]
    found: dict[int | str, Any] = {} if call.kwargs.get("output_size") is None else {"output_size": mine}
    return found if whole == mine or call.operands[0].shape[dim] != 1 else {1: mine, **found}
