"""Attention over a sequence that is split over the ranks of the cp axis.

Ring attention (Liu et al. 2023, Ring Attention with Blockwise Transformers): queries stay on their rank, keys and
values are passed around the ring. Each rank accumulates the block of keys that it holds into its result by the running
maximum M and sum L of the softmax (Milakov and Gimelshein 2018; Dao et al. 2022, FlashAttention):

    M' = max(M, max s)     L' = L e^(M-M') + Σ e^(s-M')     O' = O e^(M-M') + e^(s-M') V     result O / L

M and L are saved separately for backward: if a mask adds the lowest number of the type, M + log L rounds to M, and the
sum would be lost. Backward, with p = e^(s-M) / L and D = Σ dO ∘ O over a row (Dao et al. 2022, appendix B.2):

    dV += pᵀ dO     ds = p ∘ (dO Vᵀ - D)     dQ += ds K · scale     dK += dsᵀ Q · scale

With dropout every score counts in its row's sum, dropped or not, and K = keep / (1 - p) scales p in products with
values: O' += (e^(s-M') ∘ K) V, dV += (p ∘ K)ᵀ dO, and ds = p ∘ (K ∘ (dO Vᵀ) - D). K is keyed by the element's position
in the whole [..., heads, s, s] and recomputed in backward.

Where torch has a fused kernel, which stores no scores (`fused_attention.py`), one call computes the tile of a rank's
keys, with a result R and the log S of each row's sum of exponentials, which are merged with those of the tiles so far:

    S' = log(e^S + e^S_tile)     R' = R e^(S-S') + R_tile e^(S_tile-S')

With S and R of whole rows, the kernel's backward pass gives a tile's gradients. Other tiles are written out in pieces.

dK and dV are passed along with the keys that they belong to, and one step further, to their owner. The next block is
sent while a rank computes. Sums over tiles are in float32 at least, and so are products computed in pieces.

Ulysses (Jacobs et al. 2023, DeepSpeed Ulysses): an all-to-all gives each rank all tokens of some heads; another one
reverses it for the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoptd.ops import fused_attention as fused
from autoptd.ops.attention import SCORES, attention, empty_result
from autoptd.ops.axis.ring import RingMessage, around
from autoptd.ops.cp_axis import Parts, Tokens, packed, unpacked
from autoptd.ops.dropout import FIRST_DIM, DimSlice, DropoutKey, Elements, SamplePosition


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: Tokens,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    key: str = "",
    rng: DropoutKey | None = None,
    samples: SamplePosition = FIRST_DIM,
    parts: Sequence[DimSlice] = (),
    enable_gqa: bool = False,
) -> Tensor:
    """Compute this rank's rows of scaled dot product attention over the whole sequence.

    q [..., heads, s/n, d], k and v [..., kv heads, s/n, d]: own tokens. mask [..., s/n or 1, s]: rows of own tokens,
    all columns; true for visible keys, or a number added to the scores; it takes no gradient. `samples` and `parts`
    describe the rows of the scores [..., heads, s/n, s], including the split of tokens.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if cp.size == 1:
        return attention(q, k, v, mask, dropout_p, is_causal, scale, key, rng, samples, parts, enable_gqa)
    dropped = None
    if dropout_p and rng is not None and rng.active:
        elements = rng.elements((*q.shape[:-1], k.shape[-2]), key, samples, parts, q.device)
        dropped = _Dropped(elements, dropout_p, cp)
    operands: Any = (q, k, v, cp, mask, is_causal, scale)
    is_fused = fused.takes(q, v, mask, dropped is not None)
    return _FusedRing.apply(*operands) if is_fused else _WrittenRing.apply(*operands, dropped)  # type: ignore[no-any-return]


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: Tokens,
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
    """Compute the result of `ring_attention` by exchanging tokens for heads, which n divides.

    If n does not divide kv heads, each is copied for the heads that share it. mask [..., s or 1, s]. `samples` and
    `parts` describe the scores [..., heads/n, s, s], including the split of heads.
    """
    if k.shape[-3] % cp.size:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    q, k, v = (cp.all_to_all(x, (x.ndim - 2, 1), (x.ndim - 3, 1)) for x in (q, k, v))
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mask.tensor_split(cp.size, -3)[cp.rank]
    out = attention(q, k, v, mask, dropout_p, is_causal, scale, key, rng, samples, parts, enable_gqa, fast)
    return cp.all_to_all(out, (out.ndim - 3, 1), (out.ndim - 2, 1))


class _FusedRing(torch.autograd.Function):
    """Ring attention by one fused kernel for the keys of each rank.

    Saves its operands, its result, and one number per row for backward.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: Tokens, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        out: Any = None
        logs: Any = None
        for owner, (keys, values) in _round(cp, k, v):
            tile = _tile(cp, owner, q.shape[-2], is_causal)
            if tile is None:
                continue
            part, sums = fused.forward(*tile.cut(q, keys, values), tile.columns(mask, cp), tile.on_diagonal, scale)
            if out is None:  # own keys come first, and all queries have scores with them
                out, logs = part.to(torch.promote_types(q.dtype, torch.float32)), sums
                continue
            rows, before = out[..., tile.query, :], logs[..., tile.query]
            both = torch.logaddexp(before, sums)
            rows.mul_(_ratio(before, both)).addcmul_(part, _ratio(sums, both))
            before.copy_(both)
        result = empty_result(q, v.shape[-1]).copy_(out)
        logs.masked_fill_(logs == -math.inf, math.inf)  # weights in rows that see nothing are 0, in backward too
        ctx.save_for_backward(q, k, v, result, logs)
        ctx.how = cp, mask, is_causal, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logs = ctx.saved_tensors
        cp, mask, is_causal, scale = ctx.how
        d_q = torch.zeros_like(q, dtype=logs.dtype)
        arriving: RingMessage | None = None
        for owner, (keys, values) in _round(cp, k, v):
            tile, found = _tile(cp, owner, q.shape[-2], is_causal), None
            if tile is not None:
                rows = grad[..., tile.query, :], out[..., tile.query, :], logs[..., tile.query]
                found = fused.backward(
                    *tile.cut(q, keys, values), *rows, tile.columns(mask, cp), tile.on_diagonal, scale
                )
            if arriving is None:
                sums = packed(*(torch.zeros(x.shape, dtype=logs.dtype, device=x.device) for x in (k, v)))
            else:
                sums = arriving.wait()
            if tile is not None and found is not None:
                d_q[..., tile.query, :].add_(found[0])
                for total, part in zip(unpacked(sums), found[1:], strict=True):
                    total[..., tile.key, :].add_(part)
            arriving = RingMessage(cp.group, sums)  # to the next rank with the keys; the last time to their owner
        assert arriving is not None
        d_k, d_v = unpacked(arriving.wait())
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None, None, None


def _ratio(sums: Tensor, of: Tensor) -> Tensor:
    """Return the share of sums in larger ones, both as logs, for each row of a result; 0 for rows without any."""
    return (sums - _finite(of)).exp_().unsqueeze(-1)


class _WrittenRing(torch.autograd.Function):
    """Ring attention by plain products. Saves its operands, its result, and two numbers per row for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cp: Tokens,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        dropped: _Dropped | None,
    ) -> Tensor:
        rows = _RingQueries(q, k, cp, mask, is_causal, scale, dropped)
        highest = rows.like_q(1).fill_(-math.inf)
        total, out = rows.like_q(1).zero_(), rows.like_q(v.shape[-1]).zero_()
        for owner, (keys, values) in _round(cp, k, v):
            for tile in rows.tiles(owner):
                query = tile.query
                above, sums, part = rows.folded(tile, keys, values, highest[..., query, :])
                decay = (highest[..., query, :] - _finite(above)).exp_()
                total[..., query, :] = total[..., query, :] * decay + sums
                out[..., query, :] = out[..., query, :] * decay + part
                highest[..., query, :] = above
        unseen = total == 0
        highest, total = highest.masked_fill_(unseen, 0), total.masked_fill_(unseen, 1)
        result = empty_result(q, v.shape[-1])
        rows.grouped_view(result).copy_(out.div_(total))
        ctx.save_for_backward(q, k, v, result, highest, total)
        ctx.rows, ctx.cp, rows.q = rows, cp, None
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, highest, total = ctx.saved_tensors
        rows, cp = ctx.rows, ctx.cp
        rows.q = rows.grouped(q)
        rows.begin_backward(grad, out, highest, total)
        d_q = rows.like_q(q.shape[-1]).zero_()
        arriving: RingMessage | None = None
        for owner, (keys, values) in _round(cp, k, v):
            sums = packed(*(torch.zeros(x.shape, dtype=rows.dtype, device=x.device) for x in (k, v)))
            d_k, d_v = unpacked(sums)
            for tile in rows.tiles(owner):
                to_q, to_k, to_v = rows.gradients(tile, keys, values)
                d_q[..., tile.query, :].add_(to_q)
                d_k[..., tile.key, :].add_(to_k)
                d_v[..., tile.key, :].add_(to_v)
            if arriving is not None:
                for mine, theirs in zip(sums, arriving.wait(), strict=True):
                    mine += theirs
            arriving = RingMessage(cp.group, sums)  # to the next rank with the keys; the last time to their owner
        assert arriving is not None
        d_k, d_v = unpacked(arriving.wait())
        rows.q = rows.given = None
        return rows.joined(d_q).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None, None, None, None


def _finite(highest: Tensor) -> Tensor:
    """Return the largest scores, with 0 for rows that have seen no key yet."""
    return highest.masked_fill(highest == -math.inf, 0)


@dataclass(frozen=True)
class _Dropped:
    """Dropout of the scores of own rows, with probability `p`."""

    elements: Elements  # rows of own tokens, columns of any rank's
    p: float
    cp: Tokens

    def kept(self, owner: int, query: slice, key: slice) -> Tensor:
        """Return which scores of a tile are kept, [..., heads, queries, keys]; keys are the owner's."""
        here = replace(self.elements, parts=(*self.elements.parts, self.cp.part_of(owner, -1)))
        return here.narrow(-2, query.start, query.stop).narrow(-1, key.start, key.stop).keep(self.p)


@dataclass(frozen=True)
class _Tile:
    """A block of scores: queries of this rank and keys of an owner, who has `length` of them."""

    owner: int
    length: int
    query: slice
    key: slice
    on_diagonal: bool  # under a causal mask; else each query sees all keys

    def cut(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tile's queries, keys and values."""
        return q[..., self.query, :], keys[..., self.key, :], values[..., self.key, :]

    def columns(self, mask: Tensor | None, cp: Tokens) -> Tensor | None:
        """Return the tile's part of a mask [..., own queries or 1, all keys or 1]."""
        if mask is None:
            return None
        rows = mask if mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., self.query, :]
        if rows.shape[-1] == 1:
            return rows
        chunks = cp.chunks(self.owner)
        width = self.length // len(chunks)
        return torch.cat([rows[..., i * width : (i + 1) * width] for i in chunks], -1)[..., self.key]


def _tile(cp: Tokens, owner: int, length: int, is_causal: bool) -> _Tile | None:
    """Return the scores of this rank's queries with the keys of an owner, without those that a causal mask hides.

    Chunks of two ranks alternate or follow each other, so these are a rectangle: a query sees all keys of other ranks'
    earlier chunks.
    """
    mine, theirs = cp.chunks(cp.rank), cp.chunks(owner)
    width, first, last = length // len(mine), 0, len(theirs)
    if is_causal and owner != cp.rank:
        first = sum(chunk < theirs[0] for chunk in mine)
        last = sum(chunk < mine[-1] for chunk in theirs)
    if not last:
        return None
    on_diagonal = is_causal and owner == cp.rank
    return _Tile(owner, length, slice(first * width, length), slice(0, last * width), on_diagonal)


class _RingQueries:
    """The queries of this rank, grouped by key head, and the computation of their tiles by plain products."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        cp: Tokens,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        dropped: _Dropped | None = None,
    ) -> None:
        self.cp, self.is_causal, self.scale, self.dropped = cp, is_causal, scale, dropped
        self.heads, self.length = k.shape[-3], k.shape[-2]
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.q: Any = self.grouped(q)
        self.given: Any = None  # in backward: gradients, row sums, and the saved numbers of each row
        self.mask = mask
        if mask is not None and mask.ndim > 2:  # group heads like those of the queries
            self.mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, (self.heads, -1))

    def grouped(self, x: Tensor) -> Tensor:
        """[..., heads, rows, d] -> [..., kv heads, heads per kv head, rows, d], at full precision."""
        return self.grouped_view(x.to(self.dtype))

    def grouped_view(self, x: Tensor) -> Tensor:
        """Group the heads of a tensor without a copy."""
        return x.unflatten(-3, (self.heads, -1))

    def joined(self, x: Tensor) -> Tensor:
        """The inverse of `grouped_view`."""
        return x.flatten(-4, -3)

    def like_q(self, width: int) -> Tensor:
        return torch.empty((*self.q.shape[:-1], width), dtype=self.dtype, device=self.q.device)

    def shared(self, x: Tensor, rows: slice) -> Tensor:
        """Return some of the keys or values, with a dim for the heads that share them."""
        return x[..., rows, :].to(self.dtype).unsqueeze(-3)

    def tiles(self, owner: int) -> Iterator[_Tile]:
        """Yield the tiles with the keys of an owner, in pieces of at most `SCORES` scores."""
        whole = _tile(self.cp, owner, self.length, self.is_causal)
        if whole is None:
            return
        first, last = whole.query.start, whole.query.stop
        most = max(1, SCORES // max(1, self.length * math.prod(self.q.shape[:-2])))
        if whole.on_diagonal:
            most = min(most, max(1, -(-last // 2)))  # so that the first half skips the keys of the second
        for at in range(first, last, most):
            query = slice(at, min(at + most, last))
            yield replace(whole, query=query, key=slice(0, query.stop) if whole.on_diagonal else whole.key)

    def folded(self, tile: _Tile, keys: Tensor, values: Tensor, highest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows' largest score so far, and relative to it the tile's sums of exponentials and of values."""
        scores = self._scores(tile, keys)
        above = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights = (scores - _finite(above)).exp_()
        return above, weights.sum(-1, keepdim=True), self._kept(weights, tile) @ self.shared(values, tile.key)

    def begin_backward(self, grad: Tensor, out: Tensor, highest: Tensor, total: Tensor) -> None:
        given = self.grouped(grad)
        self.given = given, (given * self.grouped(out)).sum(-1, keepdim=True), highest, total

    def gradients(self, tile: _Tile, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a tile's contributions to the gradients of its queries, keys and values."""
        grad, inner, highest, total = (x[..., tile.query, :] for x in self.given)
        weights = (self._scores(tile, keys) - highest).exp_() / total
        kept = self._kept(weights, tile)
        to_values = (kept.transpose(-2, -1) @ grad).sum(-3)
        to_scores = kept * (grad @ self.shared(values, tile.key).transpose(-2, -1)) - weights * inner
        to_scores *= self.scale
        to_keys = (to_scores.transpose(-2, -1) @ self.q[..., tile.query, :]).sum(-3)
        return to_scores @ self.shared(keys, tile.key), to_keys, to_values

    def _kept(self, weights: Tensor, tile: _Tile) -> Tensor:
        """Return a tile's weights after dropout."""
        if self.dropped is None:
            return weights
        keep = self.dropped.kept(tile.owner, tile.query, tile.key).unflatten(-3, (self.heads, -1))
        return weights * keep * (1 / (1 - self.dropped.p or 1))

    def _scores(self, tile: _Tile, keys: Tensor) -> Tensor:
        """Return a tile's masked scores, [..., kv heads, heads per kv head, queries, keys]."""
        query = tile.query
        scores: Tensor = self.q[..., query, :] @ self.shared(keys, tile.key).transpose(-2, -1) * self.scale
        if tile.on_diagonal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(query.start)
            scores = scores.masked_fill(~seen, -math.inf)
        if (mask := tile.columns(self.mask, self.cp)) is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
        return scores


def _round(cp: Tokens, k: Tensor, v: Tensor) -> Iterator[tuple[int, Parts]]:
    """Yield (owner, its keys and values) of every rank, own first; the next ones are sent while these are used."""
    return ((owner, unpacked(parts)) for owner, parts in around(cp.group, packed(k, v)))
