"""An in-place cross entropy: the numbers of one process, and no logits are overwritten that have other readers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.compile.program import make_program, read_sharding
from autoptd.errors import RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.passes.analysis import overwriting
from autoptd.testing.parity import train_alone, train_in_lockstep
from tests.parity.parity_check import OPTIONS, Variant, check, complaints, planned, source
from tests.parity.parity_models import TOKENS, VOCAB, WIDTH, randomised, tokens

CUBE = Mesh(2, 2, 2)
IN_PLACE = Variant(bulk=True, loss="in_place")
CASES = [
    ("nanogpt", CUBE, IN_PLACE),
    ("nanogpt", Mesh(1, 1, 8), replace(IN_PLACE, schedule="zero-bubble")),
    ("nanogpt", CUBE, replace(IN_PLACE, recompute="ops", zero=3)),
    ("llama", Mesh(2, 4, 1), replace(IN_PLACE, recompute="full")),
    ("llama", Mesh(2, 2, 1, cp=2), IN_PLACE),
    ("nanogpt", Mesh(4, 1, 2), replace(IN_PLACE, recompute="selective")),
    ("bert", Mesh(1, 4, 2), IN_PLACE),
    ("vit", Mesh(4, 2, 1), IN_PLACE),
    ("odd_mlp", Mesh(8, 1, 1), IN_PLACE),
]


@pytest.mark.parametrize(("name", "mesh", "variant"), CASES, ids=[f"{n}-{v.recompute}-{m}" for n, m, v in CASES])
def test_a_loss_in_place_changes_no_number(name: str, mesh: Mesh, variant: Variant) -> None:
    plan = planned(name, mesh, variant)
    text = "".join(make_program(source(name), plan, read_sharding(source(name), plan)).files.values())
    assert plan.not_runnable == () and text.count("in_place=True") == 1 and "clone()" not in text
    assert not check(name, mesh, variant, "sgd")


@pytest.mark.parametrize(("tp", "loss", "says"), [(2, "auto", "in_place"), (2, "kept", "kept"), (1, "auto", "kept")])
def test_a_cut_vocabulary_s_loss_is_in_place_by_itself(tp: int, loss: str, says: str) -> None:
    plan = planned("nanogpt", Mesh(2, tp, 1), Variant(bulk=True, loss=loss))
    text = "".join(make_program(source("nanogpt"), plan, read_sharding(source("nanogpt"), plan)).files.values())
    assert plan.method.loss == says and text.count("in_place=True") == (says == "in_place")
    assert text.count("vocab_cross_entropy") == (tp > 1)


class Twice(nn.Module):
    """Two losses of the same logits, which the op before them saves as well if `capped`."""

    def __init__(self, capped: bool) -> None:
        super().__init__()
        self.table, self.head, self.capped = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False), capped

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(ids))
        logits = torch.tanh(logits) if self.capped else logits
        after = F.cross_entropy(logits.flatten(0, 1), labels.flip(1).flatten())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.5 * after


def trained(capped: bool) -> tuple[str, list[str]]:
    """Return the program's text, and what is wrong with its training."""
    torch.manual_seed(0)
    ids, labels = tokens()
    model, batch = randomised(Twice(capped)), {"ids": ids, "labels": labels}
    made = autoptd.parallelize(
        model, world=4, cluster="dgx-h100", batch=len(ids), seq=TOKENS, inputs={n: x[:2] for n, x in batch.items()},
        precision="fp64", optimizer="sgd", optimizer_options=OPTIONS["sgd"],
        fix={"dp": 2, "tp": 2, "pp": 1, "micro": 2, "loss": "in_place"},
    )  # fmt: skip
    alone = train_alone(model, [batch], optimizer="sgd", optimizer_options=OPTIONS["sgd"])
    return "".join(made.program.files.values()), complaints("twice", train_in_lockstep(made, [batch]), alone)


@pytest.mark.fault("logits read after their loss")
@pytest.mark.parametrize("capped", [False, True])
def test_logits_that_others_read_are_copied(capped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text, wrong = trained(capped)
    assert not wrong
    # the second loss may overwrite them unless the op before saves them
    assert (text.count("in_place=True"), text.count(".clone()")) == (2, 2 if capped else 1)
    monkeypatch.setattr(overwriting, "writes_logits", lambda *_, **__: True)
    with pytest.raises(RuntimeFault, match="modified by an inplace operation"):
        trained(capped)


class Weighed(nn.Module):
    """A loss of rows, each with a weight and a power of its own, over more classes than are worth gathering."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 100_000, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = self.head(self.table(ids))
        rows = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=1)
        return (rows * weights * (1 - torch.exp(-rows)).square()).sum() / weights.sum()


def weighed() -> tuple[str, list[str]]:
    """Return the program's text, and what is wrong with its training."""
    torch.manual_seed(0)
    ids, labels = tokens()
    batch = {"ids": ids, "labels": labels % VOCAB, "weights": torch.rand(ids.shape, dtype=torch.float64)}
    made = autoptd.parallelize(
        model := randomised(Weighed()), world=4, cluster="dgx-h100", batch=len(ids), seq=TOKENS,
        inputs={n: x[:2] for n, x in batch.items()}, precision="fp64", optimizer="sgd",
        optimizer_options=OPTIONS["sgd"], fix={"dp": 2, "tp": 2, "pp": 1, "micro": 2, "splits": {"head.weight": "S0"}},
    )  # fmt: skip
    alone = train_alone(model, [batch], optimizer="sgd", optimizer_options=OPTIONS["sgd"])
    return "".join(made.program.files.values()), complaints("weighed", train_in_lockstep(made, [batch]), alone)


def test_rows_of_a_loss_over_a_cut_vocabulary() -> None:
    text, wrong = weighed()
    assert not wrong and text.count("ops.vocab_row_cross_entropy(") == 1
