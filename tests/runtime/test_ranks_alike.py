"""Ranks that were given different values, arguments or learning rates: a replica would train on its own, silently."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import InputsError, PlanError, RuntimeFault
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.initialise import _digest
from autoptd.runtime.optimizers.groups import ParameterGroup

MESHES = [{"dp": 2, "zero": 0}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}]


@cache
def made(**fix: Any) -> autoptd.Parallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 8)).double()
    model[0].register_buffer("empty", torch.zeros(0))
    x = torch.randn(2, 8, dtype=torch.float64)
    parallel = autoptd.parallelize(
        model,
        world=2,
        fix=fix,
        inputs={"input": x},
        loss=lambda out: out.square().mean(),
        batch=4,
        precision="fp64",
        optimizer="sgd",
        optimizer_options={"lr": 0.1},
    )
    for stage in range(parallel.plan.mesh.pp):  # stage files are imported once, not by two threads
        parallel.stage_module(parallel.layout.mesh.rank(stage, 0, 0))
    return parallel


def run(change: Callable[[autoptd.Parallel, dict[str, Tensor]], None], /, **fix: Any) -> None:
    """Start two ranks, of which `change` changes the second, and take a step."""
    parallel = made(**fix)
    values = parallel.initial_values()

    def body(c: Communicators) -> None:
        mine, own = copy.copy(parallel), {name: x.clone() for name, x in values.items()}
        if c.rank == 1:
            change(mine, own)
        mine.start(c, own)
        mine.train_step({"input": torch.ones(4 // mine.dp_size, 8, dtype=torch.float64)})

    run_lockstep(parallel.layout.mesh, body)


@pytest.mark.parametrize("fix", MESHES, ids=str)
def test_ranks_that_are_alike_train(fix: dict[str, Any]) -> None:
    run(lambda parallel, values: None, **fix)


@pytest.mark.parametrize("fix", MESHES, ids=str)
def test_other_weights_on_a_rank_are_refused(fix: dict[str, Any]) -> None:
    with pytest.raises((PlanError, RuntimeFault), match="other values on some ranks") as caught:
        run(lambda parallel, values: values["3.weight"][1:2].add_(1e-9), **fix)
    assert "3.weight" in str(caught.value) and "0.weight" not in str(caught.value)


def test_stages_need_only_their_own_values() -> None:
    run(lambda parallel, values: values.pop("0.weight"), pp=2)


ARGUMENTS = {
    "optimizer": "adamw",
    "optimizer_options": {"lr": 0.2},
    "groups": (ParameterGroup(("*.bias",), {"lr": 0.2}),),
    "clip_norm": 1.0,
    "seed": 1,
    "non_finite": "skip",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_other_arguments_on_a_rank_are_refused(name: str) -> None:
    asked = {"groups": "parameter_groups"}.get(name, name)
    with pytest.raises((PlanError, RuntimeFault), match=f"the ranks were given different {asked}"):
        run(lambda parallel, values: setattr(parallel, f"_{name}", ARGUMENTS[name]), dp=2, zero=1)


@pytest.mark.parametrize("fix", MESHES, ids=str)
def test_a_learning_rate_of_one_rank_is_refused_and_nothing_changes(fix: dict[str, Any]) -> None:
    parallel = made(**fix)
    values = parallel.initial_values()

    def body(c: Communicators) -> tuple[str, bool]:
        mine = copy.copy(parallel)
        mine.start(c, values)
        share = {"input": torch.ones(4 // mine.dp_size, 8, dtype=torch.float64)}
        mine.train_step(share)
        before = mine.state_dict()
        mine.optimizer.param_groups[0]["lr"] *= 0.5 if c.rank == 1 else 1
        with pytest.raises(InputsError) as caught:
            mine.train_step(share)
        after = mine.state_dict()
        mine.optimizer.param_groups[0]["lr"] = 0.05
        mine.train_step(share)
        return str(caught.value), all(torch.equal(x, after[name]) for name, x in before.items())

    for said, same in run_lockstep(parallel.layout.mesh, body):
        assert "rank 0: lr = 0.1 in group 0" in said and "rank 1: lr = 0.05 in group 0" in said
        assert same


SAMPLERS: dict[str, list[dict[str, Any] | None]] = {
    "alike": [{"samples": 8, "seed": 3}, {"samples": 8, "seed": 3}],
    "on one rank alone": [{"samples": 8}, None],  # which sends samples to the other
    "of other seeds": [{"samples": 8}, {"samples": 8, "seed": 1}],
    "in order": [{"samples": 8}, {"samples": 8, "shuffle": False}],
    "of other data": [{"samples": 8}, {"samples": 12}],
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("fix", [{"dp": 2}, {"tp": 2}], ids=str)
def test_samplers_that_take_other_samples_are_refused(fix: dict[str, Any], name: str) -> None:
    parallel = made(**fix)
    values = parallel.initial_values()

    def body(c: Communicators) -> str:
        mine = copy.copy(parallel)
        mine._samplers = WeakSet()
        mine.start(c, values)
        share = {"input": torch.ones(4 // mine.dp_size, 8, dtype=torch.float64)}
        options = SAMPLERS[name][c.rank]
        sampler = mine.sampler(**options) if options else None
        mine.sampler(9, seed=c.rank)  # which takes no samples
        mine.train_step(share)
        if sampler is not None:
            next(iter(sampler))
        try:
            mine.train_step(share)
        except InputsError as error:
            return str(error)
        return ""

    for said in run_lockstep(parallel.layout.mesh, body):
        if name in ("alike", "on one rank alone"):
            assert not said
        else:
            assert "ranks take samples in different orders" in said
            assert "rank 0: 8 samples, shuffled by seed 0" in said and "rank 1: " in said


@pytest.mark.parametrize("how", ["peeks", "resumes", "goes on"])
@pytest.mark.parametrize("fix", [{"dp": 2}, {"pp": 2}], ids=str)
def test_samplers_at_other_places_are_refused(fix: dict[str, Any], how: str) -> None:
    parallel = made(**fix)
    values = parallel.initial_values()

    def body(c: Communicators) -> list[str]:
        mine, said = copy.copy(parallel), list[str]()
        mine._samplers = WeakSet()
        mine.start(c, values)
        share = {"input": torch.ones(4 // mine.dp_size, 8, dtype=torch.float64)}
        sampler = mine.sampler(12)
        if c.rank == 1 and how == "peeks":
            next(iter(sampler))
        if c.rank == 1 and how == "resumes":
            sampler.start_at(1)
        for _ in range(2):
            for _ in sampler:
                try:
                    mine.train_step(share)
                except InputsError as error:
                    said.append(str(error))
                    sampler.start_at(mine.step)
                    break
        return said

    for said in run_lockstep(parallel.layout.mesh, body):
        assert len(said) == (how != "goes on")
        assert all("rank 0: 12 samples, shuffled by seed 0, from step 0\n" in each for each in said)
        assert all("rank 1: 12 samples, shuffled by seed 0, from step 1\n" in each for each in said)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (4099,), (96, 64)], ids=str)
def test_any_other_element_is_another_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.arange(math.prod(shape) + 1) % 2  # one more: the second half begins between two words
    x = values.to(dtype)[1:].view(shape)
    assert _digest(x) == _digest(x.clone())
    assert x.ndim < 2 or _digest(x.t()) == _digest(x.t().contiguous())
    for place in {0, x.numel() // 2, x.numel() - 1}:
        other = x.clone()
        other.view(-1)[place] = 1 - x.view(-1)[place].to(torch.float64).item()
        assert _digest(other) != _digest(x)


def test_the_order_of_rows_is_part_of_a_digest() -> None:
    x = torch.randn(4096, 8)
    assert _digest(x.flip(0)) != _digest(x)
