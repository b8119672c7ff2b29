"""Inputs that forward writes to: a program reads what one process reads, and the caller's tensor stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autoptd
from autoptd.errors import InputsError, RuntimeFault
from autoptd.passes.normalise import view_writes
from autoptd.passes.trace import trace as tracing
from tests.parity.parity_check import TOLERANCE, step_off_by

WORDS, WIDTH, TOKENS = 20, 8, 6
Body = Callable[["Tagger", Tensor, Tensor, Tensor], Tensor]


class Tagger(nn.Module):
    """`body` of the model, tokens [b, s], labels [b, s] and positions [b, 1] gives the loss."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.words, self.head = body, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        return self.body(self, ids, labels, positions)

    def hidden(self, ids: Tensor) -> Tensor:
        h = self.words(ids.clone())
        for layer in self.layers:
            h = h + layer(h).tanh()
        return h


def clamped(m: Tagger, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    """A head that answers questions: positions behind the last token are ignored."""
    score, place = m.hidden(ids).sum(-1), positions.squeeze(-1)
    place.clamp_(0, score.size(1))
    return F.cross_entropy(score, place, ignore_index=score.size(1))


def written_early(m: Tagger, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    """Tokens and labels of the first layer and the last are those before the write, and after it."""
    first, before = m.words(ids.clone()), labels.clone()
    ids[:, 1:].add_(1).remainder_(WORDS)
    labels[labels < 4] = -100
    h = first + m.hidden(ids)
    labels.transpose(0, 1)[:2].clamp_(min=1)
    return F.cross_entropy(m.head(h).mT, labels) + F.cross_entropy(m.head(m.layers[0](h)).mT, before)


def in_parts(m: Tagger, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    left, right = ids.chunk(2, 1)
    left.copy_(right)
    return F.cross_entropy(m.head(m.hidden(ids)).mT, labels.masked_fill_(labels < 4, -100))


def in_each_layer(m: Tagger, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    """Each layer reads what the layer before it has written."""
    h = m.words(ids)
    for layer in m.layers:
        h = h + layer(h).tanh() * (labels.clone() / WORDS)[..., None]
        labels.add_(positions)
    return F.cross_entropy(m.head(h).mT, labels.remainder(WORDS))


def batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, WORDS, (6, TOKENS), generator=rng) for _ in range(2))
    return {"ids": ids, "labels": labels, "positions": torch.tensor([[1], [99], [0], [5], [-3], [6]])}


def off_by(body: Body, **fix: Any) -> float:
    """Return the largest difference of a step's tensors from those of one process."""
    torch.manual_seed(0)
    return step_off_by(Tagger(body).double(), batch(), **fix)


BODIES = [clamped, written_early, in_parts, in_each_layer]
FIXES = [{"dp": 2, "tp": 2, "micro": 1}, {"pp": 2, "tp": 2, "micro": 2, "recompute": "full"}]


@pytest.mark.parametrize("fix", FIXES, ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_what_is_written_is_read_as_on_one_process(body: Body, fix: dict[str, Any]) -> None:
    assert off_by(body, **fix) <= TOLERANCE


@pytest.mark.fault("an input read as it was given")
@pytest.mark.parametrize("body", BODIES)
def test_a_write_that_is_left_out_is_seen(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(graph: fx.Graph, inputs: Any) -> set[str]:
        """Copy the inputs, and take out all writes."""
        written = copied(graph, inputs)
        for node in [n for n in graph.nodes if view_writes.is_write(n)]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        return written

    copied = tracing.copy_written_inputs
    monkeypatch.setattr(tracing, "copy_written_inputs", without)
    with pytest.raises((AssertionError, RuntimeFault)):  # the second of a position behind the last token
        assert off_by(body, **FIXES[0]) <= TOLERANCE


def parallel(body: Body) -> autoptd.Parallel:
    ask: dict[str, Any] = {"world": 1, "cluster": "dgx-h100", "batch": 6, "precision": "fp64", "optimizer": "sgd"}
    return autoptd.parallelize(Tagger(body).double(), inputs={n: x[:2] for n, x in batch().items()}, **ask)


def test_the_callers_tensor_stays_as_it_is() -> None:
    made, given = parallel(written_early), batch()
    made.train_step(given)
    assert all(torch.equal(x, given[name]) for name, x in batch().items())
    notes = [note for note in made.plan.notes if "forward writes to the input" in note]
    assert [note.split()[5] for note in notes] == ["ids:", "labels:"]


def overlapping(data: dict[str, Tensor]) -> dict[str, Tensor]:
    text = torch.cat((data["ids"], data["labels"][:, -1:]), 1)
    return {**data, "ids": text[:, :-1], "labels": text[:, 1:]}


@pytest.mark.fault("one input written, another read")
@pytest.mark.parametrize("change", [overlapping, lambda data: {**data, "labels": data["ids"]}])
def test_a_written_input_that_shares_its_memory_is_refused(change: Any) -> None:
    made = parallel(clamped)
    made.train_step(change(batch()))  # neither is written to
    with pytest.raises(InputsError, match="the model writes to 'ids', which shares its memory with 'labels'") as error:
        parallel(written_early).train_step(change(batch()))
    assert "ids.clone(" in error.value.fix


def test_a_written_input_that_is_strided_is_refused() -> None:
    data = batch()
    with pytest.raises(InputsError, match="the model writes to 'ids', which is not contiguous"):
        parallel(in_parts).train_step({**data, "ids": data["ids"].t().contiguous().t()})
