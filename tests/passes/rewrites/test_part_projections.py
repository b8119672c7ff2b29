"""Cuts into unequal parts move up to the weights of projections, and compute the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.passes.graph import info
from autoptd.passes.trace.traced import Traced
from tests.passes.interpret import assert_unchanged, normalised

WIDTH = 8
BATCH = {"x": torch.randn(6, 5, WIDTH, dtype=torch.float64)}


class Mixer(nn.Module):
    """Mamba-2's projections: a gate [8], x [8], B [4] and steps [2] of one weight; x and B convolved over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 22)
        self.conv1d = nn.Conv1d(12, 12, 3, groups=12, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        gate, both, steps = self.in_proj(x).split([8, 12, 2], -1)
        both = F.silu(self.conv1d(both.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        x, b = both.split([8, 4], -1)
        heads = (x.unflatten(-1, (2, 4)) * steps.softmax(-1)[..., None]).flatten(-2)
        return (heads * gate.sigmoid() * b.mean(-1, keepdim=True)).square().mean()


class Joined(nn.Module):
    """Query, key and value of a delta net: joined for one convolution, then cut where they were joined."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 8)
        self.conv1d = nn.Conv1d(12, 12, 3, groups=12, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.conv1d(torch.cat([self.q(x), self.v(x)], -1).transpose(1, 2))[..., : x.shape[1]]
        q, v = mixed.transpose(1, 2).split([4, 8], -1)
        return (q.mean(-1, keepdim=True) * v).square().mean()


class Latents(nn.Module):
    """A projection to features that all heads read alike."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.down(x).split([4, 2], -1)
        return (a.mean(-1) * b.mean(-1)).square().mean()


def shapes(traced: Traced, op: str) -> list[int]:
    """Return the features of each of these ops' results."""
    dim = 1 if op == "conv1d" else -1
    found = [n for n in traced.graph.graph.nodes if n.op == "call_function" and f"{op}." in str(n.target)]
    return sorted(info(n).shape[dim] for n in found)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("model", "linear", "conv"),
    [(Mixer, [2, 4, 8, 8], [4, 8]), (Joined, [4, 8], [4, 8]), (Latents, [6], [])],
)
def test_parts_have_products_of_their_own(model: type[nn.Module], linear: list[int], conv: list[int]) -> None:
    torch.manual_seed(0)
    plain = model().double()
    traced = normalised(plain, BATCH)
    assert shapes(traced, "linear") == linear
    assert shapes(traced, "conv1d") == conv
    assert_unchanged(plain, BATCH)
