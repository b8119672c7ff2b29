"""Layers: which module may import which, over the real imports of every file, those for type checking included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"autoptd": ROOT / "autoptd", "autoptd.passes": ROOT / "passes", "autoptd.cost_models": ROOT / "cost_models"}

# A line may import from the lines above it, a name from itself; the longest name that matches a module counts.
LAYERS = """
text caller_modes
errors progress
outputs schedule
boundary cost_models nest
models layout
ops
passes
plans.data
plans.checks
plans.files
explain.tables explain.costs
explain.timeline explain.choices
explain.breakdown explain.plan
explain.compare
report
plans.model
runtime codegen search
plans export
compile checkpoint read_values
trace_cache planned_reads old_values
explain out_of_memory planned_model optimizer_parts
running trackers
stopping
evaluating saving
parallel
arguments
api
answers testing profile
verification doctor
cli
"""
NEVER = {
    "runtime": ("passes", "explain"),
    "search": ("plans", "explain"),
    "codegen": ("plans", "explain"),
}


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


KNOWN = {name for name, _ in modules()}
LEVELS = {name: level for level, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}


@cache
def nodes(source: str) -> tuple[ast.Import | ast.ImportFrom | ast.ClassDef, ...]:
    """Return the imports and classes of a source, anywhere in it."""
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef)
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))


def imports(source: str) -> Iterator[str]:
    """Yield the modules of autoptd that a source imports."""
    for node in nodes(source):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in KNOWN:
                name = name.rpartition(".")[0]
            if name:
                yield name


def layer_of(module: str) -> str:
    """Return the longest name of `LAYERS` that is a prefix of a module."""
    name = module.removeprefix("autoptd.")
    while name not in LEVELS:
        assert name, f"{module} is in no layer"
        name = name.rpartition(".")[0]
    return name


def wrong_imports(module: str, source: str) -> list[str]:
    mine = layer_of(module)
    never = NEVER.get(mine, ())
    wrong = []
    for name in imports(source):
        theirs = "" if name == "autoptd" else layer_of(name)
        if theirs == mine:
            continue
        if not theirs or LEVELS[theirs] >= LEVELS[mine] or theirs.startswith(never or ("-",)):
            wrong.append(name)
    return wrong


def test_imports_point_one_way():
    found = {
        module: wrong_imports(module, path.read_text("utf-8")) for module, path in modules() if module != "autoptd"
    }
    assert len(found) > 100
    assert {module: wrong for module, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("autoptd.cost_models.memory", "from autoptd.plans.model import Plan"),
        ("autoptd.cost_models.memory", "import autoptd"),
        ("autoptd.passes.fold", "def f():\n    from autoptd.search.planner import Planner"),
        ("autoptd.passes.fold", "if TYPE_CHECKING:\n    from autoptd.runtime.trainer import Trainer"),
        ("autoptd.runtime.executor", "from autoptd.passes import fold"),
        ("autoptd.search.planner", "from autoptd.runtime.trainer import Trainer"),
        ("autoptd.search.planner", "from autoptd.codegen.emit import Program"),
        ("autoptd.codegen.emit", "import autoptd.api"),
        ("autoptd.plans.model", "from autoptd.cli.main import main"),
        ("autoptd.errors", "from autoptd.plans.model import Plan"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str):
    assert wrong_imports(module, source) != []


def test_no_files_import_each_other_in_a_cycle():
    graph = nx.DiGraph((module, name) for module, path in modules() for name in imports(path.read_text("utf-8")))
    graph.remove_node("autoptd")  # it imports on first use
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_no_class_has_the_name_of_another():
    places: dict[str, list[str]] = {}
    for module, path in modules():
        for node in nodes(path.read_text("utf-8")):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_packages_are_small_and_say_what_they_are_for():
    for folder in PACKAGES.values():
        for package in [folder, *(p.parent for p in folder.rglob("__init__.py"))]:
            files = list(package.glob("*.py"))
            assert len(files) <= 16 or package == ROOT / "autoptd", f"{package} has {len(files)} files"
            assert ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))), f"{package} says nothing"
