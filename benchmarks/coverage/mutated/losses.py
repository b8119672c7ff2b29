"""Losses of logits [b, s, v] and labels [b, s], where -100 marks tokens without a label; and losses of pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

TokenLoss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def transposed(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2), y)


def shifted(z: Tensor, y: Tensor) -> Tensor:
    if z.size(1) < 2:
        return cross_entropy(z, y)
    return F.cross_entropy(z[:, :-1].reshape(-1, z.size(-1)), y[:, 1:].reshape(-1))


def smoothed(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1), label_smoothing=0.2)


def summed(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") / 10


def by_hand(z: Tensor, y: Tensor) -> Tensor:
    valid = y != -100
    picked = z.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * valid).sum() / valid.sum()


def masked_rows(z: Tensor, y: Tensor) -> Tensor:
    valid = y != -100
    return F.cross_entropy(z[valid], y[valid])


def per_sample(z: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(z.mT, y, reduction="none")
    return (each.sum(1) / (y != -100).sum(1).clamp(min=1)).mean()


def focal(z: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def hardest(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.mT, y, reduction="none").mean(1).max()


def hard_half(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.mT, y, reduction="none").mean(1).topk(4)[0].mean()


def weighted(z: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, z.size(-1), dtype=z.dtype)
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), weight=weight)


def bounded(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y) + 1e-3 * z.logsumexp(-1).square().mean()


def balanced(z: Tensor, y: Tensor) -> Tensor:
    p = z.softmax(-1)
    return (
        cross_entropy(z, y)
        + (p.mean((0, 1)) * (p.argmax(-1, keepdim=True) == torch.arange(z.size(-1))).double().mean((0, 1))).sum()
    )


def perplexity(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z / 3, y).exp()


def averaged_samples(z: Tensor, y: Tensor) -> Tensor:
    """Loop over samples of several lengths."""
    return sum(F.cross_entropy(a, b) for a, b in zip(z, y, strict=True)) / len(z)  # type: ignore[return-value]


def rewards(z: Tensor, y: Tensor) -> Tensor:
    log_p = z.log_softmax(-1)
    reward = (z.argmax(-1) == y).to(z.dtype).mean(1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-2)
    return -(log_p.amax(-1).mean(1) * advantage.detach()).mean() - 0.1 * (log_p.exp() * log_p).sum(-1).mean().neg()


def hinge(z: Tensor, y: Tensor) -> Tensor:
    return F.multi_margin_loss(z.flatten(0, 1), y.clamp(min=0).flatten())


def squared(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z.softmax(-1), F.one_hot(y.clamp(min=0), z.size(-1)).to(z.dtype))


def kl(z: Tensor, y: Tensor) -> Tensor:
    wanted = F.one_hot(y.clamp(min=0), z.size(-1)).to(z.dtype) * 0.9 + 0.1 / z.size(-1)
    return F.kl_div(z.log_softmax(-1), wanted, reduction="batchmean")


def without_read(z: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(z, y)
    return loss if not loss.isnan() else z.mean()


TOKENS: Mapping[str, TokenLoss] = {
    "cross entropy": cross_entropy,
    "transposed": transposed,
    "shifted": shifted,
    "smoothed": smoothed,
    "summed": summed,
    "by hand": by_hand,
    "masked rows": masked_rows,
    "per sample": per_sample,
    "focal": focal,
    "hardest": hardest,
    "hard half": hard_half,
    "weighted": weighted,
    "z-loss": bounded,
    "balanced": balanced,
    "perplexity": perplexity,
    "loop over samples": averaged_samples,
    "rewards": rewards,
    "hinge": hinge,
    "squared": squared,
    "kl": kl,
    "if": without_read,
}
USUAL = (
    "cross entropy",
    "transposed",
    "shifted",
    "smoothed",
    "by hand",
    "masked rows",
    "per sample",
    "z-loss",
    "summed",
)
PAIRS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clip": lambda a, b: _both(F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t() * 5),
    "siglip": lambda a, b: -F.logsigmoid((a @ b.t()) * (2 * torch.eye(len(a), dtype=a.dtype) - 1)).mean(),
    "triplet": lambda a, b: F.triplet_margin_loss(a, b, b.roll(1, 0)),
    "cosine": lambda a, b: 1 - F.cosine_similarity(a, b).mean(),
    "barlow": lambda a, b: (
        (_standard(a).t() @ _standard(b) / len(a) - torch.eye(a.size(1), dtype=a.dtype)).square().sum()
    ),
    "vicreg": lambda a, b: F.mse_loss(a, b) + F.relu(1 - a.var(0).add(1e-4).sqrt()).mean() + a.T.cov().square().mean(),
    "simclr": lambda a, b: _simclr(torch.cat((a, b))),
    "byol": lambda a, b: (2 - 2 * (F.normalize(a, dim=1) * F.normalize(b.detach(), dim=1)).sum(1)).mean(),
    "ranked": lambda a, b: F.margin_ranking_loss(a.sum(1), b.sum(1), torch.ones(len(a), dtype=a.dtype), 0.1),
}


def _both(z: Tensor) -> Tensor:
    y = torch.arange(z.size(0))
    return (F.cross_entropy(z, y) + F.cross_entropy(z.t(), y)) / 2


def _standard(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-2)


def _simclr(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    scores = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(z) // 2))
