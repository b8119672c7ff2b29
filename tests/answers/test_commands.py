"""Explanations on the command line: output as text and as JSON, and exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoptd.api
import autoptd.cli.main as cli
from autoptd.compile.traced import TracedModel

SMALL = "tests.answers.small:small_gpt"
PLAN = ["plan", SMALL, "--seq", "256", "--cluster", "dgx-h100"]


@pytest.fixture(autouse=True)
def traced_before(traced: TracedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoptd.api, "trace", lambda *_, **__: traced)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    return code, *capsys.readouterr()


def test_sweep_holds_the_batch_of_the_largest_world(capsys: pytest.CaptureFixture[str]):
    words = [*PLAN, "--sweep", "world=2,4", "--fix", "pp=1"]
    code, text, _ = told(capsys, *words)
    assert code == 0
    assert "batch was not given: 32 samples, 8 × 4, the largest world, at every point" in text
    data = json.loads(told(capsys, *words, "--json")[1])
    assert [(point["world"], point["batch"]) for point in data["points"]] == [(2, 32), (4, 32)]
    assert data["points"][0]["scaling_efficiency"] == 1.0


def test_a_sweep_without_any_plan_is_no(capsys: pytest.CaptureFixture[str]):
    code, text, _ = told(capsys, *PLAN, "--world", "2", "--sweep", "tp=3,5")
    assert code == 1 and "[1] not possible: world 2 is not divisible by tp 3" in text


def test_pareto_and_sensitivity(capsys: pytest.CaptureFixture[str]):
    words = [*PLAN, "--world", "1", "--batch", "16"]
    assert "Fastest plan for each device memory" in told(capsys, *words, "--pareto")[1]
    data = json.loads(told(capsys, *words, "--sensitivity", "--json")[1])
    assert len(data["reactions"]) == 10


def test_why_an_op(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    saved = str(tmp_path / "plan.json")
    assert told(capsys, *PLAN, "--world", "2", "--fix", "tp=2", "-o", saved)[0] == 0
    code, _, errors = told(capsys, "explain", saved, "--op", "head", "--memory", "--model", SMALL)
    assert code == 2 and "two different reports" in errors
    code, text, _ = told(capsys, "explain", saved, "--op", "head", "--model", SMALL, "--json")
    found: dict[str, Any] = json.loads(text)
    assert code == 0 and found["found"][0]["alternatives"][0]["chosen"]
    code, _, errors = told(capsys, "explain", saved, "--op", "haed", "--model", SMALL)
    assert code == 2 and "did you mean 'head'" in errors


def test_time_by_op(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    saved = str(tmp_path / "plan.json")
    assert told(capsys, *PLAN, "--world", "2", "--fix", "tp=2", "-o", saved)[0] == 0
    code, text, _ = told(capsys, "explain", saved, "--ops", "--model", SMALL)
    assert code == 0 and "Time by module and kernel" in text and "Parameters by module" in text
    code, text, _ = told(capsys, "explain", saved, "--ops", "--model", SMALL, "--json")
    found: dict[str, Any] = json.loads(text)
    assert code == 0 and sorted(found) == sorted(
        ["step_time_s", "mfu", "ideal_s", "rows", "rest_s", "quicker", "parameters"]
    )
    code, _, errors = told(capsys, "explain", saved, "--ops", "--memory", "--model", SMALL)
    assert code == 2 and "--memory and --ops are two different reports" in errors


def test_costs_are_in_every_report(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    saved = str(tmp_path / "plan.json")
    asks = ["--price", "2.5 USD", "--tokens", "1T"]
    words = [*PLAN, "--world", "2", "--fix", "tp=1,pp=1"]
    code, text, _ = told(capsys, *words, *asks, "-o", saved)
    assert code == 0 and " USD per billion tokens (2.5 USD per device-hour)" in text and "1T tokens: " in text
    made = json.loads(told(capsys, *words, *asks, "--json")[1])
    assert made["plan"] == json.loads(Path(saved).read_text()) == json.loads(told(capsys, *words, "--json")[1])
    for command in ("explain", "simulate"):
        assert " USD per billion tokens" in told(capsys, command, saved, *asks)[1]
        shown = json.loads(told(capsys, command, saved, *asks, "--json")[1])["cost"]
        assert shown["per_billion"] == pytest.approx(made["cost"]["per_billion"], rel=1e-6)
        assert shown["units"] == 1e12 and shown["currency"] == "USD"
    both = json.loads(told(capsys, "compare", saved, saved, *asks, "--json")[1])["cost"]
    assert both == [made["cost"], made["cost"]]
    code, text, _ = told(capsys, *PLAN, "--sweep", "world=1,2", "--fix", "tp=1,pp=1", *asks)
    assert code == 0 and "per Gtok" in text and "cheapest: world " in text and "days, total: of 1T tokens" in text
    code, _, errors = told(capsys, *words, "--sensitivity", *asks)
    assert code == 2 and "--price is not for --sensitivity" in errors


def test_a_cost_that_means_nothing_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, traced: TracedModel, tmp_path: Path
):
    from autoptd.answers.query import PlanQuery

    monkeypatch.setattr(PlanQuery, "plan", lambda *_: pytest.fail("planned"))
    pools = tmp_path / "two.toml"
    device = "device.memory_bytes = 1e9\ndevice.memory_bytes_per_s = 1e9\ndevice.matmul_flops_per_s = "
    device = f"{device}{{fp64 = 1e9, fp32 = 1e9, bf16 = 1e9, fp16 = 1e9}}\n"
    levels = '[[levels]]\nname = "x"\nbytes_per_s = 1e9\nlatency_s = 1e-6\n'
    both = f'name = "two"\ndevice.name = "a"\n{device}{levels}[[others]]\nranks = 1\ndevice.name = "b"\n{device}'
    pools.write_text(both.replace("1e9\ndevice.memory_bytes_per_s", "1000000000\ndevice.memory_bytes_per_s"))
    words = ["plan", SMALL, "--seq", "256", "--world", "2", "--cluster", str(pools), "--price", "2"]
    code, _, errors = told(capsys, *words)
    assert code == 2 and "one price is given for 2 types of device" in errors
    monkeypatch.setattr(autoptd.api, "trace", lambda *_, **__: replace(traced, sizes={}))
    code, _, errors = told(capsys, *PLAN, "--world", "2", "--tokens", "1T")
    assert code == 2 and "without a length in tokens" in errors
