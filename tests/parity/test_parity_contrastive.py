"""Contrastive losses whose encoder runs once over two views, one after another: the gradients of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.errors import UnsupportedOp
from autoptd.passes.losses import whole_batch
from autoptd.passes.rewrites import equal_selections
from autoptd.testing.parity import train_in_lockstep
from tests.parity.parity_check import TOLERANCE
from tests.parity.test_parity_losses import made, off


def filled_diagonal(z: Tensor, ids: Tensor) -> Tensor:
    n, b = z.size(0), ids.size(0)
    alike = (z @ z.T / 0.5).masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(alike, torch.cat([torch.arange(b, n), torch.arange(b)]))


def without_the_diagonal(z: Tensor, ids: Tensor) -> Tensor:
    """Take positives and negatives out of the similarities by masks (github.com/sthalles/SimCLR)."""
    labels = torch.cat([torch.arange(ids.size(0)) for _ in range(2)])
    labels, own = (labels[None] == labels[:, None]).float(), torch.eye(z.size(0), dtype=torch.bool)
    labels = labels[~own].view(z.size(0), -1)
    alike = (z @ z.T)[~own].view(z.size(0), -1)
    positives = alike[labels.bool()].view(z.size(0), -1)
    negatives = alike[~labels.bool()].view(z.size(0), -1)
    logits = torch.cat([positives, negatives], dim=1)
    return F.cross_entropy(logits / 0.5, torch.zeros(logits.size(0), dtype=torch.long))


def diagonals_beside(z: Tensor, ids: Tensor) -> Tensor:
    """Take positives from the diagonals of the pairs of views."""
    b, n = ids.size(0), z.size(0)
    alike = torch.exp(F.cosine_similarity(z[:, None], z[None], dim=2) / 0.5)
    positives = torch.cat([torch.diag(alike, b), alike.diagonal(-b)])
    others = alike.masked_select((torch.ones_like(alike) - torch.eye(n)).bool()).view(n, -1)
    return -torch.log(positives / others.sum(1)).mean()


def rolled_diagonal(z: Tensor, ids: Tensor) -> Tensor:
    own = torch.eye(z.size(0), dtype=torch.bool)
    alike = (z @ z.T).masked_fill_(own, -9e15) / 0.5
    return (alike.logsumexp(-1) - alike[own.roll(shifts=z.size(0) // 2, dims=0)]).mean()


def written_mask(z: Tensor, ids: Tensor) -> Tensor:
    """Select by a mask that is written in place, in parts."""
    n, alike = z.size(0), z @ z.T
    mask = torch.ones((n, n), dtype=torch.bool).fill_diagonal_(0)
    mask[: n // 2, n // 2 :] = mask[n // 2 :, : n // 2] = mask[: n // 2, : n // 2]
    return alike[mask].reshape(n, -1).exp().sum(1).log().mean()


def same_class(z: Tensor, ids: Tensor) -> Tensor:
    """Pull samples of one class together (Khosla et al. 2020, Supervised Contrastive Learning)."""
    features = torch.stack(z.split([ids.size(0), ids.size(0)]), dim=1)
    z = torch.cat(torch.unbind(features, dim=1), dim=0)
    alike = torch.eq(ids[:, None], ids[None]).float().repeat(2, 2)
    others = torch.scatter(torch.ones_like(alike), 1, torch.arange(z.size(0)).view(-1, 1), 0)
    logits = z @ z.T / 0.5
    logits = logits - logits.max(dim=1, keepdim=True)[0].detach()
    chances = logits - (logits.exp() * others).sum(1, keepdim=True).log()
    return -((alike * others * chances).sum(1) / (alike * others).sum(1)).mean()


class TwoViews(nn.Module):
    """An encoder with batch norm, over both views of every sample."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss
        self.encode = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 7))

    def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        return self.loss(F.normalize(self.encode(torch.cat([x, y])), dim=1), ids)


def views(samples: int = 6) -> dict[str, Tensor]:
    x, y = torch.randn(2, samples, 8, dtype=torch.float64)
    return {"x": x, "y": y, "ids": torch.arange(samples) % 3}


LOSSES = [filled_diagonal, without_the_diagonal, diagonals_beside, rolled_diagonal, written_mask, same_class]


@pytest.mark.parametrize("mesh", [{"micro": 3}, {"micro": 3, "tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_as_on_one_process(loss: Callable[[Tensor, Tensor], Tensor], mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, batch = TwoViews(loss).double(), views()
    assert off(made(model, batch, fix=mesh), model, batch) <= TOLERANCE


class Plain(TwoViews):
    """An encoder without statistics, so that a step may have several microbatches."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(loss)
        self.encode = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 7))


class Momentum(TwoViews):
    """An encoder and its slow copy, which computes without gradients, and has running statistics of its own."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(loss)
        self.slow = copy.deepcopy(self.encode).requires_grad_(False)
        self.predict = nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        views = torch.cat([x, y])
        q1, q2 = self.predict(self.encode(views)).chunk(2)
        with torch.no_grad():
            k1, k2 = self.slow(views).chunk(2)
        return self._of_pairs(q1, k2) + self._of_pairs(q2, k1)

    def _of_pairs(self, q: Tensor, k: Tensor) -> Tensor:
        """Compare each query with the keys of all samples (Chen et al. 2021, MoCo v3)."""
        logits = torch.einsum("nc,mc->nm", [F.normalize(q, dim=1), F.normalize(k, dim=1)]) / 0.2
        return F.cross_entropy(logits, torch.arange(logits.size(0)))


def test_a_slow_copy_updates_its_running_statistics_without_gradients() -> None:
    torch.manual_seed(0)
    model, batch = Momentum(same_class).double(), views()
    parallel = made(model, batch, fix={"micro": 3, "tp": 2})
    assert off(parallel, model, batch) <= TOLERANCE
    after = train_in_lockstep(parallel, [batch]).state["slow.1.running_mean"]
    assert after.abs().max() > 1e-3


@pytest.mark.parametrize("loss", [without_the_diagonal, same_class], ids=lambda loss: loss.__name__)
def test_over_ragged_microbatches(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = Plain(loss).double(), views()
    assert off(made(model, batch), model, batch) <= TOLERANCE


@pytest.mark.fault("samples misplaced")
def test_views_taken_for_neighbours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read rows (view, sample) as (sample, view)."""
    torch.manual_seed(0)
    right = whole_batch.write_op

    def swapped(graph, like, target, args, shape, *more):  # type: ignore[no-untyped-def]
        if len(shape) == 4:
            shape = (1, shape[1], shape[0] * shape[2], shape[3])
            args = (args[0], list(shape))
        return right(graph, like, target, args, shape, *more)

    monkeypatch.setattr(whole_batch, "write_op", swapped)
    with pytest.raises(UnsupportedOp, match="reshape works across samples"):
        made(Plain(filled_diagonal).double(), views())


def up_to_six(z: Tensor, ids: Tensor) -> Tensor:
    n = z.size(0)
    return (z @ z.T)[(torch.arange(n) < 12).expand(n, n)].view(n, -1).exp().sum(1).log().mean()


@pytest.mark.fault("rows that are not selected")
def test_another_number_of_elements_than_planned_stops_the_step() -> None:
    assert max(equal_selections._TRIED) == 6
    torch.manual_seed(0)
    model, batch = Plain(up_to_six).double(), views(8)
    with pytest.raises(RuntimeError, match="another number of elements in some row"):
        train_in_lockstep(made(model, batch), [batch])
    batch = views()
    assert off(made(model, batch), model, batch) <= TOLERANCE
