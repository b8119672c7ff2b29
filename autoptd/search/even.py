"""Cuts with the same number of blocks on every stage, as frameworks without a search make them.

The blocks are the repetitions of the unit that the model has most of; what comes before them is on the first stage,
what comes after on the last. Where their number does not divide, but with two more it does, embedding and head count
as a block each (Megatron-Core, --account-for-embedding-in-pipeline-split); otherwise the first stages have one more.
"""

from __future__ import annotations

from autoptd.errors import PlanError
from autoptd.passes.fold import Folded


def even_cuts(folded: Folded, stages: int) -> tuple[tuple[int, int], ...]:
    """First and last segment of each stage. Raises PlanError where there are fewer blocks than stages."""
    unit = max(folded.units, key=lambda u: (u.count, u.length))
    counts = even_counts(unit.count, stages)
    if min(counts) < 1 and len(folded.segments) > unit.count * unit.length:
        counts = [max(0, n) for n in counts]
    ends = []
    at = unit.first
    for n in counts:
        at += n * unit.length
        ends.append(at - 1)
    ends[-1] = len(folded.segments) - 1
    starts = [0] + [end + 1 for end in ends[:-1]]
    if any(end < start for start, end in zip(starts, ends, strict=True)):
        raise PlanError(
            f"{unit.count} blocks cannot be shared evenly by {stages} stages",
            where="fix['stages']",
            fix=f"use at most {unit.count} stages (pp × virtual), or leave 'stages' out",
        )
    return tuple(zip(starts, ends, strict=True))


def even_counts(blocks: int, stages: int) -> list[int]:
    """Blocks of each stage."""
    if blocks % stages and (blocks + 2) % stages == 0 and stages > 1:
        share = (blocks + 2) // stages
        return [share - 1, *[share] * (stages - 2), share - 1]
    return [blocks // stages + (i < blocks % stages) for i in range(stages)]
