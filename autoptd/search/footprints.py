"""Bytes of activations that blocks and stages hold, from the moments of `passes/liveness.py` at given sizes."""

from __future__ import annotations

from collections.abc import Sequence

from autoptd.passes.fold import Folded, Segment
from autoptd.passes.liveness import Peak, cuts_logits
from autoptd.passes.sharding import Sharding
from autoptd.search.tensors import Sharded, Tensors
from autoptd.search.wishes import Method


def block_peak(tensors: Tensors, sharded: Sharded, segments: Sequence[Segment], policy: str, method: Method) -> Peak:
    """What consecutive segments keep, and need at most, per microbatch under a recompute policy; kept per kinds."""
    key = tuple(s.kind for s in segments), policy, method.gathers, method.loss
    if key not in sharded.peaks:
        found = tensors.workbook.walk(
            segments,
            sharded.sharding.kinds,
            policy,
            regather=method.gathers == "again",
            in_place_loss=loss_of(method, tensors.folded, sharded.sharding) == "in_place",
        )
        sharded.peaks[key] = found.peak(tensors.number, tensors.ranks, tensors.cp)
    return sharded.peaks[key]


def loss_of(method: Method, folded: Folded, sharding: Sharding) -> str:
    """`"kept"` or `"in_place"`: what is asked for, or what `"auto"` comes to under this sharding."""
    if method.loss != "auto":
        return method.loss
    return "in_place" if cuts_logits(folded, sharding) else "kept"
