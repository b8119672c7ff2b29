"""Commands with and without a kept trace: the same output, without the libraries that only tracing needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  its first import sets a variable, after a command has made its entry

import autoptd.api
from autoptd.cli.main import main
from autoptd.trace_cache import depends_on

CONFIGURATION = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 256,
    "n_positions": 64,
}
PINNED = ("--world", "2", "--cluster", "dgx-h100", "--fix", "pp=1,recompute=none,schedule=1f1b,offload=0")
# one process: prints what the command prints, and at the end which libraries it has loaded
COMMAND = """
import sys
from autoptd.trace_cache import depends_on
depends_on._SETTLED_NS = -(10**18)
from autoptd.cli.main import main
code = main(sys.argv[1:])
loaded = [name for name in ("transformers", "torch._dynamo", "torch.export._trace") if name in sys.modules]
print(loaded, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGURATION))
    return str(folder)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """Keep traces in a folder of the test, and record every trace that is made."""
    made: list[object] = []
    trace: Callable[..., Any] = autoptd.api.trace

    def recorded(model: object, **how: Any) -> Any:
        made.append(model)
        return trace(model, **how)

    monkeypatch.setenv("AUTOPTD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(depends_on, "_SETTLED_NS", -(10**18))
    monkeypatch.setattr(autoptd.api, "trace", recorded)
    return made


def out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def test_other_questions_about_a_model_need_no_trace(
    traces: list[object], model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    first = out(capsys, "plan", model, *PINNED, "--json")
    assert len(traces) == len(entries(tmp_path)) == 1
    assert out(capsys, "plan", model, *PINNED, "--json") == first
    assert json.loads(first)["model"] == "model"
    for words in (
        ("--world", "4", "--cluster", "dgx-a100-80gb", "--fix", "pp=2,recompute=full"),
        (*PINNED, "--batch", "64", "--optimizer", "sgd"),
        (*PINNED, "--sensitivity"),
        (*PINNED, "--pins"),
        ("--sweep", "world=1,2", "--fix", "pp=1"),
    ):
        out(capsys, "plan", model, *words)
    assert len(traces) == len(entries(tmp_path)) == 1


def test_explanations_of_a_plan_need_no_trace(
    traces: list[object],
    model: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    saved = str(tmp_path / "plan.json")
    out(capsys, "plan", model, *PINNED, "--seq", "64", "-o", saved)
    words = [("explain", saved, flag, *rest, "--model", model) for flag, *rest in (("--memory",), ("--op", "lm_head"))]
    kept = [out(capsys, *command) for command in words]
    assert len(traces) == 1
    monkeypatch.setenv("AUTOPTD_CACHE", "off")
    assert [out(capsys, *command) for command in words] == kept
    assert len(traces) == 3


def test_what_is_traced_otherwise_is_traced(
    traces: list[object], model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    plan = ("plan", model, *PINNED, "--json")
    for number, words in enumerate([(), ("--seq", "32"), ("--precision", "fp32")], 1):
        out(capsys, *plan, *words)
        assert len(traces) == len(entries(tmp_path)) == number
    assert main([*plan, "--loss-averaging", "per-microbatch"]) == 2  # refused by the trace
    assert "has no effect" in capsys.readouterr().out
    first = json.loads(out(capsys, *plan))
    (Path(model) / "config.json").write_text(json.dumps({**CONFIGURATION, "n_layer": 3}))
    changed = json.loads(out(capsys, *plan))
    assert len(traces) == 5 and changed["graph_hash"] != first["graph_hash"]
    Path(model).rename(tmp_path / "renamed")
    assert json.loads(out(capsys, "plan", str(tmp_path / "renamed"), *PINNED, "--json"))["model"] == "renamed"
    assert len(traces) == 6


def test_a_configuration_that_changes_during_the_trace_is_not_kept(
    traces: list[object],
    model: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    trace: Callable[..., Any] = autoptd.api.trace

    def changing(given: object, **how: Any) -> Any:
        (Path(model) / "config.json").write_text(json.dumps({**CONFIGURATION, "n_layer": 3}))
        return trace(given, **how)

    monkeypatch.setattr(autoptd.api, "trace", changing)
    out(capsys, "plan", model, *PINNED)
    assert not (tmp_path / "cache").exists()


def test_callables_and_failures_are_not_kept(
    traces: list[object],
    model: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    from tests.trace_cache.test_copies import GPTSizes, NanoGPT

    module = types.ModuleType("made_here")
    module.make = lambda: NanoGPT(GPTSizes(vocab=64, max_seq=16, width=32, layers=2, heads=2))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    for _ in range(2):
        out(capsys, "plan", "made_here:make", *PINNED)
    assert len(traces) == 2
    for _ in range(2):
        assert main(["plan", model, *PINNED, "--seq", "65"]) == 2
        assert "longer than the 64 positions" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "nowhere.json"), *PINNED]) == 2
    assert not (tmp_path / "cache").exists()


def test_switched_off(
    traces: list[object],
    model: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    out(capsys, "plan", model, *PINNED)
    monkeypatch.setenv("AUTOPTD_CACHE", "off")
    before = [(file.name, file.stat().st_mtime_ns) for file in entries(tmp_path)]
    out(capsys, "plan", model, *PINNED)
    assert len(traces) == 2
    assert [(file.name, file.stat().st_mtime_ns) for file in entries(tmp_path)] == before


def test_processes(model: str, tmp_path: Path):
    """Two at once trace, and keep one trace; a third finds it and loads no library that only tracing needs."""
    home = tmp_path / "home"
    home.mkdir()
    variables = {**os.environ, "HOME": str(home), "AUTOPTD_CACHE": "", "XDG_CACHE_HOME": ""}
    command = [sys.executable, "-c", COMMAND, "plan", model, *PINNED, "--json"]

    def start() -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=variables, cwd=Path(__file__).parents[2], **pipes)

    both = [process.communicate(timeout=300) for process in [start(), start()]]
    third = start().communicate(timeout=300)
    plans = {plan for plan, _ in (*both, third)}
    assert len(plans) == 1 and json.loads(plans.pop())["world"] == 2
    assert all("transformers" in errors for _, errors in both)
    assert third[1].strip().splitlines()[-1] in ("[]", "['torch._dynamo']")
    files = [path.relative_to(home) for path in home.rglob("*") if path.is_file()]
    assert [file.parent for file in files] == [Path(".cache") / "autoptd"]
    assert files[0].suffix == ".trace"
