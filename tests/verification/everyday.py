"""Tiny everyday models, one for each kind of input and each way to run; `CASES` lists how each is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

WIDTH, VOCAB, TOKENS = 8, 12, 8
IDS, FLAGS, REAL = torch.int64, torch.bool, torch.float32


def is_traced(x: Tensor) -> bool:
    """Return whether a tensor of forward is one of a trace."""
    return isinstance(x, FakeTensor)


@dataclass(frozen=True)
class Case:
    """A model, its inputs by shape and dtype (dim 0 the samples), and the options of its plan."""

    build: Callable[[], nn.Module]
    inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    fix: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    loss: Callable[..., Tensor] | None = None

    def examples(self, samples: int = 2) -> dict[str, Tensor]:
        """Return empty tensors on meta."""
        return {n: torch.empty(samples, *shape, dtype=t, device="meta") for n, (shape, t) in self.inputs.items()}


class Perceptron(nn.Module):
    """Three layers; the loss is `loss(logits, **inputs)`."""

    def __init__(self, loss: Callable[..., Tensor], act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.loss, self.act = loss, act

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.loss(self.c(self.act(self.b(self.act(self.a(x))))), **others)


def perceptron(loss: Callable[..., Tensor], **options: Any) -> Callable[[], nn.Module]:
    """Make a perceptron whose `forward` has the keywords of the loss."""
    return lambda: Perceptron(loss, **options)


class Attention(nn.Module):
    """Fused qkv; the mask is passed to scaled_dot_product_attention."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), heads

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(b, s, h))


Read = Callable[[Tensor, Tensor | None], Tensor | None]


class Text(nn.Module):
    """Tokens with a mask that `read` makes of an input of any kind; ragged labels."""

    def __init__(
        self, read: Callable[[Tensor, Tensor | None], Tensor | None], *, tied: bool = False, layers: int = 1
    ) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(layers))
        self.head, self.read = nn.Linear(WIDTH, VOCAB, bias=False), read
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        seen = self.read(ids, mask)
        for layer in self.layers:
            x = layer(x, seen)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def lengths(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return a mask from the number of tokens of each sample."""
    assert mask is not None
    return (torch.arange(ids.shape[1], device=ids.device)[None] < mask[:, None])[:, None, None]


class TorchEncoder(nn.Module):
    """torch's own layer, with dropout inside of multi_head_attention_forward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=dropout, batch_first=True)

    def forward(self, ids: Tensor, pad: Tensor, labels: Tensor) -> Tensor:
        x = self.layer(self.table(ids), src_key_padding_mask=pad)
        return F.cross_entropy(self.head(x).transpose(1, 2), labels)


class TwoLengths(nn.Module):
    """An encoder and a decoder with sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.memory, self.head = nn.Embedding(VOCAB, WIDTH), Attention(), nn.Linear(WIDTH, VOCAB)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory, x = self.memory(self.table(source), None), self.table(target)
        x = x + torch.softmax(self.q(x) @ self.k(memory).transpose(1, 2), -1) @ memory
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Image(nn.Module):
    """Convolutions with strides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 5)

    def forward(self, pixels: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.b(torch.relu(self.a(pixels)))))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class Constants(nn.Module):
    """A table that is not a buffer, a number as a tensor, positions of the default dtype, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.b.requires_grad_(False)
        self.tables = [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))]
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        waves = torch.exp(torch.arange(WIDTH, device=x.device) / -WIDTH)
        h = F.linear(torch.tanh(self.b(self.a(x * self.scale)) + torch.tensor(0.1)), self.tables[0]) * waves
        logits = self.c(h)
        return {"loss": F.cross_entropy(logits, y) + 0.01 * logits.pow(2).mean(), "logits": logits}


class Tied(nn.Module):
    """One table as embedding and head, dropout, label smoothing, a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop, self.up = nn.Embedding(VOCAB, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.drop(torch.relu(self.up(self.drop(self.table(ids))))))
        penalty = 1e-3 * self.table.weight.pow(2).sum()
        return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1) + penalty


def squared(out: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Loss passed by the user."""
    return F.mse_loss(out, inputs["y"])


class Plain(nn.Module):
    """Model without a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.c(torch.tanh(self.a(x)))


def no_mask(ids: Tensor, mask: Tensor | None) -> None:
    """Every token attends to every other."""


X, Y = ((WIDTH,), REAL), ((), IDS)
TEXT = {"ids": ((TOKENS,), IDS), "labels": ((TOKENS,), IDS)}
PAIR = {"dp": 2, "tp": 2, "pp": 1, "micro": 1}
DEEP = {"dp": 1, "tp": 1, "pp": 2, "micro": 1}
CROSS, CLASSES = perceptron(lambda out, y: F.cross_entropy(out, y)), {"x": X, "y": Y}
NUMBERS = {"x": X, "y": ((5,), REAL)}


def _bce(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(torch.sigmoid(out), y)


def _kl(out: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(out, -1), y, reduction="batchmean")


def _logarithm(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, torch.log(y) + y.sqrt())


def _nll(out: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(out, -1), y, ignore_index=3)


CASES: dict[str, Case] = {
    "float inputs": Case(CROSS, CLASSES, PAIR),
    "float inputs, fp64": Case(CROSS, {"x": ((WIDTH,), torch.float64), "y": Y}, PAIR, "fp64"),
    "half inputs, fp16": Case(CROSS, {"x": ((WIDTH,), torch.float16), "y": Y}, DEEP, "fp16"),
    "bfloat inputs, bf16": Case(CROSS, {"x": ((WIDTH,), torch.bfloat16), "y": Y}, PAIR, "bf16"),
    "regression": Case(perceptron(lambda out, y: F.mse_loss(out, y)), NUMBERS, PAIR),
    "probabilities": Case(perceptron(_bce), NUMBERS, PAIR),
    "divergence": Case(perceptron(_kl), NUMBERS, PAIR),
    "logarithm and root": Case(perceptron(_logarithm), NUMBERS, PAIR),
    "likelihood, a label left out": Case(perceptron(_nll), CLASSES, PAIR),
    "a loss handed in": Case(Plain, {"x": X, "y": ((5,), REAL)}, PAIR, loss=squared),
    "several losses, constants, frozen": Case(Constants, CLASSES, {**PAIR, "zero": 3}),
    "boolean mask of four dims": Case(
        lambda: Text(lambda ids, mask: mask), {**TEXT, "mask": ((2, TOKENS, TOKENS), FLAGS)}, PAIR
    ),
    "float mask": Case(lambda: Text(lambda ids, mask: mask), {**TEXT, "mask": ((2, TOKENS, TOKENS), REAL)}, DEEP),
    "integer mask": Case(
        lambda: Text(lambda ids, mask: (mask > 0)[:, None, None]), {**TEXT, "mask": ((TOKENS,), IDS)}, PAIR
    ),
    "lengths": Case(lambda: Text(lengths), {**TEXT, "mask": ((), IDS)}, DEEP),
    "padding by id": Case(lambda: Text(lambda ids, mask: (ids != 0)[:, None, None], tied=True), TEXT, PAIR),
    "torch's encoder with dropout": Case(lambda: TorchEncoder(0.2), {**TEXT, "pad": ((TOKENS,), FLAGS)}, PAIR),
    "two lengths": Case(TwoLengths, {"source": ((10,), IDS), "target": ((6,), IDS), "labels": ((6,), IDS)}, PAIR),
    "images": Case(Image, {"pixels": ((3, 16, 24), REAL), "y": Y}, PAIR),
    "tied, dropout, ZeRO 2": Case(Tied, TEXT, {"dp": 2, "tp": 1, "pp": 2, "micro": 1, "zero": 2}),
    "interleaved, recomputed": Case(
        lambda: Text(no_mask, layers=4), TEXT, {**DEEP, "schedule": "interleaved", "virtual": 2, "recompute": "full"}
    ),
    "zero-bubble": Case(lambda: Text(no_mask), TEXT, {**DEEP, "schedule": "zero-bubble"}),
    "tokens cut over cp": Case(lambda: Text(no_mask), TEXT, {"dp": 1, "tp": 1, "pp": 1, "cp": 2, "micro": 1}),
    "compiled kernels": Case(CROSS, CLASSES, {**PAIR, "micro": 2, "kernels": "compiled"}),
}
