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
from autoptd.errors import InputsError
from tests.parity.parity_check import MODELS, source
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
        return super().logits(x) / (2.0 if self.training else 0.5)


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

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def train(self, mode: bool = True) -> OtherWeights:
        self.scale = 2.0 if mode else 3.0
        return super().train(mode)

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * self.scale


class OtherInput(Body):
    """A block whose ops read another parameter in eval mode."""

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


class AlwaysOfBatch(Body):
    """A batch norm that takes the statistics of the batch in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2 * WIDTH).double()

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        return F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)


class Logits(Noise):
    """Noise in training alone; the loss is a function of what forward returns."""

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


class PlainLogits(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


def penalised(out: Tensor, y: Tensor) -> Tensor:
    term = 0.01 * out.square().mean() if torch.is_grad_enabled() else 0.0
    return F.cross_entropy(out, y) + term


PARTED: dict[Callable[[], nn.Module], tuple[str, str]] = {  # model -> code named in the error of training, of eval mode
    TrainedTerm: ("loss = loss + 0.01 * out.square().mean()", ""),
    TermOfEvaluation: ("", "return loss if self.training else loss + out.square().mean()"),
    TermWithGradients: ("loss = loss + 0.01 * out.square().mean()", ""),
    ReadsRequiresGrad: ("torch.tanh(x) if x.requires_grad", "torch.tanh(x) if x.requires_grad"),
    Temperature: ("/ (2.0 if self.training else 0.5)", "/ (2.0 if self.training else 0.5)"),
    Noise: ("x = x + 0.1 * torch.randn_like(x)", ""),
    OwnDropout: ("x * (torch.rand_like(x) > 0.25)", ""),
    AlwaysDrops: ("", "F.dropout(super().features(x), 0.5)"),
    OtherActivation: ("F.rrelu(", "F.rrelu("),
    OtherWeights: ("super().logits(x) * self.scale", "super().logits(x) * self.scale"),
    OtherInput: ("b = self.up(x), self.slow(x)", "b if self.training else a"),
    OtherOrder: ("torch.rand_like(x), torch.rand_like(x)", ""),
    OwnStatistics: ("mean = x.mean(0) if self.training", ""),
    AlwaysOfBatch: ("F.batch_norm(", "F.batch_norm("),
}


def running(model: nn.Module, **options: Any) -> Parallel:
    given = {"inputs": {"x": X, "y": Y}, **options}
    return autoptd.parallelize(model, world=1, batch=8, precision="fp64", **given)


def plain(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """Return the loss of a copy of the model in eval mode."""
    with torch.no_grad():
        return float(copy.deepcopy(model).eval()(**batch))


@pytest.mark.fault("another evaluation")
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


class ReadsNumbers(Body):
    def logits(self, x: Tensor) -> Tensor:
        out = super().logits(x)
        if not self.training:
            out = out / float(out.abs().max())
        return out


def test_an_eval_mode_that_cannot_be_traced_is_refused() -> None:
    par = running(ReadsNumbers())
    with pytest.raises(InputsError, match="what the model computes in eval mode is unknown") as refused:
        par.eval_step({"x": X, "y": Y})
    assert "float(out.abs().max())" in refused.value.where


def test_a_loss_with_gradients_alone_is_refused() -> None:
    par = running(PlainLogits(), inputs={"x": X}, loss=penalised, targets={"y": Y})
    with pytest.raises(InputsError, match="in another way in eval mode") as refused:
        par.eval_step({"x": X, "y": Y})
    assert "term = 0.01 * out.square().mean() if torch.is_grad_enabled()" in refused.value.where


def test_a_metric_is_that_of_eval_mode() -> None:
    made = Logits()
    par = running(made, inputs={"x": X}, loss=F.cross_entropy, targets=Y)

    def each(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(out, batch["targets"], reduction="none")

    with pytest.raises(InputsError, match="in another way in eval mode"):
        par.eval_step({"x": X, "targets": Y})
    found = float(par.evaluate([{"x": X, "targets": Y}], {"loss": each})["loss"])
    with torch.no_grad():
        assert abs(found - float(F.cross_entropy(copy.deepcopy(made).eval()(X), Y))) < 1e-12


def test_modes_of_the_caller_do_not_matter() -> None:
    """The modes are those of the plan, whatever the loop sets, and stay as they were."""
    model = TrainedTerm()
    par = running(model)
    model.eval()
    with pytest.raises(InputsError, match="in another way in eval mode"):
        par.eval_step({"x": X, "y": Y})
    assert not any(m.training for m in model.modules())
    same = Body()
    par = running(same)
    same.eval()
    assert abs(float(par.eval_step({"x": X, "y": Y})) - plain(same, {"x": X, "y": Y})) < 1e-12
    assert not any(m.training for m in same.modules())


def test_a_model_that_changed_is_not_compared() -> None:
    model = OtherWeights()
    par = running(model)
    model.scale = 5.0
    with pytest.raises(InputsError, match=r"scale of the model was 2\.0 when it was planned"):
        par.eval_step({"x": X, "y": Y})


class SameInBoth(Body):
    """Branches of which both sides compute the same, and what the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(2 * WIDTH, momentum=None).double(), nn.AlphaDropout(0.3)
        self.register_buffer("seen", torch.zeros(()).double())
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(2 * WIDTH, 2, 8, 0.2, batch_first=True).double(), 2
        )
        self.rows = nn.LSTM(2 * WIDTH, 2 * WIDTH, 2, batch_first=True, dropout=0.3).double()

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    def features(self, x: Tensor) -> Tensor:
        x = self.norm(super().features(x))
        if self.training:
            with torch.no_grad():
                self.seen.add_(1)
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        else:
            x = self.block(x)
        x = self.encoder(self.drop(x)[:, None].expand(-1, 3, -1))
        return self.rows(x)[0].mean(1)


class DropsPath(Body):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH).double() for _ in range(4))

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.3:
                continue
            y = layer(x)
            if self.training:
                y = y / 0.75 * torch.floor(0.75 + torch.rand(len(y), 1, dtype=y.dtype))
            x = x + y
        return x


class CountsInTraining(Body):
    """Code of training alone needs a size as a number."""

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            assert list(range(x.shape[1]))
        return super().features(x[..., None].expand(-1, -1, WIDTH).flatten(0, 1)).unflatten(0, (-1, x.shape[1])).sum(1)


class WritesInTraining(Body):
    """Only one of two modes writes to tensors, for which operands stand for ops that return them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES).double())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.logits(x)
        if self.training:
            self.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return F.mse_loss(out, F.one_hot(y, CLASSES).to(out.dtype))


SAME = [Body, SameInBoth, DropsPath, CountsInTraining, WritesInTraining]


@pytest.mark.parametrize("make", SAME, ids=lambda make: make.__name__)
def test_what_is_the_same_is_evaluated(make: Callable[[], nn.Module]) -> None:
    model = make()
    par = running(model)
    batch = {"x": X, "y": Y}
    assert abs(float(par.eval_step(batch)) - plain(model, batch)) < 1e-12
    par.train_step(batch)
    model.load_state_dict(par.state_dict())
    assert abs(float(par.eval_step(batch)) - plain(model, batch)) < 1e-12


class LeavesTokensOut(nn.Module):
    """The loss reads all tokens but the first ones: its sizes are products of a number of samples and a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 6).double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.table(ids)
        return nn.functional.cross_entropy(logits[:, 2:].flatten(0, 1), labels[:, 2:].flatten())


class LoopsOverTokens(LeavesTokensOut):
    """The loop makes a number of the length, with which the slice is traced from None or from 0."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        steps = F.pad(self.table(ids), (0, 0, 2, 0))[:, : ids.shape[1]]
        state, states = torch.zeros_like(steps[:, 0]), list[Tensor]()
        for i in range(ids.shape[1]):
            state = torch.tanh(state + steps[:, i])
            states.append(state)
        return nn.functional.cross_entropy(torch.stack(states, 1).flatten(0, 1), labels.flatten())


class WritesTokens(LoopsOverTokens):
    """The loop makes a number of the length, with which the slice is written from None or from 0."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scale = torch.ones(2, ids.shape[1] + 2, dtype=self.table.weight.dtype)
        scale[1:, : ids.shape[1]] *= 2
        return super().forward(ids, labels) * scale[1].mean()


class AddsLengths(LeavesTokensOut):
    """The lengths of two inputs are numbers, as their sum is one; that of a third, which is the same here, is none."""

    def forward(self, ids: Tensor, times: Tensor, ahead: Tensor, y: Tensor) -> Tensor:
        every = torch.cat((times, ahead), 1) @ torch.arange(12.0)
        return self.table(ids[:, -4:]).square().mean() * every.mean() + (y * torch.arange(4.0)).mean()


def test_lengths_of_which_the_sum_alone_is_a_number() -> None:
    ids, times = torch.arange(40).reshape(5, 8) % 6, torch.ones(5, 8)
    given = {"ids": ids, "times": times, "ahead": times[:, 4:], "y": times[:, 4:]}
    check_evaluates(source := autoptd.trace(AddsLengths(), inputs=given, precision="fp64"))
    assert ("ids", 1) in source.folded.traced.sizes.values()


@pytest.mark.parametrize("make", [LeavesTokensOut, LoopsOverTokens, WritesTokens], ids=lambda make: make.__name__)
def test_sizes_written_otherwise_are_the_same(make: Callable[[], nn.Module]) -> None:
    ids = torch.arange(40).reshape(5, 8) % 6
    check_evaluates(autoptd.trace(make(), inputs={"ids": ids, "labels": ids}, precision="fp64"))


class BranchesOfSizes(nn.Module):
    """Other values of large batches and of short samples in eval mode, where training takes no branch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 6).double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.table(ids)
        if not self.training and (ids.shape[0] > 32 or ids.shape[1] < 5):
            logits = logits.cumsum(1)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.fault("another evaluation")
def test_branches_of_eval_mode_alone_are_conditions_of_evaluation() -> None:
    def batch(samples: int, tokens: int) -> dict[str, Tensor]:
        ids = torch.arange(samples * tokens).reshape(samples, tokens) % 6
        return {"ids": ids, "labels": ids.flip(1)}

    model = BranchesOfSizes()
    par = running(model, inputs=batch(8, 7))
    par.train_step(batch(8, 4))
    for sizes, says in (((8, 4), "traced where s >= 5, but here s = 4"), ((40, 7), "where b <= 32, but here b = 40")):
        with pytest.raises(InputsError, match=says):
            par.eval_step(batch(*sizes))
    losses = [float(par.eval_step(batch(*sizes))) for sizes in ((8, 7), (30, 6))]
    model.load_state_dict(par.state_dict())
    assert losses == pytest.approx([plain(model, batch(8, 7)), plain(model, batch(30, 6))], rel=1e-12)


OFTEN = [*MODELS, *DROPOUT, *FEW_MESHES, *UPDATING]
ALWAYS_DROP = {"folded_dropout", "written_dropout"}  # models that drop in eval mode too
POWER_METHOD = {"updating_spectral"}  # iterates in training alone


@pytest.mark.parametrize("name", OFTEN)
def test_everyday_models_are_evaluated(name: str) -> None:
    """Models whose eval mode differs from training by dropout alone, or in nothing, and that update no buffer in it."""
    wrong = name in ALWAYS_DROP | POWER_METHOD
    says = "in another way in eval mode" if wrong else "updates the buffer .* in eval mode too"
    with pytest.raises(InputsError, match=says) if wrong or name in UPDATING else nullcontext():
        check_evaluates(source(name))


class Counts(Body):
    """A count of steps that training alone updates, and a table that every pass makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scales", torch.ones(WIDTH, dtype=torch.float64), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        self.scales = torch.arange(x.shape[1], dtype=x.dtype) / WIDTH
        return super().features(x * self.scales)


def test_a_buffer_that_training_alone_updates_is_no_hindrance() -> None:
    model = Counts()
    par = running(model)
    batch = {"x": X, "y": Y}
    par.train_step(batch)
    loss = float(par.eval_step(batch))
    model.load_state_dict(par.state_dict())
    assert abs(loss - plain(model, batch)) < 1e-12 and float(par.state_dict()["steps"]) == float(model.steps) == 1
