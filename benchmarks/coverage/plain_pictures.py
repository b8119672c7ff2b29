"""Plain modules over pictures and sound, as people write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.made import Built, Made, normal, whole

WIDTH, CLASSES = 16, 5


def pictures(side: int = 16) -> dict[str, Tensor]:
    return {"x": normal(3, side, side), "labels": whole(CLASSES)}


class Classifier(nn.Module):
    """A body and a head with cross entropy."""

    def __init__(self, body: nn.Module, width: int, pool: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.pool = body, nn.Linear(width, CLASSES), pool

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.body(x)
        return F.cross_entropy(self.head(x.mean((2, 3)) if self.pool else x.flatten(1)), labels)


def classifier(body: Callable[[], nn.Module], width: int = WIDTH, pool: bool = True) -> Callable[[], Built]:
    return lambda: (Classifier(body(), width, pool), pictures())


def norms(kind: str) -> Callable[[int], nn.Module]:
    return {
        "group": lambda n: nn.GroupNorm(4, n),
        "batch": nn.BatchNorm2d,
        "instance": lambda n: nn.InstanceNorm2d(n, affine=True),
        "frozen": lambda n: nn.BatchNorm2d(n).eval(),
    }[kind]


class Residual(nn.Module):
    """A residual block of two convolutions, with a projection where the size changes."""

    def __init__(self, into: int, out: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = norm(out), norm(out)
        self.short = nn.Conv2d(into, out, 1, stride) if stride > 1 or into != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.short(x)
        return F.relu(y)


def resnet(kind: str) -> nn.Module:
    norm = norms(kind)
    stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), norm(WIDTH), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    blocks = [Residual(WIDTH, WIDTH, 1, norm), Residual(WIDTH, 32, 2, norm), Residual(32, 32, 1, norm)]
    return nn.Sequential(stem, *blocks)


class KeepFrozen(nn.Module):
    """A residual net whose batch norms stay in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = resnet("batch")

    def train(self, mode: bool = True) -> KeepFrozen:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def vgg() -> nn.Module:
    convs = [nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(WIDTH, 32, 3, padding=1)]
    rest = [nn.ReLU(True), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 64), nn.ReLU(True)]
    return nn.Sequential(*convs, *rest)


class ConvNext(nn.Module):
    """A ConvNeXt block with a layer norm over channels and a scale per layer."""

    def __init__(self, into: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(into, into, 5, padding=2, groups=into)
        self.norm = nn.LayerNorm(into)
        self.mlp = nn.Sequential(nn.Linear(into, 4 * into), nn.GELU(), nn.Linear(4 * into, into))
        self.gamma = nn.Parameter(torch.full((into,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))) * self.gamma
        return x + y.permute(0, 3, 1, 2)


class DropPath(nn.Module):
    """A residual branch that some samples skip."""

    def __init__(self, branch: nn.Module, rate: float = 0.2) -> None:
        super().__init__()
        self.branch, self.rate = branch, rate

    def forward(self, x: Tensor) -> Tensor:
        keep = x.new_empty((x.size(0),) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate) / (1 - self.rate)
        return x + self.branch(x) * keep


class UNet(nn.Module):
    """A U-Net with skips over the bottleneck, upsampled by `up`."""

    def __init__(self, up: str) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = self.pair(3, 8), self.pair(8, 16), self.pair(16, 32)
        self.up2, self.up1 = (self.raised(up, 32, 16), self.raised(up, 16, 8))
        self.out2, self.out1 = self.pair(32, 16), self.pair(16, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    @staticmethod
    def pair(into: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU())

    @staticmethod
    def raised(up: str, into: int, out: int) -> nn.Module:
        if up == "transposed":
            return nn.ConvTranspose2d(into, out, 2, stride=2)
        if up == "shuffle":
            return nn.Sequential(nn.Conv2d(into, 4 * out, 1), nn.PixelShuffle(2))
        return nn.Sequential(nn.Upsample(scale_factor=2, mode=up), nn.Conv2d(into, out, 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        low = self.middle(F.avg_pool2d(two, 2))
        two = self.out2(torch.cat([self.up2(low), two], 1))
        one = self.out1(torch.cat([self.up1(two), one], 1))
        return F.cross_entropy(self.head(one), mask)


def unet(up: str) -> Built:
    return UNet(up), {"x": normal(3, 16, 16), "mask": whole(CLASSES, 16, 16)}


class Masked(nn.Module):
    """A masked autoencoder: a random quarter of the patches is seen, the rest is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(48, 32)
        self.positions = nn.Parameter(torch.randn(1, 16, 32) * 0.02)
        self.mask = nn.Parameter(torch.zeros(1, 1, 32))
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.decoder = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.head = nn.Linear(32, 48)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(x, 4).flatten(2).transpose(1, 2)
        order = noise.argsort(1)
        back = order.argsort(1)
        h = self.patch(patches) + self.positions
        seen = self.encoder(h.gather(1, order[:, :4, None].expand(-1, -1, 32)))
        h = torch.cat([seen, self.mask.expand(x.size(0), 12, -1)], 1)
        h = h.gather(1, back[..., None].expand(-1, -1, 32)) + self.positions
        hidden = (back >= 4).to(x.dtype)
        return (((self.head(self.decoder(h)) - patches) ** 2).mean(-1) * hidden).sum() / hidden.sum()


class Speech(nn.Module):
    """Convolutions over sound and a CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(8, 32, 3, 2, 1), nn.GELU(), nn.Conv1d(32, 32, 3, 1, 1), nn.GELU())
        self.head = nn.Linear(32, 12)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, sound: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
        z = self.head(self.net(sound).transpose(1, 2)).log_softmax(-1).transpose(0, 1)
        frames = torch.full((z.size(1),), z.size(0), dtype=torch.long)
        return self.loss(z, words, frames, lengths)


def speech() -> Built:
    return Speech(), {"sound": normal(8, 40), "words": whole(11, 5) + 1, "lengths": whole(3) + 3}


PICTURES: dict[str, Callable[[], Built]] = {
    "VGG": classifier(vgg, 64, pool=False),
    "ResNet GroupNorm": classifier(lambda: resnet("group"), 32),
    "ResNet BatchNorm": classifier(lambda: resnet("batch"), 32),
    "ResNet BatchNorm frozen": classifier(KeepFrozen, 32),
    "ResNet InstanceNorm": classifier(lambda: resnet("instance"), 32),
    "ConvNeXt": classifier(lambda: nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), ConvNext(WIDTH), ConvNext(WIDTH))),
    "DropPath": classifier(lambda: nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), DropPath(ConvNext(WIDTH)))),
    "U-Net transposed": lambda: unet("transposed"),
    "U-Net shuffle": lambda: unet("shuffle"),
    "U-Net nearest": lambda: unet("nearest"),
    "U-Net bilinear": lambda: unet("bilinear"),
    "MAE": lambda: (Masked(), {"x": normal(3, 16, 16), "noise": normal(16, seed=5)}),
    "Speech CTC": speech,
}

CASES = [Made(name, "plain", make) for name, make in PICTURES.items()]
