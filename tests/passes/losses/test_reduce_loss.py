"""The loss of a batch does not depend on how the batch is cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import InputsError, TraceError, UnsupportedOp
from autoptd.passes.losses.loss_form import LossForm, loss_form
from autoptd.passes.trace.loss import read_objective
from autoptd.passes.trace.trace import trace
from tests.everyday_losses import (
    CLASSES,
    EXACT,
    FUNCTIONS,
    RATIOS,
    REFUSED,
    WHOLE,
    Loss,
    Model,
    model_of,
    ragged,
)
from tests.passes.interpret import assert_same, assert_unchanged, in_microbatches, normalised, whole


def loss_of(out: Any, loss: Callable[..., Tensor] | None, inputs: Mapping[str, Tensor]) -> Tensor:
    objective, _ = read_objective(loss, inputs)
    return objective.of_outputs(out, inputs, objective.loss)


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    tolerant = 1e-6 if "float32" in name else 1e-12
    model, batch = model_of(EXACT[name]), ragged()
    traced = normalised(model, batch)
    wanted = whole(model, batch)
    for pieces in ([6], [1, 3, 2], [3, 3], [1] * 6):
        assert_same(in_microbatches(model, traced, batch, pieces), wanted, tolerant)


def test_microbatch_without_a_valid_token() -> None:
    batch = ragged()
    batch["labels"][0] = -100
    assert_unchanged(model_of(EXACT["cross_entropy"]), batch)


class Regularised(Model):
    """A penalty that depends on no input counts once, not once per microbatch."""

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, labels, mask) + 0.01 * self.head.weight.square().sum() + self.inner.bias.mean()


def test_penalty_on_parameters_counts_once() -> None:
    torch.manual_seed(0)
    assert_unchanged(Regularised(EXACT["cross_entropy"]).double(), ragged())


class Constant(Model):
    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, labels, mask) + self.weights.sum() + mask.sum() / mask.sum()


def test_terms_without_gradient_keep_their_value() -> None:
    torch.manual_seed(0)
    assert_unchanged(Constant(EXACT["mean"]).double(), ragged(), pieces=(2, 2, 2))


@pytest.mark.parametrize("name", RATIOS)
def test_a_sum_over_what_inputs_give_is_exact(name: str) -> None:
    form = compare(RATIOS[name])
    assert form.outer is None


def compare(loss: Loss, batch: dict[str, Tensor] | None = None) -> LossForm:
    model, batch = model_of(loss), ragged() if batch is None else batch
    traced = normalised(model, batch)
    wanted = whole(model, batch)
    for pieces in ([6], [1, 3, 2], [5, 1]):
        assert_same(in_microbatches(model, traced, batch, pieces), wanted, 1e-11)
    return loss_form(traced.graph)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_sums_is_exact(name: str) -> None:
    assert compare(FUNCTIONS[name]).outer is not None


def test_a_sum_is_rounded_as_that_of_the_batch() -> None:
    assert compare(lambda z, y, m: z.square().mean() * (z.detach().sum() * 3).long()).outer is not None


def test_a_bound_by_the_number_of_samples_is_refused() -> None:
    model = model_of(lambda z, y, m: z.square().mean() * (m * 2).sum().clamp(max=z.shape[0]))
    with pytest.raises(UnsupportedOp, match="computes with the number of samples"):
        raise loss_form(normalised(model, ragged()).graph).refused[0]


class Uncertain(Model):
    """Terms weighted by learned numbers (Kendall et al. 2018)."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.log_variance = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return (-self.log_variance).exp() * super().forward(x, labels, mask) + self.log_variance


@pytest.mark.parametrize("name", ["two_terms", "masked_average_guarded"])
def test_learned_factors_keep_a_mean_linear(name: str) -> None:
    torch.manual_seed(0)
    traced = assert_unchanged(Uncertain(EXACT[name]).double(), ragged())
    assert loss_form(traced.graph).outer is None


@pytest.mark.parametrize("name", ["root", "dice", "switch"])
def test_parameters_within_a_function_of_sums(name: str) -> None:
    torch.manual_seed(0)

    class Tempered(Uncertain):
        def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
            return (super().forward(x, labels, mask) + self.log_variance).exp().sqrt()

    assert_unchanged(Tempered(FUNCTIONS[name]).double(), ragged())


@pytest.mark.parametrize("name", WHOLE)
def test_functions_of_the_whole_batch(name: str) -> None:
    form = compare(WHOLE[name])
    assert form.outer is not None and 0 < form.row_width <= 2 * 2 * CLASSES


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_op_its_place_and_ways_out(name: str) -> None:
    loss, says = REFUSED[name]
    try:
        text = str(loss_form(normalised(model_of(loss), ragged()).graph).refused[0])
    except UnsupportedOp as error:  # a result that is mapped back to samples
        text = str(error)
    assert says in text and "everyday_losses.py" in text and "fix" in text


def test_no_parameter_reaches_the_loss() -> None:
    with pytest.raises(TraceError, match="no trainable parameter reaches the loss"):
        normalised(model_of(lambda z, y, m: m.mean()), ragged())


def test_counts_depend_on_inputs_alone() -> None:
    traced = normalised(model_of(EXACT["two_terms"]), ragged())
    output = next(n for n in traced.graph.graph.nodes if n.op == "output")
    names = [n.name for n in traced.graph.graph.nodes if n.name.startswith("loss_count")]
    assert names == ["loss_count_0", "loss_count_1"] and len(output.args) == 3


class Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "wrap", [lambda x: x, Output, lambda x: {"loss": x, "logits": torch.ones(3)}, lambda x: (x, torch.ones(3))]
)
def test_loss_is_found(wrap: Callable[[Tensor], object]) -> None:
    value = torch.tensor(2.0)
    assert loss_of(wrap(value), None, {}) is value


@pytest.mark.parametrize(
    "out", [torch.ones(3), {"logits": torch.ones(3)}, (torch.ones(2),), None, {"loss": torch.ones(3)}]
)
def test_no_loss_is_refused(out: object) -> None:
    with pytest.raises(InputsError, match="holds no scalar loss"):
        loss_of(out, None, {})


def test_loss_callable_takes_outputs_or_also_inputs() -> None:
    z = torch.ones(3)
    assert loss_of(z, lambda out: out.sum(), {}) == 3
    assert loss_of(z, lambda out, inputs: out.sum() * inputs["w"], {"w": torch.tensor(2)}) == 6


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_loss_callable_is_traced_with_the_model() -> None:
    torch.manual_seed(0)
    model, x = Logits().double(), torch.randn(6, 4, dtype=torch.float64)
    traced = normalised(model, {"x": x}, loss=lambda out: out.square().mean())
    found = in_microbatches(model, traced, {"x": x}, [1, 5]).loss
    torch.testing.assert_close(found, model(x).square().mean().detach())


def test_a_model_without_loss_is_refused() -> None:
    with pytest.raises(InputsError, match="a tensor of 2 dims, which holds no scalar loss"):
        trace(Logits(), {"x": torch.ones(6, 4)})
