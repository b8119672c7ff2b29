"""Decoder-only transformer in plain PyTorch: GPT, MPT, Llama, Nemotron or a mixture of experts, by its `Shape`.

Shapes: [b, s] tokens, [b, s, width] hidden states, [b, s, vocab] logits. `forward(input_ids, labels)` returns the
mean cross entropy in float32; labels are the targets of each position, so nothing is shifted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published.mixture import LatentProjection, RoutedExperts

if TYPE_CHECKING:
    from benchmarks.published.shapes import Shape

_ROTARY_BASE = 10_000.0  # Su et al. 2021, section 3.2.2; no cost depends on it


def squared_relu(x: Tensor) -> Tensor:
    """Return ReLU squared (So et al. 2021, Primer)."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU (Hendrycks and Gimpel 2016) by its tanh approximation, as GPT-2 does."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "squared_relu": squared_relu,
}


def _norm(shape: Shape) -> nn.Module:
    return nn.RMSNorm(shape.width, eps=1e-5) if shape.norm == "rms" else nn.LayerNorm(shape.width, eps=1e-5)


def rotary_tables(s: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each [s, head_dim] (Su et al. 2021, equation 34, rotating halves instead of pairs)."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.arange(s, device=device, dtype=torch.float32)[:, None] * _ROTARY_BASE**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embeddings to x [b, heads, s, head_dim]."""
    cos, sin = (table.to(x.dtype) for table in tables)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class JoinedProjection(nn.Module):
    """Queries, keys and values from one matmul, laid out per key-value head as in Megatron-Core."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        self.group = shape.heads // shape.kv_heads  # query heads per key-value head
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.width, width, bias=shape.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        b, s, _ = x.shape
        y = self.qkv(x).view(b, s, self.kv_heads, self.group + 2, self.head_dim)
        parts = y.split((self.group, 1, 1), dim=3)
        return tuple(part.flatten(2, 3).transpose(1, 2) for part in parts)


class SeparateProjections(nn.Module):
    """Queries, keys and values from a matmul each, as in torchtitan."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=shape.bias)
        self.k = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.v = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=shape.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        b, s, _ = x.shape
        return tuple(y.view(b, s, -1, self.head_dim).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, training: bool) -> Tensor:
    """Return causal attention by its score matrix, all in the compute dtype (Megatron's fp16 softmax kernel).

    q, k, v: [b, heads, s, head_dim], with as many key as query heads.
    """
    s = q.shape[2]
    scores = torch.matmul(q, k.transpose(2, 3)) * (1 / math.sqrt(q.shape[3]))
    future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, -10000.0).softmax(dim=-1)
    return torch.matmul(F.dropout(weights, dropout, training), v)


class Attention(nn.Module):
    """Causal self-attention, fused or unfused."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dropout, self.unfused = shape.dropout, shape.unfused
        self.group = shape.heads // shape.kv_heads
        self.project = JoinedProjection(shape) if shape.joined else SeparateProjections(shape)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=shape.bias)
        norms = (nn.RMSNorm(shape.head_dim, eps=1e-6) if shape.head_norm else nn.Identity() for _ in "qk")
        self.q_norm, self.k_norm = norms

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if tables is not None:
            q, k = rotate(q, tables), rotate(k, tables)
        if self.unfused:
            if self.group > 1:
                k, v = k.repeat_interleave(self.group, dim=1), v.repeat_interleave(self.group, dim=1)
            y = unfused_attention(q, k, v, self.dropout, self.training)
        else:
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.group > 1)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class LatentAttention(nn.Module):
    """Causal multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        assert shape.latent is not None
        self.latent = shape.latent
        self.project = LatentProjection(shape.width, shape.heads, shape.latent)
        self.out = nn.Linear(shape.heads * shape.latent.values, shape.width, bias=False)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        b, s, _ = x.shape
        q, plain, rotary, v = self.project(x)
        q_plain, q_rotary = q.split((self.latent.plain, self.latent.rotary), dim=-1)
        q = torch.cat((q_plain, rotate(q_rotary, tables)), dim=-1)
        shared = rotate(rotary, tables).expand(*plain.shape[:3], self.latent.rotary)
        k = torch.cat((plain, shared), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class Perceptron(nn.Module):
    """Two-layer perceptron: up, activation, down."""

    def __init__(self, shape: Shape, ffn: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.up = nn.Linear(shape.width, ffn, bias=shape.bias)
        self.down = nn.Linear(ffn, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedPerceptron(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate x) · up x); one matmul computes gate and up if `joined`."""

    def __init__(self, shape: Shape, ffn: int) -> None:
        super().__init__()
        self.joined = shape.joined
        self.up = nn.Linear(shape.width, (1 + shape.joined) * ffn, bias=shape.bias)
        if not shape.joined:
            self.gate = nn.Linear(shape.width, ffn, bias=shape.bias)
        self.down = nn.Linear(ffn, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1) if self.joined else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


def perceptron(shape: Shape, ffn: int) -> nn.Module:
    """Return a perceptron of this width."""
    return GatedPerceptron(shape, ffn) if shape.activation == "swiglu" else Perceptron(shape, ffn)


class Mixture(nn.Module):
    """Routed experts, and shared ones beside them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        assert shape.experts is not None
        self.experts = RoutedExperts(shape.width, shape.experts, shape.activation == "swiglu")
        self.shared = perceptron(shape, shape.experts.shared) if shape.experts.shared else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.experts(x)
        return y if self.shared is None else y + self.shared(x)


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm perceptron or mixture of experts."""

    def __init__(self, shape: Shape, mixture: bool = False) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = _norm(shape), _norm(shape)
        self.attention = Attention(shape) if shape.latent is None else LatentAttention(shape)
        self.perceptron = Mixture(shape) if mixture else perceptron(shape, shape.ffn)
        self.drop = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.drop(self.attention(self.norm_1(x), tables))
        return x + self.drop(self.perceptron(self.norm_2(x)))


class NextToken(nn.Module):
    """One layer more, which predicts the token after the next (DeepSeek-AI 2024, DeepSeek-V3, section 2.2)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3 = _norm(shape), _norm(shape), _norm(shape)
        self.join = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.block = Block(shape, mixture=shape.experts is not None)

    def forward(self, x: Tensor, ahead: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        joined = self.join(torch.cat((self.norm_1(ahead), self.norm_2(x)), dim=-1))
        return self.norm_3(self.block(joined, tables))


class Transformer(nn.Module):
    """Decoder with its loss: embedding, blocks, norm, head, cross entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.rotary = shape.latent.rotary if shape.latent else shape.head_dim
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width) if shape.positions else None
        if shape.positions:
            self.max_seq = shape.positions
        self.drop = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()
        layers = shape.experts.layers if shape.experts else "d" * shape.layers
        self.blocks = nn.ModuleList(Block(shape, mixture=kind == "m") for kind in layers)
        self.norm = _norm(shape)
        self.ahead = NextToken(shape) if shape.ahead else None
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        s, device = input_ids.shape[1], input_ids.device
        x = self.tokens(input_ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(s, device=device))
        tables = None if self.positions is not None else rotary_tables(s, self.rotary, device)
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, tables)
        loss = self.loss(self.norm(x), labels)
        if self.ahead is not None:  # a token later than `labels` would be the target; no cost depends on that
            loss = loss + self.loss(self.ahead(x, self.tokens(labels), tables), labels)
        return loss

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of hidden states."""
        logits = self.head(x).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def example_inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        """Return tokens and labels on the meta device."""
        return {name: torch.empty(batch, seq, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}


def _initialise(module: nn.Module) -> None:
    """Draw weights from a normal distribution of deviation 0.02; zero biases (Radford et al. 2018, section 4.1)."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
