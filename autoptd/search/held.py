"""The parameters that a stage holds: how each is stored, in which dtype, and whether gradients pass it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoptd.passes.fold import Folded
from autoptd.passes.graph import infos
from autoptd.passes.placements import Placement


@dataclass(frozen=True)
class Held:
    """A parameter on a stage: its place in forward order, local elements, how it is stored, whether it is frozen."""

    order: int
    numel: int
    placement: Placement
    frozen: bool


def parameter_dtypes(folded: Folded) -> dict[str, torch.dtype]:
    """Name of a parameter -> its own dtype: of integers, say, that are frozen."""
    nodes = (*(p for s in folded.segments for p in s.parameters), *folded.unused_parameters)
    return {folded.traced.parameters[node.name]: infos(node)[0].dtype for node in nodes}


def kinds_with_gradient(folded: Folded) -> frozenset[str]:
    """The kinds to any of whose tensors a gradient comes: their parameters are read in the backward pass too."""
    kinds = folded.representatives.items()
    return frozenset(kind for kind, segment in kinds if any(t.requires_grad for n in segment.nodes for t in infos(n)))
