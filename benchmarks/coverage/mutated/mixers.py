"""Token mixers without attention [b, s, d] -> [b, s, d]: recurrent nets, scans, convolutions over tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.mutated.draw import Draw, Shape


class Recurrent(nn.Module):
    """A recurrent net of torch, in one direction or both, batch or time first."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        kind = draw.one(nn.LSTM, nn.GRU, nn.RNN)
        self.first, both = draw.chance(0.5), draw.odd()
        self.net = kind(shape.width, shape.head, draw.one(1, 2), batch_first=self.first, bidirectional=both)
        self.out = nn.Linear(shape.head * (1 + both), shape.width)
        draw.notes.append(f"{kind.__name__} batch_first={self.first} bidirectional={both}")

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x if self.first else x.transpose(0, 1))[0]
        return self.out(y if self.first else y.transpose(0, 1))


class Cells(nn.Module):
    """A loop over time steps with a cell, and outputs in a list."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.cell = draw.one(nn.GRUCell, nn.RNNCell)(shape.width, shape.width)
        self.start = nn.Parameter(torch.randn(shape.width) * 0.1)
        draw.notes.append("cells")

    def forward(self, x: Tensor) -> Tensor:
        h, found = self.start.expand(x.size(0), -1), []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            found.append(h)
        return torch.stack(found, 1)


class GatedSum(nn.Module):
    """A diagonal state space by running sums of decayed inputs."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(shape.width, 3 * shape.hidden), nn.Linear(shape.hidden, shape.width)
        self.decay = nn.Parameter(torch.linspace(-2, 0, shape.hidden))
        self.form = draw.one("log", "loop", "matrix")
        draw.notes.append(f"gated sum {self.form}")

    def forward(self, x: Tensor) -> Tensor:
        u, gate, step = self.inner(x).chunk(3, -1)
        rate = -F.softplus(step) * self.decay.exp()  # logarithm of the factor of each step
        if self.form == "log":
            total = rate.cumsum(1)
            h = (u * (-total).exp()).cumsum(1) * total.exp()
        elif self.form == "matrix":
            total = rate.cumsum(1)
            mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()[..., None]
            far = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(~mask, -torch.inf).exp()
            h = torch.einsum("bstn,btn->bsn", far, u)
        else:
            h, state = [], torch.zeros_like(u[:, 0])
            for t in range(x.size(1)):
                state = state * rate[:, t].exp() + u[:, t]
                h.append(state)
            h = torch.stack(h, dim=1)
        return self.outer(h * F.silu(gate))


class Convolved(nn.Module):
    """Convolution over tokens: depthwise, grouped or full, causal by padding."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        groups = draw.one(1, shape.width, *(n for n in range(2, shape.width) if shape.width % n == 0))
        self.kernel = draw.one(1, 2, 3)
        self.conv = nn.Conv1d(shape.width, shape.width, self.kernel, groups=groups, bias=draw.chance(0.5))
        draw.notes.append(f"conv1d {self.kernel} groups={groups}")

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, (self.kernel - 1, 0))).mT


class AcrossTokens(nn.Module):
    """A layer over tokens, as MLP-Mixer has it."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(shape.tokens, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, shape.tokens)
        )
        draw.notes.append("mixer")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.transpose(1, 2)).transpose(1, 2)


class Spectral(nn.Module):
    """A product with a learnt filter in frequencies, as global filter networks have it."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(shape.tokens // 2 + 1, shape.width, 2) * 0.1)
        draw.notes.append("spectral")

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter), n=x.size(1), dim=1)


Mixer = Callable[[Draw, Shape], nn.Module]
MIXERS: Mapping[str, Mixer] = {
    "recurrent": Recurrent,
    "cells": Cells,
    "gated sum": GatedSum,
    "convolved": Convolved,
    "across tokens": AcrossTokens,
    "spectral": Spectral,
}


def drawn_mixer(draw: Draw, shape: Shape) -> nn.Module:
    return draw.named(MIXERS)(draw, shape)
