"""Terms that a loss function returns beside the loss are those of one process over the whole batch."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.api import Parallel
from autoptd.errors import AutoptdError, InputsError, RuntimeFault
from autoptd.runtime.batch_counts import BatchSums
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.testing.parity import differences
from autoptd.verification.verdict import verify_plan

X = torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).double()
Y = torch.tensor([0, 1, 2, -100, 4, 5, -100, -100, 2, 3])  # of 10 samples 7 count, not equally many on each rank


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(4))).double()


def named(out: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return a mean over labels, one over samples, a function of sums, and a count."""
    entropy = nn.functional.cross_entropy(out, targets)
    z, rms = out.logsumexp(-1).square().mean(), out.square().mean().sqrt()
    right = ((out.argmax(-1) == targets).sum() / (targets >= 0).sum()).double()
    return {"z": z, "loss": entropy + 0.1 * z + 0.3 * rms, "entropy": entropy, "rms": rms, "right": right}


def made(loss: Any = named, world: int = 4, batch: int = 10, **fix: Any) -> Parallel:
    return autoptd.parallelize(
        model(),
        world=world,
        inputs={"input": X[:2]},
        targets=Y[:2],
        loss=loss,
        batch=batch,
        precision="fp64",
        optimizer="sgd",
        optimizer_options={"lr": 0.1},
        cluster="dgx-h100",
        fix=fix,
    )


def trained(par: Parallel, steps: int = 3) -> list[tuple[list[dict[str, float]], dict[str, Tensor]]]:
    values = par.initial_values()
    par.layout  # noqa: B018  before the ranks are threads

    def body(c: Communicators) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
        mine = copy.copy(par)
        mine.start(c, values)
        found = []
        for _ in range(steps):
            rows = torch.arange(10).tensor_split(mine.dp_size)[mine.dp_rank]
            loss = mine.train_step({"input": X[rows], "targets": Y[rows]})
            assert mine.losses["loss"] is loss
            mine.eval_step({"input": X[rows][:1], "targets": Y[rows][:1] * 0})
            found.append({name: float(x) for name, x in mine.losses.items()})
        return found, mine.state_dict()

    return run_lockstep(par.layout.mesh, body)


def alone(steps: int = 3) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    plain, found = model(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(steps):
        losses = named(plain(X), Y)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        found.append({name: float(x) for name, x in losses.items()})
    return found, plain.state_dict()


def wrong(results: list[tuple[list[dict[str, float]], dict[str, Tensor]]]) -> list[str]:
    expected, state = alone()
    faults = []
    for rank, (found, after) in enumerate(results):
        assert max(differences(after, state).values()) < 1e-12
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert mine.keys() == theirs.keys()
            faults += [
                f"rank {rank}, step {step}: {name} is {mine[name]!r} instead of {x!r}"
                for name, x in theirs.items()
                if mine[name] != pytest.approx(x, rel=1e-12)
            ]
    return faults


FIXES: list[dict[str, Any]] = [
    {"dp": 4, "micro": 3, "zero": 3},
    {"dp": 2, "tp": 2, "micro": 2},
    {"dp": 2, "pp": 2, "micro": 1, "zero": 2},
    {"tp": 2, "pp": 2, "micro": 3},
    {"dp": 2, "pp": 2, "micro": 3, "virtual": 2, "schedule": "interleaved"},
    {"pp": 4, "micro": 4, "schedule": "zero-bubble"},
]


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_over_plans(fix: Mapping[str, Any]) -> None:
    par = made(**fix)
    assert not wrong(trained(par))
    assert par.plan.updates == tuple(f"losses.{name}" for name in ("entropy", "right", "rms", "z"))
    assert not [name for name in par.initial_values() if name not in par.layout.parameters | par.layout.buffers]


@pytest.mark.parametrize("fault", ["one microbatch", "one rank"])
def test_terms_of_a_part_of_the_batch_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add, update = BatchSums.add, BatchSums.new_buffers

    def first(self: BatchSums, *given: Any) -> None:
        if not self.own.any():
            add(self, *given)

    def own_sums(self: BatchSums, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        return update(self, self.own)

    monkeypatch.setattr(BatchSums, *(("add", first) if fault == "one microbatch" else ("new_buffers", own_sums)))
    assert wrong(trained(made(dp=2, pp=2, micro=1)))


def test_verify_compares_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made(dp=2, tp=2, micro=2).plan
    given = {"inputs": {"input": X[:2]}, "targets": Y[:2], "loss": named}
    assert verify_plan(plan, model(), **given).agrees  # type: ignore[arg-type]
    monkeypatch.setattr(BatchSums, "add", lambda *_: None)
    assert not verify_plan(plan, model(), **given).agrees  # type: ignore[arg-type]


def test_before_the_first_step_there_is_none() -> None:
    with pytest.raises(RuntimeFault, match="before the first step"):
        made(world=1).losses  # noqa: B018


def test_a_plain_loss_has_no_terms() -> None:
    par = made(nn.CrossEntropyLoss(), world=1)
    loss = par.train_step({"input": X, "targets": Y})
    assert par.losses == {"loss": loss} and not par.plan.updates


def test_a_model_s_own_losses_are_named_by_a_function() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.losses = nn.Linear(6, 6), 0.5  # the name that terms would have

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = self.layer(x)
            return {"near": out.square().mean(), "far": out.abs().sum()}

    plain = Several().double()
    par = autoptd.parallelize(
        plain,
        world=1,
        inputs={"x": X[:2]},
        loss=lambda losses: {"loss": sum(losses.values()), **losses},
        batch=10,
        precision="fp64",
    )
    expected = {name: float(x) for name, x in plain(X).items()}
    loss = float(par.train_step({"x": X}))
    found = {name: float(x) for name, x in par.losses.items()}
    assert found == pytest.approx({"loss": loss, **expected}, rel=1e-12)
    assert loss == pytest.approx(sum(expected.values()), rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda out, y: {"loss": out.sum(), "each": out.sum(-1)}, "a tensor of 1 dims as 'each'"),
        (lambda out, y: {"loss": out.sum(), "lr": 0.1}, "float as 'lr'"),
        (lambda out, y: {"a": out.sum(), "b": out.sum()}, "sum(losses.values())"),
        (lambda out, y: {"loss": out.sum(), 1: out.sum()}, "1 as the name of a term"),
        (lambda out, y: {"loss": out.sum(), "largest": out.max()}, "max"),
    ],
    ids=["of each sample", "no tensor", "no loss", "no name", "no sum"],
)
def test_what_is_no_term_is_refused(loss: Any, says: str) -> None:
    with pytest.raises(AutoptdError, match=re.escape(says)):
        made(loss, dp=4)


def test_terms_have_any_names() -> None:
    """Names as trackers group them, those of a module's attributes, and some that are alike without their dots."""
    names = ["rewards/chosen", "loss.ce", "loss_ce", "training", "forward", "type", "_held", "class", "a term", "τ"]

    def loss(out: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": out.square().mean(), **{name: out.mean() * i for i, name in enumerate(names)}}

    expected = float(model()(X).mean())
    for (losses,), _ in trained(made(loss, dp=2, pp=2), steps=1)[::3]:
        assert losses == pytest.approx({"loss": losses["loss"], **{n: expected * i for i, n in enumerate(names)}})


def test_terms_are_not_averaged() -> None:
    with pytest.raises(InputsError, match="computed from the whole batch"):
        autoptd.parallelize(
            model(),
            world=1,
            inputs={"input": X[:2]},
            targets=Y[:2],
            loss=named,
            batch=10,
            loss_averaging="per-microbatch",
        )
