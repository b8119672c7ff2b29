"""Base models over tokens: decoders, encoders, encoder-decoders, pairs, several heads, with drawn sizes and parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.made import normal, whole
from benchmarks.coverage.mutated.attention import drawn_attention
from benchmarks.coverage.mutated.channels import drawn_channels, drawn_norm
from benchmarks.coverage.mutated.draw import Draw, Shape
from benchmarks.coverage.mutated.losses import PAIRS, TOKENS, USUAL
from benchmarks.coverage.mutated.ops import drawn_op
from benchmarks.coverage.mutated.wiring import drawn_trunk, maybe_wrapped

Drawn = tuple[nn.Module, dict[str, Any]]


def text(shape: Shape, ragged: bool, **more: Tensor) -> dict[str, Any]:
    """Return ids and labels, some of which are left out if samples are ragged."""
    labels = whole(shape.words, shape.tokens, seed=3)
    if ragged:
        for i in range(1, len(labels)):
            labels[i, max(1, shape.tokens - i) :] = -100
    return {"ids": whole(shape.words, shape.tokens), "labels": labels, **more}


def token_loss(draw: Draw) -> Callable[[Tensor, Tensor], Tensor]:
    return draw.named(TOKENS if draw.odd() else {name: TOKENS[name] for name in USUAL}, "loss ")


class LanguageModel(nn.Module):
    """Embedding, trunk and head. The loss may read an early layer, the head may be tied; outputs have several forms."""

    def __init__(self, draw: Draw, shape: Shape, causal: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.words, shape.width)
        self.positions = nn.Parameter(torch.randn(shape.tokens, shape.width) * 0.1) if draw.chance(0.5) else None
        self.start = drawn_op(draw) if draw.chance(draw.spice / 3) else nn.Dropout(draw.one(0.0, 0.1))
        self.trunk = drawn_trunk(draw, shape, causal)
        self.norm = drawn_norm(draw, shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=draw.chance(0.5))
        self.loss, self.form = token_loss(draw), draw.one("loss", "loss", "tuple", "dict")
        self.early = draw.odd()
        if draw.chance(0.25):
            self.head.weight = self.embed.weight
            draw.notes.append("tied")

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(ids) * self.embed.weight.size(1) ** 0.5
        if self.positions is not None:
            x = x + self.positions[: ids.size(1)]
        outputs = self.trunk.outputs(self.start(x))
        logits = self.head(self.norm(outputs[-1]))
        loss = self.loss(logits, labels)
        if self.early:
            loss = loss + 0.3 * self.loss(self.head(outputs[1]), labels)
        return (
            (loss, logits)
            if self.form == "tuple"
            else {"loss": loss, "logits": logits}
            if self.form == "dict"
            else loss
        )


def decoder(draw: Draw) -> Drawn:
    shape = Shape.drawn(draw)
    return LanguageModel(draw, shape, causal=True), text(shape, draw.chance(0.5))


class Classifier(nn.Module):
    """An encoder with a class per sample: from the first token, a mean of real tokens, the largest or the last one."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.words, shape.width, padding_idx=0)
        self.kinds = nn.Embedding(2, shape.width)
        self.trunk = drawn_trunk(draw, shape, causal=False)
        self.head = nn.Sequential(nn.Linear(shape.width, shape.width), nn.Tanh(), nn.Linear(shape.width, 5))
        self.pool = draw.one("first", "mean", "max", "last", "attention")
        self.loss = draw.one(nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), nn.MultiMarginLoss())
        draw.notes.append(f"pool {self.pool}")

    def forward(self, ids: Tensor, classes: Tensor) -> Tensor:
        real = ids != 0
        x = self.trunk(self.embed(ids) + self.kinds((ids > 3).long()))
        if self.pool == "mean":
            y = (x * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
        elif self.pool == "max":
            y = x.masked_fill(~real[..., None], -1e4).amax(1)
        elif self.pool == "last":
            y = x[torch.arange(x.size(0)), (real.sum(1) - 1).clamp(min=0)]
        elif self.pool == "attention":
            y = torch.einsum("bsd,bs->bd", x, x.mean(-1).masked_fill(~real, -1e4).softmax(1))
        else:
            y = x[:, 0]
        return self.loss(self.head(y), classes)


def encoder(draw: Draw) -> Drawn:
    shape = Shape.drawn(draw)
    if draw.chance(0.4):
        return LanguageModel(draw, shape, causal=False), text(shape, ragged=True)
    ids = whole(shape.words - 1, shape.tokens) + 1
    for i in range(len(ids)):
        ids[i, max(1, shape.tokens - i % 4) :] = 0
    return Classifier(draw, shape), {"ids": ids, "classes": whole(5)}


class Translator(nn.Module):
    """An encoder, and a decoder whose layers attend to its last output or to all of them."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(shape.words, shape.width), nn.Embedding(shape.words, shape.width)
        if draw.chance(0.4):
            self.target = self.source
        self.encoder = drawn_trunk(draw, shape, causal=False)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "own": drawn_attention(draw, shape, causal=True),
                    "cross": drawn_attention(draw, shape, causal=False),
                    "mlp": maybe_wrapped(drawn_channels(draw, shape), draw, shape, 0.5),
                    "norms": nn.ModuleList(drawn_norm(draw, shape.width) for _ in range(3)),
                }
            )
            for _ in range(min(2, shape.layers))
        )
        self.head, self.loss = nn.Linear(shape.width, shape.words), token_loss(draw)
        self.all = draw.odd()

    def forward(self, source: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        memories = self.encoder.outputs(self.source(source))
        x = self.target(ids)
        for i, layer in enumerate(self.layers):
            a, b, c = layer["norms"]
            memory = memories[min(i + 1, len(memories) - 1)] if self.all else memories[-1]
            x = x + layer["own"](a(x))
            x = x + layer["cross"](b(x), memory)
            x = x + layer["mlp"](c(x))
        return self.loss(self.head(x), labels)


def encoder_decoder(draw: Draw) -> Drawn:
    shape = Shape.drawn(draw)
    return Translator(draw, shape), text(shape, draw.chance(0.5), source=whole(shape.words, shape.tokens, seed=5))


class Pair(nn.Module):
    """Two towers, or one for both sides, and a loss of the batch's pairs; one tower may be an average of the other."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.trunk = drawn_trunk(draw, shape, causal=False)
        self.features = nn.Sequential(
            nn.Linear(9, shape.width), nn.ReLU(), drawn_norm(draw, shape.width) if draw.odd() else nn.Identity()
        )
        self.ends = nn.ModuleList(nn.Linear(shape.width, 6, bias=False) for _ in range(2))
        self.same, self.loss = draw.chance(0.3), draw.named(PAIRS, "loss ")
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, ids: Tensor, ids2: Tensor, pixels: Tensor) -> Tensor:
        a = self.ends[0](self.trunk(self.words(ids)).mean(1))
        if self.same:
            b = self.ends[0](self.trunk(self.words(ids2)).mean(1))
        else:
            b = self.ends[1](self.features(pixels)).mean(1)
        return self.loss(a, b) + self.scale.exp() * 0.01


def pairs(draw: Draw) -> Drawn:
    shape = Shape.drawn(draw)
    more = {"ids2": whole(shape.words, shape.tokens, seed=6), "pixels": normal(4, 9)}
    return Pair(draw, shape), {"ids": whole(shape.words, shape.tokens), **more}


class Headed(nn.Module):
    """Features, a trunk, and several heads whose losses are weighed by hand, by uncertainty, or the worst counts."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.inner = nn.Linear(9, shape.width)
        self.query = nn.Parameter(torch.randn(2, shape.width))
        self.trunk = drawn_trunk(draw, shape, causal=False)
        heads = {
            "kind": nn.Linear(shape.width, 5),
            "size": nn.Linear(shape.width, 2),
            "seen": nn.Linear(shape.width, 1),
        }
        self.heads = nn.ModuleDict(heads)
        self.logs = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in heads})
        self.form = draw.one("sum", "uncertainty", "worst", "dict", "scheduled")
        draw.notes.append(f"losses {self.form}")

    def forward(self, x: Tensor, kind: Tensor, size: Tensor, seen: Tensor) -> Any:
        h = torch.cat((self.query.expand(len(x), -1, -1), self.inner(x)), 1)[:, : x.size(1)]
        h = self.trunk(h)[:, 0]
        z = {name: head(h) for name, head in self.heads.items()}
        losses = {
            "kind": F.cross_entropy(z["kind"], kind),
            "size": F.huber_loss(z["size"], size),
            "seen": (
                F.binary_cross_entropy_with_logits(z["seen"].squeeze(-1), seen, reduction="none") * (kind > 1)
            ).sum()
            / (kind > 1).sum().clamp(min=1),
        }
        if self.form == "uncertainty":
            return sum(loss * (-self.logs[n]).exp() + self.logs[n] for n, loss in losses.items())
        if self.form == "worst":
            return torch.stack(list(losses.values())).max()
        if self.form == "scheduled":
            return losses["kind"] + losses["size"] * (losses["kind"].detach() / (losses["size"].detach() + 1e-6))
        total = functools.reduce(torch.add, losses.values())
        return {"loss": total, **losses} if self.form == "dict" else total


def several_heads(draw: Draw) -> Drawn:
    shape = Shape.drawn(draw)
    batch = {
        "x": normal(shape.tokens, 9),
        "kind": whole(5),
        "size": normal(2, seed=4),
        "seen": whole(2, seed=8).double(),
    }
    return Headed(draw, shape), batch


BASES: Mapping[str, Callable[[Draw], Drawn]] = {
    "decoder": decoder,
    "encoder": encoder,
    "encoder-decoder": encoder_decoder,
    "pairs": pairs,
    "several heads": several_heads,
}
