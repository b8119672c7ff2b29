"""Pixels of a sample: of the pictures, or frames, that a model's first convolutions read."""

from __future__ import annotations

import math

from torch import fx

from autoptd.passes.graph import info_of, op_name
from autoptd.passes.trace.traced import Traced

_CHANNELS_FIRST = 2  # dims of a picture before its pixels: samples and channels


def pixels_of(traced: Traced) -> int:
    """Return the pixels of the largest picture among a sample's inputs, or of all its frames; 0 without one.

    A picture is an input [b, channels, height, width], or with more dims, that a convolution reads, also after ops that
    keep its shape."""
    found = 0
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder" and node.name in traced.inputs and _is_read_by_convolution(node):
            sides = info_of(node).shape[_CHANNELS_FIRST:]
            if len(sides) > 1 and all(isinstance(side, int) for side in sides):
                found = max(found, math.prod(sides))
    return found


def _is_read_by_convolution(picture: fx.Node) -> bool:
    shape, waiting, seen = info_of(picture).shape, [picture], {picture}
    while waiting:
        for user in waiting.pop().users:
            if user.op != "call_function" or user in seen:
                continue
            if op_name(user).startswith("conv"):
                return True
            if getattr(info_of(user), "shape", None) == shape:
                seen.add(user)
                waiting.append(user)
    return False
