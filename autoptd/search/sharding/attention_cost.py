"""Kernels of an attention op on one rank, by implementation (`passes/analysis/attention.py`).

    fused       one kernel; in a ring one for the keys of each rank, and kernels that merge their results
    efficient   one kernel, at the rates of FlashAttention's first version: xFormers' kernel, which torch's is, runs
                about as fast (Dao 2023, FlashAttention-2, figures 4 to 6, quoted from memory)
    written     unfused: products with the scores as result or operand, and softmax and mask through memory

Under a causal mask a fused kernel skips masked scores. Unfused attention does not, but a ring skips whole chunks: of
the 2 cp × 2 cp blocks of a sequence's scores a rank has 4 cp, of which it computes 2 cp + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from autoptd.cost_models.cluster import Device
from autoptd.cost_models.op_time import OpWork
from autoptd.layout.placements import Split
from autoptd.ops.attention import SCORES
from autoptd.passes.analysis.attention import AttentionForm, passes_of
from autoptd.passes.opcall import OpCall
from autoptd.passes.rules.attention import OWN_KEYS
from autoptd.passes.rules.factors import Strategy

_PART = "attention"
TORCH = "torch"  # the kernel that torch's scaled_dot_product_attention takes on the device
_MERGED_BYTES = 2 + 4 + 4  # of an element of a tile: read in the compute type, added in float32


@dataclass(frozen=True)
class Shape:
    """Local sizes of attention: `heads` (samples × heads) matrices of `queries` × `keys` scores; head dim `width`."""

    heads: int
    queries: int
    keys: int  # of all `cp` ranks, which share them
    width: int
    cp: int = 1

    @property
    def flops(self) -> float:
        """Floating-point operations of the two products of a forward pass, without a mask."""
        return 4.0 * self.heads * self.queries * self.keys * self.width


def moved_keys(call: OpCall, strategy: Strategy, exchanged_by: int = 1) -> Fraction:
    """Return the key heads that a rank sends to cp ranks, as a multiple of those in the operand's placement.

    `exchanged_by`: cp ranks of Ulysses, for which key heads that do not divide are copied for each query head.
    """
    (heads, keys), ranks = ((t.shape[-3] if t.ndim > 2 else 1 for t in call.operands[:2]), strategy.ranks)
    if not isinstance(heads, int) or not isinstance(keys, int):
        return Fraction(1)
    pairs = zip((heads, keys), call.operands, strategy.needs, strict=False)
    mine, placed = (n // ranks if isinstance(p, Split) and p.dim == t.ndim - 3 else n for n, t, p in pairs)
    held = placed
    if strategy.implementation == OWN_KEYS.name:  # see `Axis.own_keys`
        held = 1 if heads // keys % mine == 0 else mine
    return Fraction(mine if held % exchanged_by else held, placed)


def attention_works(
    form: AttentionForm,
    shape: Shape,
    nbytes: int,
    dtype: str,
    device: Device,
    implementation: str,
    backward: bool = False,
    by_hand: bool = False,
) -> Iterator[OpWork]:
    """Yield the kernels of one pass. `nbytes`: operands, results and their gradients, each moved once.

    `implementation`: of fused kernels, as fixed in the plan's options; empty: by default. `by_hand`: one kernel merges
    a result into a tensor of the ring (Transformer Engine's context parallelism, quoted from memory), not torch's ops.
    """
    kernel = form.kernel(device.kind)
    tiles, rows, share = _tiles(form, shape)
    if form.ring and implementation == TORCH:  # the runtime's ring calls FlashAttention itself
        implementation = "flash"
    if kernel == "written":
        yield from _written(form, shape, dtype, tiles, share, backward)
        return
    first_version = kernel == "efficient" and implementation in ("", "flash", TORCH)
    yield OpWork(
        "attention",
        shape.flops * (2.5 if backward else 1),  # five products instead of two (Dao 2023)
        nbytes,
        dtype,
        shape.queries,
        shape.keys,
        shape.width,
        shape.heads,
        form.causal,
        backward,
        launches=tiles,
        implementation="triton" if first_version else implementation,
        rows=0 if tiles == 1 else -(-shape.queries // 2) if form.causal else shape.queries,  # all or half
    )
    if tiles > 1:
        one = passes_of(form)[backward]
        merged, launches = (_MERGED_BYTES, 1) if by_hand else (one.nbytes, one.launches)
        times = (2 if backward else 1) if by_hand else 1  # results; gradients of queries, and of keys and values
        added = round(tiles * shape.heads * rows * shape.width * merged * times)
        yield OpWork("memory", 0, added, "fp32", launches=tiles * launches * times, part=_PART)


def _tiles(form: AttentionForm, shape: Shape) -> tuple[int, int, float]:
    """Return (tiles of a rank, average queries of a tile, share of all scores that the tiles cover).

    Under a causal mask a rank has tiles of all its queries with its own keys and the first half of earlier ranks', and
    of the second half of its queries with all keys of later ranks. Unfused, its own are in halves.
    """
    if not form.ring:
        return 1, shape.queries, 1.0
    if not form.causal:
        return shape.cp, shape.queries, 1.0
    return shape.cp, round(shape.queries * (3 * shape.cp + 1) / (4 * shape.cp)), (2 * shape.cp + 1) / (4 * shape.cp)


def _written(
    form: AttentionForm, shape: Shape, dtype: str, tiles: int, share: float, backward: bool
) -> Iterator[OpWork]:
    one = passes_of(form)[backward]
    scores = shape.heads * shape.queries * shape.keys * share
    spans = tiles * -(-int(scores) // (tiles * SCORES))
    wide = form.ring and dtype in ("bf16", "fp16")  # a ring's tiles are in float32
    keys = max(1, round(shape.keys * share))
    for _ in range(one.products):
        yield OpWork(
            "matmul",
            2 * scores * shape.width,
            scores * (4 if wide else form.dtype.itemsize),
            "fp32" if wide else dtype,
            shape.queries,
            keys,
            shape.width,
            shape.heads,
            backward=backward,
            launches=spans,
            part=_PART,
        )
    yield OpWork("memory", 0, scores * one.nbytes, "fp32", launches=spans * one.launches, part=_PART)
