"""Losses of several parts, as people write them: distillation, auxiliary losses, preferences, rewards, tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.made import Built, Made, normal, whole
from benchmarks.coverage.plain_others import CLASSES, mlp
from benchmarks.coverage.plain_sequences import TOKENS, WIDTH, WORDS, Block, fused, tokens

FEATURES = 16


class Decoded(nn.Module):
    """A causal language model, from tokens to logits and the outputs of its layers."""

    def __init__(self, layers: int = 2, outputs: int = WORDS) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(layers))
        self.head = nn.Linear(WIDTH, outputs, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, found = self.embedding(ids) + self.positions(torch.arange(ids.size(1), device=ids.device)), []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return self.head(x), found


def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """Return log p of each token but the first: [b, s - 1]."""
    return model(ids)[0][:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


class Taught(nn.Module):
    """A student, trained to match a frozen teacher's distribution and hidden states as well as the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Decoded(2), Decoded(3).requires_grad_(False)
        self.match = nn.Linear(WIDTH, WIDTH)

    def train(self, mode: bool = True) -> Taught:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted, theirs = self.teacher(ids)
        logits, ours = self.student(ids)
        soft = F.kl_div((logits / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="batchmean") * 4
        hidden = sum(F.mse_loss(self.match(a), b) for a, b in zip(ours, theirs[1:], strict=True))
        return 0.5 * soft + 0.5 * F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + hidden


class Bounded(nn.Module):
    """Cross entropy with a z-loss over the valid tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoded()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits, valid = self.model(ids)[0], labels != -100
        size = (logits.logsumexp(-1).square() * valid).sum() / valid.sum()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * size


class Balanced(nn.Module):
    """A mixture with a load balance and a z-loss of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 4),
            nn.Linear(WIDTH, WORDS),
        )
        self.experts = nn.ModuleList(mlp(WIDTH, 64, WIDTH) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        logits = self.router(x)
        shares = logits.softmax(-1)
        best, chosen = shares.topk(2, -1)
        gates = torch.zeros_like(shares).scatter(-1, chosen, best)
        y = x + sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        used = F.one_hot(chosen, 4).sum(2).to(x.dtype).mean((0, 1))
        balance = 4 * (used * shares.mean((0, 1))).sum()
        return (
            F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())
            + 0.01 * balance
            + 0.001 * logits.logsumexp(-1).square().mean()
        )


class TwoTasks(nn.Module):
    """Two heads; some samples are labelled for one task only."""

    def __init__(self, missing: str) -> None:
        super().__init__()
        self.trunk, self.kind, self.size = mlp(FEATURES, 32, 32), nn.Linear(32, CLASSES), nn.Linear(32, 1)
        self.missing = missing

    def forward(self, x: Tensor, kind: Tensor, size: Tensor, known: Tensor) -> Tensor:
        h = self.trunk(x)
        found = self.size(h).squeeze(-1)
        if self.missing == "nan":
            known = ~size.isnan()
            error = torch.where(known, (found - size.nan_to_num()).square(), 0.0)
        else:
            error = F.smooth_l1_loss(found, size, reduction="none") * known
        return F.cross_entropy(self.kind(h), kind, ignore_index=-1) + 0.3 * error.sum() / known.sum().clamp(min=1)


def two_tasks(missing: str) -> Built:
    kind, size = whole(CLASSES), normal(seed=5)
    kind[1] = kind[5] = -1
    if missing == "nan":
        size[2] = size[3] = torch.nan
    return TwoTasks(missing), {
        "x": normal(FEATURES),
        "kind": kind,
        "size": size,
        "known": (torch.arange(8) % 3 != 0).double(),
    }


class Supervised(nn.Module):
    """A loss at every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for i, (layer, head) in enumerate(zip(self.layers, self.heads, strict=True)):
            x = layer(x).tanh()
            loss = loss + 0.5**i * F.cross_entropy(head(x), labels)
        return loss


class Adversaries(nn.Module):
    """A generator and a discriminator in one step: each is frozen in the other's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(FEATURES, 32, FEATURES), mlp(FEATURES, 32, 1)

    def forward(self, z: Tensor, real: Tensor) -> Tensor:
        made = self.generator(z)
        critic = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made.detach())).mean()
        frozen = {name: p.detach() for name, p in self.critic.named_parameters()}
        return critic + F.softplus(-torch.func.functional_call(self.critic, frozen, (made,))).mean()


class Preferred(nn.Module):
    """Direct preference optimisation, with both answers in one batch, in two passes, or as dim 1 of the samples."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.policy, self.reference, self.form = Decoded(), Decoded().requires_grad_(False), form

    def score(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return log p of each answer under the policy minus that under the reference."""
        with torch.no_grad():
            before = log_probabilities(self.reference, ids)
        return ((log_probabilities(self.policy, ids) - before) * mask[:, 1:]).sum(-1)

    def forward(self, chosen: Tensor, rejected: Tensor, chosen_mask: Tensor, rejected_mask: Tensor) -> Tensor:
        n = chosen.size(0)
        if self.form == "passes":
            better, worse = self.score(chosen, chosen_mask), self.score(rejected, rejected_mask)
        elif self.form == "dim":
            pairs, masks = torch.stack([chosen, rejected], 1), torch.stack([chosen_mask, rejected_mask], 1)
            better, worse = self.score(pairs.flatten(0, 1), masks.flatten(0, 1)).view(n, 2).unbind(1)
        else:
            both = self.score(torch.cat([chosen, rejected]), torch.cat([chosen_mask, rejected_mask]))
            better, worse = both.chunk(2) if self.form == "chunk" else (both[:n], both[n:])
        return -F.logsigmoid(0.1 * (better - worse)).mean()


class Rewarded(nn.Module):
    """A Bradley-Terry reward of the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoded(outputs=1)

    def score(self, ids: Tensor, mask: Tensor) -> Tensor:
        last = mask.long().cumsum(1).argmax(1)
        return self.model(ids)[0].squeeze(-1).gather(1, last[:, None]).squeeze(1)

    def forward(self, chosen: Tensor, rejected: Tensor, chosen_mask: Tensor, rejected_mask: Tensor) -> Tensor:
        better, worse = self.score(chosen, chosen_mask), self.score(rejected, rejected_mask)
        return -F.logsigmoid(better - worse - 0.1).mean() + 0.01 * (better + worse).square().mean()


def mask(seed: int) -> Tensor:
    """Return which tokens are of the answer: none of a prompt of two, none of the padding."""
    found = torch.ones(8, TOKENS, dtype=torch.float64)
    for i in range(8):
        found[i, TOKENS - i * seed % 7 :] = 0
    found[:, :2] = 0
    return found


def pairs() -> dict[str, Tensor]:
    ids = {"chosen": whole(WORDS, TOKENS), "rejected": whole(WORDS, TOKENS, seed=9)}
    return ids | {"chosen_mask": mask(4), "rejected_mask": mask(3)}


class Clipped(nn.Module):
    """PPO's clipped ratio with the penalty of GRPO, over tokens of the whole batch, of each sample, or whitened."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.policy, self.form = Decoded(), form

    def forward(self, ids: Tensor, real: Tensor, old: Tensor, reference: Tensor, advantage: Tensor) -> Tensor:
        new, real = log_probabilities(self.policy, ids), real[:, 1:]
        if self.form == "whitened":
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-4)
        ratio, a = (new - old).exp(), advantage[:, None]
        far = (reference - new).exp() - (reference - new) - 1
        each = 0.04 * far - torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
        if self.form == "samples":
            return ((each * real).sum(-1) / real.sum(-1).clamp(min=1)).mean()
        return (each * real).sum() / real.sum()


def rollouts() -> dict[str, Tensor]:
    old, reference = normal(TOKENS - 1, seed=8) * 0.1 - 3.6, normal(TOKENS - 1, seed=7) * 0.1 - 3.6
    return {
        "ids": whole(WORDS, TOKENS),
        "real": mask(4),
        "old": old,
        "reference": reference,
        "advantage": normal(seed=6),
    }


class Ahead(nn.Module):
    """Heads that predict tokens further ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.steps = Decoded(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        last, loss = self.model(ids)[1][-1], torch.zeros((), dtype=torch.float64)
        for k, step in enumerate(self.steps, 1):
            logits = self.model.head(step(last))[:, :-k]
            loss = loss + F.cross_entropy(logits.reshape(-1, WORDS), ids[:, k:].reshape(-1)) / 2
        return loss


class Transcribed(nn.Module):
    """A CTC loss of sequences of several lengths."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.net, self.loss = mlp(FEATURES, 32, 7), nn.CTCLoss(reduction=reduction, zero_infinity=True)

    def forward(self, x: Tensor, labels: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        loss = self.loss(self.net(x).log_softmax(-1).transpose(0, 1), labels, steps, lengths)
        return loss.mean() if loss.ndim else loss


def spoken() -> dict[str, Tensor]:
    steps, lengths = torch.tensor([12, 12, 10, 9, 12, 11, 8, 12]), torch.tensor([4, 3, 2, 4, 1, 4, 3, 2])
    return {"x": normal(TOKENS, FEATURES), "labels": whole(6, 4) + 1, "steps": steps, "lengths": lengths}


class Detected(nn.Module):
    """A dictionary of losses, as torchvision's detection models return."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.kind, self.box = mlp(FEATURES, 32, 32), nn.Linear(32, CLASSES), nn.Linear(32, 4)

    def forward(self, x: Tensor, kind: Tensor, box: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x)
        return {"kind": F.cross_entropy(self.kind(h), kind), "box": F.smooth_l1_loss(self.box(h), box)}


def ragged() -> dict[str, Tensor]:
    batch = tokens()
    for i in range(8):
        batch["labels"][i, TOKENS - i :] = -100
    return batch


LOSSES: dict[str, Callable[[], Built]] = {
    "Distillation of a language model": lambda: (Taught(), tokens()),
    "z-loss": lambda: (Bounded(), ragged()),
    "Load balance": lambda: (Balanced(), tokens()),
    "Two tasks masked": lambda: two_tasks("mask"),
    "Two tasks NaN": lambda: two_tasks("nan"),
    "Deep supervision": lambda: (Supervised(), {"x": normal(FEATURES), "labels": whole(CLASSES)}),
    "Generator and critic": lambda: (Adversaries(), {"z": normal(FEATURES), "real": normal(FEATURES, seed=4)}),
    **{f"DPO {form}": lambda form=form: (Preferred(form), pairs()) for form in ("passes", "dim", "chunk", "slices")},  # type: ignore[misc]
    "Reward model": lambda: (Rewarded(), pairs()),
    **{f"PPO {form}": lambda form=form: (Clipped(form), rollouts()) for form in ("tokens", "samples", "whitened")},  # type: ignore[misc]
    "Multi-token prediction": lambda: (Ahead(), {"ids": whole(WORDS, TOKENS)}),
    **{f"CTC {how}": lambda how=how: (Transcribed(how), spoken()) for how in ("mean", "sum", "none")},  # type: ignore[misc]
}


def added(losses: dict[str, Any]) -> Tensor:
    total: Tensor = sum(losses.values())  # type: ignore[assignment]
    return total


CASES = [
    *(Made(name, "plain", make) for name, make in LOSSES.items()),
    Made(
        "Losses in a dict, summed",
        "plain",
        lambda: (Detected(), {"x": normal(FEATURES), "kind": whole(CLASSES), "box": normal(4, seed=5)}),
        loss=added,
    ),
]
