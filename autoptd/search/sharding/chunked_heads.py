"""Kernels of a head that is computed in chunks (ops/linear_cross_entropy.py), beyond those of whole logits.

With logits in 16 bits (l bytes) and a loss in float32 (w bytes), each chunk takes, as kernels of their own whatever
fuses the rest of the program, bytes of its elements

    forward     cast l + w, maximum w, difference 2 w, exponential 2 w, sum w
    backward    cast l + w, difference 2 w, exponential 2 w, cast of the result w + l

That the logits' product runs once more in backward is counted apart, as that of any recomputed op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from autoptd.cost_models.op_time import OpWork
from autoptd.ops.linear_cross_entropy import chunks
from autoptd.passes.analysis.heads import Head
from autoptd.passes.graph import info
from autoptd.passes.rules.factors import Strategy
from autoptd.search.sharding.cost import Prices

_PASSES = 10  # times that kernels move an element of the loss's type, in both passes
_KERNELS = 24  # of a chunk, in both passes, seen in a profile of the op


def chunked_works(prices: Prices, head: Head, placed: Mapping[fx.Node, Strategy]) -> Iterator[OpWork]:
    """Yield the memory traffic and launches of a head in chunks, less those of its ops on whole logits."""
    logits, width = info(head.linear), head.computed_in.itemsize
    nbytes = prices.nbytes(logits, placed[head.linear].gives[0])
    elements = nbytes // logits.dtype.itemsize
    columns = max(1, prices.number(logits.shape[-1]) * nbytes // max(1, prices.nbytes(logits)))
    casts = 3 * (nbytes + elements * width) if logits.dtype.itemsize < width else 0
    whole = [w for n in (*head.between, head.loss) for works in prices.kernels(n, placed[n]) for w in works]
    moved = _PASSES * elements * width + casts - sum(w.nbytes for w in whole)
    launches = _KERNELS * len([*chunks(elements // columns, columns)])
    yield OpWork("memory", 0, max(0, moved), "fp32", launches=launches, part="head", origin=head.loss.name)
