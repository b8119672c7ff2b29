"""Gradients that autograd itself sums: in flat buffers, or where it made them if no rank adds anything to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import B
from autoptd.ops.library import element_count
from autoptd.ops.stage import Stage, parameter
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from autoptd.runtime.zero import grad_reduce as reduction

SHAPES = {"a": (6,), "b": (2, 3), "unused": (5,)}


class TwoViews(Stage):
    """Σ x·(a + b) over views of both parameters, to which autograd gives one tensor as gradient."""

    inputs = ("x",)
    is_last = True
    count_inputs = ("x",)

    @staticmethod
    def loss_counts(**inputs: Tensor) -> tuple[Tensor, ...]:
        return (element_count(inputs["x"].shape[0]),)

    def forward(self, x: Tensor, counts: tuple[Tensor, ...]) -> Tensor:
        return ((self.a.view(3, 2) + self.b.view(3, 2)) * x).sum() / counts[0]


def trained(mesh: Mesh, steps: int = 2) -> list[tuple[list[dict[str, Tensor]], bool]]:
    """Return the gradients of steps of two microbatches, by rank, and whether autograd keeps them."""
    specs = {name: TensorSpec(B, shape) for name, shape in SHAPES.items()}
    layout = Layout(mesh, 1, 2, ("x",), specs, precision="fp64")

    def body(c: Communicators) -> tuple[list[dict[str, Tensor]], bool]:
        stage = TwoViews(Axis(c.tp))
        for name, shape in SHAPES.items():
            parameter(stage, name, shape, torch.float64)
        made = Trainer(stage, layout, c, "sgd", lr=0.1)
        made.load_parameters({name: torch.ones(shape) for name, shape in SHAPES.items()})
        found = []
        for step in range(steps):
            made.train_step({"x": inputs(step)[2 * c.dp.rank :][:2]})
            found.append(made.gradients())
        return found, all(buffer.alone for buffer in made._buffers._buffers)

    return run_lockstep(mesh, body)


def inputs(step: int) -> Tensor:
    return torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def wrong(mesh: Mesh) -> bool:
    """Return whether a gradient differs from the mean of x, over this mesh's samples."""
    found = False
    for by_step, alone in trained(mesh):
        assert alone == (mesh.world == 1)
        for step, gradients in enumerate(by_step):
            expected = inputs(step)[: 2 * mesh.dp].mean(0)
            assert gradients.keys() == {"a", "b"}
            found |= any(not torch.allclose(g.reshape(3, 2), expected, 1e-14, 1e-14) for g in gradients.values())
    return found


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
def test_parameters_that_are_read_as_views_have_gradients_of_their_own(mesh: Mesh) -> None:
    assert not wrong(mesh)


@pytest.mark.fault("a gradient of two parameters")
def test_one_tensor_as_the_gradient_of_two_parameters_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "has_one_owner", lambda _: True)
    assert wrong(Mesh())


def test_readers_of_memory_are_counted() -> None:
    """A private count of torch 2.13.0."""
    x = torch.ones(6)
    assert reduction.has_one_owner(x)
    view = x.view(2, 3)
    assert not reduction.has_one_owner(x) and not reduction.has_one_owner(view)
    del view
    assert reduction.has_one_owner(x)


def test_autograd_gives_one_tensor_to_two_parameters() -> None:
    """Seen in torch 2.13.0, and why `has_one_owner` is asked: once it is mended, the check can go."""
    a, b = (torch.nn.Parameter(torch.ones(shape)) for shape in ((6,), (2, 3)))
    ((a.view(3, 2) + b.view(3, 2)) * torch.rand(3, 2)).sum().backward()
    assert a.grad is not None and b.grad is not None
    assert a.grad.data_ptr() == b.grad.data_ptr()
