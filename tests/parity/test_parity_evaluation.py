"""`eval_step` gives the loss of the plain model in eval mode, or says where the model parts from what it trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.api import Parallel
from autoptd.compile.evaluation import check_evaluates
from autoptd.compile.read import read_model
from autoptd.errors import InputsError
from autoptd.progress import Silent
from tests.parity.parity_check import MODELS, case, source
from tests.parity.parity_models import DROPOUT, FEW_MESHES
from tests.parity.updating_models import UPDATING

WIDTH, CLASSES = 6, 4
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).double()
Y = torch.arange(8) % CLASSES


class Body(nn.Module):
    """An MLP that returns its loss, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES)
        self.double()

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), y)


class TrainedTerm(Body):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.logits(x)
        loss = F.cross_entropy(out, y)
        if self.training:
            loss = loss + 0.01 * out.square().mean()
        return loss


class TermOfEvaluation(Body):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.logits(x)
        loss = F.cross_entropy(out, y)
        return loss if self.training else loss + out.square().mean()


class TermWithGradients(Body):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.logits(x)
        loss = F.cross_entropy(out, y)
        if torch.is_grad_enabled():
            loss = loss + 0.01 * out.square().mean()
        return loss


class ReadsRequiresGrad(Body):
    def features(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return torch.tanh(x) if x.requires_grad else torch.sigmoid(x)


class Temperature(Body):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) / (2.0 if self.training else 1.0)


class Noise(Body):
    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return x


class OwnDropout(Body):
    """Dropout by hand, which no program knows as such."""

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        if self.training:
            x = x * (torch.rand_like(x) > 0.25) * 4 / 3
        return x


class AlwaysDrops(Body):
    def features(self, x: Tensor) -> Tensor:
        return F.dropout(super().features(x), 0.5)


class OtherActivation(Body):
    def features(self, x: Tensor) -> Tensor:
        return F.rrelu(self.up(x), training=self.training)


class OtherWeights(Body):
    """A module whose `train` sets what forward reads."""

    scale = 2.0

    def train(self, mode: bool = True) -> OtherWeights:
        self.scale = 2.0 if mode else 1.0
        return super().train(mode)

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * self.scale


class OtherInput(Body):
    """The same ops on another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, 2 * WIDTH).double()

    def features(self, x: Tensor) -> Tensor:
        a, b = self.up(x), self.slow(x)
        return torch.tanh(a) + torch.sigmoid(b if self.training else a)


class OtherOrder(Body):
    """Draws of the same kind, of which evaluation has one alone."""

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        first, second = torch.rand_like(x), torch.rand_like(x)
        return x + first - (second if self.training else first)


class OwnStatistics(Body):
    """Running statistics by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2 * WIDTH).double())

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        mean = x.mean(0) if self.training else self.mean
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
        return x - mean


class BranchOfSizes(Body):
    """Another branch in large batches of evaluation alone."""

    def features(self, x: Tensor) -> Tensor:
        if not self.training and x.size(0) > 32:
            return torch.sigmoid(self.up(x))
        return super().features(x)


def penalised(out: Tensor, y: Tensor) -> Tensor:
    term = 0.01 * out.square().mean() if torch.is_grad_enabled() else 0.0
    return F.cross_entropy(out, y) + term


PARTED: dict[Callable[[], nn.Module], tuple[str, str]] = {  # model -> code named in the error of training, of eval mode
    TrainedTerm: ("loss = loss + 0.01 * out.square().mean()", ""),
    TermOfEvaluation: ("", "return loss if self.training else loss + out.square().mean()"),
    TermWithGradients: ("loss = loss + 0.01 * out.square().mean()", ""),
    ReadsRequiresGrad: ("torch.tanh(x) if x.requires_grad", "torch.tanh(x) if x.requires_grad"),
    Temperature: ("/ (2.0 if self.training else 1.0)", "/ (2.0 if self.training else 1.0)"),
    Noise: ("x = x + 0.1 * torch.randn_like(x)", ""),
    OwnDropout: ("x * (torch.rand_like(x) > 0.25)", ""),
    AlwaysDrops: ("", "F.dropout(super().features(x), 0.5)"),
    OtherActivation: ("F.rrelu(", "F.rrelu("),
    OtherWeights: ("super().logits(x) * self.scale", "super().logits(x) * self.scale"),
    OtherInput: ("b = self.up(x), self.slow(x)", ""),
    OtherOrder: ("torch.rand_like(x), torch.rand_like(x)", ""),
    OwnStatistics: ("mean = x.mean(0) if self.training", ""),
    BranchOfSizes: ("", "if not self.training and x.size(0) > 32"),
}


def running(model: nn.Module, **options: Any) -> Parallel:
    given = {"inputs": {"x": X, "y": Y}, **options}
    return autoptd.parallelize(model, world=1, batch=8, precision="fp64", **given)


def plain(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """Return the loss of a copy of the model in eval mode."""
    with torch.no_grad():
        return float(copy.deepcopy(model).eval()(**batch))


@pytest.mark.parametrize("make", PARTED, ids=lambda make: make.__name__)
def test_a_model_that_evaluates_otherwise_is_refused(make: Callable[[], nn.Module]) -> None:
    training, evaluation = PARTED[make]
    par = running(make())
    for _ in range(2):  # each time
        with pytest.raises(InputsError, match="in another way in eval mode than in training") as refused:
            par.eval_step({"x": X, "y": Y})
    places = dict(line.split(": ", 1) for line in refused.value.where.splitlines())
    for when, code in (("in training", training), ("in eval mode", evaluation)):
        assert code in places.get(when, "")
        assert not code or "test_parity_evaluation.py:" in places[when]
    assert "par.evaluate" in refused.value.fix
    par.train_step({"x": X, "y": Y})  # goes on
