"""Layers that compute filters for each sample train as on one process, also split over channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import AutoptdError
from autoptd.ops import library as ops
from autoptd.testing.parity import train_in_lockstep
from tests.parity import parity_check
from tests.parity.parity_check import TOLERANCE, step_off_by

SAMPLES, CHANNELS, PLACES = 6, 4, 6


class Modulated(nn.Module):
    """A convolution of pictures whose filters a style scales, as in StyleGAN2 (Karras et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(8, CHANNELS, 3, 3))
        self.style, self.head = nn.Linear(PLACES, CHANNELS), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        b, c, places = x.shape
        picture = x.unsqueeze(-1) * x.unsqueeze(-2)
        filters = self.filters[None] * (self.style(x.mean(1)) + 1)[:, None, :, None, None]
        filters = filters * (filters.square().sum([2, 3, 4], keepdim=True) + 1e-8).rsqrt()
        y = F.conv2d(picture.reshape(1, b * c, places, places), filters.view(-1, c, 3, 3), padding=1, groups=b)
        return F.cross_entropy(self.head(y.view(b, -1, places, places).mean((2, 3))), labels)


class Chosen(nn.Module):
    """Filters and biases of several experts, mixed for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.biases = nn.Parameter(torch.randn(3, 6, CHANNELS, 3)), nn.Parameter(torch.randn(3, 6))
        self.router, self.head = nn.Linear(CHANNELS, 3), nn.Linear(6, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        share = self.router(x.mean(2)).softmax(-1)
        filters = (share @ self.experts.flatten(1)).view(len(x) * 6, CHANNELS, 3)
        bias = (share @ self.biases).view(-1)
        y = F.conv1d(x.reshape(1, -1, PLACES), filters, bias, padding=1, groups=x.size(0)).view(len(x), 6, PLACES)
        return F.cross_entropy(self.head(y.mean(2)), labels)


class Depthwise(nn.Module):
    """A filter for each channel of each sample, of an even width: one side is padded more."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.head = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(CHANNELS, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        b, c, places = x.shape
        filters = self.filters(x.mean(2)).view(b * c, 1, 4)
        y = F.conv1d(x.view(1, b * c, places), filters, padding="same", groups=b * c).view(b, c, places)
        return F.cross_entropy(self.head(y.mean(2)), labels)


def batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(SAMPLES, CHANNELS, PLACES, dtype=torch.float64, generator=rng),
        "labels": torch.randint(4, (SAMPLES,), generator=rng),
    }


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("fix", [{"dp": 2, "tp": 2, "micro": 1}, {"pp": 2, "tp": 2, "micro": 2}], ids=str)
@pytest.mark.parametrize("kind", [Modulated, Chosen, Depthwise])
def test_trains_as_one_process(kind: type[nn.Module], fix: dict[str, Any]) -> None:
    assert step_off_by(model_of(kind), batch(), **fix) <= TOLERANCE


def test_filters_of_another_sample_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.sample_conv

    def planted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(ops, "sample_conv", lambda x, weight, *rest: real(x, weight.roll(1, 0), *rest))
        return train_in_lockstep(*args, **kwargs)

    monkeypatch.setattr(parity_check, "train_in_lockstep", planted)
    with pytest.raises(AssertionError):
        assert step_off_by(model_of(Modulated), batch(), dp=2, micro=3) <= TOLERANCE


class Mixed(Chosen):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Give each sample filters of another one."""
        filters = self.experts[0].expand(len(x), -1, -1, -1) * x.mean((1, 2)).flip(0)[:, None, None, None]
        y = F.conv1d(x.reshape(1, -1, PLACES), filters.reshape(-1, CHANNELS, 3), padding=1, groups=x.size(0))
        return F.cross_entropy(self.head(y.view(len(x), 6, PLACES).mean(2)), labels)


def test_filters_computed_from_other_samples_are_refused() -> None:
    with pytest.raises(AutoptdError, match="works across samples"):
        autoptd.trace(model_of(Mixed), inputs=batch(), precision="fp64")
