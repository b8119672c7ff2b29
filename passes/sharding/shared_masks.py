"""Boolean attention masks that several attentions read, which a stage converts once.

torch's kernels add a mask to the scores: each call makes a copy of a boolean one in the query's type, with 0 and −∞
(`convert_boolean_attn_mask` in ATen's attention.cpp), and saves it for backward. A mask that is converted before is
passed on, so that all attentions of a stage save the one copy. The choice of the kernel does not depend on the mask's
type, and up to torch 2.12 cuDNN's kernel converted with −65504, so that masks are converted from 2.13 on.

The memory-efficient kernel pads a mask with rows of no multiple of 16 elements, in a copy for each call: such masks
stay boolean. So do those of which tp ranks read parts, and those of attention over cp ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoptd.layout.placements import B
from autoptd.passes.analysis.saved_tensors import boolean_masks, saved_tensors
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import info, operands
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.sharding import KindSharding, Sharding, ops_of

_PASSED_ON = (2, 13)  # the first torch whose kernels all convert alike
_ALIGNED = 16  # elements of a row

Number = Callable[[Any], int]


@dataclass(frozen=True)
class MaskRead:
    """An attention that converts the mask it reads, and the type."""

    kind: str
    attention: fx.Node
    mask: fx.Node
    dtype: torch.dtype


def shared_masks(folded: Folded, sharding: Sharding, number: Number) -> Mapping[fx.Node, torch.dtype]:
    """Return the masks to convert, and into which types. `number` evaluates sizes.

    Of attentions that correspond to each other in segments of one kind, all read such masks or none does.
    """
    if not passes_masks_on() or folded.cut is not None:
        return {}
    reads = [r for segment in folded.segments for r in _reads(segment, sharding.kinds[segment.kind])]
    counts = Counter(read.mask for read in reads)
    if max(counts.values(), default=0) < 2:
        return {}
    readers = Counter(o for s in folded.segments for n in s.nodes for o in n.all_input_nodes if o in counts)
    types: dict[fx.Node, set[torch.dtype]] = {}
    for read in reads:
        types.setdefault(read.mask, set()).add(read.dtype)
    found = {
        mask
        for mask, count in counts.items()
        if count > 1
        and readers[mask] == count  # all of its readers
        and len(types[mask]) == 1
        and number(info(mask).shape[-1]) % _ALIGNED == 0
        and all(mask not in segment.nodes for segment in folded.segments)
    }
    while other := {read.kind for read in reads if read.mask not in found}:
        kept = found - {read.mask for read in reads if read.kind in other}
        if kept == found:
            break
        found = kept
    return {mask: types[mask].pop() for mask in counts if mask in found}


def passes_masks_on() -> bool:
    """Return whether this torch gives equal results for a boolean mask and for the mask converted from it."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= _PASSED_ON


def converting(segment: Segment, masks: Mapping[fx.Node, torch.dtype]) -> Iterator[fx.Node]:
    """Yield the attentions of a segment that read one of these masks."""
    return (n for n in segment.nodes if n.target in _TARGETS and any(o in masks for o in operands(n)))


_TARGETS = (torch.ops.aten.scaled_dot_product_attention.default,)


def _reads(segment: Segment, decided: KindSharding) -> Iterator[MaskRead]:
    for i, node in ops_of(segment):
        if node.target not in _TARGETS:
            continue
        call = op_of(node).call
        masks = boolean_masks(call)
        if masks and saved_tensors(call).converted and decided.strategies[i].needs[masks[0]] == B:
            yield MaskRead(segment.kind, node, operands(node)[masks[0]], call.operands[0].dtype)


__all__ = ["MaskRead", "converting", "passes_masks_on", "shared_masks"]
