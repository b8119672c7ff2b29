"""The state of an optimizer is loaded by the rank and the plan that it is of, and by no other."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import InputsError, RuntimeFault
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep

BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).double()


@cache
def made(optimizer: str, **fix: Any) -> autoptd.Parallel:
    options: dict[str, Any] = {"batch": 4, "precision": "fp64", "optimizer": optimizer}
    found = autoptd.parallelize(
        model(), world=2, fix=fix, inputs={"input": BATCHES[0]}, loss=lambda out: out.square().mean(), **options
    )
    for stage in range(found.plan.mesh.pp):  # stage files are imported once, not by two threads
        found.stage_module(found.layout.mesh.rank(stage, 0, 0))
    return found


def train(parallel: autoptd.Parallel, steps: slice, states: list[Any] | None = None) -> list[tuple[Any, Any]]:
    """Train on two ranks, which first load `states`; return each rank's optimizer state and the parameters."""
    start = parallel.initial_values()

    def body(c: Communicators) -> tuple[Any, dict[str, Tensor]]:
        mine = copy.copy(parallel)
        mine.start(c, start)
        if states is not None:
            mine.optimizer.load_state_dict(states[c.rank])
        for batch in BATCHES[steps]:
            mine.train_step({"input": batch.tensor_split(mine.dp_size)[mine.dp_rank]})
        return copy.deepcopy(mine.optimizer.state_dict()), mine.state_dict()

    return run_lockstep(parallel.layout.mesh, body)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("fix", [{"dp": 2, "zero": 1}, {"tp": 2}, {"pp": 2}], ids=str)
def test_each_rank_loads_its_own_state_alone(fix: dict[str, Any], optimizer: str) -> None:
    parallel = made(optimizer, **fix)
    own = [state for state, _ in train(parallel, slice(2))]
    again = [state for state, _ in train(parallel, slice(0), own)]
    for state, loaded in zip(own, again, strict=True):
        assert state["state"].keys() == loaded["state"].keys()
        for number, values in state["state"].items():
            for name, x in values.items():
                other = loaded["state"][number][name]
                assert torch.equal(x, other) if isinstance(x, Tensor) else x == other
    assert any(state["state"] for state in own)
    with pytest.raises((InputsError, RuntimeFault), match="of other parameters than this rank's optimizer updates"):
        train(parallel, slice(0), own[::-1])


def test_copies_of_a_rank_share_a_state() -> None:
    """Data-parallel ranks without ZeRO update the same elements."""
    parallel = made("adamw", dp=2, zero=0)
    own = [state for state, _ in train(parallel, slice(2))]
    train(parallel, slice(1), own[::-1])


def test_states_of_other_plans_and_of_plain_optimizers_are_refused() -> None:
    others = [state for state, _ in train(made("adamw", dp=2, zero=1), slice(2))]
    plain = torch.optim.AdamW(model().parameters())
    for states in (others, [plain.state_dict()] * 2):
        with pytest.raises((InputsError, RuntimeFault), match=r"par\.resume restore"):
            train(made("adamw", tp=2), slice(1), states)
