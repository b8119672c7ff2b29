"""Models that amplify rounding: what they amplify is no fault, and a fault in them is still found."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
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
