"""Rules of the project: its public names, its sources, its continuous integration, its licence."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import autoptd
from tests.test_layers import modules

ROOT = Path(__file__).parents[1]

LINES = 400
# Paths of a machine, and package indexes, have no place in the project.
FORBIDDEN = ("/" + "work/", "index" + "-url")  # in two parts, so that this file passes
SKIPPED = {".git", ".hypothesis", ".venv", "__pycache__", "build", "dist", "out", "site", "autoptd.egg-info"}


def test_the_public_names_are_sorted_and_there():
    assert list(autoptd.__all__) == sorted(autoptd.__all__)
    assert [name for name in autoptd.__all__ if not hasattr(autoptd, name)] == []


def test_the_public_names_are_frozen():
    types = ["AutoptdError", "Cluster", "Parallel", "Plan", "TracedModel"]
    assert autoptd.__all__ == [*types, "parallelize", "plan", "shared", "trace"]


def test_dir_lists_the_public_names():
    import importlib.metadata

    autoptd.Plan.load  # noqa: B018  loads submodules, which become attributes
    assert dir(autoptd) == sorted([*autoptd.__all__, "__version__"])
    assert autoptd.__version__ == importlib.metadata.version("autoptd")


def test_importing_autoptd_does_not_import_torch_or_a_solver():
    code = "import sys, autoptd; sys.exit(not {'torch', 'pulp', 'highspy'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_source_file_says_what_it_is_for_and_is_short():
    for module, path in modules():
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= LINES, f"{path} is longer than {LINES} lines"
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"


def test_ci_runs_what_the_readme_says():
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in lines
    assert "make lint" in lines
    assert "make wheel" in lines
    assert "set -euo pipefail" in lines


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
