"""Rows of tokens that ranks of cp or tp share: what keeps tokens apart trains as on one process, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import PlanError
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.parity.parity_check import bulk
from tests.passes.batch.test_index_moves import (
    EXPERTS,
    RIGHT,
    SGD,
    TOGETHER,
    VOCAB,
    Body,
    Model,
    one_after_another,
)

TOKENS = 8
SORTED = [name for name in RIGHT if name in TOGETHER["back"] + TOGETHER["groups"]]
OTHERS = [
    *("weights of each row", "choices first", "repeated tokens", "masked", "scattered gates"),
    "position of a flat row",
]


def batch() -> dict[str, Tensor]:
    """Return two samples with ragged labels, and tokens with ties."""
    rng = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, VOCAB, (4, TOKENS), generator=rng) for _ in range(2))
    labels[0, :3] = -100
    return {"ids": ids, "labels": labels}


def difference(body: Body, cp: int = 2) -> float:
    """Train on cp ranks and on one process; return the largest difference of a gradient."""
    model, data = Model(body), batch()
    made = autoptd.parallelize(
        model, world=cp, cluster="dgx-h100", batch=4, seq=TOKENS, inputs={n: x[:2] for n, x in data.items()},
        precision="fp64", optimizer="sgd", optimizer_options=SGD,
        fix={"cp": cp, "dp": 1, "tp": 1, "pp": 1, "micro": 2},
    )  # fmt: skip
    found = train_in_lockstep(made, [data])
    alone = train_alone(model, [data], optimizer="sgd", optimizer_options=SGD)
    return max(differences(found.gradients, alone.gradients).values())


@pytest.mark.parametrize("names", [SORTED, OTHERS], ids=["sorted", "others"])
def test_rows_of_single_tokens_train_as_one_process(names: list[str]) -> None:
    assert difference(one_after_another(names)) < 1e-10
    assert difference(one_after_another(names), cp=4) < 1e-10


def penalties(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """A loss of flat rows, with a penalty on the router's logits and one on a product."""
    flat = x.flatten(0, 1)
    logits = m.router(flat)
    loss = torch.nn.functional.cross_entropy(m.head(x).flatten(0, 1), labels.flatten())
    return loss + 0.1 * logits.logsumexp(-1).pow(2).mean() + (flat * flat).mean()


def test_sums_over_rows_are_partial_values() -> None:
    assert difference(penalties) < 1e-10


def capacity_of_rows(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Drop tokens beyond the second of an expert, in the order of a sample's tokens."""
    chosen = torch.nn.functional.one_hot(m.router(x).argmax(-1), EXPERTS)
    return x + m.down[0, 0] * (chosen * (chosen.cumsum(1) <= 2)).sum(-1, keepdim=True)


def first_of_its_sample(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Each token reads the largest of its sample, by row numbers."""
    rows = torch.arange(x.shape[0]) * x.shape[1] + x[..., 0].argmax(1)
    return x + x.flatten(0, 1)[rows][:, None]


def product_of_neighbours(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Rows of all tokens of a sample, in the order of a sort, meet the rows in batch order."""
    order = x[..., 0].argsort(1)
    return x + (x.gather(1, order[..., None].expand(x.shape)).flatten(0, 1) * x.flatten(0, 1)).view(x.shape)


def test_a_capacity_in_the_order_of_tokens_is_counted_for_some_experts_on_each_rank() -> None:
    assert difference(capacity_of_rows) < 1e-10
    assert difference(capacity_of_rows, cp=4) < 1e-10


WRONG: dict[str, Body] = {
    "largest": first_of_its_sample,
    "sorted tokens": product_of_neighbours,
    "numbers of flat rows": RIGHT["numbers of flat rows"],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_mixes_tokens_is_refused(name: str) -> None:
    with pytest.raises(PlanError) as refused:
        difference(WRONG[name])
    assert "mixes positions" in refused.value.what and "test_" in refused.value.where


class Gated(nn.Module):
    """Two mixtures; the gates of the first are scattered into zeros, one row for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(16, 4, bias=False) for _ in range(2))
        self.up, self.down = (nn.Parameter(torch.randn(4, 16, 16) / 4) for _ in range(2))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        z = x.reshape(-1, w)
        gates, chosen = self.first(z).softmax(-1).topk(2, -1)
        gates = torch.zeros(b * s, 4, dtype=z.dtype).scatter(1, chosen, gates)
        h = nn.functional.silu(torch.einsum("tw,ewd->etd", z, self.up))
        out = (torch.einsum("etd,edw->etw", h, self.down) * gates.t()[..., None]).sum(0)
        gates, chosen = self.second(z).softmax(-1).topk(2, -1)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            out = out.index_add(0, rows, expert(z[rows]) * gates[rows, place, None])
        return (x + out.view(b, s, w)).tanh()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(12, 16), nn.Sequential(Gated(), Gated(), Gated())

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.layer_norm(self.layers(self.table(ids)), (16,)).square().mean()


@pytest.mark.parametrize("fix", [{"tp": 2}, {"dp": 2, "tp": 2, "recompute": "full"}], ids=str)
def test_zeros_for_rows_of_own_tokens_of_a_tp_rank(fix: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, data = Mixture().double(), {"ids": torch.randint(0, 12, (8, TOKENS))}
    made = autoptd.parallelize(
        model, world=fix["tp"] * fix.get("dp", 1), cluster=bulk(Cluster.load("dgx-h100")), batch=8, inputs=data,
        precision="fp64", optimizer="sgd", optimizer_options=SGD, fix={"pp": 1, "micro": 2, **fix},
    )  # fmt: skip
    assert "O" in made.plan.splits.activations.values()  # the splits that this test is about
    found = train_in_lockstep(made, [data])
    alone = train_alone(model, [data], optimizer="sgd", optimizer_options=SGD)
    assert max(differences(found.gradients, alone.gradients).values()) < 1e-10
