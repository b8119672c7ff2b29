"""Ops whose result for one sample depends on others are refused, by name and line; no others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.compile import read
from autoptd.errors import UnsupportedOp
from autoptd.ops import library as ops
from autoptd.passes.losses.statistics_form import batch_statistics

SAMPLES, TOKENS, VOCAB, WIDTH = 4, 6, 12, 8
Body = Callable[[Tensor, Tensor, Tensor], "Tensor | tuple[Tensor, Tensor]"]


class Model(nn.Module):
    """`body` of hidden states [b, s, h], tokens and labels [b, s] gives hidden states, and optionally labels."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.table, self.head = body, nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        made = self.body(self.table(ids), ids, labels)
        x, labels = made if isinstance(made, tuple) else (made, labels)
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def traced(body: Body) -> autoptd.TracedModel:
    ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
    return autoptd.trace(Model(body), inputs={"ids": ids, "labels": ids})


def attends_over_samples(x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    q = x.transpose(0, 1)[:, None]
    return F.scaled_dot_product_attention(q, q, q)[:, 0].transpose(0, 1)


def like_its_samples(x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    first = x[:, 0]
    return x + (first @ first.t() @ first)[:, None]


def uniform_samples_second(x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Begin with equal chances, whose samples are not in the first dim, as routing between capsules does."""
    chances = x.new_zeros(x.shape[1], x.shape[0], x.shape[2]).flatten(0, 1).softmax(-1)
    return x + (chances.view(x.shape[1], x.shape[0], -1) * x.transpose(0, 1)).transpose(0, 1)


def scaled_by_frequency(x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    return x + F.embedding(ids, x.new_ones(VOCAB, WIDTH), scale_grad_by_freq=True)


MIXING: list[tuple[str, Body]] = [
    ("prod works", lambda x, ids, labels: x - x.prod(0)),
    ("softmax works", lambda x, ids, labels: x.softmax(0)),
    ("softmax works", lambda x, ids, labels: x.flatten(0, 1).softmax(0).view(x.shape)),
    ("amax works", lambda x, ids, labels: x - x.amax(0)),
    ("cumsum works", lambda x, ids, labels: x.cumsum(0)),
    ("flip works", lambda x, ids, labels: x.flip(0)),
    ("roll works", lambda x, ids, labels: x.roll(1, 0)),
    ("sort works", lambda x, ids, labels: x.sort(0)[0]),
    ("select works", lambda x, ids, labels: x + x[0]),
    ("slice works", lambda x, ids, labels: x + x[:1]),
    ("matmul pairs", like_its_samples),
    ("eq pairs", lambda x, ids, labels: x * (ids[:, None, 0] == ids[None, :, 0]).sum(1)[:, None, None]),
    ("scaled_dot_product_attention works", attends_over_samples),
    ("flip works", lambda x, ids, labels: x + ids.flip(0)[..., None]),
    ("index works", lambda x, ids, labels: x + x[[0]]),
    ("any works", lambda x, ids, labels: torch.where((x > 3).any(), 2 * x, x)),
    ("all works", lambda x, ids, labels: x.masked_fill((x < 3).all(0), 0.0)),
    ("isin works", lambda x, ids, labels: x * torch.isin(ids, labels + 3)[..., None]),
    ("isin works", lambda x, ids, labels: x * torch.isin(x.round(), x.round() + 3)),
    ("tril works", lambda x, ids, labels: x * x[..., 0].tril()[..., None]),
    ("triu works", lambda x, ids, labels: x * torch.ones(ids.shape).triu()[..., None]),
    ("softmax works", lambda x, ids, labels: x * (1 + x.new_zeros(ids.shape).softmax(0)[..., None])),
    ("topk computes with the number of samples", lambda x, ids, labels: x + x.topk(len(x) // 2 + 1)[0].sum()),
    ("randint computes with the number of samples", lambda x, ids, labels: x + torch.randint(0, len(x), (1,))),
    ("embedding scales gradients by how often", scaled_by_frequency),
]  # fmt: skip


@pytest.mark.fault("samples mixed")
@pytest.mark.parametrize(("says", "body"), MIXING, ids=[f"{i}-{says}" for i, (says, _) in enumerate(MIXING)])
def test_what_mixes_samples_is_refused(says: str, body: Body) -> None:
    with pytest.raises(UnsupportedOp, match=says) as error:
        traced(body)
    assert "test_batch_independence.py" in error.value.where


ENDS: list[tuple[str, Body]] = [
    ("roll works", lambda x, ids, labels: (x, labels.roll(1, 0))),
    ("mul computes with the number of samples", lambda x, ids, labels: (x, labels * ids.shape[0])),
    ("clamp computes with the number of samples", lambda x, ids, labels: (x, labels.clamp(max=ids.shape[0]))),
]


@pytest.mark.parametrize(("says", "body"), ENDS, ids=[says for says, _ in ENDS])
def test_an_end_of_the_loss_reads_no_more_numbers_of_a_sample_than_a_bound(
    says: str, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = traced(body).folded.loss_form.row_width
    assert width >= TOKENS * VOCAB
    monkeypatch.setattr(read, "LARGEST", width - 1)
    with pytest.raises(UnsupportedOp, match=says):
        traced(body)


def test_attention_over_samples_may_be_tokens_that_come_first() -> None:
    with pytest.raises(UnsupportedOp) as error:
        traced(attends_over_samples)
    assert "batch_first=True" in error.value.fix and "[samples, tokens]" in error.value.fix


STATISTICS: list[Body] = [
    lambda x, ids, labels: x - x.mean(0, keepdim=True),
    lambda x, ids, labels: x / (1 + x.mean()),
    lambda x, ids, labels: x / (1 + x.var(0)),
    lambda x, ids, labels: x / x.norm(dim=0),
    lambda x, ids, labels: x - x.detach().sum(0),
]  # fmt: skip


@pytest.mark.parametrize("body", STATISTICS)
def test_sums_that_samples_read_are_of_the_whole_batch(body: Body) -> None:
    found = traced(body)
    sums = [n for n in found.folded.traced.graph.graph.nodes if n.target is ops.sum_over_batch]
    statistics = batch_statistics(found.folded.traced.graph)
    assert sums and statistics.count == len(sums) and statistics.evaluation == "unknown"


def last_of_each(x: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    last = (ids > 0).sum(1)
    return x[torch.arange(x.shape[0]), last], labels[:, 0]


def written_into(x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = 0
    return y


def rows_of_halves(x: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the tokens of all samples, b · ⌊s / 2⌋ rows."""
    half = x.shape[1] // 2
    return x[:, :half].flatten(0, 1).softmax(-1).view(x.shape[0], half, -1), labels[:, :half]


APART: list[Body] = [
    lambda x, ids, labels: x - x.mean((1, 2), keepdim=True),
    lambda x, ids, labels: x.cumsum(1).flip(1).roll(1, 2),
    lambda x, ids, labels: x.flatten(0, 1).softmax(-1).view(x.shape),
    lambda x, ids, labels: x @ x.transpose(1, 2) @ x,
    lambda x, ids, labels: x * (ids[:, :, None] == ids[:, None, :]).sum(1)[..., None],
    lambda x, ids, labels: x.sort(1)[0] + x.norm(dim=1, keepdim=True),
    lambda x, ids, labels: x + torch.arange(x.shape[1])[None, :, None].expand(x.shape[0], -1, -1),
    lambda x, ids, labels: x.unflatten(0, (-1, 1)).flatten(0, 1),
    lambda x, ids, labels: x.double().flatten(0, 1).type_as(x.flatten(0, 1)).view(x.shape),
    lambda x, ids, labels: x * ids.shape[0],  # the whole batch's, as in one process
    lambda x, ids, labels: x.type_as(x) * (x.shape[0] / x.shape[0]),
    lambda x, ids, labels: x.new_zeros(x.shape[1], x.shape[2]) + x,
    uniform_samples_second,
    lambda x, ids, labels: x.movedim(0, 1).contiguous().movedim(0, 1),
    lambda x, ids, labels: torch.cat((x[:, 1:], x[:, :1]), 1),
    last_of_each,
    written_into,
    rows_of_halves,
    lambda x, ids, labels: x * torch.isin(ids, torch.tensor([1, 5]))[..., None],
    lambda x, ids, labels: x.tril() * (x > 0.5).any(1, keepdim=True) * torch.ones(x.shape[1:]).tril(),
    lambda x, ids, labels: x * torch.searchsorted(x.sort(-1)[0].detach(), x.detach()),
]


@pytest.mark.parametrize("body", APART, ids=range(len(APART)))
def test_what_keeps_samples_apart_is_not(body: Body) -> None:
    assert traced(body).folded.segments


def shuffled(x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(x.size(0))]


@pytest.mark.parametrize("body", [shuffled, lambda x, ids, labels: 0.7 * x + 0.3 * x.flip(0)], ids=["shuffled", "flip"])
def test_mixed_inputs_are_to_be_mixed_by_the_data_loader(body: Body) -> None:
    with pytest.raises(UnsupportedOp) as error:
        traced(body)
    assert "let the data loader do it" in str(error.value)
