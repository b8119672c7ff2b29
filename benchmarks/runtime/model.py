"""Model that both programs train: a decoder in plain PyTorch, written without regard to parallelism.

Shapes: [b, s] tokens, [b, s, width] hidden states, [b, s, vocab] logits. Layers are like Llama's, with learned instead
of rotary positions; queries, keys and values are separate layers, so that PyTorch's tensor parallelism can split them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model; `inner`: width between the two layers of a perceptron."""

    vocab: int
    seq: int
    width: int
    inner: int
    layers: int
    heads: int


TIMED = Sizes(vocab=2048, seq=128, width=256, inner=704, layers=8, heads=8)
TINY = Sizes(vocab=32, seq=4, width=8, inner=16, layers=8, heads=2)  # ops of negligible size
VOCAB, SEQ, WIDTH, LAYERS = TIMED.vocab, TIMED.seq, TIMED.width, TIMED.layers


class Attention(nn.Module):
    """Causal self-attention; `head`: size of a head. The number of heads follows from the input, as tp splits them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        self.q, self.k, self.v, self.out = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (layer(x).view(b, s, -1, self.head).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class Perceptron(nn.Module):
    """A gated perceptron (Shazeer 2020)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (nn.LayerNorm(sizes.width) for _ in range(2))
        self.attention, self.perceptron = Attention(sizes), Perceptron(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.perceptron(self.norm_2(x))


class Decoder(nn.Module):
    """Decoder from tokens to logits, or a pipeline stage of it; `first`: with embeddings, `last`: with the head."""

    def __init__(self, sizes: Sizes, blocks: range, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.width) if first else None
        self.positions = nn.Embedding(sizes.seq, sizes.width) if first else None
        self.blocks = nn.ModuleDict({str(i): Block(sizes) for i in blocks})
        self.norm = nn.LayerNorm(sizes.width) if last else None
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Trained(nn.Module):
    """Decoder with its loss, the input of `autoptd.parallelize`."""

    def __init__(self, sizes: Sizes = TIMED) -> None:
        super().__init__()
        self.decoder = Decoder(sizes, range(sizes.layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return mean_cross_entropy(self.decoder(tokens), targets)

    def example_inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        """Return tokens and targets on the meta device."""
        return {name: torch.empty(batch, seq, dtype=torch.int64, device="meta") for name in ("tokens", "targets")}


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
