"""Layers over the features of each token [b, s, d] -> [b, s, d]: norms, gated products, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.mutated.draw import Draw, Shape

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "softplus": F.softplus,
    "tanh": torch.tanh,
    "exp": lambda x: (x - x.detach().amax(-1, keepdim=True)).exp(),
}


class RootNorm(nn.Module):
    """RMSNorm by hand, in float32 as libraries write it or not."""

    def __init__(self, width: int, wide: bool) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(width)), wide

    def forward(self, x: Tensor) -> Tensor:
        y = x.double() if self.wide else x
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Turned(nn.Module):
    """A norm over channels that are the second dim."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def divisor(n: int) -> int:
    return next((k for k in (4, 3, 2, 5) if n % k == 0), 1)


NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without bias": lambda n: nn.LayerNorm(n, bias=False),
    "RMSNorm": nn.RMSNorm,
    "RMSNorm by hand": lambda n: RootNorm(n, wide=False),
    "RMSNorm by hand in float64": lambda n: RootNorm(n, wide=True),
}
ODD_NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "GroupNorm": lambda n: Turned(nn.GroupNorm(divisor(n), n)),
    "BatchNorm": lambda n: Turned(nn.BatchNorm1d(n)),
    "BatchNorm without statistics": lambda n: Turned(nn.BatchNorm1d(n, track_running_stats=False)),
    "BatchNorm cumulative": lambda n: Turned(nn.BatchNorm1d(n, momentum=None)),
    "InstanceNorm": lambda n: Turned(nn.InstanceNorm1d(n, affine=True)),
    "none": lambda n: nn.Identity(),
}


def drawn_norm(draw: Draw, width: int) -> nn.Module:
    return draw.named(ODD_NORMS if draw.chance(draw.spice / 3) else NORMS, "norm ")(width)


class Gated(nn.Module):
    """SwiGLU and its relatives: two products or a fused one."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.form, bias = draw.one("apart", "chunk", "unbind", "plain", "plain", "einsum"), draw.chance(0.5)
        self.act = draw.named(ACTIVATIONS, f"mlp {self.form} ")
        n = shape.hidden
        self.up = nn.Linear(shape.width, n if self.form in ("plain", "apart", "einsum") else 2 * n, bias)
        self.gate = nn.Linear(shape.width, n, bias) if self.form == "apart" else None
        self.down = nn.Linear(n, shape.width, bias)
        self.drop = nn.Dropout(draw.one(0.0, 0.0, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bsd,nd->bsn", x, self.up.weight) if self.form == "einsum" else self.up(x)
        if self.gate is not None:
            h = self.act(self.gate(x)) * h
        elif self.form == "chunk":
            a, b = h.chunk(2, -1)
            h = self.act(a) * b
        elif self.form == "unbind":
            a, b = h.unflatten(-1, (-1, 2)).unbind(-1)
            h = self.act(a) * b
        else:
            h = self.act(h)
        return self.drop(self.down(h))


class Experts(nn.Module):
    """A mixture: the best experts of each token, in one of several spellings."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.number = draw.one(1, 2, 3, 4, 4)
        self.best = draw.one(*range(1, min(3, self.number + 1)))
        self.form = draw.one("loop", "mask", "dense", "batched", "gathered")
        self.before = draw.chance(0.5)  # softmax before the choice
        draw.notes.append(f"experts {self.form} {self.best} of {self.number}")
        self.router = nn.Linear(shape.width, self.number, bias=False)
        if self.form in ("batched", "gathered"):
            self.up = nn.Parameter(torch.randn(self.number, shape.width, shape.hidden) * shape.width**-0.5)
            self.down = nn.Parameter(torch.randn(self.number, shape.hidden, shape.width) * shape.hidden**-0.5)
        else:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(shape.width, shape.hidden), nn.SiLU(), nn.Linear(shape.hidden, shape.width))
                for _ in range(self.number)
            )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        weights, chosen = (scores.softmax(-1) if self.before else scores).topk(self.best, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True) if self.before else weights.softmax(-1)
        gates = torch.zeros_like(scores).scatter(-1, chosen, weights)
        if self.form == "dense":
            return sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        if self.form == "batched":
            h = F.silu(torch.einsum("bsd,edh->besh", x, self.up))
            return torch.einsum("besh,ehd,bse->bsd", h, self.down, gates)
        if self.form == "gathered":
            h = F.silu(torch.einsum("bsd,bskdh->bskh", x, self.up[chosen]))
            return torch.einsum("bskh,bskhd,bsk->bsd", h, self.down[chosen], weights)
        if self.form == "mask":
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                mine = (chosen == i).any(-1)
                out[mine] += expert(x[mine]) * gates[..., i][mine][:, None]
            return out
        flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        for i, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen.flatten(0, 1) == i)
            out.index_add_(0, rows, expert(flat[rows]) * weights.flatten(0, 1)[rows, nth, None])
        return out.view_as(x)


class Low(nn.Module):
    """A product with two thin matrices beside a frozen one, and a branch of no width."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        self.base = nn.Linear(shape.width, shape.width).requires_grad_(False)
        self.down, self.up = nn.Linear(shape.width, 2, bias=False), nn.Linear(2, shape.width, bias=False)
        self.none = nn.Linear(shape.width, 0) if draw.odd() else None
        draw.notes.append("low rank" + ("" if self.none is None else " zero width"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) + self.up(self.down(x)) * 2
        return y if self.none is None else torch.cat((y, self.none(x)), -1)


class Named(nn.Module):
    """Branches in nested dictionaries and lists, one of them a lambda."""

    def __init__(self, draw: Draw, shape: Shape) -> None:
        super().__init__()
        n = shape.width
        self.branches = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(n, n), nn.Linear(n, n)]), "b": nn.Linear(n, n)})
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.tensor(0.5)), "b": nn.Parameter(torch.ones(n))})
        self.last = draw.one(lambda x: x * 0.5, torch.tanh)
        draw.notes.append("branches")

    def forward(self, x: Tensor) -> Tensor:
        found = {"a": sum(layer(x) for layer in self.branches["a"]), "b": self.branches["b"](x)}  # type: ignore[arg-type]
        return self.last(sum(self.scales[name] * y for name, y in found.items()))


CHANNELS: Mapping[str, Callable[[Draw, Shape], nn.Module]] = {
    "gated": Gated,
    "experts": Experts,
    "low": Low,
    "named": Named,
}


def drawn_channels(draw: Draw, shape: Shape) -> nn.Module:
    kind = draw.random.random()
    return (Gated if kind < 0.7 else draw.one(Experts, Low, Named))(draw, shape)
