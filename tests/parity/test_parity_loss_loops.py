"""Python loops over samples that add up losses: one pass over the batch, with the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.errors import AutoptdError
from autoptd.passes.trace.trace import trace
from tests.parity.parity_check import TOLERANCE
from tests.parity.test_parity_losses import made, off

Loss = Callable[[Tensor, Tensor], Tensor]


def by_number(z: Tensor, y: Tensor) -> Tensor:
    loss = 0.0
    for i in range(z.size(0)):
        loss = loss + F.cross_entropy(z[i], y[i])
    return loss / z.size(0)  # type: ignore[return-value]


def by_pairs(z: Tensor, y: Tensor) -> Tensor:
    """Average over labels of every sample, some of which have one that is ignored."""
    losses = []
    for a, b in zip(z, y, strict=True):
        b = torch.stack([b, torch.where(b > 1, -100, b)])
        losses.append(F.cross_entropy(torch.stack([a, a.flip(0)]), b, label_smoothing=0.1))
    return sum(losses) / len(losses)  # type: ignore[return-value]


def two_terms(z: Tensor, y: Tensor) -> Tensor:
    """Add two terms in each turn, to one that is there already."""
    loss = z.square().mean()
    for i in range(len(z)):
        loss = loss + F.mse_loss(z[i], F.one_hot(y[i], 3).to(z.dtype))
        loss += F.smooth_l1_loss(z[i], z[i].detach().flip(0), reduction="sum")
    return loss / float(len(z))


def joined(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(a[None], b[None]) + a.max() for a, b in zip(z, y, strict=True)]).mean()


def sorted_errors(z: Tensor, y: Tensor) -> Tensor:
    """Take the Lovász hinge of every sample (Berman et al. 2018)."""
    loss = torch.zeros((), dtype=z.dtype)
    for scores, label in zip(z, y, strict=True):
        truth = F.one_hot(label, 3).to(z.dtype)
        errors, order = torch.sort(1 - scores * (2 * truth - 1), dim=0, descending=True)
        truth = truth[order]
        jaccard = 1 - (truth.sum() - truth.cumsum(0)) / (truth.sum() + (1 - truth).cumsum(0))
        steps = jaccard.clone()
        steps[1:3] = jaccard[1:3] - jaccard[0:-1]
        loss = loss + torch.dot(F.relu(errors), steps)
    return loss / z.size(0)


def slices(z: Tensor, y: Tensor) -> Tensor:
    losses = [F.cross_entropy(z[i : i + 1], y[i : i + 1]) for i in range(z.size(0))]
    return sum(losses) / len(losses)  # type: ignore[return-value]


def own_constants(z: Tensor, y: Tensor) -> Tensor:
    """Make an equal constant in every turn."""
    hidden = torch.tensor([False, True, False])
    return torch.stack([torch.where(hidden, a, torch.tensor(-3.0, dtype=z.dtype)).logsumexp(0) for a in z]).mean()


LOOPS = [slices, own_constants, by_number, by_pairs, two_terms, joined, sorted_errors]


class Classifier(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss, self.body = loss, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.body(x), y)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, 8, dtype=torch.float64), "y": torch.tensor([0, 2, 1, 1, 0, 2])}


@pytest.mark.parametrize("loss", LOOPS, ids=lambda loss: loss.__name__)
def test_as_on_one_process(loss: Loss) -> None:
    torch.manual_seed(0)
    model, given = Classifier(loss).double(), batch()
    assert off(made(model, given), model, given) <= TOLERANCE


def test_a_divisor_and_the_length_of_a_list_stay_sizes() -> None:
    traced = trace(Classifier(by_pairs).double(), {n: x[:2] for n, x in batch().items()}, precision="fp64")
    assert traced.loops and [str(s) for s in traced.sizes] == ["b"]


def some(z: Tensor, y: Tensor) -> Tensor:
    loss = z.square().mean()
    for i in range(2):
        loss = loss + F.cross_entropy(z[i], y[i])
    return loss


def weighed(z: Tensor, y: Tensor) -> Tensor:
    loss = z.square().mean()
    for i in range(z.size(0)):
        loss = loss + i * F.cross_entropy(z[i], y[i])
    return loss


@pytest.mark.parametrize("loss", [some, weighed], ids=lambda loss: loss.__name__)
def test_turns_of_some_samples_or_their_places_are_refused(loss: Loss) -> None:
    """Labels of two samples, each read by its place, may as well be a table for all."""
    with pytest.raises(AutoptdError):
        made(Classifier(loss).double(), batch())
