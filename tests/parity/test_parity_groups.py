"""Parameter groups by name: under any plan each parameter is updated with the options of its own group."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.errors import PlanError
from autoptd.layout.mesh import Mesh
from autoptd.runtime.optimizers.groups import ParameterGroup, choose, read_groups
from autoptd.testing.parity import Trained, train_alone, train_in_lockstep
from tests.parity.parity_check import OPTIONS, batches, case, complaints, parallel, planned
from tests.parity.parity_check import Variant as Way

NORMS: dict[str, Any] = {"names": ["*.bias", "*[nN]orm*"], "weight_decay": 0.0}
TABLES: dict[str, Any] = {"names": "*embed*", "lr": 1e-4, "weight_decay": 0.5}
GROUPS: dict[str, list[dict[str, Any]]] = {
    "bert": [NORMS, TABLES],
    "llama": [{"names": "*norm*", "weight_decay": 0.0}, TABLES],
}


def names_of(name: str) -> list[str]:
    return [n for n, p in case(name).model.named_parameters() if p.requires_grad]


def trained(name: str, mesh: Mesh, groups: tuple[ParameterGroup, ...]) -> Trained:
    made = copy.copy(parallel(name, planned(name, mesh, Way(bulk=True)), "adamw"))
    made._groups = groups
    return train_in_lockstep(made, batches(name))


@pytest.mark.fault("groups ignored")
@pytest.mark.parametrize("mesh", [Mesh(8, 1, 1), Mesh(2, 2, 2), Mesh(1, 2, 4)], ids=str)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_groups_are_stepped_as_they_say(name: str, mesh: Mesh) -> None:
    groups, found, options = read_groups(GROUPS[name], names_of(name)), case(name), OPTIONS["adamw"]
    alone = train_alone(
        found.model, batches(name), loss=found.loss, optimizer="adamw", optimizer_options=options, groups=groups
    )
    assert not complaints(name, trained(name, mesh, groups), alone)
    assert complaints(name, trained(name, mesh, ()), alone), "groups that are ignored"


def test_every_rank_has_every_group() -> None:
    """Schedulers and logs index groups by position."""
    names = ["embed.weight", "a.bias"]
    groups = read_groups([{**NORMS, "names": "*.bias"}, TABLES], names)
    chosen = choose("adamw", {"lr": 1e-3, "weight_decay": 0.1}, groups, names)
    made = chosen.build({"a.bias": nn.Parameter(torch.ones(2))})
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.0, 0.5]
    assert [g["lr"] for g in made.param_groups] == [1e-3, 1e-3, 1e-4]
    assert [g["params"][0].numel() for g in made.param_groups] == [0, 2, 0]


def test_the_first_that_fits_counts() -> None:
    groups = read_groups([{"names": ["a.*"], "lr": 1.0}, {"names": ["*"], "lr": 2.0}], ["a.x", "b.x"])
    assert [g.names for g in choose("sgd", {}, groups, ["a.x", "b.x"]).groups] == [(), ("a.x",), ("b.x",)]


def test_a_factory_gets_the_groups() -> None:
    seen: list[Any] = []
    groups = read_groups([{"names": "a", "lr": 0.5}], ["a"])
    made = choose(lambda given: seen.append(given) or torch.optim.SGD(given, lr=0.1), {}, groups, ["a"])
    made.build({"a": nn.Parameter(torch.ones(1))})
    assert seen[-1][1]["lr"] == 0.5 and seen[-1][1]["params"][0].numel() == 1


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"names": ["*.biass"]}], r"no trainable parameter is called '\*.biass'"),
        ([{"weight_decay": 0.0}], "name patterns"),
        (["*.bias"], "name patterns"),
        ([{"names": []}], "name patterns"),
        ([{"names": "0.bias", "params": []}], "list names, not params"),
        ([{"names": "0.bias", "weight_dekay": 0.0}], "AdamW has no option 'weight_dekay'"),
    ],
)
def test_wrong_groups(groups: list[Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    asked = {"world": 1, "inputs": {"input": torch.zeros(2, 8)}, "loss": lambda out: out.sum(), "batch": 2}
    with pytest.raises(PlanError, match=message) as caught:
        autoptd.parallelize(model, **asked, precision="fp32", parameter_groups=groups)
    assert caught.value.where == "parameter_groups[0]" and caught.value.fix
