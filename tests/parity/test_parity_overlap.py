"""Products beside communication of tp: the numbers of one process, under each way to run a step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.compile.program import make_program, read_sharding
from autoptd.cost_models.cluster import Cluster
from autoptd.layout.mesh import Mesh
from autoptd.testing.parity import train_alone, train_in_lockstep
from tests.parity.parity_check import (
    Variant,
    alone,
    batches,
    bulk,
    check,
    complaints,
    parallel,
    planned,
    source,
    with_files,
)
from tests.parity.parity_models import VOCAB, WIDTH, randomised, tokens
from tests.parity.test_parity_recompute import made_for, measured, predicted, saved_by_norms

RING = Variant(bulk=True, overlap=("p2p", "tp"))
WAYS = {
    "1f1b": RING,
    "zero-bubble": replace(RING, schedule="zero-bubble", micro=1, clip_norm=0.7),
    "recomputed": replace(RING, recompute="full"),
    "zero 3": replace(RING, zero=3),
    "gathered again": replace(RING, gathers="again"),
}
MODELS = ("llama", "gpt2", "mixtral", "t5")
PIPELINES = [(name, tp, way) for name in MODELS for tp in (2, 4) for way in WAYS]
# small messages: tensors are whole on all ranks, or other splits take fewer messages than either form
WHOLE = [("llama", "1f1b"), ("llama", "zero-bubble"), ("gpt2", "recomputed"), ("t5", "zero 3"), ("t5", "zero-bubble")]
SUMS = [(n, True, way) for n in ("llama", "gpt2", "t5") for way in WAYS] + [(n, False, way) for n, way in WHOLE]
REST = [
    ("llama", Mesh(1, 4, 2), replace(RING, recompute="selective", gathers="again", loss="in_place")),
    ("llama", Mesh(1, 2, 2, cp=2), RING),
    ("gpt2", Mesh(2, 2, 2), replace(RING, schedule="zero-bubble-v", virtual=2, overlap=("dp", "p2p", "tp"), micro=1)),
]


def emitted(name: str, mesh: Mesh, variant: Variant) -> str:
    plan = planned(name, mesh, variant)
    assert plan.not_runnable == ()
    return "".join(make_program(source(name), plan, read_sharding(source(name), plan)).files.values())


@pytest.mark.parametrize(("name", "tp", "way"), PIPELINES)
def test_overlap_changes_no_number(name: str, tp: int, way: str) -> None:
    mesh = Mesh(2, tp, 1) if way == "zero 3" else Mesh(1, tp, 2)
    text = emitted(name, mesh, WAYS[way])
    assert "ring=True" in text
    assert "tp.linear_scatter" in text or name == "mixtral"  # some plans for it only sum
    assert ("again=True" in text) == (way == "gathered again")
    assert not check(name, mesh, WAYS[way], "adamw")


@pytest.mark.parametrize(("name", "mesh", "variant"), REST, ids=[f"{n}-{v.recompute}-{m}" for n, m, v in REST])
def test_overlap_beside_other_options(name: str, mesh: Mesh, variant: Variant) -> None:
    assert "ring=True" in emitted(name, mesh, variant)
    assert not check(name, mesh, variant, "adamw")


@pytest.mark.parametrize(("name", "bulk", "way"), SUMS)
def test_sums_beside_the_products_of_weights_change_no_number(name: str, bulk: bool, way: str) -> None:
    variant = replace(WAYS[way], bulk=bulk, overlap=("dp", "p2p"))
    mesh = Mesh(2, 2, 1) if way == "zero 3" else Mesh(1, 2, 2)
    text = emitted(name, mesh, variant)
    assert f"tp.{'gather_linear' if bulk else 'sum_gradient_linear'}" in text
    assert "ring=True" not in text and "tp.linear_scatter" not in text
    assert ("again=True" in text) == (bulk and way == "gathered again")
    assert not check(name, mesh, variant, "adamw")


class MadeLayer(nn.Module):
    """A layer whose weights are made from a tensor that an earlier stage computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Parameter(torch.ones(4 * WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, made: Tensor) -> Tensor:
        y = F.linear(self.norm(x), made * 2, self.up).relu()
        for _ in range(26):  # a segment of its own
            y = y.tanh() * 1.01
        return x + F.linear(y, made.t() * 3, self.down)


class MadeWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.code, self.make = nn.Parameter(torch.ones(8)), nn.Linear(8, 4 * WIDTH * WIDTH)
        self.layers = nn.ModuleList(MadeLayer() for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, made = self.table(ids), self.make(self.code).view(4 * WIDTH, WIDTH)
        for layer in self.layers:
            x = layer(x, made)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("overlap", [["p2p"], ["p2p", "tp"]], ids=["gathered", "ring"])
def test_weights_that_other_ranks_compute_have_their_gradients_in_time(overlap: list[str]) -> None:
    torch.manual_seed(0)
    model, (ids, labels) = randomised(MadeWeights()), tokens()
    batch = {"ids": ids, "labels": labels}
    asked = {
        "batch": len(ids),
        "inputs": batch,
        "precision": "fp64",
        "optimizer": "sgd",
        "cluster": bulk(Cluster.load("dgx-h100")),
    }
    fix = {"tp": 2, "pp": 2, "schedule": "zero-bubble", "micro": 2, "overlap": overlap}
    made = autoptd.parallelize(model, world=4, fix=fix, **asked)
    found, expected = train_in_lockstep(made, [batch]), train_alone(model, [batch], optimizer="sgd")
    assert not complaints("made", found, expected)


@pytest.mark.parametrize("overlap", [["p2p"], ["p2p", "tp"]], ids=["gathered", "ring"])
@pytest.mark.parametrize("gathers", ["kept", "again"])
@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize("name", ["llama", "nanogpt"])
def test_kept_bytes_are_those_predicted(name: str, policy: str, gathers: str, overlap: list[str]) -> None:
    made = made_for(name, 2, policy, gathers=gathers, overlap=overlap)
    assert "tp.gather_linear" in "".join(made.program.files.values())
    assert measured(name, made, policy) - saved_by_norms(name, policy) == predicted(name, made, policy)


@pytest.mark.fault("a bias on every rank")
@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        (r"tp\.pad\((self\.mlp\.c_proj\.bias), dim=0\)", r"tp.all_gather(\1, dim=0)"),
        (r"(mlp\.c_fc\.weight\.t\(\), self\.mlp\.c_fc\.bias)", r"\1 * 2"),
    ],
)
def test_an_edited_bias_is_seen(pattern: str, by: str) -> None:
    made = parallel("gpt2", planned("gpt2", Mesh(1, 2, 1), RING), "adamw", None)
    files = {name: re.sub(pattern, by, text) for name, text in made.program.files.items()}
    assert files != made.program.files, "nothing was planted"
    found = train_in_lockstep(with_files(made, files), batches("gpt2", 2))
    assert complaints("gpt2", found, alone("gpt2", "adamw", None, 2))
