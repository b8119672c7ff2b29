"""Attention [b, s, d] -> [b, s, d] in many spellings, with heads that need not divide the width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.mutated.draw import Draw, Shape

Core = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # q, k, v [b, h, s, e], causal -> [b, h, s, e]


def hidden_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return the mask of pairs that attention leaves out, [s, t]."""
    return torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1) & causal


def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def fused_masked(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden_of(q, k, causal), scale=0.3)


def by_einsum(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("bhqe,bhke->bhqk", q, k) / math.sqrt(q.size(-1))
    return torch.einsum("bhqk,bhke->bhqe", scores.masked_fill(hidden_of(q, k, causal), -torch.inf).softmax(-1), v)


def by_bmm(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    b, h = q.shape[:2]
    q, k, v = (x.reshape(b * h, -1, x.size(-1)) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * q.size(-1) ** -0.5
    bias = torch.zeros(q.size(1), k.size(1), dtype=q.dtype).masked_fill(hidden_of(q, k, causal), -1e9)
    return torch.bmm(F.softmax(scores + bias, -1), v).view(b, h, -1, v.size(-1))


def over_queries(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Normalise over queries, as slot attention does."""
    weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-2)
    return weights / (weights.sum(-1, keepdim=True) + 1e-6) @ v


def over_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return (q @ k.mT).tril().softmax(1) @ v if q.size(-2) == k.size(-2) else (q @ k.mT).softmax(1) @ v


def linear(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    if not causal:
        return q @ (k.mT @ v) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
    state = torch.einsum("bhse,bhsf->bhsef", k, v).cumsum(2)
    return torch.einsum("bhse,bhsef->bhsf", q, state) / (q * k.cumsum(2)).sum(-1, keepdim=True)


def best_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attend to the best keys of each query."""
    scores = (q @ k.mT).masked_fill(hidden_of(q, k, causal), -1e9)
    least = scores.topk(min(3, k.size(-2)), -1)[0][..., -1:]
    return scores.masked_fill(scores < least, -1e9).softmax(-1) @ v


def soft_capped(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = 5 * torch.tanh(q @ k.mT / 5)
    return F.dropout(scores.masked_fill(hidden_of(q, k, causal), -1e9).softmax(-1), 0.1) @ v


def by_head(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Loop over heads."""
    one = zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)
    return torch.stack([(a @ b.mT).masked_fill(hidden_of(a, b, causal), -1e9).softmax(-1) @ c for a, b, c in one], 1)


CORES: Mapping[str, Core] = {
    "fused": fused,
    "fused masked": fused_masked,
    "einsum": by_einsum,
    "bmm": by_bmm,
    "over queries": over_queries,
    "over heads": over_heads,
    "linear": linear,
    "best keys": best_keys,
    "soft cap": soft_capped,
    "by head": by_head,
}


def no_positions(x: Tensor) -> Tensor:
    return x


def rotary(x: Tensor) -> Tensor:
    s, e = x.size(-2), x.size(-1) // 2 * 2
    angle = torch.outer(torch.arange(s, dtype=x.dtype), 100.0 ** (-torch.arange(0, e, 2, dtype=x.dtype) / e))
    angle = torch.cat((angle, angle), -1)
    a, b = x[..., :e].chunk(2, -1)
    return torch.cat((x[..., :e] * angle.cos() + torch.cat((-b, a), -1) * angle.sin(), x[..., e:]), -1)


def interleaved(x: Tensor) -> Tensor:
    s, e = x.size(-2), x.size(-1) // 2 * 2
    angle = torch.arange(s, dtype=x.dtype)[:, None] / torch.arange(1, e // 2 + 1, dtype=x.dtype)
    even, odd = x[..., 0:e:2], x[..., 1:e:2]
    pairs = torch.stack((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), -1)
    return torch.cat((pairs.flatten(-2), x[..., e:]), -1)


POSITIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": no_positions,
    "rotary": rotary,
    "interleaved": interleaved,
}


class Heads(nn.Module):
    """Attention with projections of its own: one fused or three, keys shared by groups of heads, a gate or none."""

    def __init__(self, draw: Draw, shape: Shape, causal: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.head = shape.heads, shape.groups, shape.head
        self.core, self.causal = draw.named(CORES, "attention "), causal
        self.place = draw.named(POSITIONS, "positions ")
        self.form = (
            draw.one("apart", "apart", "fused", "view") if self.groups == self.heads else draw.one("apart", "fused")
        )
        self.share = draw.one("repeat", "expand", "einsum")
        self.merge = draw.one("reshape", "flatten", "einsum")
        draw.notes.append(f"{self.form} {self.share} {self.merge}")
        wide, narrow, bias = self.heads * self.head, self.groups * self.head, draw.chance(0.5)
        if self.form == "apart":
            self.q, self.k, self.v = (nn.Linear(shape.width, n, bias) for n in (wide, narrow, narrow))
        else:
            self.qkv = nn.Linear(shape.width, wide + 2 * narrow, bias)
        self.out = nn.Linear(wide, shape.width, bias)
        self.norm = nn.RMSNorm(self.head) if draw.odd() else None
        self.gate = nn.Linear(shape.width, self.heads) if draw.odd() else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = self.projected(x, x if memory is None else memory)
        if self.norm is not None:
            q, k = self.norm(q), self.norm(k)
        q, k = self.place(q), self.place(k)
        if self.groups != self.heads:
            k, v = self.shared(k), self.shared(v)
        y = self.core(q, k, v, self.causal and memory is None)
        if self.gate is not None:
            y = y * self.gate(x).sigmoid().mT.unsqueeze(-1)
        if self.merge == "einsum":
            return torch.einsum("bhse,ohe->bso", y, self.out.weight.view(-1, self.heads, self.head))
        y = y.transpose(1, 2)
        return self.out(y.flatten(2) if self.merge == "flatten" else y.reshape(*x.shape[:2], self.heads * self.head))

    def projected(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, [b, heads or groups, s, head]."""
        wide, narrow = self.heads * self.head, self.groups * self.head
        if self.form == "apart":
            parts = self.q(x), self.k(memory), self.v(memory)
        elif self.form == "view" and memory is x:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.head).permute(2, 0, 3, 1, 4)
            return q, k, v
        else:
            weights, bias = self.qkv.weight.split([wide, narrow, narrow]), self.qkv.bias
            if memory is x:
                parts = self.qkv(x).split([wide, narrow, narrow], -1)
            else:
                biases = (None,) * 3 if bias is None else bias.split([wide, narrow, narrow])
                parts = tuple(F.linear(t, w, b) for t, w, b in zip((x, memory, memory), weights, biases, strict=True))
        return tuple(p.unflatten(-1, (-1, self.head)).transpose(1, 2) for p in parts)  # type: ignore[return-value]

    def shared(self, x: Tensor) -> Tensor:
        """Repeat keys or values for the heads of their group."""
        n = self.heads // self.groups
        if self.share == "repeat":
            return x.repeat_interleave(n, 1)
        if self.share == "expand":
            return x.unsqueeze(2).expand(-1, -1, n, -1, -1).reshape(x.size(0), -1, *x.shape[2:])
        return torch.einsum("bgse,n->bgnse", x, torch.ones(n, dtype=x.dtype)).flatten(1, 2)


class Library(nn.Module):
    """torch's attention module, batch or time first; its width must be a multiple of its heads."""

    def __init__(self, draw: Draw, shape: Shape, causal: bool) -> None:
        super().__init__()
        wide = shape.heads * shape.head
        self.first, self.causal = draw.chance(0.5), causal
        self.inner = nn.Linear(shape.width, wide) if wide != shape.width else nn.Identity()
        self.attention = nn.MultiheadAttention(
            wide, shape.heads, dropout=draw.one(0.0, 0.1), bias=draw.chance(0.5), batch_first=self.first,
            add_bias_kv=draw.odd(), add_zero_attn=draw.odd(),
        )  # fmt: skip
        self.outer = nn.Linear(wide, shape.width) if wide != shape.width else nn.Identity()
        self.weights = draw.odd()
        draw.notes.append(f"MultiheadAttention batch_first={self.first}")

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k = self.inner(x), self.inner(x if memory is None else memory)
        if not self.first:
            q, k = q.transpose(0, 1), k.transpose(0, 1)
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1) if self.causal and memory is None else None
        y, _ = self.attention(q, k, k, attn_mask=mask, need_weights=self.weights)
        return self.outer(y if self.first else y.transpose(0, 1))


def drawn_attention(draw: Draw, shape: Shape, causal: bool) -> nn.Module:
    return Library(draw, shape, causal) if draw.chance(0.12) else Heads(draw, shape, causal)
