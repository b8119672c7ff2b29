"""Edges of the pipeline: integer and gradient-free wires, relays, frozen stages, buffers, dropout under any cut."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.cost_models.memory import in_flight
from autoptd.errors import RuntimeFault
from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import B
from autoptd.ops.dropout import DropoutKey
from autoptd.ops.stage import Stage, Wire, buffer, parameter
from autoptd.ops.tp_axis import Axis
from autoptd.runtime import messages
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from autoptd.schedule import RUNNABLE, row_of
from tests.runtime import test_trainer
from tests.runtime import tiny_model as tiny

F64 = torch.float64


def wire(name: str, dtype: torch.dtype = F64, grad: bool = False) -> Wire:
    return Wire(name, dtype, lambda n: (n, 3), requires_grad=grad)


WIRES = (wire("skip", grad=True), wire("picks", torch.int64), wire("mask", torch.bool), wire("x", grad=True))


class First(Stage):
    """Sends a tensor that only the last stage reads, an integer, a boolean, and one that the middle stage processes."""

    inputs = ("x",)
    sends = WIRES
    sizes = {"n": ("x", 0)}  # noqa: RUF012

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * self.first
        return y, (x * 10).long(), x > 0, y * self.table


class Middle(Stage):
    receives = sends = WIRES
    sizes = {"n": ("x", 0)}  # noqa: RUF012

    def forward(self, skip: Tensor, picks: Tensor, mask: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return skip, picks, mask, torch.sin(x) if not hasattr(self, "middle") else torch.sin(x * self.middle)


class Last(Stage):
    inputs = ("x",)
    receives = WIRES
    is_last = True
    sizes = {"n": ("x", 0)}  # noqa: RUF012

    def forward(self, skip: Tensor, picks: Tensor, mask: Tensor, y: Tensor, x: Tensor, counts: Any) -> Tensor:
        return ((skip * y * picks + self.last * x) * mask).sum()


def spec(frozen: tuple[str, ...]) -> dict[str, TensorSpec]:
    names = ("first", "middle", "last")
    return {n: TensorSpec(B, (3,), (i,), n not in frozen) for i, n in enumerate(names)}


@pytest.mark.parametrize("frozen", [(), ("first",), ("middle",), ("first", "middle"), ("first", "middle", "last")])
@pytest.mark.parametrize("samples", [6, 5])
def test_all_kinds_of_wires(frozen: tuple[str, ...], samples: int) -> None:
    """Values and gradients through relays, integers and frozen stages; a stage without trainable parameters."""
    mesh = Mesh(pp=3)
    layout = Layout(
        mesh, 2, 3, ("x",), spec(frozen), {"table": TensorSpec(B, (3,), (0,))}, precision="fp64", bucket_elements=1
    )
    x = torch.randn(samples, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    full = {name: torch.linspace(0.5, 1.5, 3, dtype=F64) + i for i, name in enumerate(layout.parameters)}
    table = torch.tensor([1.0, -2.0, 3.0])

    w = {n: t.clone().requires_grad_(n not in frozen) for n, t in full.items()}
    y = x * w["first"]
    loss = ((y * torch.sin(y * table * w["middle"]) * (x * 10).long() + w["last"] * x) * (x > 0)).sum()
    if loss.requires_grad:
        loss.backward()

    def body(c: Communicators) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        with torch.device("meta"):
            stage = (First, Middle, Last)[c.stage](Axis(c.tp))
            name = ("first", "middle", "last")[c.stage]
            parameter(stage, name, (3,), F64, name not in frozen)
            if c.stage == 0:
                buffer(stage, "table", (3,))
        trainer = Trainer(stage, layout, c, "sgd", lr=0.1)
        trainer.load_parameters(full | {"table": table})
        value = float(trainer.train_step({"x": x}))
        return value, trainer.gradients(), trainer.state_dict()

    for value, gradients, after in run_lockstep(mesh, body):
        assert value == pytest.approx(float(loss.detach()), rel=1e-13)
        assert gradients.keys() == {n for n, t in w.items() if t.grad is not None}
        for name, t in w.items():
            if t.grad is not None:
                torch.testing.assert_close(gradients[name], t.grad, rtol=1e-12, atol=1e-13)
            expected = t.detach() - (0.1 * t.grad if t.grad is not None else 0)
            torch.testing.assert_close(after[name], expected, rtol=1e-12, atol=1e-13)


def test_a_stage_that_sends_another_shape_is_named() -> None:
    class Wrong(First):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            skip, picks, mask, y = super().forward(x)
            return skip, picks.int(), mask, y

    def body(c: Communicators) -> None:
        stage = (Wrong, Middle, Last)[c.stage](Axis(c.tp))
        parameter(stage, ("first", "middle", "last")[c.stage], (3,), F64)
        if c.stage == 0:
            buffer(stage, "table", (3,))
        buffers = {"table": TensorSpec(B, (3,), (0,))}
        layout = Layout(Mesh(pp=3), 2, 1, ("x",), spec(()), buffers, precision="fp64")
        Trainer(stage, layout, c).train_step({"x": torch.ones(2, 3, dtype=F64)})

    message = r"(?s)picks is torch.int32 \[2, 3\], but the next stage expects torch.int64.*F0 of stage 0, rank 0"
    with pytest.raises(RuntimeFault, match=message):
        run_lockstep(Mesh(pp=3), body)


def test_dropout_does_not_depend_on_the_cut_and_changes_with_the_step() -> None:
    """Any pp gives the same losses for equal dp, tp and microbatches, another seed gives others; tp ranks agree."""

    def losses(pp: int, seed: int = 5) -> list[float]:
        mesh = Mesh(dp=2, tp=2, pp=pp)

        def body(c: Communicators) -> list[float]:
            stage = tiny.make_stage(Axis(c.tp), pp, c.stage, DropoutKey(seed), p=0.3)
            trainer = Trainer(stage, tiny.layout(mesh), c, "sgd", lr=0.0)
            trainer.load_parameters(tiny.weights())
            mine = test_trainer.share(tiny.batch(12, 0), c)
            return [float(trainer.train_step(mine)) for _ in range(2)] + [float(trainer.eval_step(mine))]

        results = run_lockstep(mesh, body)
        assert all(result == results[0] for result in results)
        return results[0]

    one, two, four = (losses(pp) for pp in (1, 2, 4))
    assert one == pytest.approx(two, rel=1e-13) and two == pytest.approx(four, rel=1e-13)
    assert len(set(one)) == 3
    assert one[2] == pytest.approx(float(tiny.plain_loss(tiny.weights(), **tiny.batch(12, 0))), rel=1e-12)
    assert losses(1, seed=6)[0] != one[0]


@pytest.mark.parametrize("shape", [(8, 3), (7,), (5, 3), (1,), ()], ids=str)
def test_slices_make_up_the_whole(shape: tuple[int, ...]) -> None:
    """Ranks need not divide the tensor, and may outnumber its elements."""

    def body(c: Communicators) -> bool:
        x = torch.arange(float(torch.Size(shape).numel())).view(shape)
        part = messages.MessagePart(shape, x.dtype, c.tp.size)
        mine = part.cut(x, c.tp.rank)
        assert mine.shape == part.empty(c.device).shape and mine.numel() * c.tp.size < x.numel() + c.tp.size
        return torch.equal(part.whole(mine, c.tp), x)

    assert all(run_lockstep(Mesh(tp=4), body))


def test_recompute_changes_no_bit() -> None:
    """Blocks with communication and dropout, recomputed while other microbatches are between forward and backward."""
    mesh = Mesh(2, 2, 2)

    def body(c: Communicators, recompute: bool) -> dict[str, Tensor]:
        stage = tiny.make_stage(Axis(c.tp), 2, c.stage, DropoutKey(3), p=0.3, recompute=recompute)
        trainer = Trainer(stage, tiny.layout(mesh), c, "sgd", lr=0.1)
        trainer.load_parameters(tiny.weights())
        for seed in range(2):
            trainer.train_step(test_trainer.share(tiny.batch(12, seed), c))
        return trainer.state_dict()

    kept, again = (run_lockstep(mesh, lambda c, r=r: body(c, r))[0] for r in (False, True))  # type: ignore[misc]
    assert all(torch.equal(again[name], value) for name, value in kept.items())


class Held:
    """An object that lives as long as what refers to it."""


@pytest.mark.parametrize("kind", RUNNABLE)
def test_activations_die_with_their_backward(kind: str) -> None:
    """Activations alive never exceed the schedule's bound, which predicts memory; none outlive the step."""
    virtual = row_of(kind).chunks or 2
    mesh = Mesh(pp=4 // virtual, virtual=virtual, stage_order=row_of(kind).shape)
    most, made = [0] * mesh.pp, [list[weakref.ref[Any]]() for _ in range(mesh.pp)]

    def body(c: Communicators) -> None:
        trainer = test_trainer.build(c, tiny.layout(mesh, micro=1, microbatches=8, schedule=kind))
        for stage in trainer.stages:

            def forward(*args: Tensor, whole: Any = stage.forward, **kwargs: Any) -> Any:
                out = whole(*args, **kwargs)
                node = (out if isinstance(out, Tensor) else out[0]).grad_fn
                node.metadata["held"] = held = Held()  # as long as the graph, with what it saves
                made[c.stage].append(weakref.ref(held))
                most[c.stage] = max(most[c.stage], sum(ref() is not None for ref in made[c.stage]))
                return out

            stage.forward = forward  # type: ignore[method-assign]
        trainer.train_step(tiny.batch(8, 0))
        assert all(ref() is None for ref in made[c.stage]) and len(made[c.stage]) == 8 * mesh.virtual

    gc.disable()
    try:
        run_lockstep(mesh, body)
    finally:
        gc.enable()
    bounds = [in_flight(rank, mesh.pp, 8, kind, mesh.virtual) for rank in range(mesh.pp)]
    assert all(held <= bound for held, bound in zip(most, bounds, strict=True)), (most, bounds)
    assert most[0] == bounds[0]
