"""The arguments that key random numbers, equally under every plan, by the op and the element's position."""

from __future__ import annotations

import torch
from torch import fx

from autoptd.codegen.expressions import size_text
from autoptd.layout.placements import Placement, Split
from autoptd.passes.batch.batch_dims import SamplePlace, counts_samples, sample_place
from autoptd.passes.graph import info
from autoptd.passes.opcall import Size
from autoptd.passes.sharding.context_parallel_graph import before_cut, ring, ulysses

ATTENTION = {
    torch.ops.aten.scaled_dot_product_attention.default: "attention",
    ring: "ring_attention",
    ulysses: "ulysses_attention",
}


def keyed(node: fx.Node, placement: Placement, at: tuple[int, int], first: int | None) -> tuple[str, tuple[Size, ...]]:
    """Return the arguments of an op whose result is placed so on tp, and the sizes that they mention.

    `at`: its segment and position; `first`: in a block, the first segment, from which keys count. The elements of
    attention are the scores [..., queries, keys], placed like the result except for its width.
    """
    (index, i), before, sizes = at, before_cut(node), list[Size]()
    i = i if before is None else before.position
    key = f'"{index}.{i}"' if first is None else f'f"{{self._first + {index - first}}}.{i}"'
    place, text = sample_place(node), f"key={key}, rng=self.dropout"
    width = info(node).ndim - 1 if node.target in ATTENTION else None
    if place is not None and place.dim != width:
        sizes += [place.outer, place.inner]
        text += _samples_text(place)
    else:
        text += ", samples=ops.MICROBATCH" if counts_samples(info(node)) else ", samples=None"
    parts = []
    if isinstance(placement, Split) and placement.dim != width:
        parts.append(_part_text("tp", placement.dim, placement.groups))
    if node.target is ulysses:  # the whole sequence for some of a tp rank's heads
        parts.insert(0, _part_text("cp", info(node).ndim - 3))
    elif before is not None and before.tokens is not None:
        sizes.append(before.tokens.outer)
        parts.append(_part_text("cp", before.tokens.dim, before.tokens.outer))
    return text + (f", parts=[{', '.join(parts)}]" if parts else ""), tuple(sizes)


def _samples_text(place: SamplePlace) -> str:
    """Return the argument for the position of samples; "" if they are the first dim."""
    given = [f"{k}={size_text(v)}" for k, v in (("outer", place.outer), ("inner", place.inner)) if v != 1]
    given = [f"dim={place.dim}", *given] if place.dim else given
    return f", samples=ops.Samples({', '.join(given)})" if given else ""


def _part_text(axis: str, dim: int, groups: Size = 1) -> str:
    return f"{axis}.part(dim={dim}{f', groups={size_text(groups)}' if groups != 1 else ''})"
