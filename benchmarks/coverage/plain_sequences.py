"""Plain modules over sequences, as people write them: torch's transformers, recurrent nets, GPTs, attention by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.coverage.made import Built, Made, normal, whole

WORDS, WIDTH, TOKENS, HEADS = 40, 32, 12, 4


def tokens() -> dict[str, Tensor]:
    return {"ids": whole(WORDS, TOKENS), "labels": whole(WORDS, TOKENS, seed=3)}


class LanguageModel(nn.Module):
    """Embedding, a body [b, s, width] -> [b, s, width], and a head with cross entropy."""

    def __init__(self, body: nn.Module, tied: bool = False, **head: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.body = body
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        self.loss = nn.CrossEntropyLoss(**head)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        return self.loss(self.head(self.body(x)).flatten(0, 1), labels.flatten())


def language(body: Callable[[], nn.Module], **options: Any) -> Callable[[], Built]:
    return lambda: (LanguageModel(body(), **options), tokens())


class Causal(nn.Module):
    """torch's encoder with a causal mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device, dtype=x.dtype)
        return self.encoder(x, mask=mask, is_causal=True)


class Padded(nn.Module):
    """torch's encoder over sequences of several lengths, and a mean over the real tokens."""

    def __init__(self, pool: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.pool = pool

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        padding = ids == 0
        x = self.encoder(self.embedding(ids), src_key_padding_mask=padding)
        keep = (~padding).unsqueeze(-1).to(x.dtype)
        x = (x * keep).sum(1) / keep.sum(1) if self.pool else x[:, 0]
        return F.cross_entropy(self.head(x), labels)


def padded(pool: bool) -> Built:
    ids = whole(WORDS - 1, TOKENS) + 1
    for i in range(len(ids)):
        ids[i, TOKENS - i % 4 :] = 0
    return Padded(pool), {"ids": ids, "labels": whole(3)}


class Translator(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 64, dropout=0.1, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, WORDS)
        self.batch_first = batch_first

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(target.size(1)).to(self.head.weight.dtype)
        padding = source == 0
        x, y = self.source(source), self.target(target)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        z = self.transformer(x, y, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        z = z if self.batch_first else z.transpose(0, 1)
        return F.cross_entropy(self.head(z).reshape(-1, WORDS), labels.reshape(-1))


def translator(batch_first: bool) -> Built:
    source = whole(WORDS - 1, TOKENS) + 1
    source[1, 8:] = source[3, 5:] = 0
    target = {"target": whole(WORDS, 9, seed=3), "labels": whole(WORDS, 9, seed=4)}
    return Translator(batch_first), {"source": source, **target}


class Decoder(nn.Module):
    """torch's decoder over a memory that is given."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, batch_first=True, activation="gelu")
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.queries = nn.Parameter(torch.randn(6, WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, memory: Tensor, boxes: Tensor) -> Tensor:
        x = self.decoder(self.queries.expand(memory.size(0), -1, -1), memory)
        return F.l1_loss(self.head(x), boxes)


class Attention(nn.Module):
    """MultiheadAttention with a mask per head, a padding mask, or both."""

    def __init__(self, mask: bool, padding: bool, needs: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=needs)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask, self.padding, self.needs = mask, padding, needs

    def forward(self, x: Tensor, real: Tensor, target: Tensor) -> Tensor:
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1) if self.mask else None
        padding = real == 0 if self.padding else None
        z = self.norm(x)
        y, weights = self.attention(z, z, z, attn_mask=mask, key_padding_mask=padding, need_weights=self.needs)
        loss = F.mse_loss(self.head(x + y), target)
        return loss + 0.1 * weights.square().mean() if self.needs else loss


def attention(mask: bool = False, padding: bool = False, needs: bool = False) -> Callable[[], Built]:
    real = torch.ones(8, TOKENS, dtype=torch.int64)
    real[2, 7:] = real[5, 3:] = 0
    batch = {"x": normal(TOKENS, WIDTH), "real": real, "target": normal(TOKENS, WIDTH, seed=5)}
    return lambda: (Attention(mask, padding, needs), batch)


class Recurrent(nn.Module):
    """The outputs of a recurrent net, projected back to the width if it is bidirectional."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.net = kind(WIDTH, WIDTH, batch_first=True, **options)
        each = self.net.proj_size or WIDTH
        self.out = nn.Linear(each * (1 + self.net.bidirectional), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x)[0])


class Cells(nn.Module):
    """A loop over time steps with a GRU cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, found = x.new_zeros(x.size(0), WIDTH), []
        for t in range(TOKENS):
            h = self.cell(x[:, t], h)
            found.append(h)
        return torch.stack(found, 1)


class LastState(nn.Module):
    """A classifier by the last state of an LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        _, (h, _) = self.lstm(self.embedding(ids.t()))
        return F.cross_entropy(self.head(h[-1]), labels)


class Block(nn.Module):
    """A GPT's block, with attention by `attend(q, k, v)`."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.1))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).reshape(b, s, -1))
        return x + self.mlp(self.norm2(x))


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.size(-2)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.size(-1))
    hidden = torch.ones(s, s, dtype=torch.bool).tril().logical_not()
    return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention by running sums."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("bhsd,bhse->bhsde", k, v).cumsum(2)
    return torch.einsum("bhsd,bhsde->bhse", q, state) / torch.einsum("bhsd,bhsd->bhs", q, k.cumsum(2)).unsqueeze(-1)


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with a bias by distance and head."""
    s = q.size(-2)
    far = torch.arange(s)[None, :] - torch.arange(s)[:, None]
    slope = 2.0 ** -torch.arange(1, HEADS + 1, dtype=q.dtype)
    bias = (slope[:, None, None] * far).masked_fill(far > 0, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def turned(x: Tensor) -> Tensor:
    """Rotary embedding by complex numbers."""
    s, d = x.size(-2), x.size(-1)
    angles = torch.outer(torch.arange(s, dtype=x.dtype), 100.0 ** (-torch.arange(0, d, 2, dtype=x.dtype) / d))
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turn).flatten(-2)


def rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)


class Stack(nn.Module):
    """Blocks, each checkpointed or not."""

    def __init__(self, attend: Any, recompute: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attend) for _ in range(2))
        self.recompute, self.reentrant = recompute, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.recompute else block(x)
        return x


class Shared(nn.Module):
    """One block, applied three times (a universal transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(fused)
        self.steps = nn.Parameter(torch.randn(3, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = self.block(x + step)
        return x


class Experts(nn.Module):
    """A mixture by hand: the two best experts of each token, one loop over experts."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )
        self.dense = dense

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.dense:
            gates = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights)
            return x + sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        for i, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen.flatten(0, 1) == i)
            out.index_add_(0, rows, expert(flat[rows]) * weights.flatten(0, 1)[rows, nth, None])
        return x + out.view_as(x)


class Mixer(nn.Module):
    """An MLP-Mixer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.across = nn.Sequential(nn.Linear(TOKENS, 24), nn.GELU(), nn.Linear(24, TOKENS))
        self.within = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Dilated(nn.Module):
    """Gated causal convolutions with growing dilation, as WaveNet has them."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda conv: conv) -> None:
        super().__init__()
        self.gates = nn.ModuleList(wrap(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**i)) for i in range(3))
        self.mixes = nn.ModuleList(wrap(nn.Conv1d(WIDTH, 2 * WIDTH, 1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, skipped = x.transpose(1, 2), 0.0
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            more, skip = mix(a.tanh() * b.sigmoid()).chunk(2, 1)
            x, skipped = x + more, skipped + skip
        return F.relu(skipped).transpose(1, 2)


def weight_norm(conv: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(conv)


def old_weight_norm(conv: nn.Module) -> nn.Module:
    return nn.utils.weight_norm(conv)


def compiled() -> Built:
    return torch.compile(LanguageModel(Stack(fused)), backend="eager"), tokens()  # type: ignore[return-value]


def mlm() -> Built:
    model, batch = LanguageModel(Causal(dropout=0.0), ignore_index=-100), tokens()
    hidden = normal(TOKENS) < 0.8
    return model, batch | {"labels": batch["labels"].masked_fill(hidden, -100)}


SEQUENCES: dict[str, Callable[[], Built]] = {
    "TransformerEncoder causal": language(lambda: Causal(dropout=0.1)),
    "TransformerEncoder pre-norm": language(lambda: Causal(dropout=0.0, norm_first=True, activation="gelu")),
    "TransformerEncoder padding": lambda: padded(pool=True),
    "TransformerEncoder padding first": lambda: padded(pool=False),
    "TransformerEncoder masked labels": mlm,
    "Transformer batch first": lambda: translator(True),
    "Transformer time first": lambda: translator(False),
    "TransformerDecoder queries": lambda: (Decoder(), {"memory": normal(TOKENS, WIDTH), "boxes": normal(6, 5, seed=5)}),
    "MultiheadAttention": attention(),
    "MultiheadAttention attn_mask": attention(mask=True),
    "MultiheadAttention key_padding_mask": attention(padding=True),
    "MultiheadAttention both masks": attention(mask=True, padding=True),
    "MultiheadAttention weights, bias_kv": attention(needs=True),
    "LSTM": language(lambda: Recurrent(nn.LSTM)),
    "LSTM two layers": language(lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.1)),
    "LSTM bidirectional": language(lambda: Recurrent(nn.LSTM, bidirectional=True)),
    "LSTM projected": language(lambda: Recurrent(nn.LSTM, proj_size=16, bidirectional=True)),
    "GRU": language(lambda: Recurrent(nn.GRU)),
    "GRU two layers": language(lambda: Recurrent(nn.GRU, num_layers=2)),
    "GRU bidirectional": language(lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True)),
    "RNN": language(lambda: Recurrent(nn.RNN)),
    "GRUCell loop": language(Cells),
    "LSTM last state": lambda: (LastState(), {"ids": whole(WORDS, TOKENS), "labels": whole(4)}),
    "GPT": language(lambda: Stack(fused)),
    "GPT tied": language(lambda: Stack(fused), tied=True),
    "GPT einsum": language(lambda: Stack(written)),
    "GPT alibi": language(lambda: Stack(alibi)),
    "GPT complex rotary": language(lambda: Stack(rotary)),
    "GPT linear attention": language(lambda: Stack(linear)),
    "GPT checkpoint": language(lambda: Stack(fused, recompute=True)),
    "GPT checkpoint reentrant": language(lambda: Stack(fused, recompute=True, reentrant=True)),
    "GPT compiled": compiled,
    "GPT label smoothing": language(lambda: Stack(fused), label_smoothing=0.1),
    "GPT class weights": language(lambda: Stack(fused), weight=torch.linspace(0.5, 2, WORDS, dtype=torch.float64)),
    "Universal transformer": language(Shared),
    "Mixture by loop": language(lambda: Experts(dense=False)),
    "Mixture dense": language(lambda: Experts(dense=True)),
    "MLP-Mixer": language(lambda: nn.Sequential(Mixer(), Mixer())),
    "WaveNet": language(Dilated),
    "WaveNet weight norm": language(lambda: Dilated(weight_norm)),
    "WaveNet old weight norm": language(lambda: Dilated(old_weight_norm)),
}

CASES = [Made(name, "plain", make) for name, make in SEQUENCES.items()]
