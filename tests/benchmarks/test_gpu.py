"""The command for one GPU, on a CPU: its rows, its page, and that a wrong plan or a failing case is a row."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from autoptd.testing.parity import Trained
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import parity
from benchmarks.gpu.cases import CASES
from benchmarks.gpu.page import page
from benchmarks.gpu.rows import Row, table
from benchmarks.gpu.steps import measure
from benchmarks.gpu.tokens import by_turns

SHORT = [
    parity.Check(2, {"tp": 2}),
    parity.Check(4, {"dp": 2, "ep": 2, "tp": 2}, "bf16", model="mixture"),
]


@pytest.mark.parametrize("check", SHORT, ids=str)
def test_a_plan_passes(check: parity.Check) -> None:
    row = parity.measure(check, "cpu")
    assert row.passed and float(row.figures["difference"]) < (1e-10 if check.precision == "fp64" else 0.05)


@pytest.mark.parametrize("check", SHORT, ids=str)
def test_a_wrong_gradient_is_a_miss(check: parity.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    train = parity.train_in_lockstep

    def wrong(*args: object, **named: object) -> Trained:
        found = train(*args, **named)  # type: ignore[arg-type]
        name = max(found.gradients, key=lambda n: float(found.gradients[n].norm()))
        found.gradients[name] = found.gradients[name] * 1.1
        return found

    monkeypatch.setattr(parity, "train_in_lockstep", wrong)
    assert parity.measure(check, "cpu").passed is False


def test_a_plan_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "CHECKS", (parity.Check(2, {"ep": 2}, model="small"),))
    (row,) = parity.run("small", "cpu")
    assert row.passed is False and "experts" in row.problem


def test_a_case_that_fails_is_a_row(tmp_path: Path) -> None:
    (row,) = command.in_process("steps", "nothing,eager", "cpu", tmp_path)
    assert row == Row("steps", "nothing,eager", passed=False, problem="KeyError: 'nothing'")


def test_every_kind_of_plan_is_checked() -> None:
    """ZeRO stages, schedules, axes and recomputation, dense and with experts, in both precisions."""
    values = {(key, value) for check in parity.CHECKS for key, value in check.fix.items()}
    assert {("zero", stage) for stage in range(4)} <= values
    schedules = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v")
    assert {("schedule", name) for name in schedules} <= values
    assert {(axis, 2) for axis in ("dp", "tp", "pp", "cp", "ep", "shards")} <= values
    assert {check.precision for check in parity.CHECKS if check.compiled} == {"fp64", "bf16"}


def test_steps_and_tokens_of_tiny_models() -> None:
    cases = {case.name: case for case in CASES["cpu"]}
    row = measure(cases["gpt2-tiny"], "eager", "local", "cpu", steps=1)
    assert float(row.figures["loss"]) == pytest.approx(math.log(512), rel=0.2)  # tokens are drawn uniformly
    assert row.figures["predicted"].endswith(" ms") and row.figures["measured"].endswith(" ms")
    assert "tokens/s" in by_turns(cases["gpt2-tiny"], "cpu", pairs=1).figures["autoptd"]


def test_the_page_is_of_the_rows() -> None:
    kept = Path("benchmarks/data/gpu/rows.jsonl").read_text("utf-8").splitlines()
    about, *rows = map(json.loads, kept)
    assert Path("docs/gpu.md").read_text("utf-8") == page(about, [Row(**row) for row in rows])


def test_a_table_has_a_column_for_each_figure() -> None:
    rows = [Row("parity", "a", {"ranks": "2"}, True), Row("parity", "b", passed=False, problem="no memory")]
    assert table(rows).splitlines() == [
        "|  | ranks |  |",
        "| --- | ---: | --- |",
        "| a | 2 | pass |",
        "| b | no memory | MISS |",
    ]


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert command.main([]) == 1
        assert "--device cpu" in capsys.readouterr().err
