"""Ways of writing models that libraries have: each trains as in one process."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoptd.verification.copies import copied
from tests.parity.front_check import WIDTH, Plain, Scored, wrong, x
from tests.parity.parity_models import randomised


class DataRead(Scored):
    """A model that reads a weight by `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(self.first(x), self.middle.weight.data, self.middle.bias))
        return self.last(h).square().mean()


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_read_by_data(frozen: bool) -> None:
    """They have no gradient there, and still change with the steps."""
    model = randomised(DataRead())
    model.middle.weight.requires_grad_(not frozen)
    assert wrong(model, x()) == []


def test_a_model_that_has_run_is_copied() -> None:
    """The weight of the older weight norm is a computed tensor that the module holds."""
    model = Plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.middle)
    model(torch.randn(2, WIDTH)).sum().backward()
    other = copied(model)
    assert torch.equal(other.middle.weight, model.middle.weight) and other.middle.weight.grad_fn is None
    assert wrong(randomised(model), x(), lambda out: out.square().mean()) == []


class Scales(Plain):
    """A model that takes a list of one constant apart."""

    def forward(self, x: Tensor) -> Tensor:
        (scale,) = x.new_full((1,), 0.5).unbind()
        return super().forward(x) * scale


def test_a_tuple_of_one_constant() -> None:
    assert wrong(randomised(Scales()), x(), lambda out: out.square().mean()) == []
