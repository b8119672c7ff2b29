"""Cross entropy of the logits x Wᵀ + b, of which a part of the columns exists at a time, in both passes.

    forward    z_c = x W_cᵀ              for each chunk c of the vocabulary; running maximum M and sum S:
               M' = max(M, max z_c)      S' = S exp(M - M') + Σ exp(z_c - M')
               loss = log S + M - z_label = L - z_label
    backward   z_c again                 d_c = exp(z_c - L) - onehot
               dW_c = d_cᵀ (g x)         dx = g Σ_c d_c W_c

with the gradient g of each row's loss, which multiplies x and dx instead of the far wider d. What is saved is x, W and
L, one number per row. Chunks are of columns, not of rows: each dW_c is then a whole product, rounded once, where chunks
of rows would add up parts of dW, of the weight's size and in float32; and over a vocabulary split over ranks, M and S
are combined once, with the two all-reduces that whole logits take too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoptd.ops.tp_axis import Axis

LOGITS = 2**24  # elements that exist at a time
_COLUMNS = 256  # least columns of a chunk: fewer would leave most of a GPU's multiprocessors without a tile


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    tp: Axis | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sum the cross entropy of valid positions: x [..., h], weight [v, h], labels [...] -> 0-dim.

    It is computed in `dtype`, or that of x if that is wider. `tp`: of a weight [v/t, h] split over its ranks, each of
    which returns the whole sum.
    """
    return _losses(x, weight, labels, bias, tp, ignore_index, label_smoothing, dtype).sum()


def linear_row_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    tp: Axis | None = None,
    ignore_index: int = -100,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the cross entropy of each position, 0 for ignored labels, as `linear_cross_entropy`: [...]."""
    return _losses(x, weight, labels, bias, tp, ignore_index, 0.0, dtype)


def _losses(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    tp: Axis | None,
    ignore_index: int,
    smoothing: float,
    dtype: torch.dtype,
) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]), weight, bias, labels.reshape(-1)
    wide = torch.promote_types(dtype, x.dtype)
    found: Tensor = _LinearCrossEntropy.apply(*flat, tp, ignore_index, smoothing, wide)
    return found.view(labels.shape)


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of the columns, of at most `LOGITS` elements each but for very many rows."""
    step = max(_COLUMNS, LOGITS // max(1, rows) // _COLUMNS * _COLUMNS)
    yield from (slice(first, min(first + step, columns)) for first in range(0, columns, step))


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross entropies of the rows of x [n, h]. Smoothing e over v classes makes labels (1 - e) onehot + e / v."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        tp: Axis | None,
        ignore_index: int,
        smoothing: float,
        dtype: torch.dtype,
    ) -> Tensor:
        columns, rank, ranks = weight.shape[0], tp.rank if tp else 0, tp.size if tp else 1
        valid, local = labels != ignore_index, labels - rank * columns
        known = ~valid | ((labels >= 0) & (labels < columns * ranks))
        torch._assert_async(known.all(), "a label is neither a class nor ignore_index")
        largest = x.new_full(labels.shape, torch.finfo(dtype).min, dtype=dtype)
        total, at_label, spread = (x.new_zeros(labels.shape, dtype=dtype) for _ in range(3))
        for part in chunks(x.shape[0], columns):
            z = _logits(x, weight, bias, part, dtype)
            index, inside = _place(local, part)
            at_label += z.gather(-1, index).squeeze(-1).masked_fill_(~inside, 0)
            if smoothing:
                spread += z.sum(-1)
            before, largest = largest, torch.maximum(largest, z.amax(-1))
            total = total * (before - largest).exp_() + z.sub_(largest.unsqueeze(-1)).exp_().sum(-1)
            del z  # before the next chunk exists
        if tp is not None:
            own, largest = largest, tp.max(largest.clone())
            total, at_label, spread = tp.sum(torch.stack((total * (own - largest).exp_(), at_label, spread)))
        norm = total.log() + largest
        ctx.save_for_backward(x, weight, bias, local, valid, norm)
        ctx.smoothing, ctx.dtype, ctx.classes = smoothing, dtype, columns * ranks
        losses = total.log_() - (at_label - largest) + smoothing * (at_label - spread / ctx.classes)
        return losses.masked_fill_(~valid, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, local, valid, norm = ctx.saved_tensors
        scale = (grad * valid).unsqueeze(-1)
        scaled = (x * scale).to(x.dtype)
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        to_x = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if wants_x else None
        to_weight = torch.empty_like(weight) if wants_weight else None
        to_bias = torch.empty_like(bias) if wants_bias else None
        for part in chunks(x.shape[0], weight.shape[0]):
            z = _logits(x, weight, bias, part, ctx.dtype).sub_(norm.unsqueeze(-1)).exp_()
            if ctx.smoothing:
                z -= ctx.smoothing / ctx.classes
            index, inside = _place(local, part)
            z.scatter_add_(-1, index, inside.to(z.dtype).mul_(ctx.smoothing - 1).unsqueeze(-1))
            z = z.to(x.dtype)
            if to_weight is not None:
                torch.mm(z.t(), scaled, out=to_weight[part])
            if to_bias is not None:
                to_bias[part] = z.t() @ scale.squeeze(-1).to(z.dtype)
            if to_x is not None:
                _add_product(to_x, z, weight[part])
            del z
        return None if to_x is None else to_x.mul_(scale).to(x.dtype), to_weight, to_bias, None, None, None, None, None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, part: slice, dtype: torch.dtype) -> Tensor:
    return F.linear(x, weight[part], None if bias is None else bias[part]).to(dtype)


def _place(local: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Return the column [n, 1] of each label in a part of the columns, 0 for others, and which labels are in it."""
    inside = (local >= part.start) & (local < part.stop)
    return (local - part.start).masked_fill_(~inside, 0).unsqueeze(-1), inside


def _add_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to a tensor of the same or a wider type."""
    if to.dtype == a.dtype:
        to.addmm_(a, b)
    else:
        to += a @ b
