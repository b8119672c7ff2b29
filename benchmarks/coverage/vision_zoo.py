"""Models of torchvision: classification and segmentation, each architecture's smallest variant on small pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.made import normal, whole

CLASSES = 10


class Labelled(nn.Module):
    """A classifier or segmenter with cross entropy, and with the losses of its auxiliary heads."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = self.net(x)
        if isinstance(out, dict):
            return F.cross_entropy(out["out"], labels) + 0.5 * F.cross_entropy(out["aux"], labels)
        if isinstance(out, tuple):
            return sum(weight * F.cross_entropy(z, labels) for weight, z in zip((1.0, 0.3, 0.3), out, strict=False))
        return F.cross_entropy(out, labels)


def grouped(channels: int) -> nn.Module:
    """Group norm in the place of batch norm."""
    return nn.GroupNorm(4 if channels % 4 == 0 else 1, channels)


def without_batch_norm(module: nn.Module) -> nn.Module:
    """Replace every batch norm by a group norm."""
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            norm = grouped(child.num_features)
            act = getattr(child, "act", None)  # timm's norms may include the activation
            setattr(module, name, norm if act is None else nn.Sequential(norm, act))
        else:
            without_batch_norm(child)
    return module


@dataclass(frozen=True)
class Picture:
    """A model by the function that makes it, with the side of its pictures."""

    name: str
    family: str
    make: Callable[[], nn.Module]
    side: int = 32
    segments: bool = False
    frames: int = 0

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the model with its loss, in float64 and training mode, and a batch."""
        torch.manual_seed(0)
        model = Labelled(self.make()).double().train()
        shape = (3, self.frames, self.side, self.side) if self.frames else (3, self.side, self.side)
        labels = whole(CLASSES, self.side, self.side) if self.segments else whole(CLASSES)
        return model, {"x": normal(*shape), "labels": labels}


# name in torchvision.models -> side of its pictures
CLASSIFIERS = {
    "alexnet": 64,
    "convnext_tiny": 32,
    "densenet121": 32,
    "efficientnet_b0": 32,
    "efficientnet_v2_s": 32,
    "googlenet": 32,
    "inception_v3": 75,
    "maxvit_t": 224,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "regnet_y_400mf": 32,
    "resnet18": 32,
    "resnet50": 32,
    "resnext50_32x4d": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "swin_t": 32,
    "swin_v2_t": 32,
    "vgg11": 32,
    "vit_b_16": 32,
    "wide_resnet50_2": 32,
}
SMALLER: dict[str, dict[str, Any]] = {
    "vit_b_16": {"image_size": 32},
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False, "aux_logits": False},
}
SEGMENTERS = ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
NORMALISED = (
    "resnet18",
    "resnet50",
    "densenet121",
    "efficientnet_b0",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_y_400mf",
)


def classifier(name: str, change: Callable[[nn.Module], nn.Module] = lambda net: net) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torchvision import models

        return change(models.get_model(name, num_classes=CLASSES, **SMALLER.get(name, {})))

    return make


def segmenter(name: str, change: Callable[[nn.Module], nn.Module] = lambda net: net) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torchvision import models

        aux = {} if name.startswith("lraspp") else {"aux_loss": True}
        kwargs = {"weights": None, "weights_backbone": None, "num_classes": CLASSES}
        net = change(models.get_model(name, **kwargs, **aux))
        return net if aux else nn.Sequential(net, Main())

    return make


class Main(nn.Module):
    """The main output of a segmenter without an auxiliary one."""

    def forward(self, out: dict[str, Tensor]) -> Tensor:
        return out["out"]


CASES = [
    *(Picture(f"torchvision {n}", "torchvision", classifier(n), side) for n, side in CLASSIFIERS.items()),
    *(
        Picture(f"torchvision {n} GroupNorm", "torchvision", classifier(n, without_batch_norm), CLASSIFIERS[n])
        for n in NORMALISED
    ),
    *(Picture(f"torchvision {n}", "torchvision", segmenter(n), segments=True) for n in SEGMENTERS),
    *(
        Picture(f"torchvision {n} GroupNorm", "torchvision", segmenter(n, without_batch_norm), segments=True)
        for n in SEGMENTERS
    ),
]
