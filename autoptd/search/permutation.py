"""Kernels that order rows of tokens for experts ("ahead" of them), and restore their order and add them up ("behind").

    fused      one kernel each, without atomic additions: Transformer Engine's moe_permute and moe_unpermute
    added      PyTorch's: rows are gathered ahead, and added up by index (scatter_add) behind; the gradient of each is
               the other. Megatron-Core without --moe-permute-fusion
    weighted   the same, and the rows are multiplied by their weights behind experts, by a kernel of its own:
               Megatron-Core until April 2025 (`unpermute` of megatron/core/transformer/moe/moe_utils.py; commit
               2659630721 moved the weights into the activation)
    twice      weighted, and ordered in two levels: first the rows of the own experts, then by expert. Megatron-Core's
               all-gather dispatcher until October 2024 (`MoEAllGatherTokenDispatcher`, commit f1f0392245)
    ""         as the graph says: the gradient of an index adds up by index, as do index_add, scatter_add and index_put

The lookups of the graph are priced as they are split. What is added up, and the kernels beside, are of the rows of a tp
rank's own tokens, which it sends (the all-to-all dispatcher); in two levels, of the rows of all tokens, which it has
gathered. In passes over these rows (to read or to write all is one):

                ahead: forward    backward         behind: forward       backward
    added       –                 added            added                 –
    weighted    –                 added            added; product, 2     product, 6
    twice       gather, 2         2 added;         2 added; product, 2;  product, 6;
                                  zeros, 1         zeros, 1; copy, 2     gather, 2

Backward of the product: the gradients of rows are read and written, and for those of weights they are multiplied by the
rows into another tensor, which is summed: 2 + 3 + 1. In two levels the first adds up to a tensor of as many rows, which
is set to zero before; what is set to zero to hold the tokens is a part of the measured rate of additions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from autoptd.cost_models.op_time import OpWork
from autoptd.passes.opcall import OpCall

# permutation -> (place, backward) -> passes beside the lookup's, kernels that add up: the table above
_KERNELS: dict[str, dict[tuple[str, bool], tuple[int, int]]] = {
    "added": {("ahead", False): (0, 0), ("ahead", True): (0, 1), ("behind", False): (0, 1), ("behind", True): (0, 0)},
    "weighted": {
        ("ahead", False): (0, 0),
        ("ahead", True): (0, 1),
        ("behind", False): (2, 1),
        ("behind", True): (6, 0),
    },
    "twice": {("ahead", False): (2, 0), ("ahead", True): (1, 2), ("behind", False): (5, 2), ("behind", True): (8, 0)},
}
_MOVED, _MOVED_BACKWARD = 1, 3  # passes over the rows that the graph's lookup counts
_ADDING = ("index_add", "scatter_add", "index_put")
_ACCUMULATE = 3  # position of index_put's argument


def adds_up(permutation: str) -> bool:
    """Return whether kernels of this kind add rows up by index."""
    return permutation in _KERNELS


def of_own_rows(permutation: str) -> bool:
    """Return whether each tp rank permutes the rows of its own tokens only, before they are sent or gathered."""
    return permutation != "twice"


def permuting(
    lookup: Iterable[OpWork], permutation: str, place: str, nbytes: float, elements: float, backward: bool = False
) -> Iterator[OpWork]:
    """Yield the kernels of a lookup of rows of experts in one pass; `nbytes`, `elements`: of the permuted rows."""
    passes, adding = _KERNELS[permutation][place, backward]
    for work in lookup:
        yield work
        if adding:
            moved = (_MOVED_BACKWARD if backward else _MOVED) * nbytes
            yield replace(work, kind="memory", nbytes=0.0, launches=0, added=elements, counted=moved)
        if adding > 1:
            yield replace(work, kind="memory", nbytes=2 * nbytes, launches=1, added=elements)
        if passes:
            yield replace(work, kind="memory", nbytes=passes * nbytes, launches=-(-passes // 2))


def is_adding(call: OpCall) -> bool:
    """Return whether an op adds the elements of its last operand up by index."""
    name = str(call.target).removeprefix("aten.").partition(".")[0].rstrip("_")
    return name in _ADDING and (name != "index_put" or bool(call.arg(_ACCUMULATE, "accumulate", False)))


def gradient_adds(call: OpCall) -> bool:
    """Return whether the gradient of a lookup is added up by index; that of an embedding has a kernel of its own."""
    return call.target is not torch.ops.aten.embedding.default
