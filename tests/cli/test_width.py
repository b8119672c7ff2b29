"""Reports and helps on a terminal of 80 columns: no line is longer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import autoptd.cli.main as cli
from autoptd.plans.model import Plan
from tests.sample_plan import sample_plan

COLUMNS = 80
REPORTS = [
    ["explain", "PLAN"],
    ["explain", "PLAN", "--all"],
    ["simulate", "PLAN"],
    ["compare", "PLAN", "OTHER"],
    ["models"],
    ["clusters"],
    ["plan", "nanogpt", "--sweep", "world=1,2", "--price", "2.5", "--fix", "tp=1,pp=1,cp=1,micro=4"],
]
COMMANDS = [
    "plan", "explain", "report", "compare", "simulate", "emit", "verify", "export", "checkpoint", "profile", "doctor",
    "models", "clusters",
]  # fmt: skip
TIMES = {"forward_s": 0.0123456, "backward_s": 0.0234567, "forward_tp_s": 0.00123, "backward_tp_s": 0.00234}


def long_named() -> Plan:
    """Return a plan with times, whose model and modules have long names."""
    plan = sample_plan(model="an-organisation/A-Model-Of-Which-The-Name-Is-Long-235B-A22B")
    times = tuple({**TIMES, "reduce_s": 0.00345, "step_s": 0.00456} for _ in plan.stages)
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"times": times})})


@pytest.mark.parametrize("words", REPORTS, ids=" ".join)
def test_a_report_fits(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    long_named().save(tmp_path / "plan.json")
    sample_plan().save(tmp_path / "other.json")
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((COLUMNS, 24)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    given = {"PLAN": str(tmp_path / "plan.json"), "OTHER": str(tmp_path / "other.json")}
    cli.main([given.get(word, word) for word in words])
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert [line for line in lines if len(line) > COLUMNS] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_fits(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > COLUMNS] == []
