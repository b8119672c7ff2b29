"""Heads whose logits have other readers as well, or are views: an in-place loss must not overwrite these.

A row of `HEADS` is a function of (model, hidden states [b, s, h], labels [b, s]) that gives a loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.parity_models import TOKENS, VOCAB, WIDTH, Case, randomised, tokens

Head = Callable[["Model", Tensor, Tensor], Tensor]


def entropy(logits: Tensor, labels: Tensor, **options: float) -> Tensor:
    """Return the mean cross entropy of logits [..., v]."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **options)  # type: ignore[arg-type]


def split_in_two(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """Question answering of transformers: start and end are views of one tensor, classes are positions."""
    start, end = m.pair(x).split(1, dim=-1)
    return pair_loss(start.squeeze(-1), end.squeeze(-1), labels)


def unbound(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    start, end = m.pair(x).unbind(-1)
    return pair_loss(start, end, labels)


def selected(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    both = m.pair(x)
    return pair_loss(both[..., 0], both[..., 1], labels)


def transposed_in_two(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    start, end = m.pair(x).transpose(1, 2).chunk(2, 1)
    return pair_loss(start.reshape(-1, start.shape[-1]), end.reshape(-1, end.shape[-1]), labels)


def one_of_two(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """Only one of several views is read."""
    first, _ = m.wide(x).chunk(2, -1)
    return entropy(first, labels)


def pair_loss(start: Tensor, end: Tensor, labels: Tensor) -> Tensor:
    at = labels.abs() % TOKENS
    return (F.cross_entropy(start, at[:, 0]) + F.cross_entropy(end, at[:, 1])) / 2


def two_losses(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(x)
    return entropy(logits, labels) + 0.5 * entropy(logits, labels.flip(1))


def shifted_twice(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """Two losses of the same logits: the next token, and the one after it."""
    logits = m.head(x)
    return entropy(logits[:, :-1], labels[:, 1:]) + 0.3 * entropy(logits[:, :-2], labels[:, 2:])


def shared_table(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """Two heads, the second a modification of the first one's logits."""
    logits = m.head(x)
    return entropy(logits + m.bias, labels) + entropy(logits, labels.flip(1))


def capped(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return entropy(5 * torch.tanh(m.head(x) / 5), labels)


def capped_only(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return entropy(torch.tanh(m.head(x)), labels)


def exponential(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return entropy(torch.exp(m.head(x) / 10).view(-1, VOCAB), labels)


def normalised(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """A norm saves its operand, which is also the operand of the first loss."""
    logits = m.head(x)
    return entropy(logits, labels) + entropy(F.layer_norm(logits, (VOCAB,)), labels)


def squashed(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return entropy(torch.sigmoid(m.head(x)), labels) + entropy(torch.softmax(m.head(x), -1), labels)


def z_loss_after(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(x)
    return entropy(logits, labels) + 1e-2 * torch.logsumexp(logits, -1).pow(2).mean()


def z_loss_before(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(x)
    z = torch.logsumexp(logits, -1).pow(2).mean()
    return entropy(logits, labels) + 1e-2 * z


def penalty_after(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """Linear in the logits: no op saves them for backward, but they are read after the loss."""
    logits = m.head(x)
    return entropy(logits, labels) + 0.1 * logits.mean()


def weighed_by_detached(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """The logits are read without gradient."""
    logits = m.head(x)
    loss = entropy(logits, labels)
    return loss + 0.1 * (x.sum(-1) * logits.detach().amax(-1)).mean()


def distilled(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(x)
    teacher = torch.softmax(m.frozen(x.detach()), -1)
    soft = F.kl_div(torch.log_softmax(logits / 2, -1), teacher, reduction="none").sum(-1).mean()
    return entropy(logits, labels) + 2 * soft


def smoothed(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(x)
    return entropy(logits, labels, label_smoothing=0.1) + 0.1 * entropy(logits, labels)


def cast(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """A cast to the logits' own dtype is not a copy."""
    logits = m.head(x)
    return entropy(logits.double(), labels) + 0.1 * entropy(logits.to(x.dtype), labels.flip(1))


def choice(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """Multiple choice: a score per token, reshaped to one row per sample, and read a second time."""
    scores = m.pair(x)[..., :1]
    rows = scores.view(-1, labels.shape[1])
    return F.cross_entropy(rows, labels[:, 0].abs() % TOKENS) + 0.1 * scores.pow(2).mean()


def spread(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """One row of logits expanded to all tokens of a sample: elements share memory."""
    return entropy(m.head(x.mean(1, keepdim=True)).expand(-1, labels.shape[1], -1), labels)


def turned(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """A reshape that copies or not, depending on the number of samples."""
    logits = m.head(x)
    rows = logits.transpose(0, 1).reshape(-1, VOCAB)
    return F.cross_entropy(rows, labels.t().reshape(-1)) + 0.1 * logits.pow(2).mean()


def by_einsum(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return entropy(torch.einsum("bsh,vh->bsv", x, m.head.weight), labels)


def straight(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """The logits have no other reader."""
    return entropy(m.head(x) / 1.5, labels)


def received(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """The hidden states are the logits."""
    return entropy(x, labels % WIDTH * (labels >= 0) - 100 * (labels < 0))


HEADS: dict[str, Head] = {
    head.__name__: head
    for head in (
        split_in_two, unbound, selected, transposed_in_two, one_of_two, two_losses, shifted_twice, shared_table, capped,
        capped_only, exponential, normalised, squashed, z_loss_after, z_loss_before, penalty_after,
        weighed_by_detached, distilled, smoothed, cast, choice, spread, turned, by_einsum, straight, received,
    )
}  # fmt: skip


class Model(nn.Module):
    """Layers whose results are saved, and a head. Without layers nothing repeats, and a head may be recomputed."""

    def __init__(self, head: Head, layers: int = 2) -> None:
        super().__init__()
        self.run = head
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.pair = nn.Linear(WIDTH, 2)
        self.wide = nn.Linear(WIDTH, 2 * VOCAB)
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.frozen = nn.Linear(WIDTH, VOCAB).requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.tanh(x + layer(x))
        return self.run(self, x, labels)


def headed(name: str, layers: int = 2) -> Case:
    """Return a model with the head of this name."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(Model(HEADS[name], layers)), {"ids": ids, "labels": labels})
