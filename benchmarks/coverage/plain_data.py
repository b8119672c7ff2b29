"""Data as people have them: nested inputs and flags, packed sequences, FlexAttention's masks, lengths, bags."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.coverage.made import Built, Made, normal, whole
from benchmarks.coverage.plain_others import CLASSES, mlp
from benchmarks.coverage.plain_sequences import HEADS, TOKENS, WIDTH, WORDS, language

WIDE, NARROW = 16, 8


class PairOfInputs(NamedTuple):
    """Two inputs, as a named tuple."""

    wide: Any
    narrow: Any


@dataclass
class Sources:
    """Two inputs and a constant, as a dataclass."""

    wide: Any
    narrow: Any
    scale: float = 0.5


class Joined(nn.Module):
    """Two nets whose inputs come in a container, with flags beside it."""

    def __init__(self, parts: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.wide, self.narrow, self.head = mlp(WIDE, 32), mlp(NARROW, 32), nn.Linear(32, 1)
        self.parts = parts

    def forward(self, given: Any, target: Tensor, mode: str = "sum", extra: Tensor | None = None) -> Tensor:
        a, b = self.parts(given)
        a, b = self.wide(a), self.narrow(b)
        h = a * b if mode == "product" else a + b
        return F.mse_loss(self.head(h if extra is None else h + extra).squeeze(-1), target)


def joined(
    container: Callable[[Tensor, Tensor], Any], parts: Callable[[Any], Any], **flags: Any
) -> Callable[[], Built]:
    return lambda: (
        Joined(parts),
        {"given": container(normal(WIDE), normal(NARROW)), "target": normal(seed=5), **flags},
    )


class PackedAttention(nn.Module):
    """Attention among the tokens of one document, in rows of several; positions start again in each."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], from_positions: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attend, self.from_positions = attend, from_positions

    def forward(self, ids: Tensor, documents: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        if self.from_positions:
            documents = (position_ids == 0).cumsum(-1)
        x = self.embedding(ids) + self.positions(position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = self.out(self.attend(q, k, v, documents).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x + y).flatten(0, 1), labels.flatten())


def block_mask(documents: Tensor) -> Tensor:
    """Return which keys a query sees: [b, 1, s, s]."""
    alike = documents[:, :, None] == documents[:, None, :]
    return (alike & torch.ones(alike.shape[-2:], dtype=torch.bool).tril()).unsqueeze(1)


def boolean(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, block_mask(documents))


def additive(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    mask = torch.zeros(block_mask(documents).shape, dtype=q.dtype).masked_fill(~block_mask(documents), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, mask)


def flexible(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (documents[b, i] == documents[b, j]) & (i >= j)

    return flex_attention(q, k, v, block_mask=create_block_mask(visible, q.size(0), None, q.size(2), q.size(2), "cpu"))


def biased(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """A slope per head, and a window of four tokens."""
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=q.dtype)

    def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((i >= j) & (i - j < 4), 20 * torch.tanh((x + slopes[h] * (j - i)) / 20), -torch.inf)

    return flex_attention(q, k, v, score_mod=score)


def packed(attend: Callable[..., Tensor], from_positions: bool = False) -> Callable[[], Built]:
    documents, positions = (torch.zeros(8, TOKENS, dtype=torch.int64) for _ in range(2))
    for row in range(8):
        for number, first in enumerate((0, 1 + row % 5, 6 + row % 4)):
            documents[row, first:], positions[row, first:] = number, torch.arange(TOKENS - first)
    batch = {"ids": whole(WORDS, TOKENS), "documents": documents, "position_ids": positions}
    return lambda: (PackedAttention(attend, from_positions), batch | {"labels": whole(WORDS, TOKENS, seed=3)})


class MeanOfReal(nn.Module):
    """A mean over as many tokens as each sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.net = nn.Embedding(WORDS, WIDTH), mlp(WIDTH, 32, CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        real = (torch.arange(ids.size(1)) < lengths[:, None]).unsqueeze(-1)
        return F.cross_entropy(self.net((self.embedding(ids) * real).sum(1) / lengths[:, None]), labels)


class Bagged(nn.Module):
    """Bags of ids, in which one stands for padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, WIDTH, **options), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.bag(ids)), labels)


def bagged(**options: Any) -> Callable[[], Built]:
    return lambda: (Bagged(**options), {"ids": whole(7, 6), "labels": whole(CLASSES)})


class Summary(nn.Module):
    """A recurrent net whose learned first states are the same for all samples, and whose last ones are read."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.net = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)
        self.first = nn.Parameter(torch.randn(2, 1, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first.expand(-1, x.size(0), -1).contiguous()
        y, last = self.net(x, (first, first) if isinstance(self.net, nn.LSTM) else first)
        last = last[0] if isinstance(last, tuple) else last
        return y + last[-1][:, None] + last.mean(0)[:, None]


DATA: dict[str, Callable[[], Built]] = {
    "Inputs in a dict of dicts": joined(lambda a, b: {"x": {"wide": a, "narrow": b}}, lambda x: tuple(x["x"].values())),
    "Inputs in a tuple": joined(lambda a, b: (a, b), lambda x: x, mode="product", extra=None),
    "Inputs in a list": joined(lambda a, b: [a, b], lambda x: x, mode="sum"),
    "Inputs in a named tuple": joined(PairOfInputs, lambda x: (x.wide, x.narrow)),
    "Inputs in a dataclass": joined(Sources, lambda x: (x.wide * x.scale, x.narrow)),
    "Inputs in a UserDict": joined(lambda a, b: UserDict(wide=a, narrow=b), lambda x: (x["wide"], x["narrow"])),
    "Packed boolean mask": packed(boolean),
    "Packed additive mask": packed(additive),
    "Packed by positions": packed(boolean, from_positions=True),
    "FlexAttention documents": packed(flexible),
    "FlexAttention scores": packed(biased),
    "Lengths": lambda: (
        MeanOfReal(),
        {"ids": whole(WORDS, TOKENS), "lengths": 5 + torch.arange(8) % 6, "labels": whole(CLASSES)},
    ),
    "EmbeddingBag maximum": bagged(mode="max"),
    "EmbeddingBag padding": bagged(mode="mean", padding_idx=2),
    "LSTM learned first state, dropout": language(lambda: Summary(nn.LSTM, dropout=0.2)),
    "GRU learned first state": language(lambda: Summary(nn.GRU)),
}

CASES = [Made(name, "plain", make) for name, make in DATA.items()]
