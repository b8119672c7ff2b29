"""Steps that are not finite: all ranks act alike, and the loss scale of fp16 moves as torch's does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.errors import InputsError, PlanError, RuntimeFault
from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import B, Split
from autoptd.ops.group import SingleRankGroup
from autoptd.ops.stage import Stage, parameter
from autoptd.ops.tp_axis import Axis
from autoptd.runtime import trainer
from autoptd.runtime.comm import interfaces as comm
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.loss_scaling import Finite, LossScale
from autoptd.runtime.trainer import Trainer
from autoptd.runtime.zero import param_buffers as buffers
from tests.runtime import test_trainer
from tests.runtime import tiny_model as tiny

OVERFLOWS = (0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0)  # the scale grows after three steps without overflow
MESHES = (Mesh(), Mesh(dp=3), Mesh(dp=2, tp=2))


class Linear(Stage):
    """Loss (Σ x·w + x·b) / 16; w is split over tp."""

    inputs = ("x",)
    is_last = True

    def forward(self, x: Tensor, counts: tuple[Tensor, ...]) -> Tensor:
        own = x.chunk(self.tp.size, 1)[self.tp.rank]
        return (self.tp.all_reduce((own * self.w).float().sum()) + (x * self.b).float().sum()) / 16


def linear(c: Communicators, precision: str = "fp16", microbatches: int = 1, **kwargs: Any) -> Trainer:
    spec = {"w": TensorSpec(Split(0), (4,)), "b": TensorSpec(B, (4,))}
    layout = Layout(c.mesh, 1, microbatches, ("x",), spec, precision=precision)
    stage = Linear(Axis(c.tp))
    for name, each in spec.items():
        parameter(stage, name, each.local_shape(c.tp.size), layout.dtype)
    made = Trainer(stage, layout, c, "sgd", lr=2.0**-4, **kwargs)
    made.load_parameters({"w": torch.ones(4), "b": torch.zeros(4)})
    return made


def batch(c: Communicators, overflow: int, value: float = 64.0) -> dict[str, Tensor]:
    """Make a batch; the last dp rank's samples may overflow: 64 · 2**16 / 16 is more than float16 holds."""
    x = torch.full((1, 4), 2.0**-10, dtype=torch.float16)
    if overflow and c.dp.rank == c.dp.size - 1:
        x[0, 3] = value
    return {"x": x}


def scales_of_torch(overflows: Sequence[int]) -> list[float]:
    w = torch.ones(4, requires_grad=True)
    made, scaler = torch.optim.SGD([w], lr=0.0), torch.amp.GradScaler("cpu", growth_interval=3)
    found = []
    for overflow in overflows:
        made.zero_grad()
        scaler.scale((w * (torch.inf if overflow else 1.0)).sum()).backward()
        scaler.step(made)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def run(mesh: Mesh) -> list[tuple[list[float], list[bool], Tensor]]:
    def body(c: Communicators) -> tuple[list[float], list[bool], Tensor]:
        made = linear(c, clip_norm=1e-3)
        assert made.finite.scaling is not None
        made.finite.scaling.growth_interval = 3
        scales, skipped = [], []
        for overflow in OVERFLOWS:
            before = {name: x.clone() for name, x in made.state_dict().items()}
            made.train_step(batch(c, overflow))
            scales.append(made.finite.scale)
            skipped.append(made.finite.skipped)
            same = all(torch.equal(x, before[name]) for name, x in made.state_dict().items())
            assert same or not overflow
        return scales, skipped, torch.cat(list(made.state_dict().values()))

    return run_lockstep(mesh, body)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_the_scale_is_torch_s(mesh: Mesh) -> None:
    expected = scales_of_torch(OVERFLOWS)
    assert len(set(expected)) > 2
    first = run(mesh)[0][2]
    for scales, skipped, state in run(mesh):
        assert scales == expected
        assert skipped == [bool(x) for x in OVERFLOWS]
        assert torch.equal(state, first)


@pytest.mark.parametrize("field", ["scale", "growth_interval"])
@pytest.mark.fault("another loss scale on one rank")
def test_a_scale_that_one_rank_changes_is_refused(field: str) -> None:
    def body(c: Communicators) -> tuple[str, bool]:
        made = linear(c)
        made.train_step(batch(c, 0))
        before = {name: x.clone() for name, x in made.state_dict().items()}
        if c.rank == 1:
            setattr(made.finite.scaling, field, 2)
        with pytest.raises(InputsError) as caught:
            made.train_step(batch(c, 0))
        now = made.state_dict()
        return str(caught.value), all(torch.equal(x, now[name]) for name, x in before.items())

    for said, unchanged in run_lockstep(Mesh(dp=2), body):
        assert f"rank 1: {field} = 2 in loss_scale" in said and unchanged


def test_defaults_are_torch_s() -> None:
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu")
    assert ours.scale == theirs.get_scale() and ours.growth_interval == theirs.get_growth_interval()
    assert (ours.growth_factor, ours.backoff_factor) == (theirs.get_growth_factor(), theirs.get_backoff_factor())


def test_the_scale_goes_on_where_it_was() -> None:
    one, other = LossScale(growth_interval=3), LossScale()
    for overflow in OVERFLOWS[:6]:
        one.update(overflow=bool(overflow))
    other.load_state_dict(one.state_dict())
    for overflow in OVERFLOWS[6:]:
        one.update(overflow=bool(overflow))
        other.update(overflow=bool(overflow))
    assert one == other and one.scale == scales_of_torch(OVERFLOWS)[-1]


@pytest.mark.fault("overflow of one rank")
def test_ranks_that_decide_alone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank checks its own gradients only."""
    whole = trainer.Trainer._finish

    def alone(self: Trainer, share: Tensor, sums: Any) -> Tensor:
        kept = self.communicators
        object.__setattr__(self, "communicators", comm.Communicators(**{**vars(kept), "world": SingleRankGroup()}))
        try:
            return whole(self, share, sums)
        finally:
            object.__setattr__(self, "communicators", kept)

    monkeypatch.setattr(trainer.Trainer, "_finish", alone)
    with pytest.raises((AssertionError, RuntimeFault)):  # a rank that steps gathers what the other does not
        test_an_overflow_on_one_rank_is_skipped_by_all_and_the_scale_is_torch_s(Mesh(dp=2))


@pytest.mark.fault("norm of scaled gradients")
def test_a_scale_that_stays_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm and update equal those of one process at any scale."""

    def body(c: Communicators, scale: float) -> tuple[float, Tensor]:
        made = linear(c)
        assert made.finite.scaling is not None
        made.finite.scaling.scale = scale
        made.train_step(batch(c, 0))
        return float(made.grad_norm), made.state_dict()["b"]  # type: ignore[arg-type]

    def agrees() -> bool:
        for scale in (1.0, 2.0**4, 2.0**16):
            for norm, b in run_lockstep(Mesh(dp=3), lambda c, scale=scale: body(c, scale)):  # type: ignore[misc]
                step = torch.full((4,), -3 * 2.0**-18, dtype=torch.float16)
                if norm != pytest.approx(3 * 2.0**-14 * 8**0.5, rel=1e-6) or not torch.equal(b, step):
                    return False
        return True

    assert agrees()
    monkeypatch.setattr(trainer.Finite, "scale", property(lambda self: self.scaling.scale))
    monkeypatch.setattr(buffers.Buffers, "scale_gradients", lambda *_: None)
    assert not agrees()


@pytest.mark.fault("narrow sums")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sums_in_16_bits_are_caught(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum 1 and 16 terms of a quarter of its last bit each."""
    little = 2.0**-9 if precision == "bf16" else 2.0**-12
    x = torch.cat((torch.full((1, 4), 16.0), torch.full((16, 4), 16 * little)))

    def gradient() -> Tensor:
        def body(c: Communicators) -> Tensor:
            made = linear(c, precision, microbatches=17)
            if made.finite.scaling is not None:
                made.finite.scaling.scale = 2.0**8
            made.train_step({"x": x.to(made.layout.dtype)})
            return made.gradients()["w"]

        return run_lockstep(Mesh(dp=2, tp=2), body)[0]

    assert torch.equal(gradient(), torch.full((4,), 2 + 32 * little))
    whole = buffers.Buffer.allocate

    def narrow(self: buffers.Buffer, dtype: torch.dtype, device: torch.device) -> None:
        self._in_compute = True  # force the compute dtype
        whole(self, dtype, device)

    monkeypatch.setattr(buffers.Buffer, "allocate", narrow)
    assert torch.equal(gradient(), torch.full((4,), 2.0))


@pytest.mark.fault("NaN of one rank")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_value_on_one_rank_stops_all_before_anything_changed(precision: str, value: float) -> None:
    def body(c: Communicators) -> str:
        made = linear(c, precision)
        made.train_step(batch(c, 0))
        before = made.state_dict()
        with pytest.raises(RuntimeFault, match=r"step 1 is not finite: .*no rank took it") as caught:
            made.train_step(batch(c, 1, value))
        assert all(torch.equal(x, before[name]) for name, x in made.state_dict().items())
        assert made.finite.skipped
        made.train_step(batch(c, 0))
        assert not made.finite.skipped and not torch.equal(made.state_dict()["b"], before["b"])
        return caught.value.where

    assert "gradients of b" in " ".join(run_lockstep(Mesh(dp=2, tp=2), body))


def test_a_value_in_a_pipeline_leaves_no_message_behind() -> None:
    mesh = Mesh(2, 1, 2)

    def body(c: Communicators) -> list[float]:
        made = test_trainer.build(c, tiny.layout(mesh), non_finite="skip")
        good = test_trainer.share(tiny.batch(12, 0), c)
        if c.stage == 0 and c.dp.rank == 1:
            with torch.no_grad():
                kept = made.stage.positions[0, 0].clone()
                made.stage.positions[0, 0] = torch.nan
        losses = [float(made.train_step(good))]
        if c.stage == 0 and c.dp.rank == 1:
            with torch.no_grad():
                made.stage.positions[0, 0] = kept
        return [*losses, float(made.train_step(good)), float(made.finite.skipped)]

    expected = float(tiny.plain_loss(tiny.weights(), **tiny.batch(12, 0)))
    for first, second, skipped in run_lockstep(mesh, body):
        assert first != first and second == pytest.approx(expected, rel=1e-12) and not skipped


def test_fp16_that_overflows_at_any_scale_is_an_error() -> None:
    def body(c: Communicators) -> None:
        made = linear(c)
        assert made.finite.scaling is not None
        made.finite.scaling.scale = 2.0**-23
        made.train_step(batch(c, 1, torch.inf))
        with pytest.raises(RuntimeFault, match="not finite"):
            made.train_step(batch(c, 1, torch.inf))

    run_lockstep(Mesh(dp=2), body)


def test_wrong_options() -> None:
    with pytest.raises(PlanError, match="unknown non_finite 'skp'"):
        Finite("skp", None)
