"""Parameters of a stage (storage, dtype, gradients) and the memory peak of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoptd.layout.placements import Placement
from autoptd.passes.analysis.liveness import Peak, cuts_logits
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos
from autoptd.passes.sharding.sharding import Sharding
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.sharding.tensors import Sharded, Tensors


@dataclass(frozen=True)
class Held:
    """A parameter on a stage. `order`: its position in forward order; `numel`: local elements."""

    order: int
    numel: int
    placement: Placement
    frozen: bool


def parameter_dtypes(folded: Folded) -> dict[str, torch.dtype]:
    """Return parameter -> its own dtype, which may differ from the plan's (frozen integers, say)."""
    nodes = (*(p for s in folded.segments for p in s.parameters), *folded.unused_parameters)
    return {folded.traced.parameters[node.name]: infos(node)[0].dtype for node in nodes}


def kinds_with_gradient(folded: Folded) -> frozenset[str]:
    """Return the kinds through which gradients flow: backward reads their parameters too."""
    kinds = folded.representatives.items()
    return frozenset(kind for kind, segment in kinds if any(t.requires_grad for n in segment.nodes for t in infos(n)))


def block_peak(
    tensors: Tensors, sharded: Sharded, segments: Sequence[Segment], policy: str, method: SearchOptions
) -> Peak:
    """Return the memory of consecutive segments per microbatch under a recompute policy, cached by their kinds."""
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


def loss_of(method: SearchOptions, folded: Folded, sharding: Sharding) -> str:
    """Return `"kept"` or `"in_place"`, with `"auto"` resolved for this sharding."""
    if method.loss != "auto":
        return method.loss
    return "in_place" if cuts_logits(folded, sharding) else "kept"
