"""Samples that are normalised by statistics over the batch: batch norm, and what people write by hand."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import InputsError, PlanError, UnsupportedOp
from autoptd.explain.plan import method
from autoptd.export.torch_program import torch_program
from autoptd.layout.mesh import Mesh
from autoptd.ops.dp_axis import Replicas
from autoptd.runtime.batch_counts import BatchSums
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from autoptd.testing.parity import train_alone, train_in_lockstep
from autoptd.verification.verdict import verify_plan
from tests.parity.parity_check import (
    TOLERANCE,
    Variant,
    alone,
    batches,
    case,
    check,
    complaints,
    parallel,
    planned,
    source,
    with_files,
)

STEPS = 3


def one(mesh: Mesh, **options: Any) -> Variant:
    """Return a variant with one microbatch of the 16 samples."""
    return Variant(bulk=True, micro=16 // mesh.dp, **options)


RESIDUAL = [
    (Mesh(dp=2), {}),
    (Mesh(dp=4), {"zero": 2}),
    (Mesh(dp=8), {"zero": 3}),
    (Mesh(dp=2, tp=2), {"zero": 0}),
    (Mesh(dp=2, pp=2), {"recompute": "full"}),
    (Mesh(dp=2, tp=2, pp=2), {"recompute": "ops", "clip_norm": 0.5}),
]
WAYS = [
    *(("normed_residual", mesh, options) for mesh, options in RESIDUAL),
    ("normed_mlp", Mesh(dp=8), {"zero": 0}),
    ("normed_mlp", Mesh(dp=4, tp=2), {"zero": 3}),
    ("normed_mlp", Mesh(dp=2, pp=4), {"schedule": "zero-bubble"}),
    ("normed_target", Mesh(dp=2, tp=2), {"zero": 0}),
    ("normed_target", Mesh(dp=2, pp=2), {"recompute": "full"}),
    ("normed_tokens", Mesh(dp=4), {"zero": 3, "recompute": "full"}),
    ("normed_tokens", Mesh(dp=2, cp=2, tp=2), {"zero": 2, "recompute": "selective"}),
    ("normed_tokens", Mesh(cp=4, pp=2), {"context": "ulysses"}),
    ("normed_pooled", Mesh(dp=2, cp=2), {}),
    ("normed_pooled", Mesh(cp=2, pp=2), {"schedule": "gpipe"}),
    ("normed_by_hand", Mesh(dp=8), {}),
    ("normed_by_hand", Mesh(dp=2, cp=2), {"recompute": "full"}),
    ("normed_by_hand", Mesh(dp=2, tp=2, pp=2), {"zero": 0}),
    ("normed_unread", Mesh(dp=2), {}),
    ("normed_unread", Mesh(dp=2, tp=2, pp=2), {"recompute": "full"}),
    ("normed_volumes", Mesh(dp=4, pp=2), {"recompute": "full"}),
    ("normed_volumes", Mesh(dp=2, tp=2), {}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), WAYS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WAYS)])
def test_normalised_as_on_one_process(name: str, mesh: Mesh, options: dict[str, Any]) -> None:
    assert not check(name, mesh, one(mesh, **options), "sgd", STEPS)


def test_tp_splits_the_channels_of_a_norm() -> None:
    mesh = Mesh(dp=2, tp=2)
    splits = planned("normed_residual", mesh, one(mesh)).splits.parameters
    assert "S0" in {placement for name, placement in splits.items() if "bn1" in name}


def test_the_plan_and_the_program_say_what_is_summed() -> None:
    mesh = Mesh(dp=2)
    plan = planned("normed_mlp", mesh, one(mesh, recompute="full"))
    assert plan.statistics == 6 and plan.schedule.microbatches == 1
    assert any("normalised by 6 sums over the batch (batch_norm)" in note for note in plan.notes)
    latency_s = Cluster.load("dgx-h100").levels[0].latency_s
    slow = planned("normed_mlp", mesh, replace(one(mesh), bulk=False)).predicted
    assert slow.time_s["dp_communication"] > 2 * 6 * latency_s
    assert "6 sums over the batch" in method(plan)
    text = "\n".join(parallel("normed_mlp", plan, "sgd").program.files.values())
    line = "keep(dp.batch_sum, total)  # over all samples: all-reduce over dp; backward all-reduce"
    assert f"total_of_batch = {line}" in text and "dp.in_training(variance, " in text
    with pytest.raises(PlanError, match="6 sums over the batch, which no exported program computes"):
        torch_program(plan, case("normed_mlp").model)


@pytest.mark.fault("statistics of a microbatch")
def test_several_microbatches_are_refused_and_one_is_chosen() -> None:
    with pytest.raises(UnsupportedOp, match="one microbatch per step") as error:
        planned("normed_residual", Mesh(dp=2), Variant(micro=2))
    assert "bn1" in error.value.where or "norm" in error.value.where
    chosen = autoptd.plan(source("normed_residual"), world=4, batch=16, cluster="dgx-h100", precision="fp64")
    assert chosen.schedule.microbatches == 1 and chosen.micro == 16 // chosen.mesh.dp
    several = chosen.model_copy(update={"schedule": chosen.schedule.model_copy(update={"microbatches": 2})})
    with pytest.raises(UnsupportedOp, match="one microbatch per step"):
        parallel("normed_residual", several, "sgd")


def uneven(name: str = "normed_residual") -> list[float]:
    """Return the losses of steps whose ranks have 8 and 3 samples, minus those of one process."""
    found, mesh = case(name), Mesh(dp=2)
    made = parallel(name, planned(name, mesh, one(mesh)), "sgd")
    shares = [{n: x[:8] for n, x in found.batch.items()}, {n: x[8:11] for n, x in found.batch.items()}]
    plain = train_alone(
        found.model,
        [{n: x[:11] for n, x in found.batch.items()}] * STEPS,
        optimizer="sgd",
        optimizer_options={"lr": 0.05, "momentum": 0.9},
    )
    values = made.initial_values()

    def body(communicators: Communicators) -> list[float]:
        mine = copy.copy(made)
        mine.start(communicators, values)
        losses = [float(mine.train_step(shares[communicators.dp.rank])) for _ in range(STEPS)]
        var = mine.state_dict()["norm.running_var"]
        off = float((var - plain.state["norm.running_var"]).norm())
        return [off, *(a - b for a, b in zip(losses, plain.losses, strict=True))]

    return run_lockstep(made.layout.mesh, body)[0]


def test_ranks_with_fewer_samples_weigh_less() -> None:
    assert max(map(abs, uneven())) < TOLERANCE


@pytest.mark.fault("uneven ranks counted alike")
def test_statistics_that_weigh_ranks_alike_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Replicas.batch_sum

    def averaged(self: Replicas, x: Tensor) -> Tensor:
        """Sums as if every rank had as many samples as the average rank."""
        own = 8 if self.rank == 0 else 3
        return known(self, x * 5.5 / own)

    monkeypatch.setattr(Replicas, "batch_sum", averaged)
    assert max(map(abs, uneven())) > 1e-6


def evaluated(name: str, model: nn.Module, batch: dict[str, Tensor]) -> list[tuple[float, float]]:
    """Return each rank's evaluated loss, and that of one process, after a step; ranks have several microbatches."""
    mesh = Mesh(dp=2, pp=2)
    made = parallel(name, planned(name, mesh, one(mesh)), "sgd")
    twice, values = {n: torch.cat((x, x.flip(0))) for n, x in batch.items()}, made.initial_values()

    def body(communicators: Communicators) -> tuple[float, float]:
        mine = copy.copy(made)
        mine.start(communicators, values)
        rank = communicators.dp.rank
        mine.train_step({n: x.tensor_split(2)[rank] for n, x in batch.items()})
        ended = float(mine.eval_step({n: x[:4] if rank else x[4:] for n, x in twice.items()}))
        plain = copy.deepcopy(model).eval()
        plain.load_state_dict(mine.state_dict())
        return ended, float(plain(**twice))

    return run_lockstep(made.layout.mesh, body)


def test_evaluation_takes_running_statistics() -> None:
    found = case("normed_residual")
    for mine, theirs in evaluated("normed_residual", found.model, dict(found.batch)):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.fault("running statistics while training")
def test_evaluation_by_statistics_of_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replicas, "in_training", lambda self, x, running: x)
    found = case("normed_residual")
    assert any(
        mine != pytest.approx(theirs, rel=1e-6)
        for mine, theirs in evaluated("normed_residual", found.model, dict(found.batch))
    )


@pytest.mark.fault("running statistics while training")
def test_training_by_running_statistics_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replicas, "in_training", lambda self, x, running: running)
    assert check("normed_residual", Mesh(dp=2), one(Mesh(dp=2)), "sgd", STEPS)


class WithoutRunning(nn.Module):
    """A norm that takes the statistics of the batch in evaluation too, after one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.known, self.batch = nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.batch(F.gelu(self.known(self.linear(x))))), label)


def test_evaluation_without_running_statistics_takes_those_of_the_evaluated_batch() -> None:
    torch.manual_seed(0)
    model = WithoutRunning().double()
    batch = {"x": torch.randn(8, 6, dtype=torch.float64), "label": torch.arange(8) % 3}
    inputs = {n: x[:2] for n, x in batch.items()}
    made = autoptd.parallelize(model, world=2, inputs=inputs, batch=8, precision="fp64", fix={"dp": 2}, optimizer="sgd")
    values = made.initial_values()
    plain = copy.deepcopy(model).eval()

    def body(communicators: Communicators) -> float:
        mine = copy.copy(made)
        mine.start(communicators, values)
        ended = float(mine.eval_step({n: x.tensor_split(2)[communicators.dp.rank] for n, x in batch.items()}))
        with pytest.raises(InputsError, match="microbatches"):
            mine.eval_step(batch)
        return ended

    assert run_lockstep(made.layout.mesh, body) == pytest.approx([float(plain(**batch))] * 2, rel=TOLERANCE)


class OfInputs(nn.Module):
    """A norm of inputs, whose statistics are counts of the batch, known before the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)), label)


def test_norms_of_inputs_take_any_microbatches() -> None:
    torch.manual_seed(0)
    model = OfInputs().double()
    batch = {"x": torch.randn(16, 6, dtype=torch.float64), "label": torch.arange(16) % 3}
    inputs, options = {n: x[:2] for n, x in batch.items()}, {"lr": 0.1}
    fix = {"dp": 2, "micro": 2}
    made = autoptd.parallelize(
        model, world=2, inputs=inputs, batch=16, precision="fp64", fix=fix, optimizer="sgd", optimizer_options=options
    )
    assert made.plan.statistics == 0 and made.plan.schedule.microbatches == 4
    found = train_in_lockstep(made, [batch] * 2)
    plain = train_alone(model, [batch] * 2, optimizer="sgd", optimizer_options=options)
    assert not complaints("normed_mlp", found, plain)
    values, known = made.initial_values(), copy.deepcopy(model).eval()

    def body(communicators: Communicators) -> float:
        mine = copy.copy(made)
        mine.start(communicators, values)
        return float(mine.eval_step({n: x.tensor_split(2)[communicators.dp.rank] for n, x in batch.items()}))

    assert run_lockstep(made.layout.mesh, body) == pytest.approx([float(known(**batch))] * 2, rel=TOLERANCE)


def test_one_element_per_channel_has_no_variance() -> None:
    """Raise as torch does, before a running variance is NaN."""
    model = OfInputs().double()
    batch = {"x": torch.randn(4, 6, dtype=torch.float64), "label": torch.arange(4) % 3}
    made = autoptd.parallelize(model, world=1, inputs=batch, batch=4, precision="fp64", fix={"dp": 1, "micro": 4})
    with pytest.raises(InputsError, match="one element per channel"):
        made.train_step({n: x[:1] for n, x in batch.items()})
    assert made.state_dict()["norm.running_var"].isfinite().all()


def test_evaluation_of_statistics_by_hand_is_refused() -> None:
    made = parallel("normed_by_hand", planned("normed_by_hand", Mesh(), one(Mesh())), "sgd")

    def body(communicators: Communicators) -> None:
        mine = copy.copy(made)
        mine.start(communicators, made.initial_values())
        with pytest.raises(InputsError, match="computed by hand, which no evaluation step takes"):
            mine.eval_step(batches("normed_by_hand", 1)[0])

    run_lockstep(made.layout.mesh, body)


def test_verify_agrees() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2)
    found = case("normed_residual")
    plan = planned("normed_residual", mesh, one(mesh, recompute="full"))
    inputs = {n: x[:2] for n, x in found.batch.items()}
    assert verify_plan(plan, found.model, inputs=inputs).agrees


def test_verify_finds_gradients_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, found = Mesh(dp=2), case("normed_residual")
    monkeypatch.setattr(Replicas, "batch_sum", lambda self, x: self.all_reduce(x))
    inputs = {n: x[:2] for n, x in found.batch.items()}
    assert not verify_plan(planned("normed_residual", mesh, one(mesh)), found.model, inputs=inputs).agrees


def test_statistics_are_in_float32_at_least_and_blocks_compile() -> None:
    """Compare losses in bf16, and of compiled blocks, with those in float32."""
    found = case("normed_residual")
    batch = {n: x.float() if x.is_floating_point() else x for n, x in found.batch.items()}
    losses = []
    for precision, compiled in (("fp32", False), ("bf16", False), ("fp32", "aot_eager")):
        made = autoptd.parallelize(
            copy.deepcopy(found.model).float(),
            world=2,
            inputs={n: x[:2] for n, x in batch.items()},
            batch=16,
            precision=precision,
            fix={"dp": 2},
            compile=compiled,
        )
        if precision == "bf16":
            assert "total = torch.sum(to" in "".join(made.program.files.values())
        losses.append(train_in_lockstep(made, [batch] * 2).losses)
    assert losses[1] == pytest.approx(losses[0], rel=3e-2) and losses[2] == pytest.approx(losses[0], rel=1e-5)


# ---- planted faults ----


def faulty() -> list[str]:
    wrong = check("normed_residual", Mesh(dp=2, pp=2), one(Mesh(dp=2, pp=2), recompute="full"), "sgd", STEPS)
    return wrong + check("normed_by_hand", Mesh(dp=2), one(Mesh(dp=2)), "sgd", STEPS)


def _alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replicas, "batch_sum", lambda self, x: x * self.size)


def _own_gradient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replicas, "batch_sum", lambda self, x: self.all_reduce(x))


def _updated_from_one_rank(patch: pytest.MonkeyPatch) -> None:
    known = Trainer._finish

    def finish(self: Trainer, share: Tensor, sums: BatchSums) -> Tensor:
        sums.own *= self.communicators.dp.size * (self.communicators.dp.rank == 0)
        return known(self, share, sums)

    patch.setattr(Trainer, "_finish", finish)


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(_alone, marks=pytest.mark.fault("statistics of a rank")),
        pytest.param(_own_gradient, marks=pytest.mark.fault("gradients of a rank's statistics")),
        pytest.param(_updated_from_one_rank, marks=pytest.mark.fault("running statistics of a rank")),
    ],
)
def test_planted(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert faulty()


@pytest.mark.fault("the other variance")
@pytest.mark.parametrize(
    ("text", "by"),
    [(r"sums\[8:16\] / \w+", "sums[8:16] / counts[0]"), (r"(squares\w* / )(counts\[0\])", r"\1(\2 - 1)")],
    ids=["running", "own"],
)
def test_the_other_variance_is_found(text: str, by: str) -> None:
    name, mesh = "normed_residual", Mesh(dp=2)
    made = parallel(name, planned(name, mesh, one(mesh)), "sgd")
    files = {path: re.sub(text, by, source) for path, source in made.program.files.items()}
    assert files != dict(made.program.files)
    found = train_in_lockstep(with_files(made, files), batches(name, STEPS))
    assert complaints(name, found, alone(name, "sgd", None, STEPS))
