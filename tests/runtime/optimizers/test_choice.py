"""Optimizers of parameters, as users ask for them; those that cannot be distributed are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import autoptd
from autoptd.errors import PlanError
from autoptd.runtime.optimizers.groups import choose, read_groups
from autoptd.runtime.optimizers.lion import Lion
from autoptd.runtime.optimizers.named import NAMED, READS
from autoptd.runtime.optimizers.separable import check_elementwise, check_separable
from autoptd.runtime.optimizers.several import SeveralOptimizers
from tests.runtime.optimizers.whole_optimizers import (
    ByPlace,
    Coupled,
    CoupledPieces,
    DecaysMatrices,
    Early,
    Late,
    Noisy,
    Orthogonal,
)

NAMES = ["embed.weight", "mlp.weight", "mlp.bias", "head.weight"]
HIDDEN = {"mlp.weight"}


def parameters() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (7, 4), "mlp.weight": (4, 4), "mlp.bias": (4,), "head.weight": (7, 4)}
    made = {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}
    for p in made.values():
        p.grad = torch.randn(p.shape, generator=draw)
    return made


def test_muon_is_adamw_for_the_rest() -> None:
    groups = read_groups([{"names": "*.bias", "weight_decay": 0.0}], NAMES)
    chosen = choose("muon", {"lr": 0.02, "adamw": {"lr": 3e-4}}, groups, NAMES, HIDDEN)
    assert chosen.names("whole") == ("mlp.weight",)
    assert [group.names for group in chosen.groups] == [("mlp.weight",), ("embed.weight", "head.weight"), ("mlp.bias",)]
    made = chosen.build(parameters())
    assert [g["lr"] for g in made.param_groups] == [0.02, 3e-4, 3e-4]
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.01, 0.0]
    with pytest.raises(PlanError, match="the options of adamw are 3"):
        choose("muon", {"adamw": 3})


def test_a_group_may_give_hidden_matrices_to_adamw() -> None:
    groups = read_groups([{"names": "mlp.*", "optimizer": "adamw", "lr": 1.0}], NAMES)
    chosen = choose("muon", {"lr": 0.02, "adamw": {"lr": 3e-4, "betas": (0.8, 0.9)}}, groups, NAMES, HIDDEN)
    made = chosen.build(parameters())
    assert [g["lr"] for g in made.param_groups] == [0.02, 3e-4, 1.0]
    assert made.param_groups[2]["betas"] == (0.8, 0.9) and chosen.names("whole") == ()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"names": "*", "optimizer": "mion"}, "unknown optimizer 'mion'"),
        ({"names": "*.bias", "optimizer": "muon"}, "muon cannot update these parameters: Muon only supports 2D"),
        ({"names": "*.bias", "optimizer": "sgd", "betas": 1}, "SGD has no option 'betas'"),
        ({"names": "*.bias", "optimizer": Coupled}, "by itself"),
        ({"names": "*.bias", "optimizer": CoupledPieces}, "by itself"),
    ],
)
def test_groups_that_are_refused(group: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        choose("adamw", {}, read_groups([group], NAMES), NAMES, HIDDEN).build(parameters())
    assert caught.value.fix


def test_muon_by_class_names_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    asked: dict[str, Any] = {"world": 1, "inputs": {"input": torch.zeros(2, 8)}, "loss": lambda out: out.sum()}
    with pytest.raises(PlanError, match="Muon only supports 2D parameters") as caught:
        autoptd.parallelize(model, **asked, batch=2, precision="fp32", optimizer=torch.optim.Muon)
    assert 'optimizer="muon"' in caught.value.fix


MODEL = nn.Linear(4, 4)
OTHERS = {
    "of the model": (lambda given: torch.optim.SGD(MODEL.parameters()), "holds other parameters"),
    "by dims": (
        lambda given: torch.optim.AdamW(
            [
                {"params": [p for p in given if p.ndim >= 2], "weight_decay": 0.1},
                {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0},
            ]
        ),
        "puts parameters into groups of its own",
    ),
    "by place": (
        lambda given: torch.optim.SGD([{"params": given[:1]}, {"params": given[1:], "lr": 1.0}]),
        "puts parameters into groups of its own",
    ),
    "in another order": (lambda given: torch.optim.SGD(given[::-1]), "puts parameters into groups of its own"),
    "some": (lambda given: torch.optim.SGD(given[:2]), "leaves out parameters"),
}


@pytest.mark.fault("an optimizer of other parameters")
@pytest.mark.parametrize("name", OTHERS)
def test_a_callable_takes_the_parameters_as_they_are_given(name: str) -> None:
    """Pieces of the model's, on several ranks: their shapes and places are others."""
    factory, says = OTHERS[name]
    with pytest.raises(PlanError, match=says) as caught:
        choose(factory, {}, parameters=NAMES).build(parameters())
    assert "parameter_groups" in caught.value.fix
    assert choose(torch.optim.SGD, {}, parameters=NAMES).build(parameters())


def test_groups_by_dims_are_given_by_name() -> None:
    """Groups that the error of such a callable advises."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    alone, x, y = copy.deepcopy(model), torch.randn(8, 4).double(), torch.arange(8) % 4
    par = autoptd.parallelize(
        model,
        world=1,
        inputs={"input": x},
        targets=y,
        loss=nn.CrossEntropyLoss(),
        batch=8,
        precision="fp64",
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5),
        parameter_groups=[{"names": [n for n, p in model.named_parameters() if p.ndim < 2], "weight_decay": 0.0}],
    )
    narrow = [p for p in alone.parameters() if p.ndim < 2]
    groups = [{"params": [alone[0].weight, alone[2].weight]}, {"params": narrow, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
    for _ in range(3):
        par.train_step({"input": x, "targets": y})
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(x), y).backward()
        optimizer.step()
    found = par.state_dict()
    assert max(float((found[name] - x).abs().max()) for name, x in alone.state_dict().items()) < 1e-12


def test_schedulers_reach_every_optimizer() -> None:
    made = choose("muon", {"lr": 0.02, "adamw": {"lr": 3e-4}}, (), NAMES, HIDDEN).build(parameters())
    assert isinstance(made, SeveralOptimizers)
    scheduler = StepLR(made, 1, 0.5)
    made.step()
    scheduler.step()
    assert [each.param_groups[0]["lr"] for each in made.optimizers] == [0.01, 1.5e-4]
    OneCycleLR(made, max_lr=[0.1, 0.01], total_steps=4, cycle_momentum=False)


def test_several_optimizers_restore_their_state() -> None:
    """The restored one goes on as the first does, with options of each group."""
    groups = read_groups([{"names": "*.bias", "optimizer": "sgd", "momentum": 0.9}], NAMES)
    chosen = choose("muon", {"lr": 0.02}, groups, NAMES, HIDDEN)
    mine = parameters()
    first = chosen.build(mine)
    first.step()
    first.param_groups[1]["lr"] = 0.25
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in mine.items()}
    second = chosen.build(theirs)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for name, p in theirs.items():
        p.grad = mine[name].grad
    assert second.param_groups[1]["lr"] == 0.25
    for made in (first, second):
        made.step()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.fault("parameters coupled")
@pytest.mark.parametrize("kind", [ByPlace, Coupled, Early, Late, Noisy, torch.optim.LBFGS])
def test_coupled_optimizers_are_found(kind: Any) -> None:
    with pytest.raises(PlanError):
        check_separable(kind, kind.__name__)


@pytest.mark.parametrize("kind", [kind for kind, reads in READS.items() if reads == "elementwise"])
def test_elementwise_optimizers_are_found(kind: Any) -> None:
    check_elementwise(lambda params: kind(params, lr=0.01), kind.__name__)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, DecaysMatrices, Orthogonal])
def test_false_claims_are_found(kind: Any) -> None:
    with pytest.raises(PlanError, match="updates pieces of a parameter otherwise"):
        check_elementwise(lambda params: kind(params, lr=0.01), kind.__name__)


@pytest.mark.parametrize("kind", [*READS, Orthogonal])
def test_separable_optimizers_are_found(kind: Any) -> None:
    state = torch.get_rng_state()
    check_separable(lambda params: kind(params, lr=0.01), kind.__name__)
    assert torch.equal(state, torch.get_rng_state())


def test_every_name_has_a_row() -> None:
    assert {named.make for named in NAMED.values()} <= READS.keys()


def test_lion_by_hand() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    made = Lion([p], lr=0.1, betas=(0.5, 0.75), weight_decay=0.5)
    p.grad = torch.tensor([4.0, -8.0])
    made.step()  # sign(g / 2) = (1, -1): 1 - 0.1 (1 + 0.5 · 1) = 0.85; -2 - 0.1 (-1 + 0.5 · -2) = -1.8
    assert torch.allclose(p, torch.tensor([0.85, -1.8]))
    p.grad = torch.tensor([-0.5, 4.0])  # momentum g / 4 = (1, -2): sign((1 - 0.5) / 2, (-2 + 4) / 2) = (1, 1)
    made.step()
    assert torch.allclose(p, torch.tensor([0.85 - 0.1 * (1 + 0.425), -1.8 - 0.1 * (1 - 0.9)]))
    with pytest.raises(ValueError, match="out of range"):
        Lion([p], lr=-1.0)
