"""Buffers that forward updates have, after each step, the values that one process gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import AutoptdError, PlanError, RuntimeFault
from autoptd.explain.plan import method
from autoptd.export.torch_program import torch_program
from autoptd.layout.mesh import Mesh
from autoptd.ops.stage import Stage
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.batch_counts import BatchSums, write
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from autoptd.verification.verdict import verify_plan
from tests.parity.parity_check import TOLERANCE, Variant, batches, case, check, parallel, planned
from tests.parity.parity_models import WIDTH

BULK = Variant(bulk=True, micro=2)
STEPS = 3
WAYS = [
    ("updating_bias", Mesh(dp=4, tp=2), BULK),
    ("updating_bias", Mesh(dp=2, cp=2, pp=2, ep=4), replace(BULK, zero=3, recompute="full")),
    ("updating_bias", Mesh(dp=4, tp=2, ep=4), replace(BULK, zero=2, micro=1)),
    ("updating_bias", Mesh(dp=2, tp=2, cp=2, ep=4, etp=1), replace(BULK, recompute="ops")),
    ("updating_bias", Mesh(dp=4, pp=2, ep=2), replace(BULK, schedule="zero-bubble", recompute="ops")),
    ("updating_bias", Mesh(dp=2, tp=2, pp=2, ep=2), replace(BULK, zero=0, schedule="interleaved", virtual=2)),
    ("updating_bias", Mesh(dp=4, pp=2, ep=2), replace(BULK, schedule="zero-bubble-v", virtual=2, zero=2)),
    ("updating_balanced", Mesh(dp=2, tp=2, pp=2), replace(BULK, recompute="full")),
    ("updating_balanced", Mesh(dp=2, cp=2, pp=2), replace(BULK, schedule="zero-bubble", zero=3)),
    ("updating_averages", Mesh(dp=2, tp=2, pp=2, ep=2), replace(BULK, recompute="full")),
    ("updating_averages", Mesh(dp=2, tp=2, cp=2), replace(BULK, zero=3)),
    ("updating_averages", Mesh(dp=4, pp=2), replace(BULK, schedule="zero-bubble")),
    ("updating_tables", Mesh(dp=2, cp=2, pp=2), BULK),
    ("updating_tables", Mesh(tp=2, dp=2, pp=2), replace(BULK, schedule="interleaved", virtual=2, micro=4)),
    ("updating_tables", Mesh(dp=4, pp=2), replace(BULK, zero=2, recompute="selective")),
    ("updating_views", Mesh(dp=2, tp=2, cp=2), replace(BULK, recompute="full")),
    ("updating_shared", Mesh(dp=2, tp=4), replace(BULK, recompute="full")),
    ("updating_shared", Mesh(dp=4, tp=2), replace(BULK, zero=3)),
    ("updating_spectral", Mesh(dp=2, tp=2, pp=2), replace(BULK, recompute="full")),
    ("updating_spectral", Mesh(dp=4, cp=2), replace(BULK, zero=3)),
    ("updating_codes", Mesh(dp=2, tp=2, pp=2), replace(BULK, recompute="full", zero=2)),
    ("updating_codes", Mesh(dp=2, tp=2, cp=2), replace(BULK, zero=3)),
    ("updating_teacher", Mesh(dp=2, pp=2), replace(BULK, schedule="zero-bubble")),
    ("updating_teacher", Mesh(dp=2, tp=2, pp=2), replace(BULK, recompute="full", zero=2)),
    ("updating_teacher", Mesh(dp=2, tp=2, cp=2), replace(BULK, zero=3)),
    ("updating_lengths", Mesh(dp=2, tp=2, pp=2), replace(BULK, recompute="full", zero=2)),
    ("updating_lengths", Mesh(dp=2, cp=2, pp=2), replace(BULK, schedule="zero-bubble", zero=3)),
]


@pytest.mark.parametrize(("name", "mesh", "variant"), WAYS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WAYS)])
def test_buffers_as_on_one_process(name: str, mesh: Mesh, variant: Variant) -> None:
    assert not check(name, mesh, variant, "adamw", STEPS)


def test_the_plan_and_the_program_name_what_is_updated() -> None:
    plan = planned("updating_bias", Mesh(dp=4, tp=2), BULK)
    assert plan.updates == tuple(f"mixtures.{i}.{name}" for i in range(3) for name in ("bias", "chosen_by"))
    (note,) = [text for text in plan.notes if "forward updates buffers" in text]
    assert "mixtures.{0..2}.bias" in note and "from 24 sums" in note and "forward updates buffers" in plan.explain()
    assert "buffers updated at the end of a step" in method(plan)
    text = parallel("updating_bias", plan, "sgd").program.files["stage_0.py"]
    assert "def update_buffers(self, sums: Tensor" in text and "summed = ((0, 8), (8, 16), (16, 24))" in text
    with pytest.raises(PlanError, match=r"forward updates mixtures\.0\.bias and other buffers from sums"):
        torch_program(
            plan.model_copy(update={"mesh": plan.mesh.model_copy(update={"ep": 1})}), case("updating_bias").model
        )


def test_evaluation_and_failed_steps_update_nothing() -> None:
    """A step whose loss is not finite is skipped, but its forward pass has run."""
    made = parallel("updating_averages", planned("updating_averages", Mesh(dp=2), BULK), "sgd")
    (batch,), values = batches("updating_averages", 1), made.initial_values()
    values = {**values, "head.weight": values["head.weight"] * torch.inf}

    def body(communicators: Communicators) -> list[Tensor]:
        found = []
        for non_finite in ("raise", "skip"):
            mine = copy.copy(made)
            mine._non_finite = non_finite
            mine.start(communicators, values)
            share = {n: x.tensor_split(2)[communicators.dp.rank] for n, x in batch.items()}
            mine._unchanging.eval_step(share)  # `Parallel.eval_step` refuses a model that updates buffers in eval mode
            if non_finite == "raise":
                with pytest.raises(RuntimeFault, match="not finite"):
                    mine.train_step(share)
            else:
                mine.train_step(share)
            found += [mine.state_dict()[f"mixtures.0.{name}"] for name in ("steps", "mean")]
        return found

    for steps, mean, skipped_steps, skipped_mean in run_lockstep(made.layout.mesh, body):
        assert steps == 0 and not mean.any()
        assert skipped_steps == 1 and skipped_mean.sum() == pytest.approx(0.1)


# ---- planted faults ----


def faulty() -> list[str]:
    wrong = check("updating_bias", Mesh(dp=2, tp=2, pp=2, ep=2), replace(BULK, recompute="full"), "sgd", STEPS)
    wrong += check("updating_tables", Mesh(dp=2, tp=2, pp=2), BULK, "sgd", STEPS)
    return wrong + check("updating_averages", Mesh(tp=2), BULK, "sgd", STEPS)


def _of_ranks(counts: Callable[[Communicators], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault in which ranks add their sums to those of the batch as `counts` says."""
    known = Trainer._finish

    def finish(self: Trainer, share: Tensor, sums: BatchSums) -> Tensor:
        sums.own *= counts(self.communicators)
        return known(self, share, sums)

    return lambda patch: patch.setattr(Trainer, "_finish", finish)


def _updates(change: Callable[[BatchSums, Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault in which new values are computed from what `change` makes of the sums."""
    known = BatchSums.new_buffers
    return lambda patch: patch.setattr(BatchSums, "new_buffers", lambda self, whole: known(self, change(self, whole)))


def _whole_on_tp(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Axis, "first_rank", lambda self, x: x)


def _adds(change: Callable[[BatchSums, Stage, Callable[[], None]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault in which `change` is called in place of adding a microbatch's sums, with what adds them."""
    known = BatchSums.add
    return lambda patch: patch.setattr(
        BatchSums, "add", lambda self, stage, sums: change(self, stage, lambda: known(self, stage, sums))
    )


def _at_once(sums: BatchSums, stage: Stage, add: Callable[[], None]) -> None:
    add()
    write(sums.new_buffers(sums.own))


def _last_alone(sums: BatchSums, stage: Stage, add: Callable[[], None]) -> None:
    for start, stop in stage.summed:
        sums.own[start:stop] = 0
    add()


def _twice(sums: BatchSums, stage: Stage, add: Callable[[], None]) -> None:
    add()
    add()


def _one_stage(patch: pytest.MonkeyPatch) -> None:
    known = BatchSums.new_buffers

    def update(self: BatchSums, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        self._stages = [stage for stage in self._stages if stage.is_last]
        return known(self, whole)

    patch.setattr(BatchSums, "new_buffers", update)


def _forgotten(patch: pytest.MonkeyPatch) -> None:
    whole = Trainer.state_dict
    patch.setattr(Trainer, "state_dict", lambda *args: {n: x for n, x in whole(*args).items() if "bias" not in n})


_OWN_SUMS = _updates(lambda sums, whole: sums.own)
PLANTED = [
    ("a bias of some samples", _OWN_SUMS),
    ("a bias of some samples", _of_ranks(lambda c: c.dp.rank == 0)),
    ("a bias updated per microbatch", _adds(_at_once)),
    ("a bias updated per microbatch", _adds(_last_alone)),
    ("counts of two forward passes", _adds(_twice)),
    ("counts of two forward passes", _whole_on_tp),
    ("buffers of other values", _one_stage),
    ("updated buffers forgotten", _forgotten),
]


@pytest.mark.fault(
    "a bias of some samples",
    "a bias updated per microbatch",
    "counts of two forward passes",
    "buffers of other values",
    "updated buffers forgotten",
)
@pytest.mark.parametrize(("name", "plant"), PLANTED)
def test_a_planted_fault_is_seen(
    name: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    try:
        assert faulty()
    except RuntimeFault as error:  # experts get rows by such sums, too
        assert "rows are sorted by expert" in str(error)


def test_without_a_fault_nothing_is_seen() -> None:
    assert not faulty()


@pytest.mark.parametrize("plant", [_OWN_SUMS, _whole_on_tp])
def test_verify_compares_updated_buffers(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "updating_averages"
    plan, inputs = planned(name, Mesh(dp=2, tp=2), BULK), {n: x[:2] for n, x in case(name).batch.items()}
    assert verify_plan(plan, case(name).model, inputs=inputs).agrees
    plant(monkeypatch)
    assert not verify_plan(plan, case(name).model, inputs=inputs).agrees


# ---- what is refused ----


class Body(nn.Module):
    """A projection whose forward is `body(self, h, p)`; p are scores without gradient."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.layer = body, nn.Linear(WIDTH, WIDTH)
        for name in ("seen", "other"):
            self.register_buffer(name, torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.body(self, h, h.detach()).square().mean()


def read_after(self: Any, h: Tensor, p: Tensor) -> Tensor:
    self.seen.add_(p.sum((0, 1)))
    return h + self.seen


def largest(self: Any, h: Tensor, p: Tensor) -> Tensor:
    self.seen.copy_(torch.maximum(self.seen, p.amax((0, 1))))
    return h


def last_sample(self: Any, h: Tensor, p: Tensor) -> Tensor:
    self.seen.lerp_(p[-1].mean(0), 0.5)
    return h


def with_gradient(self: Any, h: Tensor, p: Tensor) -> Tensor:
    self.seen = 0.9 * self.seen + h.mean((0, 1))
    return h


def drawn(self: Any, h: Tensor, p: Tensor) -> Tensor:
    self.seen.add_(torch.rand_like(self.seen))
    return h


def of_data(self: Any, h: Tensor, p: Tensor) -> Tensor:
    self.seen.data += p.sum((0, 1))
    return h


def aliased(self: Any, h: Tensor, p: Tensor) -> Tensor:
    self.other = self.seen
    self.seen.add_(p.sum((0, 1)))
    return h


def of_another_type(self: Any, h: Tensor, p: Tensor) -> Tensor:
    self.seen = self.seen.to(torch.float32) + 1
    return h


REFUSED = {
    read_after: "forward reads the buffer seen after updating it from the samples of the batch",
    largest: "forward updates the buffer seen with a value that is no function of sums over samples: amax",
    last_sample: "select|forward updates the buffer seen",
    with_gradient: "forward updates the buffer seen with a tensor that requires a gradient",
    drawn: "draws random numbers",
    aliased: "forward assigns a tensor that is also seen to the buffer other",
    of_another_type: r"assigns a tensor of torch\.float32 \[32\] to the buffer seen, of torch\.float64",
}


def test_a_write_to_the_data_of_a_buffer_is_a_write_to_it() -> None:
    model, batch = Body(of_data).double(), {"x": torch.randn(8, 8, WIDTH).double()}
    parallel = autoptd.parallelize(
        model, world=4, cluster="dgx-h100", batch=8, inputs={n: x[:2] for n, x in batch.items()}, precision="fp64",
        optimizer="sgd", optimizer_options={"lr": 0.05}, fix={"dp": 2, "tp": 2, "micro": 2},
    )  # fmt: skip
    found = train_in_lockstep(parallel, [batch, batch])
    alone = train_alone(model, [batch, batch], optimizer="sgd", optimizer_options={"lr": 0.05})
    assert float(alone.state["seen"].abs().max()) > 1
    assert max(differences(found.state, alone.state).values()) <= TOLERANCE


@pytest.mark.fault("a bias read too late")
@pytest.mark.parametrize(("body", "says"), REFUSED.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_cannot_be_exact_is_refused(body: Any, says: str) -> None:
    with pytest.raises(AutoptdError, match=says) as caught:
        autoptd.trace(Body(body).double(), inputs={"x": torch.randn(2, 8, WIDTH).double()}, precision="fp64")
    assert caught.value.fix, caught.value
    assert "test_parity_updates.py" in caught.value.where or "seen" in str(caught.value), caught.value


def test_buffers_that_share_memory_are_refused() -> None:
    model = Body(read_after).double()
    model.register_buffer("alias", model.seen[:4])
    with pytest.raises(AutoptdError, match="the buffer seen, which shares its memory with alias"):
        autoptd.trace(model, inputs={"x": torch.randn(2, 8, WIDTH).double()}, precision="fp64")


class HeldTwice(nn.Module):
    """A norm under two names, one of which is called, and a buffer that is read by its other name.

    writes: whether forward writes to a view, so that the trace is decomposed.
    """

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), self.norm, nn.Sequential(self.norm, self.head))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.head.register_buffer("also", self.seen)

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            x = x * 1.0
            x.view(x.shape[0], -1)[:, 0] = 0
        h = self.layer(x) + self.head.also
        with torch.no_grad():
            self.seen.mul_(0.9).add_(h.mean(0))
        return (h * self.head.also).square().mean()


@pytest.mark.parametrize("writes", [False, True])
def test_a_module_and_a_buffer_under_two_names(writes: bool) -> None:
    torch.manual_seed(0)
    model, batch = HeldTwice(writes).double(), {"x": torch.randn(8, WIDTH).double()}
    parallel = autoptd.parallelize(
        copy.deepcopy(model), world=4, cluster="local", inputs=batch, precision="fp64", batch=8, optimizer="sgd",
        optimizer_options={"lr": 0.05}, fix={"pp": 2, "dp": 2, "micro": 4},
    )  # fmt: skip
    found = train_in_lockstep(parallel, [batch, batch])
    alone = train_alone(model, [batch, batch], optimizer="sgd", optimizer_options={"lr": 0.05})
    assert float(alone.state["seen"].abs().max()) > 0 and float(alone.state["norm.running_mean"].abs().max()) > 0
    assert max(differences(found.state, alone.state).values()) <= TOLERANCE


class ReadsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.layer(x)) + self.norm.running_mean).square().mean()


def test_samples_that_read_running_statistics_behind_their_norm_are_refused() -> None:
    says = "forward reads the buffer norm.running_mean after updating it from the samples of the batch"
    with pytest.raises(AutoptdError, match=says):
        autoptd.trace(ReadsNorm().double(), inputs={"x": torch.randn(4, WIDTH).double()}, precision="fp64")


class Centred(nn.Module):
    """A loss with a buffer that it assigns to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, out: Tensor) -> Tensor:
        loss = (out - self.centre).square().mean()
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return loss


def test_a_loss_that_assigns_to_its_buffer_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)).double(), torch.randn(4, WIDTH).double()
    with pytest.raises(AutoptdError, match="the loss writes to a buffer of its own"):
        autoptd.trace(model, inputs={"input": x}, loss=Centred().double(), precision="fp64")
