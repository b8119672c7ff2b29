"""A GPT in plain PyTorch, in the usual style: fused qkv, learned positions, tied head, loss from `forward`.

Shapes: [b, s] tokens, [b, s, width] hidden states, [b, s, vocab] logits. If it is built under `torch.device("meta")`,
`reset_parameters` of its layers and `_init_weights` initialise its parameters later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTSizes:
    """Sizes of a `NanoGPT`. The defaults are GPT-2 small with the vocabulary rounded up to a multiple of 64."""

    vocab: int = 50304
    max_seq: int = 1024  # tokens
    width: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.0
    bias: bool = False


class Attention(nn.Module):
    """Causal self-attention; one linear layer computes queries, keys and values."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=sizes.bias)
        self.out = nn.Linear(sizes.width, sizes.width, bias=sizes.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = (
            part.view(b, s, self.heads, width // self.heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, width))


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm MLP four times as wide."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(sizes.width, bias=sizes.bias)
        self.attention = Attention(sizes)
        self.norm_2 = nn.LayerNorm(sizes.width, bias=sizes.bias)
        self.up = nn.Linear(sizes.width, 4 * sizes.width, bias=sizes.bias)
        self.down = nn.Linear(4 * sizes.width, sizes.width, bias=sizes.bias)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class NanoGPT(nn.Module):
    """GPT: `model(idx)` returns logits, `model(idx, targets)` the mean cross entropy; targets of -1 are ignored."""

    def __init__(self, sizes: GPTSizes | None = None) -> None:
        super().__init__()
        sizes = sizes or GPTSizes()
        self.max_seq = sizes.max_seq
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.positions = nn.Embedding(sizes.max_seq, sizes.width)
        self.drop = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=sizes.bias)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise weights from N(0, 0.02²) and biases with zeros (Radford et al. 2018, section 4.1)."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.drop(self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def example_inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        """Return tokens and targets on the meta device."""
        return {name: torch.empty(batch, seq, dtype=torch.int64, device="meta") for name in ("idx", "targets")}
