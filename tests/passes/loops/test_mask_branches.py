"""Branches on whether a mask has anything, or all: left out of the program where they change nothing without rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.errors import UnsupportedOp
from autoptd.passes.loops import turn_parameters
from autoptd.passes.rewrites import masked_rows
from tests.passes.interpret import assert_same, assert_unchanged, in_microbatches, normalised, whole
from tests.passes.normalise.test_normalise import batch, model_of

Body = Callable[[nn.Module, Tensor], Tensor]


def some(h: Tensor, above: float = 0.3) -> Tensor:
    return h.detach()[..., 0] > above


def rows_written(self: nn.Module, h: Tensor) -> Tensor:
    """Several masks, one of them of few rows: some microbatches have none."""
    for above in (0.1, 0.9):
        mask = some(h, above)
        if mask.any():
            h = h.clone()
            h[mask] = self.second.bias
    return h


def rows_computed(self: nn.Module, h: Tensor) -> Tensor:
    mask, rest = some(h, 0.6), some(h, -0.2)
    if mask.any():
        h = h.index_put((mask,), self.second(h[mask]))
    if not torch.all(rest):
        h = torch.where(~rest.unsqueeze(-1), self.second(h), h)
    return h


def filled(self: nn.Module, h: Tensor) -> Tensor:
    """Masks made of others, and a branch that is taken if nothing is left out."""
    mask = some(h)
    for i in range(3):
        part = mask & (h.detach()[..., 1] > 0.2 * i)
        if torch.any(part):
            h = h.masked_fill((part & mask)[..., None], 0.5)
        if part.all():
            h = h.masked_fill(~part[..., None], 0.1)
    return h


def checked(self: nn.Module, h: Tensor) -> Tensor:
    if some(h).all():
        raise ValueError("no row is left")
    return h


@pytest.mark.parametrize("body", [rows_written, rows_computed, filled, checked])
def test_branches_on_rows_are_taken(body: Body) -> None:
    assert_unchanged(model_of(body), batch())


def scaled(self: nn.Module, h: Tensor) -> Tensor:
    return h * 2 if some(h).any() else h


def others_filled(self: nn.Module, h: Tensor) -> Tensor:
    mask = some(h)
    return h.masked_fill(~mask[..., None], 0.0) if mask.any() else h


def mask_changed(self: nn.Module, h: Tensor) -> Tensor:
    """The rows of the write are not those that the branch has asked for."""
    mask = some(h)
    if mask.any():
        mask[:, :2] = True
        h = h.masked_fill(mask[..., None], 0.0)
    return h


def spread(self: nn.Module, h: Tensor) -> Tensor:
    """A write that changes a shape, whatever it selects."""
    mask, bias = some(h), self.second.bias
    if mask.any():
        bias = bias.masked_fill(mask[..., None], 0.0)
    return h * bias.sum() / 8


def another_mask(self: nn.Module, h: Tensor) -> Tensor:
    mask, other = some(h), some(h, 0.5)
    return h.masked_fill(mask[..., None], 0.0) if other.any() else h


@pytest.mark.fault("turns without rows")
@pytest.mark.parametrize("body", [scaled, others_filled, mask_changed, spread, another_mask])
def test_branches_that_change_something_without_rows_are_refused(body: Body) -> None:
    with pytest.raises(UnsupportedOp, match="depends on whether a mask selects any rows") as error:
        normalised(model_of(body), batch())
    assert "(test_normalise.py:" in error.value.where and error.value.fix


@pytest.mark.parametrize("body", [mask_changed, spread])
def test_what_is_refused_would_be_wrong(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"x": batch()["x"] * 1e-3}
    model = model_of(body)
    model.first.bias.data.fill_(-1.0)  # nothing is above 0.3
    monkeypatch.setattr(turn_parameters, "prove_turns", lambda *args: ())
    with pytest.raises(AssertionError):
        assert_unchanged(model, data)


# ---- means over rows, or a number where there are none ----

Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES, SAMPLES, TOKENS, WIDTH = 5, 6, 4, 8


class Tagger(nn.Module):
    """`loss` of scores [b, s, c] and labels [b, s]."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.loss = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.layer(x).tanh()), labels)


def first_or_nothing(z: Tensor, labels: Tensor) -> Tensor:
    """Gather the first tokens whose label is known, as DeBERTa's classifier does; a constant without any."""
    z, labels = z[:, 0], labels[:, 0]
    here = (labels >= 0).nonzero()
    if here.size(0) > 0:
        rows = torch.gather(z, 0, here.expand(here.size(0), z.size(1)))
        return F.cross_entropy(rows, torch.gather(labels, 0, here.view(-1)))
    return torch.tensor(0).to(z)


def added_if_any(z: Tensor, labels: Tensor) -> Tensor:
    known, high, loss = labels >= 0, labels > 2, z.square().mean()
    if known.any():
        loss = loss + F.cross_entropy(z[known], labels[known], label_smoothing=0.1)
    other = torch.tensor(0.0, dtype=z.dtype)
    if high.any():
        other = z[high].tanh().mean() * 0.5
    return loss + other


def ignored_rows(z: Tensor, labels: Tensor) -> Tensor:
    """Some of the selected rows have a label that does not count."""
    known, loss = labels >= -1, z.square().mean()
    if known.any():
        loss = loss + F.cross_entropy(z[known], labels[known], ignore_index=-1)
    return loss


def losses_of_rows(z: Tensor, labels: Tensor) -> Tensor:
    """No branch, and losses of all tokens in one dim."""
    each = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-1)
    return (each.view(labels.shape) * torch.arange(TOKENS)).sum() / (labels >= 0).sum().clamp(min=1)


def labelled(name: str) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    labels = torch.randint(-1, CLASSES, (SAMPLES, TOKENS), generator=rng)
    labels[:, 0] = torch.tensor([1, -1, 3, -1, 0, 4])
    none = {"all": 0, "half": SAMPLES // 2, "none": SAMPLES}[name]
    labels[:none] = -1  # of the first microbatches
    return {"x": torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64, generator=rng), "labels": labels}


@pytest.mark.parametrize("labels", ["all", "half", "none"])
@pytest.mark.parametrize("loss", [first_or_nothing, added_if_any, ignored_rows, losses_of_rows])
def test_means_of_rows_that_a_branch_asks_for(loss: Loss, labels: str) -> None:
    model, data = Tagger(loss).double(), labelled(labels)
    traced = normalised(model, labelled("all"))
    found = [in_microbatches(model, traced, data, pieces) for pieces in ([SAMPLES], [1, 3, 2])]
    if labels == "none" and loss is first_or_nothing:  # one process has no gradient at all
        assert all(not x.loss and not any(g.any() for g in x.gradients.values()) for x in found)
    elif labels == "none" and loss is ignored_rows:
        assert all(x.loss.isnan() for x in (*found, whole(model, data)))
    else:
        for x in found:
            assert_same(x, whole(model, data))


def mean_outside(z: Tensor, labels: Tensor) -> Tensor:
    """Compute a mean that is no number without rows, whatever the branch says."""
    known = labels >= 0
    loss = F.cross_entropy(z[known], labels[known])
    return loss + 1 if known.any() else loss


def other_number(z: Tensor, labels: Tensor) -> Tensor:
    known = labels >= 0
    return F.cross_entropy(z[known], labels[known]) if known.any() else torch.tensor(1.0, dtype=z.dtype)


def one_more(z: Tensor, labels: Tensor) -> Tensor:
    known = labels >= 0
    return F.cross_entropy(z[known], labels[known]) + 1 if known.any() else torch.tensor(0.0, dtype=z.dtype)


@pytest.mark.parametrize("loss", [mean_outside, other_number, one_more])
def test_other_numbers_without_rows_are_refused(loss: Loss) -> None:
    with pytest.raises(UnsupportedOp, match="depends on whether a mask selects any rows"):
        normalised(Tagger(loss).double(), labelled("all"))


@pytest.mark.fault("turns without rows")
def test_a_mean_of_no_rows_that_is_no_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_rows.MaskedRows, "_or_one", lambda self, like, count, mask: count)
    with pytest.raises(AssertionError):
        test_means_of_rows_that_a_branch_asks_for(added_if_any, "none")
