"""Notation of a convolution: channels and, with groups of channels, the groups can be split; spatial dims are whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoptd.layout.placements import Split
from autoptd.passes.opcall import OpCall
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.rules.op_notations import arrow

_GROUPS = 6  # position of the argument


def conv(call: OpCall) -> str:
    """Return the notation; of a depthwise convolution `b g ., g 1 . -> b g .`: each channel has a filter of its own."""
    source, weight = call.operands[:2]
    space, groups = ["."] * (source.ndim - 2), call.arg(_GROUPS, "groups", 1)
    bias = len(call.operands) == 3
    if groups == 1:
        return arrow([["b", "c", *space], ["o", "c", *space], *[["+", "o"]] * bias], [["b", "o", *space]])
    outer, inner = f"(g {weight.shape[0] // groups})", f"(g {weight.shape[1]})"  # type: ignore[operator]
    return arrow([["b", inner, *space], [outer, ".", *space], *[[outer]] * bias], [["b", outer, *space]])


def conv_groups(call: OpCall, strategy: Strategy, ranks: int) -> Mapping[int | str, Any]:
    """Return the groups of one rank."""
    groups, split = call.arg(_GROUPS, "groups", 1), strategy.needs[0]
    if groups == 1 or not isinstance(split, Split) or split.dim != 1:
        return {}
    return {_GROUPS if len(call.args) > _GROUPS else "groups": groups // ranks}
