"""Models that amplify rounding, or ask for the type: that is no fault, and a fault in them is still found."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import CannotVerify
from autoptd.plans.model import Plan
from autoptd.verification.smaller.smaller import Subject
from autoptd.verification.trial import Trial, replace_text, trial_on
from autoptd.verification.verdict import judge

WIDTH = 12


class ShiftBeforeNorm(nn.Module):
    """A shift that the norm removes: its gradient is zero, up to the rounding of numbers far above the others."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1))
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(1e-5 * self.layer(x) + self.shift, (WIDTH,), eps=1e-20)
        return self.head(normed).exp().mean()


@cache
def trial() -> tuple[Trial, Plan]:
    torch.manual_seed(0)
    x = torch.randn(8, 6, WIDTH, dtype=torch.float64)
    source = autoptd.trace(ShiftBeforeNorm().double(), inputs={"x": x[:2]}, precision="fp64")
    plan = autoptd.plan(source, world=4, batch=8, fix={"dp": 4}, optimizer="sgd", cluster="dgx-h100")
    return trial_on(Subject(source, plan, source), [{"x": x}, {"x": x.flip(0)}]), plan


def test_amplified_rounding_is_no_fault() -> None:
    found = judge(*trial())
    assert found.agrees, found.faults
    assert any("amplifies rounding" in line for line in found.proved)
    assert found.difference < 1e-9


def test_a_fault_in_such_a_model_is_found() -> None:
    made, plan = trial()
    assert not judge(replace_text(made, "exp(head)", "exp(head * (1 + 1e-7))"), plan).agrees


class OfTheClock(nn.Module):
    """A loss that depends on something that no seed repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() * (1 + time.perf_counter_ns() % 1000)


def test_a_model_that_does_not_repeat_itself_cannot_be_verified() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 6, WIDTH, dtype=torch.float64)
    source = autoptd.trace(OfTheClock().double(), inputs={"x": x[:2]}, precision="fp64")
    plan = autoptd.plan(source, world=4, batch=8, fix={"dp": 4}, optimizer="sgd", cluster="dgx-h100")
    with pytest.raises(CannotVerify, match="the plain model differs from itself as well") as caught:
        judge(trial_on(Subject(source, plan, source), [{"x": x}, {"x": x.flip(0)}]), plan)
    assert "no clock" in caught.value.fix


class ByType(nn.Module):
    """Code that asks for the type, and noise that is drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x + torch.randn_like(x))
        y = y * (y.var(-1, keepdim=True) + (0.1 if y.dtype == torch.float32 else 1.0)).rsqrt()
        return self.head(y).square().mean()


def trial_by_type() -> tuple[Trial, Plan]:
    torch.manual_seed(0)
    x = torch.randn(8, 6, WIDTH)
    model = ByType()
    source = autoptd.trace(model, inputs={"x": x[:2]}, precision="fp32")
    plan = autoptd.plan(source, world=4, batch=8, fix={"dp": 2, "tp": 2}, optimizer="sgd", cluster="dgx-h100")
    model.double()
    plan = plan.model_copy(update={"precision": "fp64"})
    return trial_on(Subject(source, plan, source), [{"x": x.double()}, {"x": x.double().flip(0)}]), plan


def test_code_that_asks_for_the_type_is_answered_by_the_planned_one() -> None:
    assert judge(*trial_by_type()).agrees


def test_a_fault_behind_drawn_numbers_is_located() -> None:
    made, plan = trial_by_type()
    found = judge(replace_text(made, "0.1", "0.11"), plan)
    assert not found.agrees and any("0.11" in what for _, what in found.faults), found.faults
