"""Faults of the passes, planted one by one: `verify` compares every plan with the user's own model, and locates the
difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoptd
from autoptd.ops import library as ops
from autoptd.passes.normalise import normalise
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.trace.traced import BATCH, Traced
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from autoptd.verification.verdict import verify_plan
from tests.verification.everyday import CLASSES, NUMBERS, PAIR, REAL, WIDTH, Case, is_traced, perceptron
from tests.verification.test_everyday import planned, verified
from tests.verification.verified import told

aten = torch.ops.aten
Patch = pytest.MonkeyPatch


# --- losses -------------------------------------------------------------------------------------------------------


def weigh_by_samples(graph: fx.Graph, traced: Traced) -> None:
    """Weigh each microbatch's mean over its own valid tokens by its number of samples."""
    output = next(n for n in graph.nodes if n.op == "output")
    total, *counts = output.args
    whole = next(n for n in graph.nodes if n.op == "placeholder" and n.name == "loss_count_0")
    (share,) = whole.users
    summed, valid = share.args[0], counts[0]
    with graph.inserting_before(share):
        mean = graph.call_function(aten.div.Tensor, (summed, valid))
        weighed = graph.call_function(aten.mul.Tensor, (mean, BATCH))
        samples = graph.call_function(ops.element_count, (BATCH,))
    for node in (mean, weighed):
        node.meta = dict(share.meta)
    samples.meta = {**valid.meta, "info": TensorInfo((), torch.float32, False)}
    share.replace_input_with(summed, weighed)
    output.args = (total, samples, *counts[1:])


def plant(monkeypatch: Patch, fault: Callable[[fx.Graph, Traced], None]) -> None:
    monkeypatch.setattr(normalise, "LOSS", [*normalise.LOSS, fault])


@pytest.mark.parametrize("case", [Case(perceptron(lambda out, y: F.cross_entropy(out, y)), CLASSES, PAIR)], ids=["mlp"])
def test_a_mean_that_is_weighed_by_samples_is_found(case: Case, monkeypatch: Patch) -> None:
    plant(monkeypatch, weigh_by_samples)
    found = verified(case)
    assert not found.agrees
    where, what = found.faults[0]
    assert where == "div"
    assert "do not add up to that of the whole batch" in what, told(found)
    assert "everyday.py" in what or "test_planted_passes.py" in what


# --- samples ------------------------------------------------------------------------------------------------------


class Neighbour(nn.Module):
    """Every sample also sees the previous one, by computed numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h = h + h[torch.arange(x.shape[0], device=x.device) - 1]
        return F.cross_entropy(self.c(h), y)


class Ranked(Neighbour):
    """Samples are sorted by a computed number, and not put back."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return F.cross_entropy(self.c(h[h.sum(1).argsort()]), y)


def test_an_index_move_over_the_batch_is_found(monkeypatch: Patch) -> None:
    trusting = [step for step in normalise.LOSS if not step.__module__.endswith("batch_independence")]
    monkeypatch.setattr(normalise, "LOSS", trusting)
    for build in (Neighbour, Ranked):
        found = verified(Case(build, CLASSES, PAIR))
        assert not found.agrees
        where, what = found.faults[0]
        assert where in ("index", "sort", "argsort"), told(found)
        assert "depends on the others of its batch" in what
        assert "test_planted_passes.py" in what


# --- backward passes of the user's own ----------------------------------------------------------------------------


class Round(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Straight(nn.Module):
    """A straight-through estimator; the tracer sees its forward pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.b(torch.tanh(self.a(x)))
        h = h.round() if is_traced(h) else Round.apply(h)
        return F.cross_entropy(self.c(h), y)


class Halved(Straight):
    """A hook halves a gradient; the tracer does not see it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.b(torch.tanh(self.a(x)))
        if h.requires_grad and not is_traced(h):
            h.register_hook(lambda grad: grad / 2)
        return F.cross_entropy(self.c(h), y)


class Changed(Straight):
    """The traced activation differs from the one that runs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        act = torch.relu if is_traced(x) else torch.tanh
        return F.cross_entropy(self.c(self.b(act(self.a(x)))), y)


@pytest.mark.parametrize("build", [Straight, Halved], ids=lambda build: build.__name__)
@pytest.mark.parametrize("fix", [PAIR, {"dp": 1, "tp": 1, "pp": 2, "micro": 1, "zero": 1}], ids=["tp", "pp"])
def test_a_backward_pass_that_was_dropped_is_found(build: Callable[[], nn.Module], fix: dict[str, int]) -> None:
    found = verified(Case(build, CLASSES, fix))
    assert not found.agrees
    where, what = found.faults[0]
    assert where == "b", told(found)
    assert "the model's own backward pass" in what
    assert any(re.match(r"[ab]\.(weight|bias)", place) for place, _ in found.faults[1:])


def test_a_graph_with_other_values_than_the_model_is_found() -> None:
    found = verified(Case(Changed, CLASSES, PAIR))
    assert not found.agrees
    assert found.faults[0][0] == "b"
    assert "no op of the traced graph has the values" in found.faults[0][1]


def hooked(kind: str) -> nn.Module:
    """Make a model that its configuration can make narrower, with a hook that halves a gradient."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64, max_position_embeddings=32))
    if kind == "parameter":
        model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad / 2)
    elif kind == "module":
        model.model.norm.register_full_backward_hook(lambda module, grads, out: (grads[0] / 2,))
    else:
        model.model.norm = Reversed(model.model.norm)
    return model


class Reversed(nn.Module):
    """Wrapper of a module; the tracer sees the same forward pass."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y if is_traced(y) else Halve.apply(y)


class Halve(Round):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / 2


@pytest.mark.parametrize("kind", ["parameter", "module", "another module"])
def test_what_was_done_to_a_model_after_it_was_made_is_not_lost_where_it_is_made_smaller(kind: str) -> None:
    model = hooked(kind)
    try:
        plan = autoptd.plan(model, world=2, batch=4, seq=32, precision="fp32", fix={"dp": 2}, cluster="dgx-h100")
    except autoptd.AutoptdError:
        return  # hooks are refused
    found = verify_plan(plan, model)
    assert not found.agrees
    assert re.search(r"norm|up_proj", ": ".join(found.faults[0])), told(found)


# --- the verdict is the truth --------------------------------------------------------------------------------------


def class_weights(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=torch.tensor([0.1, 1.0, 2.0, 5.0, 9.0], dtype=out.dtype))


def masked_mean(out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return ((out - y).pow(2).mean(1) * mask).sum() / (mask.sum() + 1e-6)


def root(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y).sqrt()


def largest(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).pow(2).mean(1).max()


def right(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y)


LOSSES = {
    "class weights": Case(perceptron(class_weights), CLASSES, PAIR),
    "masked mean with a guard": Case(perceptron(masked_mean), {**NUMBERS, "mask": ((), REAL)}, PAIR),
    "root": Case(perceptron(root), NUMBERS, PAIR),
    "largest": Case(perceptron(largest), NUMBERS, PAIR),
    "right": Case(perceptron(right), NUMBERS, PAIR),
    "neighbour": Case(Neighbour, CLASSES, PAIR),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_verdict_is_what_training_says(name: str) -> None:
    """The truth is measured on another batch, in float64: all ranks against one process."""
    try:
        found = verified(LOSSES[name])
        truth = _trains_alike(LOSSES[name])
    except autoptd.AutoptdError:
        return  # a refused model is never trained wrongly
    assert found.agrees == truth, told(found)


def _trains_alike(case: Case) -> bool:
    double = {n: (shape, torch.float64 if t == REAL else t) for n, (shape, t) in case.inputs.items()}
    model, plan = planned(Case(case.build, double, case.fix, "fp64"))
    model.double()
    generator = torch.Generator().manual_seed(5)
    batch = {
        n: torch.randn(8, *shape, generator=generator, dtype=t)
        if t.is_floating_point
        else torch.randint(0, 5, (8, *shape), generator=generator)
        for n, (shape, t) in double.items()
    }
    if "mask" in batch:
        batch["mask"] = (torch.arange(8) % 3 != 0).double()
    examples = {n: x[:2] for n, x in batch.items()}
    parallel = autoptd.parallelize(model, plan=plan, inputs=examples, clip_norm=1e9)
    mine, alone = train_in_lockstep(parallel, [batch]), train_alone(model, [batch], clip_norm=1e9)
    return all(off < 1e-10 for off in differences(mine.gradients, alone.gradients).values())
