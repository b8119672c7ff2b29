"""Tiny models that draw random numbers in forward, in float64: noise, masks and choices per sample, token, weight and
step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.parity_models import VOCAB, WIDTH, Case, randomised, tokens


def drop_path(x: Tensor, keep: float) -> Tensor:
    """Drop whole samples, as transformers spells it."""
    mask = keep + torch.rand((x.shape[0], *(1,) * (x.ndim - 1)), dtype=x.dtype, device=x.device)
    return x.div(keep) * mask.floor_()


def stochastic_depth(x: Tensor, keep: float) -> Tensor:
    """Drop whole samples, as timm spells it."""
    mask = x.new_empty((x.shape[0], *(1,) * (x.ndim - 1))).bernoulli_(keep)
    return x * mask.div_(keep)


class NoisyLayer(nn.Module):
    """A residual MLP: stochastic depth, dropped features, noise of activations in several layouts, dropped weights."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.features, self.keep = nn.Dropout1d(0.2), keep

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        up = F.rrelu(self.up(x), training=True)
        rows = up.reshape(b * s, 2 * h)
        rows = rows + 0.1 * torch.randn_like(rows)  # of rows (b s)
        turned = rows.view(b, s, 2 * h).transpose(0, 1).reshape(s * b, 2 * h)
        turned = turned * torch.empty_like(turned).uniform_(0.9, 1.1)  # of rows (s b)
        up = turned.view(s, b, 2 * h).transpose(0, 1)
        weight = self.down.weight * (torch.rand_like(self.down.weight) > 0.1)  # one draw per step
        down = self.features(F.linear(up, weight, self.down.bias))
        return x + drop_path(down, self.keep) + stochastic_depth(0.1 * down, self.keep)


class Noisy(nn.Module):
    """Layers with noise; before them a random order of tokens per sample, and after them a random choice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(NoisyLayer(keep) for keep in (0.9, 0.9, 0.8))
        self.times = nn.Embedding(10, WIDTH)
        self.gate, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        b, s = ids.shape
        x = self.table(ids)
        order = torch.rand(b, s, device=x.device).argsort(1)  # as in masked autoencoders
        x = torch.gather(x, 1, order[:, :, None].expand(-1, -1, WIDTH))
        kept = (torch.rand(b, s, dtype=x.dtype, device=x.device) < 0.7).to(x.dtype)
        x = x + self.times(torch.randint(0, 10, (b,), device=x.device))[:, None]
        for layer in self.layers:
            x = layer(x)
        gates = F.gumbel_softmax(self.gate(x), dim=-1)
        chosen = torch.multinomial(torch.softmax(self.gate(x).reshape(b * s, 4), -1), 2).view(b, s, 2)
        x = x * (gates.gather(-1, chosen).sum(-1, keepdim=True) + torch.bernoulli(gates.amax(-1, keepdim=True)))
        x = x[..., torch.randperm(WIDTH, device=x.device)] * (1 + torch.rand((), dtype=x.dtype, device=x.device))
        x = torch.normal(x, 0.1) + 0.5 * x
        losses = -torch.log_softmax(self.head(x), -1).gather(-1, labels[:, :, None])[..., 0]
        return (losses * kept).sum() / kept.sum()  # the count is drawn too


def noisy() -> Case:
    """See `Noisy`; the batch is one sample short."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(Noisy()), {"ids": ids[1:], "labels": labels[1:].clamp(min=0)})


class NoisyTokens(nn.Module):
    """Noise whose dims are samples, tokens and width: what cp ranks may split; layers that are skipped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for up in self.ups:
            if self.training and torch.rand(()) < 0.4:
                continue
            y = torch.tanh(up(x))
            y = y + 0.1 * torch.randn_like(y) * torch.rand(y.shape[:2], dtype=y.dtype)[..., None]
            x = x + (drop_path(y, 0.8) if self.training else y)
        return F.cross_entropy(self.head(F.dropout(x, 0.1, self.training)).flatten(0, 1), labels.flatten())


def noisy_tokens() -> Case:
    """See `NoisyTokens`."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(NoisyTokens()), {"ids": ids, "labels": labels})


class SkippedNorms(nn.Module):
    """Layers that are skipped at random, with running statistics that only those that run update."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids).mean(1)
        for layer in self.layers:
            if torch.rand([]) >= 0.5:
                x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels[:, 0])


def skipped_norms() -> Case:
    """See `SkippedNorms`."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(SkippedNorms()), {"ids": ids, "labels": labels.clamp(min=0)})


RANDOM: dict[str, Callable[[], Case]] = {"noisy": noisy, "noisy_tokens": noisy_tokens, "skipped_norms": skipped_norms}
