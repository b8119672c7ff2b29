"""Errors as users see them: their own frames, what, where and fix. If ranks report one error, one rank prints it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

import autoptd
from autoptd.boundary import PrintOnce, public
from autoptd.errors import AutoptdError, InputsError, PlanError
from autoptd.models.nanogpt import GPTSizes, NanoGPT

MOST = 30  # lines printed by a rank
ROOT = Path(__file__).parents[1]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.sum() if y.sum() > 0 else y.mean()


def untraceable(world: int | None = None) -> None:
    autoptd.parallelize(Branch(), world=world, inputs={"x": torch.zeros(4, 8)}, cluster="local", batch=8)


def gpt(**more: Any) -> autoptd.Parallel:
    model = NanoGPT(GPTSizes(vocab=64, max_seq=16, width=32, layers=2, heads=4))
    return autoptd.parallelize(model, **{"world": 1, "cluster": "local", "batch": 4, "precision": "fp32", **more})


MISTAKES: dict[str, Callable[[], object]] = {
    "a model that cannot be traced": lambda: untraceable(2),
    "a wish that is not known": lambda: gpt(fix={"tensor_parallel": 2}),
    "a plan that is none": lambda: gpt(plan=ROOT / "README.md"),
    "a cluster that is none": lambda: gpt(cluster=str(ROOT / "pyproject.toml")),
    "a model that does not fit": lambda: gpt(cluster=small()),
    "a wrong batch": lambda: gpt().train_step({"idx": torch.zeros(4, 16, dtype=torch.int64)}),
    "no such rank": lambda: gpt().stage_module(9),
    "not one of the ranks": lambda: gpt(world=2).optimizer,
    "no checkpoint": lambda: gpt().load("nowhere"),
}


def small() -> autoptd.Cluster:
    found = autoptd.Cluster.load("local")
    return found.model_copy(update={"device": found.device.model_copy(update={"memory_bytes": 10_000})})


def shown(mistake: Callable[[], object]) -> list[str]:
    """Return the lines that Python prints for the mistake."""
    with pytest.raises(AutoptdError) as caught:
        mistake()
    return "".join(traceback.format_exception(caught.value)).splitlines()


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_is_short(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AUTOPTD_DEBUG", raising=False)
    lines = shown(MISTAKES[name])
    assert len(lines) <= MOST
    inside = [line for line in lines if "File " in line and "/tests/" not in line]
    assert len(inside) == 1, inside  # boundary.py itself
    assert any(line.startswith("  fix    ") for line in lines)


def test_errors_of_invalid_files_are_short(tmp_path: Path):
    (tmp_path / "file").write_text('{"format": "autoptd-plan", "version": 1}')
    assert len(shown(lambda: autoptd.Plan.load(tmp_path / "file"))) <= MOST
    (tmp_path / "file.toml").write_text("name = 3\n[device]\nx = 1")
    assert len(shown(lambda: autoptd.Cluster.load(tmp_path / "file.toml"))) <= MOST


@pytest.mark.parametrize("name", ["a model that cannot be traced", "a wrong batch"])
def test_all_is_shown_where_that_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AUTOPTD_DEBUG", "1")
    assert sum("File " in line and "/tests/" not in line for line in shown(MISTAKES[name])) > 2


def test_what_is_behind_an_error_is_pointed_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AUTOPTD_DEBUG", "0")
    if sys.version_info >= (3, 11):
        assert "  more   AUTOPTD_DEBUG=1 shows the error that caused this one" in shown(lambda: untraceable(2))
    assert not any(line.startswith("  more") for line in shown(lambda: gpt(world=0)))


def test_errors_of_the_users_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AUTOPTD_DEBUG", raising=False)

    @public
    def call() -> None:
        raise KeyError("theirs") from ValueError("cause")

    with pytest.raises(KeyError) as caught:
        call()
    assert isinstance(caught.value.__cause__, ValueError)


# --- several ranks ------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TCPStore:
    """Environment of torchrun's processes, and the store that its agent holds."""
    store = TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
    }.items():
        monkeypatch.setenv(name, value)
    return store


def ends(rank: int, error: AutoptdError, monkeypatch: pytest.MonkeyPatch) -> None:
    """End one rank with an uncaught error."""
    monkeypatch.setenv("RANK", str(rank))
    said: list[BaseException] = []

    def before(kind: object, error: BaseException, trace: object) -> None:
        sys.stderr.write("the whole of it\n")
        said.append(error)

    PrintOnce(before)(type(error), error, None)
    assert said == [error], "a hook that was there before is left out"


def test_one_rank_says_what_all_would_say(
    launched: TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    record = tmp_path / "error.json"
    ends(2, PlanError("no", where="here", fix="yes"), monkeypatch)
    assert capsys.readouterr().err == "the whole of it\n"
    assert json.loads(record.read_text())["message"]["message"] == "PlanError: no\n  where  here\n  fix    yes"
    record.unlink()
    ends(0, PlanError("no", where="here", fix="yes"), monkeypatch)
    assert capsys.readouterr().err == "autoptd: rank 0: PlanError: no (rank 2 shows the details)\n"
    extra = json.loads(record.read_text())["message"]["extraInfo"]
    assert extra["py_callstack"] == "PlanError: no (rank 2 shows the details)"
    assert int(extra["timestamp"]) > 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({}, PlanError("no", where="elsewhere")),
        ({}, InputsError("no", where="here")),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, PlanError("no", where="here")),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, PlanError("no", where="here")),
        ({"MASTER_PORT": "1"}, PlanError("no", where="here")),
        ({"MASTER_PORT": ""}, PlanError("no", where="here")),
    ],
    ids=["another place", "another kind", "another attempt", "no store", "no answer", "no port"],
)
def test_errors_that_no_other_rank_prints_are_printed(
    launched: TCPStore,
    change: dict[str, str],
    error: AutoptdError,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    ends(0, PlanError("no", where="here"), monkeypatch)
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    ends(1, error, monkeypatch)
    assert capsys.readouterr().err == "the whole of it\n"


def test_what_torch_has_recorded_stays(launched: TCPStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "error.json").write_text("torch's")
    ends(0, PlanError("no"), monkeypatch)
    assert (tmp_path / "error.json").read_text() == "torch's"


@pytest.mark.ranks
def test_four_ranks_that_cannot_trace_the_model():
    """Under torchrun one rank prints the reason, three a single line, and the launcher's table names the failure."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["--module", "tests.test_boundary"]
    env = {name: value for name, value in os.environ.items() if name != "AUTOPTD_DEBUG"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode != 0
    ranks, _, launcher = done.stderr.partition("torch/distributed/elastic/")
    lines = [line for line in ranks.splitlines() if "launcher" not in line and not line.startswith("W")]
    lines = [re.sub(r"^\[rank\d\]: ", "", line) for line in lines]  # torch's own
    assert len(lines) <= MOST
    assert sum(line.startswith("  where  Branch (test_boundary.py:") for line in lines) == 1
    pointing = sum("shows the details)" in line for line in lines)
    assert pointing in range(4)  # the launcher may end the others first
    assert "a branch or a loop depends on data" in launcher.split("Root Cause")[1]


if __name__ == "__main__":
    untraceable()
