"""Bytes of activations that blocks and stages hold, from the moments of `passes/liveness.py` at given sizes."""

from __future__ import annotations

from collections.abc import Sequence

from autoptd.cost_models.memory import in_flight
from autoptd.passes.fold import Segment
from autoptd.passes.liveness import Peak, stage_peak
from autoptd.search.meshes import Candidate
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
        sharded.peaks[key] = found.peak(tensors.number, tensors.ranks)
    return sharded.peaks[key]


def activation_bytes(chunks: Sequence[Sequence[Peak]], rank: int, c: Candidate, method: Method) -> tuple[int, int]:
    """(kept, needed beyond that at the fullest moment) of a pipeline rank, whose chunks consist of these blocks.

    Of several chunks, the ones in flight are taken to be of average size, the one in work to be the fullest.
    """
    alive = in_flight(rank, c.pp, c.microbatches, method.schedule, method.virtual)
    kept = [sum(block.kept for block in chunk) for chunk in chunks]
    extra = max(stage_peak(chunk, 1) - whole for chunk, whole in zip(chunks, kept, strict=True))
    return round(alive * sum(kept) / len(kept)), extra
