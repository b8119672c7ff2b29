"""Inputs without samples, such as the weight of a term at this step: every microbatch and rank gets them whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.errors import AutoptdError, InputsError
from autoptd.parallel import Parallel
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from autoptd.verification.verdict import verify_plan

SAMPLES, TOKENS, WIDTH, CLASSES = 8, 6, 16, 5
MESHES: list[dict[str, Any]] = [{"dp": 2, "tp": 2, "pp": 2}, {"dp": 4, "micro": 1}, {"pp": 2, "micro": 2}]
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Annealed(nn.Module):
    """A weight and a temperature that the training loop changes, and a step that decides."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.back = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, beta: Tensor, heat: Tensor, step: Tensor) -> Tensor:
        mean, spread = self.mean(x), self.spread(x)
        y = F.softmax(self.back(mean) / heat, -1)
        y = torch.where(step > 3, self.more(y), y)
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean()
        return F.mse_loss(y, x) * torch.exp(-heat.squeeze()) + beta * divergence

    @staticmethod
    def batch(step: int) -> dict[str, Tensor]:
        heat = torch.tensor([0.7 - step / 10], dtype=torch.float64)
        return {"x": real(SAMPLES, WIDTH), "beta": real(1)[0].square(), "heat": heat, "step": torch.tensor(3 + step)}


class Tables(nn.Module):
    """Positions, a mask and the weights of classes, for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, positions: Tensor, ids: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        h = self.layer(self.embed(ids) + positions, src_mask=mask)
        return F.cross_entropy(self.out(h).transpose(1, 2), ids, weight=weights)

    @staticmethod
    def batch(step: int) -> dict[str, Tensor]:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        weights = torch.rand(CLASSES, dtype=torch.float64)
        ids = torch.randint(CLASSES, (SAMPLES, TOKENS))
        return {"positions": real(TOKENS, WIDTH), "ids": ids, "mask": mask, "weights": weights}


Kind = type[Annealed] | type[Tables]


def parallel(kind: Kind, fix: dict[str, Any]) -> Parallel:
    torch.manual_seed(0)
    model, world = kind().double(), math.prod(fix.get(axis, 1) for axis in ("dp", "cp", "tp", "pp"))
    return autoptd.parallelize(
        model,
        world=world,
        inputs=kind.batch(0),
        precision="fp64",
        batch=SAMPLES,
        cluster="dgx-h100",
        fix=fix,
        optimizer="sgd",
        optimizer_options=SGD,
    )


@pytest.mark.parametrize(("kind", "fix"), [*((k, m) for k in (Annealed, Tables) for m in MESHES), (Tables, {"cp": 2})])
def test_trains_as_one_process(kind: Kind, fix: dict[str, Any]) -> None:
    par = parallel(kind, fix)
    batches = [kind.batch(step) for step in range(2)]
    ours = train_in_lockstep(par, batches)
    torch.manual_seed(0)
    alone = train_alone(kind().double(), batches, optimizer="sgd", optimizer_options=SGD)
    assert ours.losses == pytest.approx(alone.losses, rel=1e-10) and not ours.diverged
    for found, expected in ((ours.gradients, alone.gradients), (ours.state, alone.state)):
        assert max(differences(found, expected).values()) < 1e-10


def both_ranks(change: Callable[[dict[str, Any], int], dict[str, Any]]) -> list[float | str]:
    """Return what two data-parallel ranks get from a step whose batches a function changes: the loss, or an error."""
    par = parallel(Annealed, {"dp": 2})
    values = par.initial_values()
    torch.manual_seed(1)
    batch = Annealed.batch(0)

    def body(communicators: Communicators) -> float | str:
        mine = copy.copy(par)
        mine.start(communicators, values)
        share = batch | {"x": batch["x"].chunk(2)[mine.dp_rank]}
        try:
            return float(mine.train_step(change(share, mine.dp_rank)))
        except AutoptdError as error:
            return str(error)

    return run_lockstep(par.layout.mesh, body)


@pytest.mark.fault("other values of a shared input")
def test_ranks_with_different_values_are_refused() -> None:
    assert all(isinstance(loss, float) for loss in both_ranks(lambda batch, rank: batch))
    for found in both_ranks(lambda batch, rank: batch | {"beta": batch["beta"] + rank}):
        assert isinstance(found, str) and "different values of inputs that all samples share" in found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0.3, r"\['beta'\] must be tensors"),
        (real(SAMPLES), "'beta' has 1 dims, .* instead of 0"),
        (torch.tensor(1), "'beta' is of type torch.int64"),
    ],
    ids=["number", "per sample", "type"],
)
def test_a_wrong_value_is_refused(given: Any, said: str) -> None:
    par = parallel(Annealed, {})
    with pytest.raises(InputsError, match=said):
        par.train_step(Annealed.batch(0) | {"beta": given})
    with pytest.raises(InputsError, match=r"lacks \['beta'\]"):
        par.train_step({name: x for name, x in Annealed.batch(0).items() if name != "beta"})


class Texts(nn.Module):
    """Pictures against texts: of a batch, four for each, or the names of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.text = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, texts: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.picture(x) @ self.text(texts).t(), y)


def test_an_input_that_may_be_shared_or_not_is_refused() -> None:
    def traced(samples: int) -> autoptd.TracedModel:
        inputs = {"x": real(samples, WIDTH), "texts": real(16, WIDTH), "y": torch.randint(16, (samples,))}
        return autoptd.trace(Texts().double(), inputs=inputs, precision="fp64")

    with pytest.raises(InputsError, match=r"'texts' .* may have 4 rows .* or be shared"):
        traced(4)
    assert "texts has no dim of samples: all samples of a step share it" in traced(3).notes


class Weighted(nn.Module):
    """A loss with weights of as many classes as samples: `w[y]` has a number for each sample in either case."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, SAMPLES)

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (F.cross_entropy(self.layer(x), y, reduction="none") * w[y]).sum() / w.sum()

    @staticmethod
    def batch() -> dict[str, Tensor]:
        torch.manual_seed(2)
        return {"x": real(SAMPLES, WIDTH), "y": torch.randint(SAMPLES, (SAMPLES,)), "w": real(SAMPLES).exp()}


@pytest.mark.parametrize("fix", [{"dp": 4, "micro": 1}, {"dp": 2, "tp": 2, "micro": 2}], ids=str)
def test_an_input_that_is_said_to_be_shared_is(fix: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, batch = Weighted().double(), Weighted.batch()
    inputs = batch | {"w": autoptd.shared(batch["w"])}
    par = autoptd.parallelize(
        copy.deepcopy(model), world=4, inputs=inputs, precision="fp64", batch=SAMPLES, cluster="dgx-h100", fix=fix,
        optimizer="sgd", optimizer_options=SGD,
    )  # fmt: skip
    assert "w has no dim of samples: all samples of a step share it" in par.plan.notes
    ours = train_in_lockstep(par, [batch, batch])
    alone = train_alone(copy.deepcopy(model), [batch, batch], optimizer="sgd", optimizer_options=SGD)
    assert ours.losses == pytest.approx(alone.losses, rel=1e-10)
    assert max(differences(ours.state, alone.state).values()) < 1e-10
    assert verify_plan(par.plan, model, inputs=inputs).agrees
    with pytest.raises(
        InputsError, match=r"'w' .* may have a row of dim 0 for each sample, or be shared(?s:.*)not that of a batch"
    ):
        autoptd.trace(model, inputs=batch, precision="fp64")
    inputs["w"] = autoptd.shared(batch["w"], False)
    rows = autoptd.trace(model, inputs=inputs, precision="fp64")
    assert not any("w has" in note for note in rows.notes)
    plan = autoptd.plan(rows, world=1, batch=SAMPLES, cluster="dgx-h100")
    assert verify_plan(plan, model, inputs=inputs).agrees


class Documented(Weighted):
    def example_inputs(self, samples: int, seq: int) -> dict[str, Tensor]:
        inputs = {"x": real(SAMPLES, WIDTH), "y": torch.randint(SAMPLES, (SAMPLES,))}
        return inputs | {"w": autoptd.shared(real(SAMPLES))}


def test_a_model_s_own_example_inputs_are_marked() -> None:
    plan = autoptd.plan(Documented().double(), world=2, precision="fp64", batch=SAMPLES, cluster="dgx-h100")
    assert "w has no dim of samples: all samples of a step share it" in plan.notes


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(InputsError, match="shared is given float, not a tensor"):
        autoptd.shared(0.3)  # type: ignore[arg-type]
    with pytest.raises(InputsError, match="all inputs are shared by all samples"):
        autoptd.trace(nn.Linear(WIDTH, 2), inputs={"input": autoptd.shared(real(SAMPLES, WIDTH))}, loss=torch.sum)


def test_a_loss_function_takes_a_shared_target() -> None:
    source = autoptd.trace(
        nn.Linear(WIDTH, 3).double(),
        inputs={"input": real(SAMPLES, WIDTH)},
        targets={"y": torch.randint(3, (SAMPLES,)), "weight": torch.tensor(0.3, dtype=torch.float64)},
        loss=lambda z, y, weight: F.cross_entropy(z, y) + weight * z.square().mean(),
        precision="fp64",
    )
    assert "weight has no dim of samples: all samples of a step share it" in source.notes
