"""Operands that tp gathers for products and re-gathers in backward: the numbers of one process, fewer bytes saved."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BloomConfig, BloomForCausalLM

import autoptd
from autoptd.compile.program import make_program, read_sharding
from autoptd.cost_models.cluster import Cluster
from autoptd.layout.mesh import Mesh
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.parity.parity_check import Variant, bulk, check, complaints, planned, source, with_files
from tests.parity.parity_models import VOCAB, WIDTH, randomised, tokens
from tests.parity.test_parity_dropout import is_alone, trained
from tests.parity.test_parity_recompute import KINDS, made_for, measured, predicted, saved_by_norms

CUBE = Mesh(2, 2, 2)
AGAIN = Variant(bulk=True, gathers="again")
NOT_BY_SEQUENCE = ("vit",)  # tp does not divide their sequence
CASES = [
    ("gpt2", CUBE, replace(AGAIN, zero=3)),
    ("gpt2", Mesh(1, 2, 1), replace(AGAIN, micro=16)),  # weights are gathered as well
    ("llama", CUBE, replace(AGAIN, schedule="zero-bubble")),
    ("llama", Mesh(2, 4, 1), replace(AGAIN, recompute="selective", loss="in_place")),
    ("llama", Mesh(1, 2, 2, cp=2), AGAIN),
    ("bert", Mesh(1, 4, 2), replace(AGAIN, recompute="ops", micro=1)),
    ("vit", Mesh(2, 4, 1), replace(AGAIN, zero=2)),
    ("nanogpt", CUBE, replace(AGAIN, schedule="interleaved", virtual=2, micro=1)),
    ("nanogpt", Mesh(4, 2, 1), replace(AGAIN, recompute="full")),
    ("t5", Mesh(2, 2, 1), AGAIN),
    ("oddities", Mesh(2, 4, 1), AGAIN),
]


@pytest.mark.parametrize(("name", "mesh", "variant"), CASES, ids=[f"{n}-{v.recompute}-{m}" for n, m, v in CASES])
def test_gathering_again_changes_no_number(name: str, mesh: Mesh, variant: Variant) -> None:
    plan = planned(name, mesh, variant)
    text = "".join(make_program(source(name), plan, read_sharding(source(name), plan)).files.values())
    assert plan.not_runnable == ()
    # under "ops", beside the blocks
    assert ("again=True" in text) == (variant.recompute != "full" and name not in NOT_BY_SEQUENCE)
    assert not check(name, mesh, variant, "adamw")


class Sums(nn.Module):
    """A tensor that tp gathers is read by a product, and by an addition, which is not a call in the emitted source."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        y = self.up(x) + x.sin()
        return F.cross_entropy(self.down(y).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("up", ["S0", "S1", "B"])
@pytest.mark.parametrize("table", ["S0", "S1"])
def test_what_is_no_call_runs_again(table: str, up: str) -> None:
    torch.manual_seed(0)
    model, (ids, labels) = randomised(Sums()), tokens()
    batch = {"ids": ids, "labels": labels}
    fix = {"tp": 4, "gathers": "again", "splits": {"table.weight": table, "up.weight": up}}
    made = autoptd.parallelize(model, world=4, batch=16, inputs=batch, precision="fp64", optimizer="sgd", fix=fix)
    found, expected = train_in_lockstep(made, [batch]), train_alone(model, [batch], optimizer="sgd")
    assert not complaints("sums", found, expected)


def test_views_that_the_rest_reads_are_results_of_what_runs_again() -> None:
    """Keys that are merged with samples in one line of the user's, and transposed in its next part, as in Bloom."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, use_cache=False)  # drops nothing
    model, (ids, labels) = randomised(BloomForCausalLM(config)), tokens()
    batch = {"input_ids": ids, "labels": labels}
    fix = {"tp": 2, "dp": 2, "gathers": "again", "zero": 0, "micro": 2}
    made = autoptd.parallelize(
        model, world=4, batch=16, inputs=batch, precision="fp64", optimizer="sgd", fix=fix,
        cluster=bulk(Cluster.load("dgx-h100")),
    )  # fmt: skip
    text = "".join(made.program.files.values())
    assert "recompute(core" in text
    found, expected = train_in_lockstep(made, [batch]), train_alone(model, [batch], optimizer="sgd")
    assert max(differences(found.gradients, expected.gradients).values()) < 1e-6  # the loss is in float32


def test_what_is_not_done_again_drops_the_same() -> None:
    assert is_alone("bert_dropout", trained("bert_dropout", CUBE, AGAIN))


@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize("name", KINDS)
def test_kept_bytes_are_those_predicted(name: str, policy: str) -> None:
    made, usual = (made_for(name, 2, policy, gathers=gathers) for gathers in ("again", "kept"))
    found = measured(name, made, "none") - saved_by_norms(name, policy)
    assert found == predicted(name, made, policy) < predicted(name, usual, policy)


@pytest.mark.fault("kept after all")
@pytest.mark.parametrize(
    ("name", "pattern", "by"),
    [
        ("llama", ", again=True", ""),  # the gathered operand is saved
        ("summed", r"recompute\(core, ", "core("),
        ("summed", r"spare\(F\.linear, ", "keep(F.linear, "),  # results are saved beside those that others save
    ],
)
def test_an_edited_gather_is_seen_in_bytes(name: str, pattern: str, by: str) -> None:
    made = made_for(name, 2, "none", gathers="again")
    files = {n: re.sub(pattern, by, text) for n, text in made.program.files.items()}
    files = {n: text.replace("import recompute, spare", "import keep, recompute, spare") for n, text in files.items()}
    assert files != made.program.files, "nothing was planted"
    found = measured(name, with_files(made, files), "none")
    assert found != predicted(name, made, "none") + saved_by_norms(name, "none")
