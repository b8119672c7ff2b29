"""Parts of a mixture of experts in plain PyTorch: routed and shared experts, and multi-head latent attention.

Rows are sorted by expert, multiplied by grouped matrix products, and restored, as transformers does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Experts:
    """Sizes of the mixtures. `shared`: width of the shared experts together, 0 if there are none. `layers`: a letter
    for each layer, `m` for a mixture and `d` for a dense one."""

    count: int
    chosen: int
    ffn: int
    shared: int
    layers: str


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    `queries`, `keys`: widths of the compressed queries (0: not compressed) and of the compressed keys and values;
    `plain`, `rotary`, `values`: widths of a head's parts.
    """

    queries: int
    keys: int
    plain: int
    rotary: int
    values: int


class RoutedExperts(nn.Module):
    """Every token goes to the `chosen` experts of highest score, whose results are added by their weights."""

    def __init__(self, width: int, experts: Experts, gated: bool) -> None:
        super().__init__()
        self.count, self.chosen, self.gated = experts.count, experts.chosen, gated
        self.router = nn.Linear(width, experts.count, bias=False)
        self.up = nn.Parameter(torch.empty(experts.count, width, (1 + gated) * experts.ffn))
        self.down = nn.Parameter(torch.empty(experts.count, experts.ffn, width))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).float().softmax(-1).topk(self.chosen, dim=-1)
        keys, order = torch.sort(chosen.reshape(-1))
        counts = torch.histc(keys.float(), self.count, 0, self.count - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = F.grouped_mm(tokens[order // self.chosen], self.up, offs=ends)
        if self.gated:
            gate, up = rows.chunk(2, dim=-1)
            rows = F.silu(gate) * up
        else:
            rows = F.relu(rows).square()
        rows = rows * scores.reshape(-1)[order].to(rows.dtype).unsqueeze(-1)  # as Megatron's fused activation
        rows = F.grouped_mm(rows, self.down, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=x.device)
        return rows[back].view(tokens.shape[0], self.chosen, -1).sum(dim=1).view_as(x)


class LatentProjection(nn.Module):
    """Queries, keys and values from compressed ones; a part of each head has rotary positions."""

    def __init__(self, width: int, heads: int, latent: Latent) -> None:
        super().__init__()
        self.heads, self.latent = heads, latent
        whole = heads * (latent.plain + latent.rotary)
        if latent.queries:
            self.q_down = nn.Linear(width, latent.queries, bias=False)
            self.q_norm = nn.RMSNorm(latent.queries, eps=1e-5)
        self.q_up = nn.Linear(latent.queries or width, whole, bias=False)
        self.kv_down = nn.Linear(width, latent.keys + latent.rotary, bias=False)
        self.kv_norm = nn.RMSNorm(latent.keys, eps=1e-5)
        self.kv_up = nn.Linear(latent.keys, heads * (latent.plain + latent.values), bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, the plain and the rotary (one for all heads) parts of keys, and values, [b, heads, s, …]."""
        (b, s, _), sizes = x.shape, self.latent
        queries = self.q_up(self.q_norm(self.q_down(x)) if sizes.queries else x)
        q = queries.view(b, s, self.heads, sizes.plain + sizes.rotary).transpose(1, 2)
        compressed, rotary = self.kv_down(x).split((sizes.keys, sizes.rotary), dim=-1)
        up = self.kv_up(self.kv_norm(compressed)).view(b, s, self.heads, sizes.plain + sizes.values).transpose(1, 2)
        plain, v = up.split((sizes.plain, sizes.values), dim=-1)
        return q, plain, rotary.unsqueeze(1), v
