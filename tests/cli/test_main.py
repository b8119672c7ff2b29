"""The command line: its output, its errors, and what it must not import."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autoptd.cli.main as cli
from autoptd.cli.arguments import FIXABLE, FIXED, read_sweep
from autoptd.errors import DoesNotFit, PlanError
from autoptd.plans.model import Plan
from tests.sample_plan import sample_plan

COMMANDS = ["plan", "explain", "compare", "emit", "models", "clusters"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(list(words))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def saved(tmp_path: Path) -> str:
    sample_plan().save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand in for the planner: record the requests, answer with the sample plan."""
    asked: list[dict[str, Any]] = []
    traced: list[dict[str, Any]] = []

    class Parallel:
        def emit(self, folder: str) -> None:
            Path(folder).mkdir(parents=True)
            (Path(folder) / "stage_0.py").write_text("# a stage\n")

    def trace(model: Any, **sizes: Any) -> Any:
        traced.append({"model": model, **sizes})
        return types.SimpleNamespace(model=model, seq=sizes["seq"], precision=sizes["precision"], name="unnamed")

    def plan(model: Any, **constraints: Any) -> Plan:
        asked.append({"model": model, **constraints})
        if constraints["world"] == 1:
            raise DoesNotFit("stage 0 lacks 12.3 GiB", where="stage 0", fix="use 2 devices")
        if constraints["world"] == 7:
            raise PlanError("7 devices cannot be dp × 2 × pp")
        return sample_plan(model="unnamed")

    def parallelize(model: Any, **constraints: Any) -> Parallel:
        asked.append({"model": model, **constraints})
        return Parallel()

    module = types.ModuleType("autoptd.api")
    module.plan, module.parallelize, module.trace = plan, parallelize, trace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autoptd.api", module)
    monkeypatch.setattr("autoptd.api", module, raising=False)
    return asked


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=lambda words: " ".join(words) or "autoptd")
def test_help_answers(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        cli.main([*words, "--help"])
    assert left.value.code == 0
    assert f"usage: {' '.join(['autoptd', *words])}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--help"], ["plan", "--help"], ["models"], ["plan", "gpt4", "--world", "8"]], ids=str
)
def test_torch_is_not_imported_to_answer(words: list[str]):
    code = (
        "import sys, autoptd.cli.main\n"
        "try: autoptd.cli.main.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False).returncode == 0


def test_every_command_is_known_and_named_in_the_readme():
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert [name for name in COMMANDS if f"autoptd {name}" not in readme] == []


# --- plan ---------------------------------------------------------------------------------------------------------


def test_plan_passes_the_constraints_on_and_saves(run: Run, api: list[dict[str, Any]], tmp_path: Path):
    out = tmp_path / "plan.json"
    code, text, _ = run(
        *["plan", "gpt2", "--world", "8", "--cluster", "dgx-h100", "--batch", "16", "--seq", "128"],
        *["--precision", "fp32", "--fix", "tp=2,recompute=none,zero=0"],
        *["--assume", "kernels=fused", "-o", str(out)],
    )
    assert code == 0
    (asked,) = api
    model = asked.pop("model")
    assert (type(model.model).__name__, model.seq, model.precision) == ("GPT2LMHeadModel", 128, "fp32")
    assert asked.pop("progress") is not None
    assert asked.pop("cluster").name == "dgx-h100"
    assert asked == {
        "world": 8,
        "batch": 16,
        "optimizer": "adamw",
        "fix": {"tp": 2, "recompute": "none", "zero": 0},
        "assume": {"kernels": "fused"},
        "as_": None,
        "exact": False,
        "time_limit_s": None,
    }
    assert Plan.load(out).model == "gpt2"
    assert text.startswith("gpt2 on 8 × test-cluster: dp 2 × tp 2 × pp 2")
    assert text.endswith(f"saved to {out}\n")


def test_plan_for_machines_is_the_plan_file(run: Run, api: list[dict[str, Any]]):
    code, text, errors = run("plan", "nanogpt", "--world", "8", "--json")
    assert (code, errors) == (0, "")
    assert Plan.from_json(text).to_json() == text


def test_no_is_1(run: Run, api: list[dict[str, Any]]):
    code, text, errors = run("plan", "nanogpt", "--world", "1")
    assert (code, text) == (1, "")
    assert errors.startswith("autoptd: stage 0 lacks 12.3 GiB\n  where  stage 0\n  fix    use 2 devices\n\n")
    assert "no constraint is to blame" in errors and "--world 2 " in errors
    code, text, errors = run("plan", "nanogpt", "--world", "1", "--json")
    assert (code, errors) == (1, "")
    told = {"type": "DoesNotFit", "what": "stage 0 lacks 12.3 GiB", "where": "stage 0", "fix": "use 2 devices"}
    error = json.loads(text)["error"]
    assert error.pop("why")["conflict"] == {}
    assert error == told


def test_an_impossible_constraint_is_2(run: Run, api: list[dict[str, Any]]):
    assert run("plan", "nanogpt", "--world", "7")[0] == 2


def test_a_path_that_cannot_be_written_is_refused_before_planning(run: Run, api: list[dict[str, Any]], tmp_path: Path):
    code, _, errors = run("plan", "gpt2", "--world", "8", "-o", str(tmp_path / "no" / "plan.json"))
    assert code == 2
    assert "does not exist" in errors
    (tmp_path / "file").write_text("")
    sample_plan(model="gpt2").save(tmp_path / "plan.json")
    code, _, errors = run("emit", str(tmp_path / "plan.json"), "-o", str(tmp_path / "file"))
    assert code == 2
    assert "it is a file" in errors
    assert api == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "begin with `autoptd plan llama3-8b --world 64`"),
        (["plna"], "did you mean 'plan'"),
        (["plan", "gpt2", "--wrold", "8"], "did you mean --world? see `autoptd plan --help`"),
        (["models", "llama"], "see `autoptd models --help`"),
        (["plan", "gpt2"], "required: --world"),
        (["plan", "gpt2", "--world", "0"], "'0' is not a whole number from 1"),
        (["plan", "gpt2", "--world", "8.0"], "'8.0' is not a whole number"),
        (["plan", "gpt2", "--wor", "8"], "unrecognized arguments: --wor 8"),
        (["plan", "gpt2", "--world", "8", "--fix", "tpp=8"], "'tpp' cannot be fixed; did you mean 'tp'"),
        (["plan", "gpt2", "--world", "8", "--fix", "tp"], "'tp' is not NAME=VALUE"),
        (["plan", "gpt2", "--world", "8", "--fix", "tp=2,tp=4"], "'tp' is fixed twice"),
        (["plan", "gpt2", "--world", "8", "--fix", "tp=-2"], "tp is a whole number from 1, not '-2'"),
        (
            ["plan", "gpt2", "--world", "8", "--fix", "recompute=ful"],
            "recompute is one of auto, none, selective, ops, full, offload, not 'ful'",
        ),
        (["plan", "gpt2", "--world", "8", "--fix", "overlap=dp,pp"], "'pp' is not NAME=VALUE"),
        (["plan", "gpt2", "--world", "8", "--fix", "kernels=fused"], "give --assume kernels=fused"),
        (["plan", "gpt2", "--world", "8", "--fix", "overlap=none"], "give --assume overlap=none"),
        (
            ["plan", "gpt2", "--world", "8", "--assume", "tp=2"],
            "'tp' cannot be assumed; known: attention, dispatch, fp8, gradients",
        ),
        (
            ["plan", "gpt2", "--world", "8", "--fix", "kernels=eager", "--assume", "kernels=fused"],
            "kernels is fixed and assumed",
        ),
        (
            ["plan", "gpt2", "--world", "8", "--fix", "overlap=all"],
            "overlap is none, or some of dp, ep, p2p, tp, not 'all'",
        ),
        (["plan", "gpt2", "--world", "8", "--fix", "sequence_parallel=1"], "sequence_parallel is one of true, false"),
        (["plan", "gpt2", "--world", "8", "--fix", "schedule=interleave"], "schedule is one of 1f1b, gpipe"),
        (["plan", "gpt2", "--world", "8", "-o", ""], "-o/--out: the value is empty"),
        (["plan", "gpt2", "--world", "8", "--cluster", ""], "--cluster: the value is empty"),
        (["explain", "x.json", "--svg="], "--svg: the value is empty"),
        (["plan", "gpt2", "--sweep", "world"], "'world' is not NAME=VALUE,VALUE,…"),
        (["plan", "gpt2", "--sweep", "world="], "'world=' is not NAME=VALUE,VALUE,…"),
        (["plan", "gpt2", "--sweep", "world=8,,16"], "'world=8,,16' has an empty value"),
        (["plan", "gpt2", "--sweep", "world=8,8"], "'world=8,8' has 8 twice"),
        (["plan", "gpt2", "--sweep", "worlds=8"], "'worlds' cannot be swept; did you mean 'world'"),
        (["plan", "gpt2", "--sweep", "world=8,x"], "'x' is not a whole number from 1"),
        (["plan", "gpt2", "--sweep", "world=8.."], "'8..' is not FIRST..LAST"),
        (["plan", "gpt2", "--sweep", "world=64..8"], "8..64 is meant"),
        (["plan", "gpt2", "--sweep", "world=8..32,16"], "has 16 twice"),
        (["plan", "gpt2", "--sweep", "schedule=1f1b..gpipe"], "schedule is one of 1f1b, gpipe"),
        (["plan", "gpt2", "--sweep", "schedule=1f1b,2f"], "schedule is one of 1f1b, gpipe"),
        (["plan", "gpt2", "--sweep", "batch=8,16"], "required: --world"),
        (["plan", "gpt2", "--sweep", "world=8", "--sweep", "world=16"], "world is swept twice"),
        (["plan", "gpt2", "--world", "8", "--sweep", "world=8,16"], "world is both swept and given"),
        (["plan", "gpt2", "--world", "8", "--sweep", "tp=1,2", "--fix", "tp=2"], "tp is both swept and given"),
        (["plan", "gpt2", *[w for n in ("world", "tp", "pp") for w in ("--sweep", f"{n}=1")]], "3 names are swept"),
        (["plan", "gpt2", "--sweep", "world=8", "-o", "x.json"], "--sweep makes many plans, and -o is for one"),
        (["plan", "gpt2", "--world", "8", "--pareto", "--sensitivity"], "not allowed with argument --pareto"),
        (["plan", "gpt2", "--world", "8", "--pareto", "--price", "2"], "--price is not for --pareto"),
        (["plan", "gpt2", "--sweep", "world=8", "--price", "0"], "'0' is not a price"),
        (["plan", "gpt2", "--world", "8", "--price", "-2.5"], "'-2.5' is not a price"),
        (["plan", "gpt2", "--world", "8", "--price", "nan"], "'nan' is not a price"),
        (["plan", "gpt2", "--world", "8", "--price", "2.5/h"], "'2.5/h' is not a price"),
        (["plan", "gpt2", "--world", "8", "--tokens", "1Q"], "'1Q' has the unknown unit 'Q'; known: k, M, B (or G)"),
        (["plan", "gpt2", "--world", "8", "--tokens=-1T"], "'-1T' is not a number from 1 to 1e24"),
        (["plan", "gpt2", "--world", "8", "--tokens", "1T", "--samples", "9"], "not allowed with argument --tokens"),
        (["explain", "x.json", "--memory", "--tokens", "1T"], "--tokens is not for --memory"),
        (["plan", "gpt2", "--world", "8", "--sweep", "cluster=dgx-h100,dgx-h10"], "no cluster named 'dgx-h10'"),
        (["plan", "gpt3-175", "--world", "8"], "did you mean 'gpt3-175b'"),
        (["plan", "./nowhere/config.json", "--world", "8"], "there is no file nowhere/config.json"),
        (["plan", "no_such_module:build", "--world", "8"], "cannot import 'no_such_module'"),
        (["explain", "nowhere.json"], "cannot read the plan nowhere.json"),
    ],
)
def test_bad_usage_is_2_and_one_message(run: Run, api: list[dict[str, Any]], words: list[str], said: str):
    code, text, errors = run(*words)
    assert (code, text) == (2, "")
    assert said in errors
    assert errors.startswith("autoptd: ")
    assert "Traceback" not in errors
    code, text, errors = run(*words, "--json")
    assert (code, errors) == (2, "")
    assert said in json.loads(text)["error"]["what"] + json.loads(text)["error"]["fix"]
    assert api == []


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("overlap=dp,p2p,tp=2", {"overlap": ("dp", "p2p"), "tp": 2}),
        ("tp=4, overlap=p2p", {"tp": 4, "overlap": ("p2p",)}),
        ("kernels=compiled,sequence_parallel=false", {"kernels": "compiled", "sequence_parallel": False}),
        ("virtual=2,schedule=interleaved,cp=2,zero=3", {"virtual": 2, "schedule": "interleaved", "cp": 2, "zero": 3}),
    ],
)
def test_what_fix_reads(text: str, fix: dict[str, Any]):
    assert cli.read_fix(text) == fix


def test_several_fixes_add_up_and_none_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    found = argparse.ArgumentParser()
    found.add_argument("--fix", type=cli.read_fix, action=cli.Together)
    assert found.parse_args(["--fix", "tp=2,zero=0", "--fix", "pp=2"]).fix == {"tp": 2, "zero": 0, "pp": 2}
    with pytest.raises(SystemExit):
        found.parse_args(["--fix", "tp=2", "--fix", "tp=4"])
    assert "tp given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "assumed"),
    [
        ("overlap=dp, tp,kernels=fused", {"overlap": ("dp", "tp"), "kernels": "fused"}),
        ("attention=cudnn,overlap=none,gradients=both", {"attention": "cudnn", "overlap": (), "gradients": "both"}),
    ],
)
def test_what_assume_reads(text: str, assumed: dict[str, Any]):
    assert cli.read_assume(text) == assumed
    for name, value in assumed.items():
        said = f"{name}={'+'.join(value) or 'none' if isinstance(value, tuple) else value}"
        with pytest.raises(argparse.ArgumentTypeError, match=rf"only be predicted.*give --assume {re.escape(said)}$"):
            cli.read_fix(said)


@pytest.mark.parametrize(
    ("text", "swept"),
    [
        ("world=8, 16", ("world", (8, 16))),
        ("world=8..512", ("world", (8, 16, 32, 64, 128, 256, 512))),
        ("batch=3 .. 20, 16", ("batch", (3, 6, 12, 16))),
        ("micro=2..2", ("micro", (2,))),
        ("cluster=dgx-h100,./a.toml", ("cluster", ("dgx-h100", "./a.toml"))),
        ("overlap=none,dp+p2p", ("overlap", ((), ("dp", "p2p")))),
        ("sequence_parallel=true,false", ("sequence_parallel", (True, False))),
    ],
)
def test_what_sweep_reads(text: str, swept: Any):
    assert read_sweep(text) == swept


def test_fix_knows_what_the_search_does():
    from autoptd.search.constraints import options as constraints

    assert set(FIXED) == set(constraints.KNOWN) - set(constraints.NAMED) | {"splits"}, "whose placements have a name"
    searched = constraints.ALLOWED.keys() & {*constraints.KNOWN} - {"zero"}  # others are only assumed
    given = {name: tuple(map(str, constraints.ALLOWED[name])) for name in searched}
    assert {name: FIXABLE[name] for name in given} == given
    assert FIXABLE["overlap"] == constraints.STREAMS


# --- the other commands -------------------------------------------------------------------------------------------


def test_explain(run: Run, saved: str):
    code, text, _ = run("explain", saved)
    assert (code, text) == (0, sample_plan().explain())
    code, text, _ = run("explain", saved, "--json")
    assert json.loads(text)["plan"] == json.loads(sample_plan().to_json())
    assert json.loads(text)["headline"].startswith("gpt2-small on 8")


def test_compare(run: Run, saved: str, tmp_path: Path):
    other = str(tmp_path / "other.json")
    sample_plan(zero=0).save(other)
    assert run("compare", saved, saved)[0] == 0
    code, text, _ = run("compare", saved, other)
    assert code == 1
    assert "ZeRO" in text
    code, text, _ = run("compare", saved, other, "--json")
    assert code == 1
    assert json.loads(text)["differences"] == {"zero": [1, 0]}
    assert json.loads(text)["time_s"] == []


def test_emit(run: Run, api: list[dict[str, Any]], saved: str, tmp_path: Path):
    code, _, errors = run("emit", saved, "-o", str(tmp_path / "out"))
    assert code == 2
    assert "--model MODEL" in errors
    code, text, _ = run("emit", saved, "--model", "nanogpt", "-o", str(tmp_path / "a" / "out"), "--json")
    assert code == 0
    assert json.loads(text)["files"] == [str(tmp_path / "a" / "out" / "stage_0.py")]
    assert api[0]["plan"] == sample_plan()
    assert api[0]["world"] == 8


def test_models_and_clusters(run: Run):
    code, text, _ = run("models")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == sorted(json.loads(run("models", "--json")[1]))
    code, text, _ = run("clusters")
    assert code == 0
    assert "dgx-h100" in text
    assert json.loads(run("clusters", "--json")[1])["dgx-h100"]["device"]["memory_bytes"] > 2**36


@pytest.mark.parametrize("lines", [1, 5000])
def test_a_reader_that_leaves_is_no_error(lines: int, tmp_path: Path):
    saved = str(tmp_path / "plan.json")
    sample_plan(notes=("a fact",) * lines).save(saved)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "autoptd.cli.main", "explain", saved]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def run_shell(tmp_path: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command line of bash on a plan, `autoptd` being this one."""
    sample_plan().save(tmp_path / "plan.json")
    script = f'autoptd() {{ "{sys.executable}" -m autoptd.cli.main "$@"; }}\ncd "{tmp_path}"\n{command}\n'
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2]), **variables}
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("autoptd explain plan.json >&-", 0),
        ("autoptd explain no.json 2>&-", 2),
        ("autoptd explain plan.json > /dev/full", 2),
        ("autoptd explain plan.json --json > /dev/full", 2),
        ("autoptd explain no.json --json > /dev/full", 2),
        ("autoptd explain no.json --json | true; exit ${PIPESTATUS[0]}", 2),
        ("autoptd explain no.json 2>&1 | true; exit ${PIPESTATUS[0]}", 2),
        ("autoptd explain plan.json --all | true; exit ${PIPESTATUS[0]}", 0),
    ],
)
def test_an_output_that_takes_nothing_changes_no_answer(tmp_path: Path, command: str, code: int):
    found = run_shell(tmp_path, command)
    assert (found.returncode, "Traceback" in found.stderr, "ignored" in found.stderr) == (code, False, False)
    if "full" in command and "no.json" not in command:
        assert found.stderr.startswith("autoptd: cannot write to standard output: No space left on device\n")


def test_characters_that_the_output_lacks_are_written_in_ascii(tmp_path: Path):
    full = run_shell(tmp_path, "autoptd explain plan.json").stdout
    found = run_shell(tmp_path, "autoptd explain plan.json", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (found.returncode, found.stderr) == (0, "")
    assert not full.isascii() and found.stdout.isascii()
    assert full.splitlines()[0].replace("×", "x") == found.stdout.splitlines()[0]
    assert run_shell(tmp_path, "autoptd plan --help", PYTHONIOENCODING="ascii", PYTHONUTF8="0").returncode == 0


PRINTS = """
import torch
print("imported")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        print("made")
        self.a = torch.nn.Linear(4, 4)

    def forward(self, x):
        print("run")
        return self.a(x).pow(2).mean()

    def example_inputs(self, batch, seq):
        return {"x": torch.empty(batch, 4)}
"""


def test_what_a_model_prints_is_not_in_the_report(tmp_path: Path):
    (tmp_path / "talkative.py").write_text(PRINTS)
    words = "talkative:Model --world 2 --cluster dgx-h100"
    found = run_shell(tmp_path, f"autoptd plan {words} --json -o made.json")
    assert json.loads(found.stdout)["world"] == 2
    assert set(found.stderr.split()) >= {"imported", "made", "run"}
    plain = run_shell(tmp_path, f"autoptd plan {words}")
    assert plain.stdout.startswith("Model on 2 ×")
    checked = run_shell(tmp_path, "autoptd verify made.json --model talkative:Model --json")
    assert checked.returncode == 0 and json.loads(checked.stdout), checked.stderr
