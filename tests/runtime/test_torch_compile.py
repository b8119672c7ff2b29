"""Compiled blocks: number of compilations, parts that stay outside of graphs, and faults that are detected."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import autoptd
from autoptd.errors import PlanError, RuntimeFault
from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import B
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.ops import library as ops
from autoptd.ops.dropout import DropoutKey
from autoptd.ops.stage import Stage, parameter, submodule
from autoptd.ops.tp_axis import Axis
from autoptd.runtime import torch_compile as compiled
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer

WIDTH, LAYERS = 5, 3


class Block(nn.Module):
    def __init__(self, tp: Axis, dropout: DropoutKey | None, first: int) -> None:
        super().__init__()
        self.tp, self.dropout, self.first = tp, dropout, first
        parameter(self, "w", (WIDTH, WIDTH), torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tp.all_reduce(F.gelu(x @ self.w))
        return x + ops.dropout(torch.tanh(x), 0.5, key=f"layers.{self.first}", rng=self.dropout)


class Blocks(Stage):
    inputs = ("x",)
    is_last = True

    def __init__(self, tp: Axis, dropout: DropoutKey | None = None) -> None:
        super().__init__(tp, dropout)
        parameter(self, "scale", (WIDTH,), torch.float64)
        self.blocks = [submodule(self, f"layers.{i}", Block(tp, dropout, i)) for i in range(LAYERS)]

    def forward(self, x: Tensor, counts: tuple[Tensor, ...]) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    compiled._compiled.cache_clear()
    compiled._outside_ops.cache_clear()
    yield
    compiled._compiled.cache_clear()
    compiled._outside_ops.cache_clear()
    torch.compiler.reset()


def trained(backend: Any, steps: int = 3, gather_later: bool = False) -> tuple[list[float], list[int]]:
    """Return losses, and frames compiled so far, after each step; the last microbatch has one sample fewer."""
    spec = {"scale": TensorSpec(B, (WIDTH,))}
    spec |= {f"layers.{i}.w": TensorSpec(B, (WIDTH, WIDTH)) for i in range(LAYERS)}
    values = {
        n: torch.randn(s.shape, generator=torch.Generator().manual_seed(i)) for i, (n, s) in enumerate(spec.items())
    }
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def body(c: Communicators) -> tuple[list[float], list[int]]:
        with torch.device("meta"):
            stage = Blocks(Axis(c.tp), DropoutKey(3))
        if backend:
            assert compiled.compile_stage(stage, backend) == LAYERS
        layout = Layout(c.mesh, 4, 2, ("x",), spec, precision="fp64", gather_later=gather_later)
        trainer = Trainer(stage, layout, c, "sgd", lr=1e-4)
        trainer.load_parameters(values)
        losses, graphs = [], []
        for _ in range(steps):
            losses.append(float(trainer.train_step({"x": x})))
            graphs.append(int(counters["frames"]["total"]))
        return losses, graphs

    return run_lockstep(Mesh(), body)[0]


def complaints(backend: Any = "eager") -> list[str]:
    """List what is wrong with three compiled steps."""
    losses, graphs = trained(backend)
    expected, _ = trained("")
    wrong = [] if losses == pytest.approx(expected, rel=1e-12) else ["other losses"]
    wrong += [] if graphs[0] == graphs[-1] else ["compiled again after the first step"]
    wrong += [] if len(counters["frames"]) == 2 and counters["frames"]["ok"] == graphs[-1] else ["frames that failed"]
    parts = 3 + 1  # before, between and after the all-reduce and the dropout; the loss
    return wrong + ([] if graphs[0] == 2 * parts else [f"{graphs[0]} frames instead of one set for each of two sizes"])


def test_each_class_is_compiled_once_for_each_kind_of_size() -> None:
    assert complaints() == []


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.fault("compiled every step")
def test_randomness_that_is_compiled_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the randomness changes with every microbatch and step."""
    monkeypatch.setattr(compiled, "_stays_outside", lambda *_: False)
    assert any("frames instead of" in wrong for wrong in complaints())


@pytest.mark.fault("compiled for every layer")
def test_keys_that_graphs_know_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph contains the layer's number."""
    monkeypatch.setattr(compiled._DeferredKeys, "visit_Call", lambda self, node: node)
    assert any("frames instead of" in wrong for wrong in complaints())


@pytest.mark.fault("compiled for every layer")
def test_layers_that_are_compiled_one_by_one_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_compiled", compiled._compiled.__wrapped__)
    assert any("frames instead of" in wrong for wrong in complaints())


@pytest.mark.fault("a backend that computes another thing")
def test_another_result_is_caught() -> None:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.target is torch.tanh:
                node.target = torch.sigmoid
        graph.recompile()
        return graph.forward

    assert "other losses" in complaints(backend)


@pytest.mark.fault("hooks lost in compiled blocks")
def test_blocks_whose_hooks_do_not_run_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block waits for its own parameters before it reads them, in every forward pass but the first step's."""
    waited: list[list[str]] = []
    waits = "autoptd.runtime.zero.param_buffers.Buffers.finish_gathers"
    monkeypatch.setattr(waits, lambda _, names=None: waited.append(list(names or ())))
    trained("eager", steps=1, gather_later=True)
    expected = ["scale", *(f"layers.{i}.w" for i in range(LAYERS))]
    assert [n for names in waited for n in names] == expected * 2
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args, **named: self.forward(*args, **named))
    waited.clear()
    trained("eager", steps=1, gather_later=True)
    assert not [n for names in waited for n in names]


@pytest.mark.skipif("AUTOPTD_INDUCTOR" not in os.environ, reason="AUTOPTD_INDUCTOR=1 takes a C++ compiler and a minute")
def test_inductor() -> None:
    losses, _ = trained("inductor", steps=1)
    assert losses == pytest.approx(trained("", steps=1)[0], rel=1e-12)


def test_what_cannot_be_compiled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    asked: dict[str, Any] = {"inputs": {"input": torch.zeros(2, 8)}, "loss": lambda out: out.sum(), "batch": 8}
    with pytest.raises(PlanError, match="unknown backend 'inducter'"):
        autoptd.parallelize(model, world=1, precision="fp32", compile="inducter", **asked)
    fix = {"schedule": "zero-bubble", "pp": 2}
    with pytest.raises(PlanError, match="zero-bubble schedule splits backward passes into B and W"):
        autoptd.parallelize(model, world=2, precision="fp32", compile=True, fix=fix, **asked)
    assert (
        autoptd.parallelize(model, world=2, precision="fp32", compile=True, **asked).plan.method.kernels == "compiled"
    )


SMALL = GPTSizes(vocab=16, max_seq=4, width=8, layers=1, heads=1)


def step_on(par: autoptd.Parallel) -> float:
    ids = torch.randint(16, (2, 4), generator=torch.Generator().manual_seed(0))

    def body(c: Communicators) -> float:
        par.start(c)
        return float(par.train_step(dict.fromkeys(par.layout.inputs, ids)))

    return run_lockstep(par.layout.mesh, body)[0]


def small(cluster: str, **options: Any) -> autoptd.Parallel:
    return autoptd.parallelize(NanoGPT(SMALL), world=1, batch=2, seq=4, cluster=cluster, precision="fp32", **options)


def test_blocks_are_compiled_by_default_where_a_gpu_was_planned_and_is() -> None:
    """A plan for GPUs is compiled on GPUs, one for CPUs where that is asked for, and neither on the other device."""
    here, there = torch.device("cpu"), torch.device("cuda")
    gpu, cpu = small("dgx-h100"), small("local")
    assert (gpu.plan.method.kernels, cpu.plan.method.kernels) == ("compiled", "eager")
    assert [p._backend_on(d) for p in (gpu, cpu) for d in (here, there)] == ["", "inductor", "", ""]
    asked = small("local", fix={"kernels": "compiled"})
    assert [asked._backend_on(d) for d in (here, there)] == ["inductor", ""]
    never = small("dgx-h100", compile=False)
    assert (never.plan.method.kernels, never._backend_on(there)) == ("eager", "")
    assert small("dgx-h100", fix={"schedule": "zero-bubble"}).plan.method.kernels == "eager"
    step_on(gpu)  # on a CPU, without torch.compile


def test_what_torch_compile_cannot_compile_says_what_to_do() -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise ValueError("no kernel for this")

    torch._dynamo.register_backend(fails, "fails")
    with pytest.raises(RuntimeFault) as caught:
        step_on(small("local", compile="fails"))
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeFault)
    assert "torch.compile cannot compile the program" in cause.what and "no kernel for this" in cause.what
    assert "compile=False" in cause.fix
