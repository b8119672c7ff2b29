"""The layer of Korthikanti et al. 2022: pre-norm, one query-key-value projection, attention written out, dropout."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.cost_models.cluster import Cluster
from autoptd.layout.placements import Broadcast, PartialSum, Placement, Split
from autoptd.passes.fold import Folded, Segment, fold
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.search.sharding.strategies import counts_tokens
from autoptd.search.sharding.tensors import Sharded, Tensors

H, A, V = 56 * 52, 56, 32 * 17 * 19  # width, heads, vocabulary: 56 | 2912, so widths are tried before heads


class Attention(nn.Module):
    def __init__(self, p: float, fused: bool) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.drop, self.p, self.fused = nn.Dropout(p), p, fused

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, A, H // A).transpose(1, 2) for t in self.qkv(x).split(H, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(H // A))
            mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
            y = self.drop(scores.masked_fill(~mask, -1e4).softmax(-1)) @ v
        return self.drop(self.proj(y.transpose(1, 2).reshape(b, s, H)))


class Layer(nn.Module):
    def __init__(self, p: float, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(H), Attention(p, fused), nn.LayerNorm(H)
        self.up, self.down, self.drop = nn.Linear(H, 4 * H), nn.Linear(4 * H, H), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.ln_2(x)))))


class Gpt(nn.Module):
    def __init__(self, p: float = 0.1, fused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.layers = nn.ModuleList(Layer(p, fused) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(H), nn.Linear(H, V, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def traced(fused: bool = False, p: float = 0.1) -> Folded:
    """Trace the model on meta, in bf16."""
    with torch.device("meta"):
        model = Gpt(p, fused)
    ids = {n: torch.empty(2, 40, dtype=torch.long, device="meta") for n in ("ids", "labels")}
    return fold(normalise(trace(model, ids, precision="bf16")))


class WholeTokens(Tensors):
    """Tensor parallelism without sequence parallelism: partial results are summed, never split."""

    def _edge_placements(self, tensor: TensorInfo, name: str) -> tuple[Placement, ...]:
        return tuple(p for p in super()._edge_placements(tensor, name) if isinstance(p, Broadcast))

    def _convertible(self, tensor: TensorInfo, source: Placement, target: Placement, in_prelude: bool) -> bool:
        cuts = isinstance(source, Split) or (isinstance(source, PartialSum) and isinstance(target, Split))
        counts = any(counts_tokens(n) for n in tensor.shape)
        return super()._convertible(tensor, source, target, in_prelude) and not (cuts and counts)


def solved(folded: Folded, tp: int, sequence_parallel: bool = True) -> tuple[Tensors, Sharded]:
    """Return the splits that the planner finds."""
    kind = Tensors if sequence_parallel or tp == 1 else WholeTokens
    values = {BATCH: 1, SEQUENCE: 2048}
    tensors = kind(folded, Cluster.load("dgx-h100"), tp, values, microbatches=64, sequence_parallel=sequence_parallel)
    return tensors, tensors.solve()


def block(folded: Folded) -> tuple[Segment, ...]:
    """Return one layer from the middle of the stack."""
    unit = max(folded.units, key=lambda u: u.count)
    assert unit.count == 3
    first = unit.first + unit.length
    return folded.segments[first : first + unit.length]
