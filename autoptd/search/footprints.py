"""Bytes of activations that blocks and stages hold, from the moments of `passes/liveness.py` at given sizes."""

from __future__ import annotations

from collections.abc import Sequence

from autoptd.passes.fold import Segment
from autoptd.passes.liveness import Peak
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
            in_place_loss=method.loss == "in_place",
        )
        sharded.peaks[key] = found.peak(tensors.number, tensors.ranks, tensors.cp)
    return sharded.peaks[key]
