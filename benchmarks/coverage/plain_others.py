"""Plain modules over vectors, tables and graphs, and losses of several parts, as people write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.coverage.made import Built, Made, normal, whole

WIDTH, CLASSES = 16, 5


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Towers(nn.Module):
    """Two encoders and a contrastive loss of the batch's pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(WIDTH, 32, 8), mlp(WIDTH, 32, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        z = self.scale.exp() * a @ b.t()
        y = torch.arange(z.size(0), device=z.device)
        return (F.cross_entropy(z, y) + F.cross_entropy(z.t(), y)) / 2


class Distilled(nn.Module):
    """A student that follows a frozen teacher's distribution and the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(WIDTH, 32, CLASSES), mlp(WIDTH, 64, 64, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x).div(2.0).softmax(-1)
        z = self.student(x)
        soft = F.kl_div(z.div(2.0).log_softmax(-1), wanted, reduction="batchmean") * 4.0
        return 0.5 * soft + 0.5 * F.cross_entropy(z, labels)


class Several(nn.Module):
    """Several heads, whose losses are in a dict and added up."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.trunk = mlp(WIDTH, 32, 32)
        self.heads = nn.ModuleDict({"kind": nn.Linear(32, CLASSES), "size": nn.Linear(32, 1), "seen": nn.Linear(32, 1)})
        self.log_vars = nn.ParameterDict({n: nn.Parameter(torch.zeros(())) for n in self.heads})
        self.form = form

    def forward(self, x: Tensor, kind: Tensor, size: Tensor, seen: Tensor) -> Any:
        h = self.trunk(x)
        out = {name: head(h) for name, head in self.heads.items()}
        losses = {
            "kind": F.cross_entropy(out["kind"], kind),
            "size": F.smooth_l1_loss(out["size"].squeeze(-1), size),
            "seen": F.binary_cross_entropy_with_logits(out["seen"].squeeze(-1), seen),
        }
        if self.form == "uncertainty":
            return sum(losses[n] * torch.exp(-v) + v for n, v in self.log_vars.items())
        if self.form == "tuple":
            return sum(losses.values()), out["kind"]
        return {"loss": sum(losses.values()), **out} if self.form == "dict" else sum(losses.values())


def several(form: str) -> Built:
    seen = whole(2, seed=7).double()
    return Several(form), {"x": normal(WIDTH), "kind": whole(CLASSES), "size": normal(seed=5), "seen": seen}


class Nested(nn.Module):
    """Inputs in nested dictionaries, made in forward from flat ones."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({"a": mlp(WIDTH, 32), "b": mlp(8, 32)})
        self.head = nn.Linear(32, 1)

    def forward(self, features: dict[str, dict[str, Tensor]], target: Tensor) -> Tensor:
        h = sum(net(features["dense"][name]) for name, net in self.nets.items())
        return F.mse_loss(self.head(h).squeeze(-1), target)


def nested() -> Built:
    return Nested(), {"features": {"dense": {"a": normal(WIDTH), "b": normal(8)}}, "target": normal(seed=5)}


class Recommender(nn.Module):
    """Sparse features by embedding bags, dense ones by an MLP, and their pairwise products."""

    def __init__(self, bags: bool) -> None:
        super().__init__()
        kind = (lambda n: nn.EmbeddingBag(n, 8, mode="sum")) if bags else (lambda n: nn.Embedding(n, 8))
        self.tables = nn.ModuleList(kind(n) for n in (20, 30, 40))
        self.bottom, self.top = mlp(4, 16, 8), mlp(8 + 6, 16, 1)
        self.bags = bags

    def forward(self, dense: Tensor, sparse: Tensor, click: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [table(sparse[:, i]) if self.bags else table(sparse[:, i]).sum(1) for i, table in enumerate(self.tables)]
        z = torch.stack([x, *rows], 1)
        pairs = torch.bmm(z, z.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, -1)
        out = self.top(torch.cat([x, pairs[:, i, j]], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(out, click)


def recommender(bags: bool) -> Built:
    return Recommender(bags), {"dense": normal(4), "sparse": whole(20, 3, 5), "click": whole(2, seed=4).double()}


class Graph(nn.Module):
    """Graph convolutions on dense adjacency matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 32), nn.Linear(32, 32)])
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        edges = edges + torch.eye(edges.size(-1), dtype=edges.dtype)
        root = edges.sum(-1).rsqrt()
        edges = root[:, :, None] * edges * root[:, None, :]
        for layer in self.layers:
            x = F.relu(edges @ layer(x))
        return F.cross_entropy(self.head(x).transpose(1, 2), labels)


def graph() -> Built:
    edges = (normal(7, 7) > 0).double()
    return Graph(), {"x": normal(7, WIDTH), "edges": (edges + edges.mT).clamp(max=1), "labels": whole(CLASSES, 7)}


class Ode(nn.Module):
    """Fixed steps of a Runge-Kutta method through a learned field."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = (
            nn.Sequential(nn.Linear(WIDTH + 1, 32), nn.Tanh(), nn.Linear(32, WIDTH)),
            nn.Linear(WIDTH, 1),
        )

    def slope(self, t: float, x: Tensor) -> Tensor:
        return self.field(torch.cat([x, x.new_full((x.size(0), 1), t)], -1))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = 0.25
        for step in range(4):
            t = step * h
            a = self.slope(t, x)
            b = self.slope(t + h / 2, x + h / 2 * a)
            x = x + h * self.slope(t + h / 2, x + h / 2 * b)
        return F.huber_loss(self.head(x).squeeze(-1), target)


class Discrete(nn.Module):
    """An autoencoder with Gumbel-softmax codes."""

    def __init__(self, hard: bool) -> None:
        super().__init__()
        self.encode, self.decode, self.hard = mlp(WIDTH, 32, 4 * 6), mlp(4 * 6, 32, WIDTH), hard

    def forward(self, x: Tensor) -> Tensor:
        codes = F.gumbel_softmax(self.encode(x).view(-1, 4, 6), tau=1.0, hard=self.hard)
        return F.mse_loss(self.decode(codes.flatten(1)), x)


class Variational(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(WIDTH, 32, 16), mlp(8, 32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_var = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        apart = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1).mean()
        return F.mse_loss(self.decode(z), x, reduction="sum") / x.size(0) + apart


class Quantised(nn.Module):
    """A vector-quantised autoencoder with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.codes = mlp(WIDTH, 32, 8), mlp(8, 32, WIDTH), nn.Embedding(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        far = z.square().sum(-1, keepdim=True) - 2 * z @ self.codes.weight.t() + self.codes.weight.square().sum(-1)
        q = self.codes(far.argmin(-1))
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        return loss + F.mse_loss(self.decode(z + (q - z).detach()), x)


class Regressor(nn.Module):
    """An MLP with a squared error."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.net(x).squeeze(-1), target)


def regressor(net: Callable[[], nn.Module]) -> Callable[[], Built]:
    return lambda: (Regressor(net()), {"x": normal(WIDTH), "target": normal(seed=5)})


def wrapped(wrap: Callable[[nn.Linear], nn.Module]) -> Callable[[], Built]:
    return regressor(
        lambda: nn.Sequential(wrap(nn.Linear(WIDTH, 32)), nn.Tanh(), wrap(nn.Linear(32, 32)), nn.Linear(32, 1))
    )


class Triplet(nn.Module):
    """Anchors, positives and negatives of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(WIDTH, 32, 8)

    def forward(self, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        return F.triplet_margin_loss(self.net(a), self.net(p), self.net(n), margin=0.5)


class Fourier(nn.Module):
    """A token mixer by Fourier transforms, as FNet has it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm, self.head = mlp(WIDTH, 32, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.norm(x + torch.fft.fft2(x, dim=(1, 2)).real)
        return F.mse_loss(self.head(self.mlp(x)).mean((1, 2)), target)


class FourierOperator(nn.Module):
    """A field that is filtered by learned factors of its lowest frequencies, as the Fourier neural operator has it."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.side, self.fall = nn.Linear(1, 6), nn.Conv1d(6, 6, 1), nn.Linear(6, 1)
        self.factors = nn.Parameter(torch.randn(6, 6, 5, 2) / 6)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.rise(x).transpose(1, 2)
        waves = torch.fft.rfft(h)
        kept = torch.zeros_like(waves)
        kept[:, :, :5] = torch.einsum("bix,iox->box", waves[:, :, :5], torch.view_as_complex(self.factors))
        h = F.gelu(torch.fft.irfft(kept, n=h.shape[-1]) + self.side(h))
        return F.mse_loss(self.fall(h.transpose(1, 2)), target)


OTHERS: dict[str, Callable[[], Built]] = {
    "Two towers": lambda: (Towers(), {"a": normal(WIDTH), "b": normal(WIDTH, seed=5)}),
    "Distillation": lambda: (Distilled(), {"x": normal(WIDTH), "labels": whole(CLASSES)}),
    "Losses added": lambda: several("sum"),
    "Losses and logits": lambda: several("tuple"),
    "Losses in a dict": lambda: several("dict"),
    "Losses by uncertainty": lambda: several("uncertainty"),
    "Nested inputs": nested,
    "DLRM embeddings": lambda: recommender(False),
    "DLRM EmbeddingBag": lambda: recommender(True),
    "Graph convolution": graph,
    "Neural ODE": lambda: (Ode(), {"x": normal(WIDTH), "target": normal(seed=5)}),
    "Gumbel softmax": lambda: (Discrete(False), {"x": normal(WIDTH)}),
    "Gumbel softmax hard": lambda: (Discrete(True), {"x": normal(WIDTH)}),
    "VAE": lambda: (Variational(), {"x": normal(WIDTH)}),
    "VQ-VAE": lambda: (Quantised(), {"x": normal(WIDTH)}),
    "MLP": regressor(lambda: mlp(WIDTH, 64, 64, 1)),
    "MLP weight norm": wrapped(parametrizations.weight_norm),
    "MLP orthogonal": wrapped(parametrizations.orthogonal),
    "MLP spectral norm": wrapped(parametrizations.spectral_norm),
    "Triplet": lambda: (Triplet(), {n: normal(WIDTH, seed=i) for i, n in enumerate("apn")}),
    "FNO": lambda: (FourierOperator(), {"x": normal(16, 1), "target": normal(16, 1, seed=5)}),
    "FNet": lambda: (Fourier(), {"x": normal(12, WIDTH), "target": normal(seed=5)}),
}

CASES = [Made(name, "plain", make) for name, make in OTHERS.items()]
