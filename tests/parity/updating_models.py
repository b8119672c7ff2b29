"""Tiny models whose forward updates buffers, in the ways that people write it.

bias       DeepSeek-V3's bias of scores, from counts of the batch; grouped products
tables     one table of all layers, of which each layer reads and updates its row; einsum
averages   moving averages of means and variances over tokens, assigned; counts that are read later; a counter
views      writes through views that only torch can make functional
shared     a layer that runs twice in a pass, and updates its buffers twice
spectral   both spectral norms of torch, whose power iterations write to buffers passed as `out=`
codes      a codebook that is averaged from the tokens of each code, whose rows are added by index
teacher    a momentum teacher, whose weights are buffers that the end of forward averages after the loss
lengths    rotary frequencies that depend on the number of tokens, which is counted too, beside such a term of the loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.mixture_models import CHOSEN, EXPERTS, Einsum, Grouped, Plain, by_hand, parameter
from tests.parity.parity_models import VOCAB, WIDTH, Case, randomised, tokens

RATE = 1e-2


class Biased(Grouped):
    """Grouped products, whose experts are chosen by biased scores."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.linspace(-0.05, 0.05, self.count))
        self.register_buffer("chosen_by", torch.zeros(self.count, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        import transformers.integrations.moe  # noqa: F401  torch's own product has no float64

        product = torch.ops.transformers.grouped_mm_fallback
        rows = x.flatten(0, 1)
        scores = self.gate(rows).sigmoid()
        experts = (scores + self.bias.to(scores.dtype).view(1, -1)).topk(self.chosen, -1, sorted=False)[1]
        best = scores.gather(-1, experts)
        self.balance(experts)
        keys, order = experts.flatten().sort(stable=True)
        ends = F.one_hot(keys, self.count).sum(0).cumsum(0).to(torch.int32)
        y = product(F.gelu(product(rows[order // self.chosen], self.up, ends)), self.down, ends)
        y = y * best.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // self.chosen, y).view_as(x)

    @torch.no_grad()
    def balance(self, experts: Tensor) -> None:
        counts = F.one_hot(experts, self.count).sum((0, 1))
        self.chosen_by += counts
        counts = counts.to(self.bias)
        self.bias.add_(RATE * torch.sign(counts.mean() - counts))


class Switched(Biased):
    """A router whose counts, and means detached after their sum, serve a loss and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(self.count))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = (scores + self.bias).topk(self.chosen, -1)[1]
        counts = F.one_hot(chosen, self.count).to(scores).sum((0, 1, 2))
        mean = scores.mean((0, 1))
        self.lost = self.count * (counts / counts.sum() * mean).sum()
        self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        self.bias.add_(RATE * torch.sign(counts.mean() - counts))
        return Einsum.mix(self, x, torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen)))  # type: ignore[arg-type]


class Balanced(Plain):
    """Losses of the first layers reach the last stage beside its activations."""

    def __init__(self) -> None:
        super().__init__(Switched(), Switched(), Switched())
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.mixtures)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for norm, mixture, layer in zip(self.norms, self.mixtures, self.layers, strict=True):
            x = x + layer(mixture(norm(x)).relu())
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + 0.1 * (self.mixtures[0].lost + self.mixtures[1].lost)


class Averages(Einsum):
    """Averages that choose the experts of the next step, and a counter of steps that is read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(self.count))
        self.register_buffer("spread", torch.ones(self.count))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("taken", torch.zeros(self.count))

    def forward(self, x: Tensor) -> Tensor:
        warm = 1 / (1 + self.steps)
        self.steps += 1
        scores = (self.gate(x) * self.steps / (self.steps + warm)).softmax(-1)
        chosen = (scores - self.mean / self.spread.sqrt() + 1e-3 * self.taken).topk(self.chosen, -1)[1]
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        seen = scores.detach()
        self.mean = 0.9 * self.mean + 0.1 * seen.mean((0, 1))
        with torch.no_grad():
            self.spread.lerp_(scores.flatten(0, 1).var(0) + 1.0, 0.2)
            load = torch.zeros(self.count, dtype=scores.dtype)
            load = load.scatter_add(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=scores.dtype))
            self.taken.mul_(0.5).add_(load / load.sum(), alpha=0.5)
        return self.mix(x, weights)


class Tables(nn.Module):
    """Layers that share a table of biases and one of counts; the row of a layer is updated through a view."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Einsum() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("bias", torch.zeros(layers, EXPERTS))
        self.register_buffer("load", torch.zeros(layers, EXPERTS))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, loads = self.table(ids), []
        for i, layer in enumerate(self.layers):
            scores = layer.gate(x).softmax(-1)
            chosen = (scores + self.bias[i]).topk(CHOSEN, -1)[1]
            x = x + layer.mix(x, torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen)))
            with torch.no_grad():
                loads.append(torch.histc(chosen.to(scores), EXPERTS, 0, EXPERTS - 1))
                self.load[i] += loads[-1]
        with torch.no_grad():
            whole = torch.stack(loads)
            self.bias += RATE * (whole.mean(-1, keepdim=True) - whole).sign()
            self.bias -= self.bias.mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Shared(nn.Module):
    """A layer that runs twice: the second run updates what the first has updated."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), parameter(WIDTH)
        self.register_buffer("runs", torch.zeros((), dtype=torch.int32))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scales", torch.zeros(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids) + self.mean + self.scales
        for _ in range(2):
            y = self.layer(x).tanh() * self.scale
            self.runs.add_(1)
            with torch.no_grad():
                self.mean.copy_(self.mean * 0.5 + y.flatten(0, 1).sum(0) / ids.numel())
            x = x + y
        self.scales.lerp_(self.scale.detach(), 0.3)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Views(nn.Module):
    """Buffers that are written to through views, of which torch alone knows the inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("mean", torch.zeros(WIDTH // 4, 4))
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        logits = self.head(x + self.mean.flatten())
        with torch.no_grad():
            self.mean.t().reshape(4, -1).transpose(0, 1).copy_(x.mean((0, 1)).view(-1, 4))
            self.mean.view(-1)[2:6].mul_(0.5)
            self.mean[:, 1] += (labels == 3).sum() / labels.numel()
            self.steps[1] += 1
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Spectral(nn.Module):
    """Weights divided by their largest singular value, which iterations of earlier steps approximate."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 2 * WIDTH))
        self.down = nn.utils.spectral_norm(nn.Linear(2 * WIDTH, WIDTH), n_power_iterations=2)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.down(self.up(x).tanh())
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Codes(nn.Module):
    """Tokens are replaced by the nearest code, and codes move to the mean of their tokens."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("codes", torch.randn(count, WIDTH))
        self.register_buffer("taken", torch.ones(count))
        self.register_buffer("sums", torch.ones(count, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.up(self.table(ids))
        rows = x.flatten(0, 1)
        chosen = (rows.detach()[:, None] - self.codes).square().sum(-1).argmin(1)
        code = self.codes[chosen].view_as(x)
        with torch.no_grad():
            added = torch.zeros(self.sums.shape, dtype=rows.dtype).index_add_(0, chosen, rows)
            self.taken.mul_(0.9).index_add_(0, chosen, torch.ones_like(rows[:, 0]))
            self.sums.mul_(0.9).add_(added, alpha=0.1).index_add_(0, chosen, 0.1 * rows)
            self.codes.copy_(self.sums / self.taken.clamp(min=1.0)[:, None])
        loss = F.cross_entropy(self.head(x + (code - x).detach()).flatten(0, 1), labels.flatten())
        return loss + 0.1 * F.mse_loss(x, code)


class Teacher(nn.Module):
    """A network that learns from the moving averages of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.norm, self.down = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, VOCAB)
        for name in ("table", "up", "down"):
            self.register_buffer(f"mean_{name}", 0.5 * getattr(self, name).weight.detach())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.down(self.norm(F.gelu(self.up(self.table(ids)))))
        taught = F.linear(F.gelu(F.linear(F.embedding(ids, self.mean_table), self.mean_up)), self.mean_down)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + F.mse_loss(logits, taught)
        with torch.no_grad():
            for name in ("table", "up", "down"):
                getattr(self, f"mean_{name}").lerp_(getattr(self, name).weight, 0.1)
        return loss


class Lengths(nn.Module):
    """Frequencies for long or short sequences, by the last position, and a number of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("scales", torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            last = torch.arange(ids.shape[1], device=ids.device).max()
            self.seen += ids.shape[1]
            self.scales.copy_(torch.where(last > 3, self.seen * self.scales, self.scales + 1))
        x = torch.tanh(self.up(self.table(ids))) * self.scales
        size = x.square().sum().sqrt() * labels.shape[1]
        return F.cross_entropy(self.down(x).flatten(0, 1), labels.flatten()) + 0.01 * size.log()


def case_of(model: nn.Module) -> Case:
    ids, labels = tokens()
    return Case(randomised(model), {"ids": ids, "labels": labels})


def made(kind: type[nn.Module]) -> Case:
    torch.manual_seed(0)
    return case_of(kind())


UPDATING: Mapping[str, Callable[[], Case]] = {
    "updating_bias": lambda: by_hand(Biased, Biased, Biased),
    "updating_balanced": lambda: made(Balanced),
    "updating_averages": lambda: by_hand(Averages, Averages),
    "updating_tables": lambda: made(Tables),
    "updating_shared": lambda: made(Shared),
    "updating_views": lambda: made(Views),
    "updating_spectral": lambda: made(Spectral),
    "updating_codes": lambda: made(Codes),
    "updating_teacher": lambda: made(Teacher),
    "updating_lengths": lambda: made(Lengths),
}
