"""Ownership of every element of a parameter: which ranks update it, and which count it in the gradient norm.

Each tensor-parallel rank stores its part of a parameter as a flat local tensor. Over the ranks that hold it,

    update   each element of a part is updated once among the ranks that share one copy (`Layout.sharing`)
    norm     each element of the whole tensor is counted once in the world: all parts of a split parameter, one copy of
             a replicated one, one stage's copy of a tied one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.placements import Split
from autoptd.verification.ranks import RankRun


def wrong_owners(layout: Layout, runs: Sequence[RankRun]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, what is wrong) for each parameter with an element that has no owner, or several."""
    for name, spec in layout.parameters.items():
        if spec.trainable:
            yield from _wrong_owners_of(layout, runs, name, spec)


def _wrong_owners_of(layout: Layout, runs: Sequence[RankRun], name: str, spec: TensorSpec) -> Iterator[tuple[str, str]]:
    mesh = layout.mesh
    parts = mesh.tp if isinstance(spec.placement, Split) else 1
    length = int(torch.Size(spec.local_shape(mesh.tp)).numel())
    counted = torch.zeros(parts, length, dtype=torch.int32)
    for pp in mesh.holders(spec.stages):
        for tp in range(mesh.tp):
            updated = torch.zeros(length, dtype=torch.int32)
            holders = [mesh.rank(pp, dp, tp, cp) for dp in range(mesh.dp) for cp in range(mesh.cp)]
            for rank in holders:
                for part in runs[rank].owned:
                    if part.name == name:
                        at = slice(part.start, part.start + part.size)
                        updated[at] += 1
                        counted[tp if parts > 1 else 0, at] += int(part.counts)
            wanted = mesh.copies // layout.sharing
            if wrong := _first_range(updated, wanted):
                where = f"on pipeline rank {pp}, tensor-parallel rank {tp} (ranks {_short(holders)})"
                yield name, f"{wrong} updated {_times(updated, wanted)} {where}, not {wanted}"
    for index, row in enumerate(counted):
        if wrong := _first_range(row, 1):
            of = f" of tensor-parallel rank {index}'s part" if parts > 1 else ""
            yield name, f"{wrong}{of} counted in the norm {_times(row, 1)}, not once"


def _first_range(found: Tensor, wanted: int) -> str:
    """Return the first range of elements that differ from `wanted`, as `elements 8 to 15`; empty if none does."""
    off = (found != wanted).nonzero().flatten().tolist()
    if not off:
        return ""
    stop = next((i for i, at in enumerate(off) if at != off[0] + i), len(off))
    return f"elements {off[0]} to {off[stop - 1]}" if stop > 1 else f"element {off[0]}"


def _times(found: Tensor, wanted: int) -> str:
    n = int(found[found != wanted][0])
    return {0: "never", 1: "once", 2: "twice"}.get(n, f"{n} times")


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f", … {ranks[-1]}" if len(ranks) > 4 else "")
