"""A training step of a denoiser of diffusers: the squared error of what it predicts from a noisy sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.made import SAMPLES, normal, whole

STEPS, FRACTION = "a step from 0 to 999", "a time between 0 and 1"
Sizes = tuple[int, ...] | str  # of one sample: random numbers of this shape, STEPS, FRACTION, or "real 12" for a mask


class Denoising(nn.Module):
    """A denoiser, the arguments that are the same for every batch, and the loss."""

    def __init__(self, denoiser: nn.Module, fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.numbers = {n: x for n, x in fixed.items() if not isinstance(x, Tensor)}
        self.tensors = [n for n, x in fixed.items() if isinstance(x, Tensor)]
        for name in self.tensors:
            self.register_buffer(f"fixed_{name}", fixed[name])

    def predict(self, given: Mapping[str, Tensor]) -> Tensor:
        fixed = {n: getattr(self, f"fixed_{n}") for n in self.tensors}
        # nested arguments travel as `outer.inner`
        nested: dict[str, Any] = {}
        for name, x in given.items():
            outer, _, inner = name.partition("__")
            nested.setdefault(outer, {}).update({inner: x}) if inner else nested.update({outer: x})
        out = self.denoiser(**nested, **fixed, **self.numbers)
        return out[0] if isinstance(out, tuple) else out.sample

    def forward(self, noise: Tensor, **given: Tensor) -> Tensor:
        return F.mse_loss(self.predict(given), noise)


@dataclass(frozen=True)
class Denoiser:
    """A class of diffusers with a small configuration, its inputs by sample, and its fixed arguments."""

    kind: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Sizes]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    family: str = "diffusers"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.variant}".strip()

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the denoiser with its loss, in float64 and training mode, and a batch."""
        import diffusers

        torch.manual_seed(0)
        fixed = {"return_dict": False, **self.fixed}
        model = Denoising(getattr(diffusers, self.kind)(**self.config), fixed).double().train()
        for parameter in model.parameters():  # layers that begin at zero pass no gradient on
            if not parameter.any():
                nn.init.normal_(parameter, std=0.05)
        batch = {n: drawn(sizes, seed) for seed, (n, sizes) in enumerate(self.inputs.items())}
        with torch.no_grad():
            shape = model.predict(batch).shape
        return model, {**batch, "noise": normal(*shape[1:], seed=99)}


def drawn(sizes: Sizes, seed: int) -> Tensor:
    """Return one input of the batch."""
    if sizes == STEPS:
        return whole(1000, seed=seed)
    if sizes == FRACTION:
        return torch.rand(SAMPLES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if isinstance(sizes, str):
        return torch.ones(SAMPLES, int(sizes.removeprefix("real ")), dtype=torch.int64)
    return normal(*sizes, seed=seed)
