"""An in-place loss beside other readers of its logits: the numbers of one process, whoever they are."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.compile.make_plan import make_plan
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.read import read_model
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.parallel import Parallel
from autoptd.passes.analysis import overwriting
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.search.constraints.options import read_constraints
from autoptd.testing.parity import Trained, train_alone, train_in_lockstep
from tests.parity.logit_heads import HEADS, headed
from tests.parity.parity_check import OPTIONS, complaints
from tests.parity.parity_models import VOCAB, WIDTH, randomised, tokens

MIXED = {"split_in_two", "unbound", "selected", "transposed_in_two", "choice"}  # classes are positions, so not over cp
OPS: tuple[int, dict[str, Any]] = (0, {"tp": 2, "recompute": "ops"})  # (layers, fix); recomputes the heads
IN_TURN: list[tuple[int, dict[str, Any]]] = [
    (2, {"dp": 2, "tp": 2, "sequence_parallel": False}),
    (2, {"cp": 2}),
    (0, {"recompute": "full", "micro": 4, "compile": "aot_eager"}),
    (2, {"dp": 2, "pp": 2, "zero": 3}),
    (0, {"tp": 2, "recompute": "full", "compile": "eager"}),
    (2, {"tp": 2, "gathers": "again"}),
    (2, {"pp": 2, "schedule": "zero-bubble"}),
    (0, {"tp": 2, "recompute": "selective"}),
]
TURNS = [(name, *IN_TURN[i % len(IN_TURN)]) for i, name in enumerate(HEADS)]
CASES = [(name, *OPS) for name in HEADS] + [turn for turn in TURNS if "cp" not in turn[2] or turn[0] not in MIXED]
CASES.append(("received", 2, {"tp": 2, "gathers": "again"}))


@cache
def source(name: str, layers: int) -> TracedModel:
    found = headed(name, layers)
    inputs = {n: x[:2] for n, x in found.batch.items()}
    return read_model(found.model, inputs=inputs, loss=None, seq=None, precision="fp64", progress=Silent())


@cache
def alone(name: str, layers: int) -> Trained:
    found = headed(name, layers)
    return train_alone(found.model, [found.batch], optimizer="sgd", optimizer_options=OPTIONS["sgd"])


def made(name: str, layers: int, fix: dict[str, Any]) -> Parallel:
    """Plan with an in-place loss and these constraints."""
    origin, backend = source(name, layers), fix.get("compile", "")
    fix = {"micro": 2, "loss": "in_place", **{n: x for n, x in fix.items() if n != "compile"}}
    world = 1
    for axis in ("dp", "tp", "pp", "cp"):
        world *= fix.get(axis, 1)
    plan: Plan = make_plan(
        origin,
        world=world,
        cluster=Cluster.load("dgx-h100"),
        batch=16,
        precision="fp64",
        optimizer="sgd",
        constraints=read_constraints(fix),
        progress=Silent(),
    )
    program = make_program(origin, plan, read_sharding(origin, plan))
    result = Parallel(plan, origin, program, "sgd", OPTIONS["sgd"], None, 0)
    result._backend = backend
    return result


@pytest.mark.parametrize(("name", "layers", "fix"), CASES, ids=[f"{n}-{how}" for n, _, how in CASES])
def test_no_reader_of_logits_finds_them_overwritten(name: str, layers: int, fix: dict[str, Any]) -> None:
    parallel = made(name, layers, fix)
    batch = headed(name, layers).batch
    assert not complaints(name, train_in_lockstep(parallel, [batch]), alone(name, layers))


COPIES = {"capped": 0, "by_einsum": 0, "straight": 0, "distilled": 0, "two_losses": 1, "z_loss_after": 1, "spread": 1}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_made_for_other_readers(name: str) -> None:
    text = "".join(made(name, 0, {"tp": 2}).program.files.values())
    assert text.count(".clone()") == COPIES[name]


class Dropped(nn.Module):
    """Dropout that is off returns its operand itself, as in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.drop = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), nn.Dropout(0.2)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(ids))
        loss = nn.functional.cross_entropy(self.drop(logits).flatten(0, 1), labels.flatten())
        return loss + 0.1 * logits.mean()


@pytest.mark.fault("logits read after their loss")
@pytest.mark.parametrize("name", ["penalty_after", "weighed_by_detached"])
def test_a_reader_that_keeps_nothing_would_read_probabilities(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overwriting, "writes_logits", lambda *_, **__: True)
    wrong = complaints(name, train_in_lockstep(made(name, 0, {}), [headed(name, 0).batch]), alone(name, 0))
    assert any("loss of step 0" in each for each in wrong)


def test_an_evaluation_reads_what_a_dropout_handed_on() -> None:
    torch.manual_seed(0)
    ids, labels = tokens()
    model, batch = randomised(Dropped()), {"ids": ids, "labels": labels}
    inputs = {n: x[:2] for n, x in batch.items()}
    fix = {"tp": 2, "micro": 2, "loss": "in_place"}
    parallel = autoptd.parallelize(
        model, world=2, cluster="dgx-h100", batch=16, inputs=inputs, precision="fp64", optimizer="sgd", fix=fix
    )
    values = parallel.initial_values()

    def body(communicators: Communicators) -> float:
        mine = copy.copy(parallel)
        mine.start(communicators, values)
        return float(mine.eval_step(batch))

    expected = float(model.eval()(**batch).detach())
    assert run_lockstep(parallel.layout.mesh, body) == pytest.approx([expected] * 2, rel=1e-12)
