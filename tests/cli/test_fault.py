"""A bug of autoptd in a command: one error and exit code 2, never 1, which is an answer; the traceback on request."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import autoptd.cli.main as cli
from tests.sample_plan import sample_plan

# command line, and where it is made to fail
COMMANDS = [
    (["plan", "gpt2", "--world", "8"], "autoptd.models.load.load_model"),
    (["explain", "PLAN"], "autoptd.plans.model.Plan.load"),
    (["compare", "PLAN", "PLAN"], "autoptd.explain.compare.compare"),
    (["simulate", "PLAN"], "autoptd.explain.timeline.simulate_plan"),
    (["report", "PLAN", "-o", "OUT"], "autoptd.plans.model.plan_page"),
    (["emit", "PLAN", "--model", "gpt2", "-o", "OUT"], "autoptd.models.load.load_model"),
    (["verify", "PLAN", "--model", "gpt2"], "autoptd.verification.verdict.subject_of"),
    (["export", "PLAN", "--to", "json"], "autoptd.export.mapping.mapping"),
    (["checkpoint", "check", "OUT"], "autoptd.checkpoint.folder.find"),
    (["profile", "-o", "OUT"], "autoptd.cli.profile.profile"),
    (["doctor"], "autoptd.cli.doctor.examine"),
    (["models"], "autoptd.models.load.describe_models"),
    (["clusters"], "autoptd.cost_models.cluster.Cluster.names"),
]
FAULTS = [
    KeyError("x"),
    ZeroDivisionError("division by zero"),
    AssertionError(),
    MemoryError(),
    RecursionError("too deep"),
    StopIteration(),
    UnicodeEncodeError("ascii", "×", 0, 1, "ordinal not in range"),
    SystemExit(1),
]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    plan = tmp_path / "plan.json"
    sample_plan().save(plan)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main([{"PLAN": str(plan), "OUT": str(tmp_path / "out")}.get(word, word) for word in words])
        return code, *capsys.readouterr()

    return run


def go_wrong(monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(where, wrong)


@pytest.mark.parametrize(("words", "where"), COMMANDS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_fault_in_a_command_is_one_error(
    words: list[str], where: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_wrong(monkeypatch, where, KeyError("a name that nobody expected"))
    code, _, errors = run(*words)
    assert code == 2
    assert errors.startswith("autoptd: unexpected KeyError: 'a name that nobody expected'\n  where  test_fault")
    assert "AUTOPTD_DEBUG=1" in errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) == 3


def test_every_command_is_tried() -> None:
    commands = next(a for a in cli._parser()._actions if a.choices and "plan" in a.choices)
    assert sorted(commands.choices) == sorted({words[0] for words, _ in COMMANDS})  # type: ignore[arg-type]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_whatever_it_is(error: BaseException, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    go_wrong(monkeypatch, "autoptd.models.load.describe_models", error)
    code, out, _ = run("models", "--json")
    assert code == 2
    assert json.loads(out)["error"]["type"] == "InternalError"


def test_the_traceback_is_shown_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPTD_DEBUG", "1")
    go_wrong(monkeypatch, "autoptd.models.load.describe_models", KeyError("x"))
    code, _, errors = run("models")
    assert code == 2
    assert errors.startswith("Traceback")
    assert "autoptd: unexpected KeyError" in errors


MODEL = """
import sys
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return {loss}

    def example_inputs(self, batch, seq):
        return {{"x": torch.empty(batch, 4)}}


def build():
    return Model()


def leave():
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("loss", "code", "says"),
    [
        ("self.a(x).pow(2).mean()", 0, "verified: the plan computes what the model computes"),
        ("(self.a(x).mean() * torch.sqrt(-1 - x.pow(2)).mean())", 2, "gives nothing to compare with"),
        (
            "self.a(x).pow(4 if type(x) is torch.Tensor else 2).mean()",
            1,
            "NOT the same as the plain model",
        ),
    ],
    ids=["right", "no answer", "wrong"],
)
def test_what_verify_says_is_its_exit_code(
    loss: str, code: int, says: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"model_of_{code}"
    (tmp_path / f"{name}.py").write_text(MODEL.format(loss=loss))
    monkeypatch.chdir(tmp_path)
    plan = str(tmp_path / "made.json")
    options = ["--world", "2", "--batch", "4", "--precision", "fp32", "--cluster", "dgx-h100", "-o", plan]
    assert run("plan", f"{name}:build", *options)[0] == 0
    found, out, errors = run("verify", plan, "--model", f"{name}:build")
    assert (found, says in out + errors) == (code, True), out + errors
    assert run("plan", f"{name}:leave", *options)[0] == 2


def test_interrupted_within_text_that_is_run_it_ends_with_its_own_code(tmp_path: Path) -> None:
    """Python remembers such an interrupt, and would end a module that is run by the signal."""
    (tmp_path / "interrupted.py").write_text(
        "import sys, autoptd.cli.main as cli\n"
        "cli._run = lambda _: exec('raise KeyboardInterrupt')\n"
        "sys.exit(cli.main(['models']))\n"
    )
    ended = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "autoptd: interrupted\n")
