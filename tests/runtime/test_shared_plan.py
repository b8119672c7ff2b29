"""Under a launcher one rank searches, and all ranks get its plan or its error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.errors import AutoptdError, RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.search.planner import Planner
from autoptd.testing.process_pool import ProcessPool
from tests.forked_ranks import run_script

pytestmark = pytest.mark.ranks
WORLD, WIDTH = 3, 16
MESH = Mesh(WORLD)


class Small(nn.Module):
    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.outer(torch.relu(self.inner(x))), target)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(WORLD) as made:
        yield made


def asked(c: Communicators, options: list[dict[str, Any]], breaks: bool = False) -> tuple[int, list[object]]:
    """Request plans one after the other; return how often this rank searched, and each plan or its error."""
    searches: list[int] = []
    honest = Planner.answer

    def answer(self: Planner) -> Any:
        searches.append(c.rank)
        if breaks:
            raise ZeroDivisionError("of a search")
        return honest(self)

    Planner.answer = answer  # type: ignore[method-assign]
    results: list[object] = []
    inputs = {"x": torch.zeros(2, WIDTH), "target": torch.zeros(2, WIDTH)}
    try:
        for each in options:
            known = {"world": WORLD, "cluster": "local", "batch": 6, "precision": "fp32", "watch": False}
            try:
                made = autoptd.parallelize(Small(), inputs=inputs, **known, **each)
            except (AutoptdError, ZeroDivisionError) as error:
                results.append((type(error).__name__, str(error)))
                continue
            share = {name: torch.ones(6 // made.dp_size, WIDTH) for name in inputs}
            results.append((made.plan.to_json(), float(made.train_step(share)) > 0))
    finally:
        Planner.answer = honest  # type: ignore[method-assign]
    return len(searches), results


def test_rank_0_searches_and_all_have_its_plan(pool: ProcessPool) -> None:
    found = pool.run(MESH, asked, [{"fix": {"micro": 1}}, {"fix": {"micro": 2}}])
    assert [searches for searches, _ in found] == [2, 0, 0]
    (first, second), *others = [plans for _, plans in found]
    assert all(plans == [first, second] for plans in others) and first != second
    assert all(plan[1] is True for plan in (first, second)), "each rank has trained with it"  # type: ignore[index]


def test_all_raise_the_one_error_that_rank_0_met(pool: ProcessPool) -> None:
    (_, errors), *others = pool.run(MESH, asked, [{"fix": {"headroom": 0.999999999}}, {"fix": {"tp": 2}}, {}])
    assert [kind for kind, *_ in errors[:2]] == ["DoesNotFit", "PlanError"]  # type: ignore[misc]
    assert "  where  " in str(errors[0]) or "  fix    " in str(errors[0])
    assert all(found == (0, errors) for found in others)  # the third call returns the third plan


def test_what_is_no_error_of_ours_reaches_all(pool: ProcessPool) -> None:
    (_, raised), *others = pool.run(MESH, asked, [{}], True)
    assert raised == [("ZeroDivisionError", "of a search")]
    for _, ((kind, text),) in others:  # type: ignore[misc]
        assert kind == RuntimeFault.__name__ and "rank 0 could not plan: ZeroDivisionError: of a search" in text


def apart(c: Communicators, how: str, odd: int) -> tuple[str, bool]:
    """Let one rank ask for something else; return each rank's error, and whether all trained together after it."""
    torch.manual_seed(0)
    inputs = {"x": torch.zeros(2, WIDTH), "target": torch.zeros(2, WIDTH)}
    options: dict[str, Any] = {"world": WORLD, "cluster": "local", "batch": 6, "precision": "fp32", "watch": False}
    model, others = Small(), dict(options)
    if c.rank == odd and how == "another model":
        model.inner.bias.requires_grad_(False)
    if c.rank == odd and how == "no trace":
        model.forward = lambda x, target: 1 / 0  # type: ignore[method-assign,assignment]
    if c.rank == odd and how == "no such group":
        others["parameter_groups"] = [{"names": ["*decoder*"], "lr": 0.1}]
    if c.rank == odd and how == "no such constraint":
        others["fix"] = {"mikro": 1}
    try:
        autoptd.parallelize(model, inputs=inputs, **others)
        text = "none"
    except AutoptdError as error:
        text = f"{type(error).__name__}: {error}"
    made = autoptd.parallelize(Small(), inputs=inputs, **options)
    share = {name: torch.ones(6 // made.dp_size, WIDTH) for name in inputs}
    return text, float(made.train_step(share)) > 0


SAID = {
    "another model": "has another model than rank 0",
    "no trace": "division by zero",
    "no such group": "decoder",
    "no such constraint": "mikro",
}


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("how", SAID)
def test_an_error_of_one_rank_reaches_all(pool: ProcessPool, how: str, odd: int) -> None:
    """None waits for it, and all may try again."""
    found = pool.run(MESH, apart, how, odd)
    assert all(SAID[how] in text for text, _ in found), found
    assert all(trained for _, trained in found)
    if how != "another model":  # of rank 0's, all others have another one
        assert all(f"rank {odd} cannot start" in text for rank, (text, _) in enumerate(found) if rank != odd)


@pytest.mark.parametrize(
    "name, first, other",
    [
        ("batch", {"batch": 6}, {"batch": 12}),
        ("fix", {"fix": {"micro": 1}}, {"fix": {"micro": 2}}),
        ("fix", {}, {"compile": False}),
        ("precision", {"precision": "fp32"}, {"precision": "bf16"}),
    ],
)
def test_ranks_that_ask_for_other_plans_are_refused(
    pool: ProcessPool, name: str, first: dict[str, Any], other: dict[str, Any]
) -> None:
    found = pool.run(MESH, asked_apart, first, other)
    assert [kind for kind, _ in found] == ["RuntimeFault", "RuntimeFault", "PlanError"]
    assert all(f"rank 2 was given another {name} than rank 0" in text for _, text in found)


def test_arguments_that_are_equal_in_another_form_are_the_same(pool: ProcessPool) -> None:
    found = pool.run(MESH, asked_apart, {"fix": {"dp": 3, "micro": 1}}, {"fix": {"micro": 1, "dp": 3}, "batch": 6})
    assert [kind for kind, _ in found] == ["Parallel"] * 3


def asked_apart(c: Communicators, first: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """Request a plan, on the last rank by other arguments; return the type of what was made or raised, and its text."""
    inputs = {"x": torch.zeros(2, WIDTH), "target": torch.zeros(2, WIDTH)}
    known = {"world": WORLD, "cluster": "local", "batch": 6, "precision": "fp32", "watch": False}
    try:
        made = autoptd.parallelize(Small(), inputs=inputs, **known | (other if c.rank == WORLD - 1 else first))
    except AutoptdError as error:
        return type(error).__name__, str(error)
    return type(made).__name__, ""


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import autoptd

rank = os.environ["RANK"]

def loss(out):
    if rank == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    return out.square().mean()

try:
    autoptd.parallelize(
        torch.nn.Linear(4, 4), inputs={"input": torch.zeros(2, 4)}, loss=loss, batch=4, precision="fp32", fix={"dp": 2}
    )
except autoptd.errors.RuntimeFault as error:
    Path(f"said of {rank}").write_text(str(error))
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_before_training_is_not_waited_for(
    killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(KILLED)
    run_script(2, tmp_path / "script.py", str(killed), limit_s=60)
    said = (tmp_path / f"said of {1 - killed}").read_text()
    expected = "store of the process group cannot be read", "rank 1 was killed, or crashed: its process is gone"
    assert expected[killed] in said
    assert f"rank {1 - killed}, waiting for" in said or killed
