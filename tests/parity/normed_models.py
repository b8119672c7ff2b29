"""Tiny models whose samples are normalised by statistics over the batch, in the ways that people write it.

residual   convolutions with batch norms and skips, downsampled, as in a ResNet; one norm without weights
mlp        BatchNorm1d over [b, c]: of a moving average, of an average over all steps, without running statistics
tokens     BatchNorm1d over tokens [b, c, l] beside attention, as in PatchTST; a SyncBatchNorm
by_hand    a batch norm of one's own, with detached averages, a norm over the batch, and a mean that a loss reads too
pooled     a norm of means over the tokens of a sample, which cp cuts, in more than two equal layers
unread     norms whose results nothing reads, though they update their statistics
volumes    BatchNorm3d; a layer that runs twice, and updates its statistics twice
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.parity_models import SAMPLES, VOCAB, WIDTH, Case, randomised, tokens

CLASSES = 4


class Residual(nn.Module):
    """Two convolutions with norms, and a skip."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.skip = nn.Identity() if width == out else nn.Sequential(nn.Conv2d(width, out, 1, stride), _plain(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.skip(x))


def _plain(width: int) -> nn.Module:
    return nn.BatchNorm2d(width, affine=False, momentum=0.3)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layers = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1), Residual(8, 16, 2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.layers(F.relu(self.norm(self.stem(image))))
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norms = nn.BatchNorm1d(16), nn.BatchNorm1d(16, momentum=None), nn.BatchNorm1d(16, track_running_stats=False)
        layers = [nn.Sequential(nn.Linear(16, 16), norm, nn.GELU()) for norm in norms]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x)), label)


class Unread(nn.Module):
    """Layers with norms whose results go nowhere: their statistics change all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norms = nn.ModuleList((nn.BatchNorm1d(16), nn.BatchNorm1d(16, momentum=None)))
        self.observer, self.head = nn.BatchNorm1d(16, affine=False), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for line, norm in zip(self.lines, self.norms, strict=True):
            x = line(x)
            norm(x)
            x = F.gelu(x)
        with torch.no_grad():
            self.observer(x)
        return F.cross_entropy(self.head(x), label)


class OfTarget(nn.Module):
    """A net whose features are to be those of a target net for another view; the latter runs under no_grad, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (nn.Sequential(*self._net()) for _ in range(2))
        self.target.requires_grad_(False)
        self.head = nn.Linear(16, 16)

    def _net(self) -> list[nn.Module]:
        norms = nn.BatchNorm1d(16), nn.BatchNorm1d(16, momentum=None)
        return [layer for norm in norms for layer in (nn.Linear(16, 16), norm, nn.GELU())]

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        with torch.no_grad():
            one, two = self.target(x), self.target(x.flip(1))
        mine = self.head(self.online(x))
        return -F.cosine_similarity(mine, one).mean() - (F.cosine_similarity(mine, two) * (label + 1)).mean()


class ReadAfter(nn.Module):
    """A net whose loss reads the running variance that a norm has just updated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        before = self.norm.running_var.clone()
        loss = F.cross_entropy(self.head(self.norm(self.first(x))), label)
        return loss + (self.first.bias - self.norm.running_var + before / 2).square().sum()


class Attends(nn.Module):
    """Attention and an MLP, each followed by a norm over samples and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.BatchNorm1d(WIDTH), nn.SyncBatchNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1((x + self.out(attended)).transpose(1, 2)).transpose(1, 2)
        return self.norm2((x + self.down(F.gelu(self.up(x)))).transpose(1, 2)).transpose(1, 2)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Attends() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class OfMeans(nn.Module):
    """An MLP beside a norm of the sample's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(x)) + self.norm(x.mean(1))[:, None]


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCAB, WIDTH), nn.Sequential(*(OfMeans() for _ in range(4)))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.table(ids))).flatten(0, 1), labels.flatten())


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean((0, 1)), x.var((0, 1), unbiased=False)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
            with torch.no_grad():
                self.var.lerp_(var * (n := x.shape[0] * x.shape[1]) / (n - 1), 0.1)
        return (x - mean) / (var + 1e-5).sqrt() * self.weight + self.bias


class Standardised(nn.Module):
    """Statistics over samples without a module: standardised, centred by a detached mean, normalised, and in a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = ByHand()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.layers[0](self.table(ids)))
        y = self.layers[1](x)
        x = x + (y - y.mean(0, keepdim=True)) / y.std((0, 1), keepdim=True)
        y = self.layers[2](x)
        with torch.no_grad():
            center = y.mean((0, 1))
        x = F.normalize(y - center, dim=0) + x
        mean = x.mean((0, 1))
        loss = F.cross_entropy(self.head(x - mean).flatten(0, 1), labels.flatten())
        return loss + 0.1 * (mean.square().sum() + 1).sqrt()


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(2, 6, 3), nn.BatchNorm3d(6)
        self.twice = nn.Sequential(nn.Conv3d(6, 6, 1), nn.BatchNorm3d(6), nn.ReLU())
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        y = self.twice(self.twice(self.norm(self.conv(x))))
        return F.cross_entropy(self.head(y.mean((2, 3, 4))), label)


def _random(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _labelled(kind: type[nn.Module], name: str, *shape: int) -> Case:
    """Return a case whose samples differ in their mean and scale, so that statistics of a part are others."""
    torch.manual_seed(0)
    rows = torch.linspace(0.5, 2, SAMPLES, dtype=torch.float64).view(-1, *[1] * len(shape))
    label = torch.arange(SAMPLES) * 7 % CLASSES
    return Case(randomised(kind()), {name: _random(*shape) * rows + rows, "label": label})


def _of_tokens(kind: type[nn.Module]) -> Case:
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(kind()), {"ids": ids, "labels": labels})


NORMED: Mapping[str, Callable[[], Case]] = {
    "normed_residual": lambda: _labelled(ResNet, "image", 3, 6, 10),
    "normed_target": lambda: _labelled(OfTarget, "x", 16),
    "normed_read_after": lambda: _labelled(ReadAfter, "x", 16),
    "normed_mlp": lambda: _labelled(Mlp, "x", 16),
    "normed_tokens": lambda: _of_tokens(Tokens),
    "normed_pooled": lambda: _of_tokens(Pooled),
    "normed_by_hand": lambda: _of_tokens(Standardised),
    "normed_unread": lambda: _labelled(Unread, "x", 16),
    "normed_volumes": lambda: _labelled(Volumes, "x", 2, 4, 5, 6),
}
