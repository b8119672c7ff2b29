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
from autoptd.verification.ranks import RankRun


def wrong_owners(layout: Layout, runs: Sequence[RankRun]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, what is wrong) for each parameter with an element that has no owner, or several."""
    for name, spec in layout.parameters.items():
        if spec.trainable:
            yield from _wrong_owners_of(layout, runs, name, spec)


def _wrong_owners_of(layout: Layout, runs: Sequence[RankRun], name: str, spec: TensorSpec) -> Iterator[tuple[str, str]]:
    mesh, tp = layout.mesh, layout.mesh.tp
    length = int(torch.Size(spec.local_shape(tp)).numel())
    counted: dict[tuple[int, int], Tensor] = {}
    wanted = layout.copies(spec) // layout.sharing_of(spec)
    for holders in _holders(layout, spec):
        updated = torch.zeros(length, dtype=torch.int32)
        part = spec.part(mesh, holders[0])
        counts = counted.setdefault(part, torch.zeros(length, dtype=torch.int32))
        for rank in holders:
            for piece in runs[rank].owned:
                if piece.name == name:
                    at = slice(piece.start, piece.start + piece.size)
                    updated[at] += 1
                    counts[at] += int(piece.counts)
        if wrong := _first_range(updated, wanted):
            pp, _, index = mesh.coordinates(holders[0])
            where = f"on pipeline rank {pp}, tensor-parallel rank {index} (ranks {_short(holders)})"
            yield name, f"{wrong} updated {_times(updated, wanted)} {where}, not {wanted}"
    for (expert, index), row in sorted(counted.items()):
        if wrong := _first_range(row, 1):
            of = [f"ep rank {expert}"] * (spec.ep > 1) + [f"tensor-parallel rank {index}"] * (spec.parts(tp) > spec.ep)
            whose = f" of {' and '.join(of)}'s part" if of else ""
            yield name, f"{wrong}{whose} counted in the norm {_times(row, 1)}, not once"


def _holders(layout: Layout, spec: TensorSpec) -> Iterator[list[int]]:
    """Yield the data-parallel ranks that hold the same part of a parameter, on each pipeline and tp rank."""
    mesh = layout.mesh
    for pp in mesh.holders(spec.stages):
        for tp in range(1 if spec.over_tp else mesh.tp):
            first = mesh.rank(pp, 0, tp)
            if spec.ep == 1:
                yield list(mesh.group_of(first, "data"))
            else:
                yield from (list(mesh.group_of(rank, "edp")) for rank in mesh.group_of(first, "ep"))


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
