"""Attention with keyed dropout, computed for a block of queries at a time without saving scores.

    S = scale q kᵀ + mask     P = softmax S     out = (P ∘ K) v,   K = keep / (1 − p)

Saved for backward are q, k, v, mask, out, and the log of each query's sum of exponentials; P and K are recomputed block
by block, as in FlashAttention (Dao et al. 2022, section 3.1 and appendix B.4):

    dv = (P ∘ K)ᵀ dout     dP = dout vᵀ ∘ K     dS = P ∘ (dP − rowsum(dout ∘ out))
    dq = scale dS k        dk = scale dSᵀ q

Query heads that share a key head are treated as further queries of it: q [..., heads, n, d] is viewed as
[..., kv heads, g n, d].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoptd.ops.dropout import FIRST_DIM, DimSlice, DropoutKey, Elements, SamplePosition

SCORES = 1 << 24  # elements of scores in memory at a time


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to one that is added to scores, as each of torch's attentions does for itself: 0 for
    True and −∞ for False."""
    return torch.where(mask.logical_not(), -math.inf, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    key: str = "",
    rng: DropoutKey | None = None,
    samples: SamplePosition = FIRST_DIM,
    parts: Sequence[DimSlice] = (),
    enable_gqa: bool = False,
    fast: bool = False,
) -> Tensor:
    """Scaled dot product attention, q [..., heads, sq, d], k and v [..., kv heads, sk, d], with keyed dropout.

    Without dropout this is torch's kernel, whose own dropout depends on the rank's local element numbers. `fast` takes
    that one, from a seed of its own. `samples` and `parts` describe the scores [..., heads, sq, sk]; a slice of v's
    width is not one of the parts.
    """
    if dropout_p == 0 or rng is None or not rng.active:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if fast:
        with rng.seeded(key, samples, parts, q.device):
            return F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    scores = (*q.shape[:-1], k.shape[-2])
    elements = rng.elements(scores, key, samples, parts, q.device)
    return attention_with_dropout(q, k, v, mask, is_causal, scale, dropout_p, elements)


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    p: float,
    elements: Elements,
) -> Tensor:
    """q [..., heads, sq, d], k [..., kv heads, sk, d], v [..., kv heads, sk, dv] -> [..., heads, sq, dv]."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    result: Tensor = _Attention.apply(q, k, v, mask, is_causal, factor, p, elements)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        p: float,
        elements: Elements,
    ) -> Tensor:
        ctx.how = is_causal, scale, p, elements
        out = empty_result(q, v.shape[-1])
        sums = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows in _query_blocks(q, k):
            scores = _scores(q, k, mask, is_causal, scale, rows)
            highest = _finite(scores.amax(-1, keepdim=True))
            weights = scores.sub_(highest).exp_()
            total = weights.sum(-1, keepdim=True)
            sums[..., rows] = (highest + total.log()).squeeze(-1)
            weights.div_(total.masked_fill_(total == 0, 1)).mul_(_kept(elements, rows, p))
            out[..., rows, :] = _ungroup_heads(_group_heads(weights, k).to(v.dtype) @ v, q).div_(1 - p or 1)
        ctx.save_for_backward(q, k, v, mask, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, sums = ctx.saved_tensors
        is_causal, scale, p, elements = ctx.how
        to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        to_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        inner = (grad.to(sums.dtype) * out.to(sums.dtype)).sum(-1, keepdim=True)
        for rows in _query_blocks(q, k):
            scores = _scores(q, k, mask, is_causal, scale, rows)
            weights = scores.sub_(_finite(sums[..., rows].unsqueeze(-1))).exp_()
            keep = _kept(elements, rows, p)
            here = _group_heads(grad[..., rows, :] / (1 - p or 1), k)
            to_v += (_group_heads(weights * keep, k).to(here.dtype).transpose(-2, -1) @ here).sum_to_size(v.shape)
            to_weights = _ungroup_heads(here @ v.transpose(-2, -1), q) * keep
            to_scores = weights.mul_(to_weights - inner[..., rows, :])
            if to_mask is not None:
                _mask_rows(to_mask, rows).add_(to_scores.sum_to_size(_mask_rows(to_mask, rows).shape))
            scaled = _group_heads(to_scores.mul_(scale), k).to(q.dtype)
            to_q[..., rows, :] = _ungroup_heads(scaled @ k, q)
            to_k += (scaled.transpose(-2, -1) @ _group_heads(q[..., rows, :], k)).sum_to_size(k.shape)
        return to_q, to_k, to_v, to_mask, None, None, None, None


def empty_result(q: Tensor, width: int) -> Tensor:
    """Return an empty [..., heads, sq, width], stored with queries before heads so that joining heads is free."""
    if q.ndim < 3:
        return q.new_empty(*q.shape[:-1], width)
    *batch, heads, queries = q.shape[:-1]
    return q.new_empty(*batch, queries, heads, width).transpose(-3, -2)


def _query_blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    queries = q.shape[-2]
    step = max(1, SCORES * queries // max(1, q.shape[:-1].numel() * k.shape[-2]))
    return (slice(i, min(i + step, queries)) for i in range(0, queries, step))


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float, rows: slice) -> Tensor:
    """Return the masked scores of some queries, [..., heads, rows, sk], in float32 at least."""
    scores = _ungroup_heads(_group_heads(q[..., rows, :], k) @ k.transpose(-2, -1), q)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).mul_(scale)
    if is_causal:
        before = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(rows.start)
        scores.masked_fill_(~before, -math.inf)
    if mask is not None:
        mask = _mask_rows(mask, rows)
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return scores


def _finite(highest: Tensor) -> Tensor:
    """Return the largest scores, with 0 for queries that may attend to no key."""
    return highest.masked_fill(highest == -math.inf, 0)


def _kept(elements: Elements, rows: slice, p: float) -> Tensor:
    """Return which scores of a block of queries dropout keeps, bool."""
    return elements.narrow(-2, rows.start, rows.stop).keep(p)


def _mask_rows(mask: Tensor, rows: slice) -> Tensor:
    """Return the rows of a mask, which may have a single row for all queries."""
    return mask if mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., rows, :]


def _group_heads(x: Tensor, k: Tensor) -> Tensor:
    """[..., heads, n, w] -> [..., kv heads, g n, w]; unchanged if no heads share a key head."""
    if x.ndim < 4 or x.shape[-3] == k.shape[-3]:
        return x
    return x.unflatten(-3, (k.shape[-3], -1)).flatten(-3, -2)


def _ungroup_heads(x: Tensor, q: Tensor) -> Tensor:
    """The inverse of `_group_heads`."""
    if x.ndim < 4 or x.shape[-3] == q.shape[-3]:
        return x
    return x.unflatten(-2, (q.shape[-3] // x.shape[-3], -1)).flatten(-4, -3)
