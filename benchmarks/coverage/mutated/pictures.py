"""Base models over pictures: patches with attention, and residual convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.coverage.made import normal, whole
from benchmarks.coverage.mutated.bases import Drawn
from benchmarks.coverage.mutated.channels import divisor
from benchmarks.coverage.mutated.draw import Draw, Shape
from benchmarks.coverage.mutated.wiring import drawn_trunk

PIXELS = 12
Op = Callable[[Tensor], Tensor]


class Patches(nn.Module):
    """Patches by a convolution or by unfolding, a class token or a mean, and a trunk of attention."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.side = draw.one(3, 4, 6)
        self.form = draw.one("conv", "unfold", "view")
        n = (PIXELS // self.side) ** 2
        if self.form == "conv":
            self.patch: nn.Module = nn.Conv2d(3, shape.width, self.side, self.side)
        else:
            self.patch = nn.Linear(3 * self.side**2, shape.width)
        self.token = nn.Parameter(torch.zeros(1, 1, shape.width)) if draw.chance(0.5) else None
        self.shape = Shape(**{**vars(shape), "tokens": n + (self.token is not None)})
        self.places = nn.Parameter(torch.randn(1, self.shape.tokens, shape.width) * 0.02)
        self.trunk = drawn_trunk(draw, self.shape, causal=False)
        self.head = nn.Linear(shape.width, 5)
        self.mixed = draw.odd()
        draw.notes.append(f"patches {self.form} {self.side} mixup={self.mixed}")

    def forward(self, pixels: Tensor, classes: Tensor) -> Tensor:
        b, p = pixels.size(0), self.side
        if self.form == "conv":
            x = self.patch(pixels).flatten(2).transpose(1, 2)
        elif self.form == "unfold":
            x = self.patch(F.unfold(pixels, p, stride=p).mT)
        else:
            x = self.patch(
                pixels.view(b, 3, PIXELS // p, p, PIXELS // p, p).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 3 * p * p)
            )
        if self.token is not None:
            x = torch.cat([self.token.expand(b, -1, -1), x], dim=1)
        x = self.trunk(x + self.places)
        z = self.head(x[:, 0] if self.token is not None else x.mean(1))
        if self.mixed:
            soft = 0.8 * F.one_hot(classes, 5) + 0.2 / 5
            return -(soft * z.log_softmax(-1)).sum(-1).mean()
        return F.cross_entropy(z, classes)


def vit(draw: Draw) -> Drawn:
    shape = Shape.drawn(draw)
    return Patches(draw, shape), {"pixels": normal(3, PIXELS, PIXELS), "classes": whole(5)}


NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "BatchNorm": nn.BatchNorm2d,
    "BatchNorm slow": lambda n: nn.BatchNorm2d(n, momentum=0.01, eps=1e-3),
    "GroupNorm": lambda n: nn.GroupNorm(divisor(n), n),
    "LayerNorm": lambda n: nn.GroupNorm(1, n),
    "InstanceNorm": lambda n: nn.InstanceNorm2d(n, affine=True),
    "none": lambda n: nn.Identity(),
}
PICTURE_OPS: Mapping[str, Op] = {  # [b, c, h, w] -> the same
    "shuffle": lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if x.size(1) % 2 == 0 else x,
    "roll": lambda x: x.roll((1, -1), (2, 3)),
    "shift": lambda x: torch.cat((x[:, :1], F.pad(x, (1, 0))[:, 1:, :, :-1]), 1),
    "softmax places": lambda x: x.flatten(2).softmax(-1).view_as(x) * x.size(2),
    "softmax channels": lambda x: x.softmax(1),
    "pool": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "adaptive": lambda x: x * F.adaptive_avg_pool2d(x, 1).sigmoid(),
    "down and up": lambda x: F.interpolate(F.max_pool2d(x, 2, ceil_mode=True), size=x.shape[2:], mode="nearest"),
    "dropout": lambda x: F.dropout2d(x, 0.2),
    "grid": lambda x: sampled(x),
    "pixels": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2) if x.size(1) % 4 == 0 else x,
    "lrn": lambda x: F.local_response_norm(x, 3),
    "rot90": lambda x: x.rot90(1, (2, 3)) if x.size(2) == x.size(3) else x,
    "attention": lambda x: (q := x.flatten(2).mT, F.scaled_dot_product_attention(q, q, q).mT.view_as(x))[1],
    "batch mean": lambda x: x - x.mean((0, 2, 3), keepdim=True),
    "in place": lambda x: (x + 0).relu_().mul_(0.9),
    "squeeze": lambda x: x * x.mean((2, 3), keepdim=True).tanh(),
    "none": lambda x: x,
}  # fmt: skip


def sampled(x: Tensor) -> Tensor:
    grid = F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(len(x), -1, -1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


class Residual(nn.Module):
    """Two convolutions with norms and a shortcut, which is a convolution where sizes change."""

    def __init__(self, draw: Draw, a: int, b: int, stride: int) -> None:
        super().__init__()
        groups = draw.one(1, 1, *(g for g in range(2, min(a, b) + 1) if a % g == 0 == b % g))
        kernel = draw.one(1, 3, 3, 5)
        self.first = nn.Conv2d(a, b, kernel, stride, kernel // 2, groups=groups, bias=draw.chance(0.3))
        self.second = nn.Conv2d(
            b,
            b,
            3,
            1,
            padding="same",
            dilation=draw.one(1, 1, 2),
            padding_mode=draw.one("zeros", "zeros", "circular", "reflect"),
        )
        if draw.odd():
            parametrizations.weight_norm(self.second)
        norm = draw.named(NORMS, "norm ")
        self.norms = nn.ModuleList([norm(b), norm(b)])
        self.cut = nn.Conv2d(a, b, 1, stride) if a != b or stride > 1 else nn.Identity()
        self.op = draw.named(PICTURE_OPS, "op ")
        draw.notes.append(f"{a}->{b} groups={groups}")

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.op(self.second(y)))
        y += self.cut(x)
        return F.leaky_relu(y, 0.1)


class ResNet(nn.Module):
    """Residual blocks and a head: classes, or a picture of the same size by transposed convolutions."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        widths = [draw.one(8, 12, 7), draw.one(8, 16, 11), draw.one(16, 12, 13)]
        strides = [1, draw.one(1, 2), draw.one(1, 1, 2)]
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        inner = [widths[0], *widths[:-1]]
        self.blocks = nn.Sequential(*(Residual(draw, a, b, s) for a, b, s in zip(inner, widths, strides, strict=True)))
        self.dense = draw.odd()
        scale = strides[1] * strides[2]
        if self.dense:
            self.up = nn.ConvTranspose2d(widths[-1], 8, scale, scale)
            self.head: nn.Module = nn.Conv2d(8 + 3, 5, 1)
        else:
            self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(widths[-1], 5))
        draw.notes.append(f"strides {strides} dense={self.dense}")

    def forward(self, pixels: Tensor, classes: Tensor) -> Tensor:
        x = self.blocks(self.stem(pixels))
        if not self.dense:
            return F.cross_entropy(self.head(x), classes)
        z = self.head(torch.cat((self.up(x), pixels), 1))
        return F.cross_entropy(z, classes[:, None, None].expand(-1, PIXELS, PIXELS)) + (1 - z.softmax(1).amax(1)).mean()


def resnet(draw: Draw) -> Drawn:
    return ResNet(draw), {"pixels": normal(3, PIXELS, PIXELS), "classes": whole(5)}


PICTURES: Mapping[str, Callable[[Draw], Drawn]] = {"ViT": vit, "ResNet": resnet}
