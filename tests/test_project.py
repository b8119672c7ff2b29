"""The project keeps its own rules: who may import whom, what the README promises, what no file may say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autoptd
from tests.test_layers import modules

ROOT = Path(__file__).parents[1]

LINES = 450  # all but the planner are below 400
# Another machine's paths, and where packages come from, are nobody's business here.
FORBIDDEN = ("/" + "work/", "index" + "-url")  # in two parts, so that this file passes
SKIPPED = {".git", ".hypothesis", ".venv", "__pycache__", "build", "dist", "out", "autoptd.egg-info"}


def test_the_public_names_are_sorted_and_there():
    assert list(autoptd.__all__) == sorted(autoptd.__all__)
    assert [name for name in autoptd.__all__ if not hasattr(autoptd, name)] == []


def test_the_public_names_are_frozen():
    types = ["AutoptdError", "Cluster", "Parallel", "Plan", "TracedModel"]
    assert autoptd.__all__ == [*types, "parallelize", "plan", "trace"]


def test_importing_autoptd_does_not_import_torch_or_a_solver():
    code = "import sys, autoptd; sys.exit(not {'torch', 'pulp', 'highspy'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_source_file_says_what_it_is_for_and_is_short():
    for module, path in modules():
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= LINES, f"{path} is longer than {LINES} lines"
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"


def test_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        for target in re.findall(r"\bmake (\w+)\b(?= {2,}#|`|$)", (ROOT / page).read_text("utf-8"), re.MULTILINE):
            assert target in targets, f"{page} says `make {target}`"


def test_ci_runs_what_the_readme_says():
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in lines
    assert "make lint" in lines
    assert "make wheel" in lines
    assert "set -euo pipefail" in lines


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("benchmarks/**/*.md")]


def missing_files(page: Path, text: str) -> list[str]:
    """Links of a document, and paths of the project that it quotes, that lead nowhere."""
    links = [page.parent / target for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text)]
    missing = [str(path) for path in links if not path.exists()]
    for name in re.findall(r"`(\w+/[\w./]*)`", text):
        homes = [home for home in (ROOT, ROOT / "autoptd") if (home / name.partition("/")[0]).is_dir()]
        if homes and not any((home / name).exists() for home in homes):
            missing.append(name)
    return missing


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.name)
def test_files_that_a_document_names_exist(page: Path):
    assert missing_files(page, page.read_text("utf-8")) == []


def test_a_file_that_is_missing_is_seen():
    text = "[here](docs/nowhere.md#part), `passes/nowhere.py`, [there](docs/usage.md)"
    assert len(missing_files(ROOT / "README.md", text)) == 2


def test_the_readme_links_every_document():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in readme] == []


def test_the_python_of_the_readme_compiles():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_the_first_example_of_the_readme_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    readme = (ROOT / "README.md").read_text("utf-8")
    code, shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", readme, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == shown


def test_the_license_is_whole():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_no_file_speaks_of_the_machine_it_was_written_on():
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.endswith("_cache")]
        for name in files:
            path = Path(folder) / name
            text = path.read_bytes().decode("utf-8", errors="replace")
            assert [word for word in FORBIDDEN if word in text] == [], str(path)
