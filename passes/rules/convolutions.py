"""Notation of a convolution: channels and, with groups of channels, the groups can be split.

A spatial dim is whole, unless the kernel has one element there and takes every place: such a convolution is a linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoptd.layout.placements import Split
from autoptd.passes.opcall import OpCall, Size
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.rules.op_notations import arrow

_GROUPS = 6  # position of the argument


def conv(call: OpCall) -> str:
    """Return the notation; of a depthwise convolution `b g ., g 1 . -> b g .`: each channel has a filter of its own."""
    return _notation(call, [])


def sample_conv(call: OpCall) -> str:
    """Return the notation of a convolution of each sample with filters of its own."""
    return _notation(call, ["b"])


def _notation(call: OpCall, of: list[str]) -> str:
    """Return the notation of a convolution whose filters and biases have these dims before their own."""
    kernel_shape = call.operands[1].shape[len(of) :]
    space, groups = _places(call, kernel_shape[2:]), call.arg(_GROUPS, "groups", 1)
    kernel, batch = ["."] * len(space), ["b"] * (call.operands[0].ndim - 1 - len(space))  # none: one sample alone
    bias = len(call.operands) == 3
    x, y = [*batch, "c", *space], [*batch, "o", *space]
    if groups == 1:
        return arrow([x, [*of, "o", "c", *kernel], *[["+", *of, "o"]] * bias], [y])
    outer, inner = f"(g {kernel_shape[0] // groups})", f"(g {kernel_shape[1]})"  # type: ignore[operator]
    x, y = [*batch, inner, *space], [*batch, outer, *space]
    return arrow([x, [*of, outer, ".", *kernel], *[[*of, outer]] * bias], [y])


def _places(call: OpCall, kernel: Sequence[Size]) -> list[str]:
    """Return a letter for each spatial dim that can be split, and `.` for the others."""
    steps, padding = _each(call.arg(3, "stride", 1), kernel), _each(call.arg(4, "padding", 0), kernel)
    alone = [found == (1, 1, 0) for found in zip(kernel, steps, padding, strict=True)]
    return [f"x{i}" if a else "." for i, a in enumerate(alone)]


def _each(given: int | Sequence[int], kernel: Sequence[Size]) -> list[int]:
    """Return an argument of a convolution for each spatial dim."""
    found = [given] if isinstance(given, int) else list(given)
    return found * len(kernel) if len(found) == 1 else found


def conv_groups(call: OpCall, strategy: Strategy, ranks: int) -> Mapping[int | str, Any]:
    """Return the groups of one rank. Channels are dim 1, or dim 0 of a sample alone."""
    return _groups(call, strategy, ranks, 1 + call.operands[0].ndim - call.operands[1].ndim)


def sample_conv_groups(call: OpCall, strategy: Strategy, ranks: int) -> Mapping[int | str, Any]:
    """Return the groups of one rank, where each sample has filters of its own."""
    return _groups(call, strategy, ranks, 1)


def _groups(call: OpCall, strategy: Strategy, ranks: int, channels: int) -> Mapping[int | str, Any]:
    groups, split = call.arg(_GROUPS, "groups", 1), strategy.needs[0]
    if groups == 1 or not isinstance(split, Split) or split.dim != channels:
        return {}
    return {_GROUPS if len(call.args) > _GROUPS else "groups": groups // ranks}
