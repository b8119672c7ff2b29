"""Exported programs run by real processes: loss and gradients equal those of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.export.torch_program import torch_program
from autoptd.layout.execution import ExecutionOptions
from autoptd.plans.data import MeshSizes
from autoptd.plans.model import Plan
from tests.export import run_exported
from tests.export.export_plans import LLAMA_SPLITS, Llama, llama_plan

pytestmark = pytest.mark.ranks
TP_DP, TP_PP = MeshSizes(dp=2, tp=2, pp=1), MeshSizes(dp=1, tp=2, pp=2)
CASES: dict[str, dict[str, Any]] = {
    "sequence_zero3": {"mesh": TP_DP, "sequence": True, "zero": 3},
    "zero1_tied_recomputed": {"mesh": TP_DP, "zero": 1, "tied": True, "recompute": range(1, 9)},
    "replicas_attention_whole": {
        "mesh": TP_DP,
        "zero": 0,
        "splits": {"attention.q_proj.weight": "S0/2"},
        "recompute": (1, 2, 4),
        "method": ExecutionOptions(recompute="ops"),
    },
    "columns_by_hidden_size": {
        "mesh": TP_DP,
        "sequence": True,
        "zero": 2,
        "tied": True,
        "ends": {"embed.weight": "S1"},
        "splits": {"attention.o_proj.weight": "S0"},
    },
    "pipeline": {"mesh": TP_PP, "sequence": True, "cuts": (5,), "zero": 0, "recompute": (1, 2)},
    "chunks": {"mesh": TP_PP, "cuts": (3, 5, 7), "zero": 0},
    "zero_bubble": {"mesh": MeshSizes(dp=2, tp=1, pp=2), "cuts": (5,), "schedule": "zero-bubble"},
}


def planned(name: str) -> Plan:
    options = dict(CASES[name])
    schedule = options.pop("schedule", None)
    count = 4 if options["mesh"].pp > 1 else 2
    plan = llama_plan(options.pop("cuts", ()), precision="fp64", microbatches=count, **options)
    if schedule is None:
        return plan
    return plan.model_copy(update={"schedule": plan.schedule.model_copy(update={"kind": schedule})})


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results by rank: case -> (loss, gradients, names of split values)."""
    folder = tmp_path_factory.mktemp("exported")
    for name, options in CASES.items():
        (folder / f"{name}.py").write_text(torch_program(planned(name), Llama(tied=options.get("tied", False))).text)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.export.run_exported", str(folder), str(port)]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(run_exported.WORLD)]


@cache
def expected(tied: bool, samples: int) -> tuple[float, dict[str, Tensor]]:
    return run_exported.alone(run_exported.LAYERS, tied, samples)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name: str, results: list[dict[str, Any]]) -> None:
    plan = planned(name)
    loss, whole = expected(CASES[name].get("tied", False), plan.batch)
    seen: set[str] = set()
    for _, grads, _ in (rank[name] for rank in results):
        seen |= grads.keys()
        for parameter, grad in grads.items():
            torch.testing.assert_close(grad, whole[parameter], msg=lambda m, p=parameter: f"{p}: {m}")
    assert seen == whole.keys()
    losses = [rank[name][0] for rank in results if rank[name][0] is not None]
    assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("name", ["pipeline", "chunks"])
def test_tensors_that_the_plan_splits_are_split(name: str, results: list[dict[str, Any]]) -> None:
    split = {parameter for parameter in results[0][name][2] if parameter.startswith("layers.0.")}
    assert split == {f"layers.0.{leaf}" for leaf, text in LLAMA_SPLITS.items() if text != "B"}


def test_attention_with_fused_groups_is_whole() -> None:
    program = torch_program(planned("replicas_attention_whole"), Llama())
    assert '"layers.*.mlp.up_proj": ColwiseParallel()' in program.text
    assert "layers.*.attention" not in program.text
    assert "layers.{0..3}.attention.q_proj.weight is S0/2 in the plan, B in this program" in program.differs
