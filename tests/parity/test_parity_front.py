"""Loss functions passed by the user, with targets that `forward` never sees: as in one process, or one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.errors import InputsError
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.passes.trace.loss import LossArguments, read_objective
from autoptd.testing.parity import train_in_lockstep
from autoptd.verification.verdict import verify_plan
from tests.parity.front_check import MESHES, SAMPLES, WIDTH, Plain, planned, random, wrong, x
from tests.parity.parity_models import randomised


def values() -> Tensor:
    return random(SAMPLES, WIDTH, seed=5)


def labels() -> Tensor:
    found = torch.randint(0, WIDTH, (SAMPLES,), generator=torch.Generator().manual_seed(6))
    found[3:6] = -100
    return found


class Learned(nn.Module):
    """A loss with parameters of its own, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.tensor(0.3))
        self.register_buffer("margin", torch.full((WIDTH,), 0.7))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return ((self.mix(outputs) - target).square() * self.margin * torch.exp(-self.scale)).mean()


class Weighed(nn.Module):
    """A loss with a constant only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 2, WIDTH).double())

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return ((outputs - target).square() * self.weight).mean()


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Two(Plain):
    """Two outputs, in a container."""

    def __init__(self, put: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.put = put

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return self.put(self.last(torch.tanh(self.middle(hidden))), hidden)


def of_both(logits: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
    return (logits - target).square().mean() + 0.1 * hidden.square().mean()


class Owner(Plain):
    """A model that holds its loss, as Lightning modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = Learned()

    def score(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.criterion(outputs, target) + 0.01 * self.last.weight.square().sum() * outputs.square().mean()


LOSSES: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "a module": (nn.MSELoss(), values()),
    "cross entropy, labels that do not count": (nn.CrossEntropyLoss(label_smoothing=0.1), labels()),
    "class weights, summed": (
        nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, WIDTH).double(), reduction="sum"),
        labels(),
    ),
    "a constant of its own": (Weighed(), values()),
    "a function of torch's": (F.smooth_l1_loss, values()),
    "a partial of one": (partial(F.cross_entropy, ignore_index=-100), labels()),
    "its keywords": (nn.MSELoss(), {"target": values()}),
    "two keywords": (
        lambda out, y, weight: ((out - y).square() * weight).mean(),
        {"y": values(), "weight": random(SAMPLES, WIDTH, seed=7)},
    ),
    "a mapping": (
        lambda out, t: ((out - t["y"]).square() * t["weight"]).mean(),
        {"y": values(), "weight": random(SAMPLES, WIDTH, seed=7)},
    ),
    "compiled": (torch.compile(nn.MSELoss()), values()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_targets(name: str) -> None:
    loss, targets = LOSSES[name]
    assert wrong(randomised(Plain()), x(), loss, targets) == []


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_loss_with_parameters_is_trained_and_saved(mesh: tuple[int, int, int]) -> None:
    loss = randomised(Learned())
    before = {name: t.clone() for name, t in loss.state_dict().items()}
    assert wrong(randomised(Plain()), x(), loss, values(), mesh) == []
    assert all(torch.equal(t, before[name]) for name, t in loss.state_dict().items())
    made = planned(randomised(Plain()), x(), loss, values(), mesh)
    state = train_in_lockstep(made, [{**x(), "targets": values()}]).state
    assert set(state) - set(Plain().state_dict()) == {"loss.mix.weight", "loss.scale", "loss.margin"}
    assert not torch.equal(state["loss.scale"], before["scale"])


def test_constants_of_a_loss_are_not_in_the_state() -> None:
    made = planned(randomised(Plain()), x(), Weighed(), values())
    assert set(train_in_lockstep(made, [{**x(), "targets": values()}]).state) == set(Plain().state_dict())


def test_a_model_that_has_a_loss_keeps_the_name() -> None:
    model = Plain()
    model.loss = nn.Linear(3, 3)
    model.loss.requires_grad_(False)
    made = planned(randomised(model), x(), randomised(Learned()), values())
    assert {"loss.weight", "loss_.scale"} <= set(made._source.model.state_dict())
    assert "loss_" not in dict(model.named_modules())


@pytest.mark.parametrize("of", ["child", "method"])
def test_a_loss_of_the_model(of: str) -> None:
    model = randomised(Owner())
    loss = model.criterion if of == "child" else model.score
    assert wrong(model, x(), loss, values()) == []


@pytest.mark.parametrize(
    ("put", "loss"),
    [
        (lambda a, b: {"logits": a, "hidden": b}, lambda out, y: of_both(out["logits"], out["hidden"], y)),
        (lambda a, b: (a, b), lambda out, y: of_both(*out, y)),
        (Output, lambda out, y: of_both(out.logits, out.hidden, y)),
    ],
    ids=["mapping", "tuple", "dataclass"],
)
def test_outputs_in_a_container(put: Callable[..., Any], loss: Callable[..., Tensor]) -> None:
    assert wrong(randomised(Two(put)), x(), loss, values()) == []


def test_a_hugging_face_model_whose_labels_are_targets() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=8, patch_size=4,
        num_labels=WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = randomised(ViTForImageClassification(config))
    pixels = {"pixel_values": random(SAMPLES, 3, 8, 8)}
    assert wrong(model, pixels, lambda out, target: F.cross_entropy(out.logits, target), labels()) == []


def test_what_worked_without_targets_still_does() -> None:
    def reads_inputs(out: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        return (out - inputs["x"].flip(-1)).square().mean()

    assert wrong(randomised(Plain()), x(), reads_inputs) == []
    assert wrong(randomised(Plain()), x(), lambda out: out.square().mean()) == []
    assert read_objective(reads_inputs, x())[0].form == LossArguments.INPUTS
    assert read_objective(lambda out, scale=2.0: out.mean(), x())[0].form == LossArguments.OUTPUTS


def test_targets_are_planned_traced_and_verified() -> None:
    ids = torch.randint(0, 40, (2, 8))
    model = NanoGPT(GPTSizes(vocab=40, max_seq=8, width=16, layers=2, heads=2))
    loss = Flat(nn.CrossEntropyLoss(weight=torch.rand(40), reduction="sum"))  # in float32, beside logits in bf16
    given: dict[str, Any] = {"inputs": {"idx": ids}, "targets": {"y": ids}, "loss": loss}
    traced = autoptd.trace(model, **given)
    plan = autoptd.plan(traced, world=4, cluster="dgx-h100", batch=8, fix={"tp": 2, "pp": 2})
    found = verify_plan(plan, model, **given)
    assert found.agrees, found.faults


class Flat(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.loss(logits.flatten(0, 1), y.flatten())


def test_inputs_that_are_made_leave_out_what_is_a_target() -> None:
    model = NanoGPT(GPTSizes(vocab=40, max_seq=8, width=16, layers=2, heads=2))
    targets = {"targets": torch.zeros(3, 8, dtype=torch.int64)}
    traced = autoptd.trace(model, loss=Flat(nn.CrossEntropyLoss()), targets=targets["targets"], seq=8)
    assert list(traced.folded.traced.inputs.values()) == ["idx", "targets"]


def test_a_batch_without_named_targets_is_refused() -> None:
    made = planned(randomised(Plain()), x(), nn.MSELoss(), values(), mesh=(1, 1, 1))
    batch = {**x(), "targets": values()}
    assert float(made.train_step(batch)) > float(made.eval_step(batch)) > 0
    with pytest.raises(InputsError, match=r"lacks \['targets'\] and has \['y'\].*\n.*exactly \['x', 'targets'\]"):
        made.train_step({**x(), "y": values()})


# ---- refused losses ----


def refusal(loss: Any = None, targets: Any = None, model: nn.Module | None = None, **inputs: Tensor) -> InputsError:
    with pytest.raises(InputsError) as caught:
        autoptd.plan(model or Plain(), world=2, inputs=inputs or {"x": x()["x"][:2]}, loss=loss, targets=targets)
    return caught.value


Y = torch.zeros(2, WIDTH)
SCALE = nn.Parameter(torch.ones(()))
REFUSED: dict[str, tuple[Any, Any, str, str]] = {
    "no callable": ("mse", Y, "loss is of type str", "pass a function"),
    "targets alone": (None, Y, "targets were given without a loss", "pass loss="),
    "a loss of torch's alone": (nn.MSELoss(), None, "MSELoss(input", "pass targets=, example tensors for target"),
    "a function of torch's alone": (F.mse_loss, None, "mse_loss(input", "pass targets="),
    "three arguments": (
        lambda a, b, c: a.mean(),
        None,
        "takes more than the outputs",
        "targets=, example tensors for b",
    ),
    "three arguments and a target": (lambda a, b, c: a.mean(), Y, "outputs and one target", "{'b': …, 'c': …}"),
    "one argument and a target": (lambda a: a.mean(), Y, "outputs and one target", "two arguments"),
    "an unknown keyword": (nn.MSELoss(), {"labels": Y}, "takes no 'labels'", "known: target"),
    "a missing keyword": (nn.CosineEmbeddingLoss(), {"input2": Y}, "more than 'input2'", "input2, target"),
    "not reduced": (nn.MSELoss(reduction="none"), Y, "a tensor of 2 dims", "MSELoss(reduction='mean')"),
    "not reduced by hand": (lambda a, b: (a - b) ** 2, Y, "a tensor of 2 dims", ".mean() or .sum()"),
    "no tensor": (lambda a, b: 1.0, Y, "loss returned float", "scalar tensor"),
    "several": (lambda a, b: (a.mean(), b.mean()), Y, "loss returned a tuple of 2", "sum(losses)"),
    "rows that are no samples": (
        nn.MSELoss(),
        torch.zeros(3, WIDTH),
        "'targets' is of shape [3, 16]",
        "one row per sample",
    ),
    "no rows": (nn.MSELoss(), torch.zeros(()), "'targets' is of shape []", "one row per sample"),
    "a clash": (lambda a, x: a.mean(), {"x": Y}, "'x' names an input and a target", "targets={'labels': …}"),
    "no tensors": (nn.MSELoss(), {"target": [1, 2]}, "neither a tensor nor a mapping", "example tensors"),
    "an empty mapping": (nn.MSELoss(), {}, "an empty mapping", "example tensors"),
    "no name": (lambda a, t: a.mean(), {"my labels": Y}, "'my labels' is no valid name", "like an argument"),
    "a constant on meta": (
        nn.CrossEntropyLoss(weight=torch.empty(WIDTH, device="meta")),
        torch.zeros(2, dtype=torch.int64),
        "weight of the loss CrossEntropyLoss is on the meta device",
        "outside torch.device('meta')",
    ),
    "a trainable tensor": (lambda a, b: (a - b).square().mean() * SCALE, Y, "no module registers", "nn.Parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    loss, targets, what, fix = REFUSED[name]
    error = refusal(loss, targets)
    assert what in error.what and fix in error.fix and len(str(error)) < 600


def test_a_parameter_of_another_module_is_refused() -> None:
    other = nn.Linear(2, 2)
    error = refusal(lambda out: out.mean() + other.weight.square().sum(), model=Plain())
    assert error.where.startswith("loss (test_parity_front.py:") and "other.weight.square()" in error.where
    assert "a trainable tensor [2, 2] is used that no module registers" in error.what and "detach() it" in error.fix


def test_torchs_losses_take_tensors() -> None:
    error = refusal(nn.MSELoss(), Y, Two(Output))
    assert "the model returns Output, and MSELoss takes a tensor" in error.what
    error = refusal(nn.MSELoss(), Y, Two(lambda a, b: {"logits": a, "hidden": b}))
    assert "dict with 'logits', 'hidden'" in error.what


def test_a_function_that_names_no_module_is_not_torchs() -> None:
    made: dict[str, Any] = {}
    exec("def loss(out, y): return (out['logits'] - y).square().mean()", made)
    assert made["loss"].__module__ is None
    model = randomised(Two(lambda logits, hidden: {"logits": logits, "hidden": hidden}))
    assert wrong(model, x(), made["loss"], values()) == []


def test_a_single_target_named_like_an_input() -> None:
    class Sees(Plain):
        def forward(self, targets: Tensor) -> Tensor:
            return super().forward(targets)

    with pytest.raises(InputsError) as caught:
        autoptd.plan(Sees(), world=2, inputs={"targets": Y}, loss=nn.MSELoss(), targets=Y)
    error = caught.value
    assert "a single target is named 'targets'" in error.what and "{'target': …}" in error.fix


def test_a_traced_model_has_its_targets() -> None:
    traced = autoptd.trace(Plain(), inputs={"x": x()["x"][:2]}, loss=nn.MSELoss(), targets=Y, precision="fp64")
    with pytest.raises(InputsError, match="the model was traced with"):
        autoptd.plan(traced, world=2, targets=Y)
