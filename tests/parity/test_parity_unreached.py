"""Parameters of which the loss reads detached tensors alone, or through functions that return None for a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoptd.cost_models.cluster import Cluster
from autoptd.passes.normalise import annotate
from tests.parity.parity_check import bulk, trained_apart

WIDTH, OPTIONS = 8, {"lr": 0.01, "weight_decay": 0.3}


class Watched(nn.Module):
    """Layers of two streams; what the second one makes is read detached by the layers of the first."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.watchers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        seen = x
        for layer, watcher in zip(self.layers, self.watchers, strict=True):
            x = x + torch.tanh(layer(x)) + 0.1 * seen.detach()
            seen = torch.tanh(watcher(x + seen))
        return F.cross_entropy(self.head(x), labels)


class Withholding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        return x + 0.1 * seen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Withheld(Watched):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        seen = x
        for layer, watcher in zip(self.layers, self.watchers, strict=True):
            x = Withholding.apply(x + torch.tanh(layer(x)), seen)
            seen = torch.tanh(watcher(x.detach() + seen))
        return F.cross_entropy(self.head(x), labels)


class Gated(nn.Module):
    """Gates and values are computed from the same tensor, and of the gates the loss reads signs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.watchers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 4, -1)
        for norm, watcher, up, down in zip(self.norms, self.watchers, self.ups, self.downs, strict=True):
            h = norm(x)
            x = x + down(torch.tanh(up(h)) * (watcher(h) > 0))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class ComparedSums(Watched):
    """The loss compares sums over the batch of what the watchers make, and takes their signs alone."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        seen = x
        for layer, watcher in zip(self.layers, self.watchers, strict=True):
            x, seen = x + torch.tanh(layer(x)), torch.tanh(watcher(seen))
        errors = (self.head(x) - F.one_hot(labels, WIDTH)).square().mean(0)
        return (errors.sqrt() * (1 + (seen.mean(0) > seen.mean()))).sum()


class ComparedRows(ComparedSums):
    """The loss compares samples with each other, and leaves out pairs that are alike to the watchers."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        seen, given = x, x
        for layer, watcher in zip(self.layers, self.watchers, strict=True):
            x, seen = x + torch.tanh(layer(x)), torch.tanh(watcher(seen))
        out, seen = self.head(x), F.normalize(seen, dim=-1)
        alike = (seen @ seen.t() > 0.3) & (labels[:, None] != labels)
        logits = (F.normalize(out, dim=-1) @ given.t()).masked_fill(alike, -1e4)
        return F.cross_entropy(logits, torch.arange(len(x))) + F.cross_entropy(out, labels)


def batch(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(8, WIDTH, dtype=torch.float64, generator=rng)
    return {"x": x, "labels": torch.randint(0, WIDTH, (8,), generator=rng)}


def worst(kind: type[nn.Module], fix: dict[str, Any], cluster: str | Cluster = "dgx-h100") -> float:
    """Return the largest relative error of two steps."""
    torch.manual_seed(0)
    error, wanted = trained_apart(kind().double(), [batch(0), batch(1)], OPTIONS, fix, cluster)
    assert not any(name.startswith("watchers") for name in wanted.gradients)
    return error


@pytest.mark.parametrize("kind", [Watched, Withheld, ComparedSums, ComparedRows])
@pytest.mark.parametrize(
    "fix",
    [
        {"dp": 1, "tp": 1, "pp": 4, "micro": 2},
        {"dp": 2, "tp": 1, "pp": 2, "micro": 1, "schedule": "zero-bubble", "zero": 1},
        {"dp": 1, "tp": 2, "pp": 2, "micro": 4, "recompute": "full"},
        {"dp": 2, "tp": 2, "pp": 1, "micro": 2, "zero": 3},
    ],
    ids=str,
)
def test_no_gradient_reaches_them(kind: type[Watched], fix: dict[str, Any]) -> None:
    assert worst(kind, fix) < 1e-10


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_of_the_products_of_a_tensor_has_no_gradient(sequence_parallel: bool) -> None:
    splits = {"watchers.*.weight": "S0", "ups.*.weight": "S0", "downs.*.weight": "S1"}
    fix = {"dp": 1, "tp": 2, "pp": 1, "micro": 2, "sequence_parallel": sequence_parallel, "splits": splits}
    assert worst(Gated, fix, bulk(Cluster.load("dgx-h100"))) < 1e-10


@pytest.mark.fault("zeros for no gradient")
def test_zeros_from_the_next_stage_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotate, "_has_gradient", lambda node: True)
    assert worst(Watched, {"dp": 2, "tp": 1, "pp": 2, "micro": 2}) > 1e-10
