"""Rows that a mask selects: losses, means and layers of them are as on one process, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import RuntimeFault, UnsupportedOp
from autoptd.passes.rewrites import masked_rows
from tests.parity.parity_check import TOLERANCE, step_off_by

WORDS, WIDTH, TOKENS = 20, 8, 6
Body = Callable[["Tagger", Tensor, Tensor, Tensor], Tensor]


class Tagger(nn.Module):
    """`body` of the model, hidden states [b, s, h], tokens and labels [b, s] gives the loss."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.words, self.layer = body, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.one = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.body(self, torch.tanh(self.layer(self.words(ids))), ids, labels)


def losses(m: Tagger, h: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    known, flat = labels != -100, (labels != -100).flatten()
    rows, z = flat.nonzero().squeeze(-1), m.head(h)
    score, wanted = m.one(h).squeeze(-1), labels / WORDS
    shifted = labels[:, 1:] != -100
    return (
        F.cross_entropy(z[known], labels[known], label_smoothing=0.1)
        + F.cross_entropy(z[:, :-1][shifted].contiguous().view(-1, WORDS), labels[:, 1:][shifted].view(-1))
        + F.cross_entropy(z.flatten(0, 1)[rows], labels.flatten().index_select(0, rows), reduction="sum") / known.sum()
        + F.mse_loss(score[known], wanted[known].to(h.dtype))
        + F.binary_cross_entropy(score.sigmoid()[known], wanted[known].to(h.dtype), reduction="sum") / labels.numel()
        + F.logsigmoid(score.masked_select(known)).mean()
        - (F.one_hot(labels[known], WORDS) * m.head(h[known]).log_softmax(-1)).sum(-1).mean()
    )


def layers(m: Tagger, h: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    some, few = ids > 3, ids[:, 0] > 9
    rows, made = m.layer(h[some]), h.clone()
    made[some] = rows
    here, column = torch.where(some)
    spread = (rows.mT @ rows).square().sum() / some.sum()
    chosen = h[:, 1][few]
    size = (h[here, column] ** 2).sum() / rows.shape[0] + chosen.abs().mean(0).sum() + chosen.view(-1).mean()
    return F.cross_entropy(m.head(made).mT, labels) + spread + rows.log_softmax(-1).mean((0, 1)) + size


def attention(m: Tagger, h: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """An attention of rows that the mask leaves out must not see nothing: its gradient would be no number."""
    some, made = ids > 3, h.clone()
    rows = m.layer(h[some]).view(-1, 2, WIDTH // 2)
    scores = (rows @ rows.mT).masked_fill(~some[some].view(-1, 1, 1), -torch.inf)
    made[some] = (scores.softmax(-1) @ rows).view(-1, WIDTH)
    return F.cross_entropy(m.head(made).mT, labels)


def ends(m: Tagger, h: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    rows = m.layer(h[ids == ids.amax(1, keepdim=True)])
    return F.cross_entropy(m.head(rows.view(len(ids), -1, WIDTH)[:, -1, :]), labels[:, -1].relu())


def again(m: Tagger, h: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Two selections, each by a mask of its own that is computed alike."""
    score, wanted, wide = m.one(h).squeeze(-1), (labels / WORDS).to(h.dtype), ids > 3
    return (
        F.mse_loss(score[labels != -100], wanted[labels != -100])
        + F.mse_loss(score.masked_select(~wide), wanted.masked_select(~wide))
        + F.l1_loss(h.masked_select(wide.unsqueeze(-1)), h.square().masked_select(wide.unsqueeze(-1)))
        + F.l1_loss(score[torch.where(wide & (labels > 0))], wanted[torch.where(wide & (labels > 0))])
        + F.l1_loss(score[(1 - wide.long()).bool()], wanted[(1 - wide.long()).bool()])
        + F.kl_div(h[wide].log_softmax(-1), h.detach().tanh()[wide].softmax(-1), reduction="batchmean")
    )


def written(m: Tagger, h: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """One value for all places where a mask is true; and a mask that is written to, which no earlier one equals."""
    some, made = ids > 3, h.clone()
    made[torch.where(some)] = 0.5
    before = h.detach()[some].mean()
    some[:, 0] = True
    return F.cross_entropy(m.head(made).mT, labels) + h[some].square().mean() + before + h[ids > 3].mean()


def batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, WORDS - 1, (6, TOKENS), generator=rng) for _ in range(2))
    ids[range(6), [1, 5, 2, 0, 4, 3]] = WORDS - 1
    labels[:, :2] = -100
    labels[1:3] = -100  # a whole microbatch without labels
    return {"ids": ids, "labels": labels}


def off_by(body: Body, **fix: int) -> float:
    """Return the largest difference of a step's tensors from those of one process."""
    torch.manual_seed(0)
    return step_off_by(Tagger(body).double(), batch(), **fix)


@pytest.mark.parametrize("fix", [{"dp": 2, "tp": 2, "micro": 1}, {"pp": 2, "tp": 2, "micro": 2}], ids=str)
@pytest.mark.parametrize("body", [losses, layers, attention, ends, again, written])
def test_selected_rows_are_as_on_one_process(body: Body, fix: dict[str, int]) -> None:
    assert off_by(body, **fix) <= TOLERANCE


def test_a_sample_with_two_rows_where_each_has_one_is_refused() -> None:
    """One process would take a row of another sample where the numbers of rows differ."""
    data = batch()
    data["ids"][0, :2] = data["ids"].max()
    with pytest.raises(RuntimeFault, match="selects another number of rows"):
        step_off_by(Tagger(ends).double(), data, dp=2, tp=2, micro=1)


REFUSED: list[tuple[str, Body]] = [
    ("softmax works across rows", lambda m, h, ids, labels: h[ids > 3].softmax(0).square().sum()),
    ("amax works across rows", lambda m, h, ids, labels: h[ids > 3].amax(0).sum()),
    ("that different masks select", lambda m, h, ids, labels: F.cross_entropy(m.head(h)[ids > 3], labels[labels > 3])),
    ("uniform draws random numbers", lambda m, h, ids, labels: (h[ids > 3] * torch.rand_like(h[ids > 3])).mean()),
    ("reads the number of rows", lambda m, h, ids, labels: h[ids > 3].square().sum() * h[ids > 3].shape[0] ** 2),
    ("reads the number of rows", lambda m, h, ids, labels: (h[ids > 3] * torch.arange(len(h[ids > 3]))[:, None]).sum()),
    ("do more than to select", lambda m, h, ids, labels: (h[few := ids > 3] * few.nonzero()[:, :1]).sum()),
    ("is not known of rows", lambda m, h, ids, labels: F.triplet_margin_loss(h[ids > 3], h[ids > 3], h[ids > 3] * 2)),
    ("slice works across rows", lambda m, h, ids, labels: h[ids > 3][:2].sum()),
]


@pytest.mark.parametrize(("says", "body"), REFUSED, ids=range(len(REFUSED)))
def test_what_depends_on_the_order_or_number_of_rows_is_refused(says: str, body: Body) -> None:
    with pytest.raises(UnsupportedOp, match=says) as error:
        autoptd.trace(Tagger(body), inputs=batch())
    assert error.value.where and error.value.fix


@pytest.mark.fault("rows that are not selected")
@pytest.mark.parametrize("planted", ["where", "_per_row"])
def test_rows_that_are_not_selected_are_seen(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"where": lambda self, like, x, *_: x, "_per_row": lambda self, like, total, *_: total}[planted]
    monkeypatch.setattr(masked_rows.MaskedRows, planted, wrong)
    with pytest.raises((AssertionError, RuntimeFault)):
        assert off_by(losses, dp=2, tp=2, micro=1) <= TOLERANCE
