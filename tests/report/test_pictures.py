"""Pictures: what they draw is what the data say, equal data give equal bytes, and wrong uses are refused first."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import autoptd
from autoptd.cli.main import main
from autoptd.errors import PlanError
from autoptd.models.load import load_model
from autoptd.plans.model import Plan
from autoptd.report.drawing import drawing
from autoptd.report.pictures import frontier_picture, memory_picture, sweep_picture, timeline_picture
from tests import pictures

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, _ = load_model("nanogpt")
    fix = {"tp": 2, "pp": 2, "micro": 2, "zero": 1, "cp": 1, "schedule": "1f1b", "recompute": "full", "offload": 0}
    return autoptd.plan(model, world=8, cluster="dgx-h100", batch=64, fix=fix)


def words(file: Path) -> str:
    return " ".join("".join(node.itertext()) for node in ElementTree.parse(file).iter() if node.tag.endswith("}text"))


def fills(file: Path) -> list[str]:
    """Return the colour of each filled path."""
    return re.findall(r'style="fill: (#[0-9a-f]{6})', file.read_text("utf-8"))


def test_the_timeline_has_a_part_for_each_pass(plan: Plan, tmp_path: Path):
    file, again = tmp_path / "a.svg", tmp_path / "b.svg"
    timeline_picture(plan, file)
    timeline_picture(plan, again)
    assert file.read_bytes() == again.read_bytes()
    drawn = drawing(plan)
    assert drawn is not None
    passes = sum(row[i] == 0 for row in drawn["ranks"] for i in range(0, len(row), 5))
    assert passes == plan.schedule.microbatches * plan.mesh.pp
    found = fills(file)
    assert found.count("#4c8dd6") == passes + 1  # and the legend
    assert found.count("#2c5f9e") == passes + 1
    assert found.count("#b3541e") == passes + 1  # recomputation of each
    assert "dp 2 × tp 2 × pp 2" in words(file)


def test_the_memory_picture_has_every_category(plan: Plan, tmp_path: Path):
    memory_picture(plan, tmp_path / "m.svg")
    shown = words(tmp_path / "m.svg")
    for name, size in plan.predicted.memory[0].items():
        assert not size or name.replace("_", " ") in shown
    assert "95% confidence" in shown


def test_sweeps_and_frontiers_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sweep, frontier = tmp_path / "s.svg", tmp_path / "f.svg"
    fixed = ["--fix", "tp=1,pp=1,cp=1,micro=4"]
    given = ["plan", "nanogpt", "--cluster", "dgx-h100", "--batch", "64", *fixed]
    assert main([*given, "--sweep", "world=1,2", "--svg", str(sweep)]) == 0
    assert "world 2" in words(sweep)
    assert "100% of perfect scaling" in words(sweep)
    points = [{"device_bytes": (9 - i) * 2**30, "step_time_s": 1.0 + i, "plan": f"dp{i} <b>"} for i in range(3)]
    frontier_picture(points, frontier, "time & memory")
    assert "3  dp2 <b>" in words(frontier)
    assert "time & memory" in words(frontier)
    capsys.readouterr()


def test_legends_name_what_is_drawn(plan: Plan, tmp_path: Path):
    memory_picture(plan, tmp_path / "m.svg")
    timeline_picture(plan, tmp_path / "t.svg")
    hatched = re.findall(r"fill: url\(#(\w+)\)", (tmp_path / "m.svg").read_text("utf-8"))
    assert len(hatched) == plan.mesh.pp + 1  # a part of each bar, and of the legend
    for file in ("m.svg", "t.svg"):
        assert all(f" {rank} " in f" {words(tmp_path / file)} " for rank in range(plan.mesh.pp))


def test_pictures_of_the_documents_are_those_of_the_commands(tmp_path: Path):
    made = pictures.run(tmp_path)
    assert {file.name for file in made} == {file.name for file in pictures.PICTURES.glob("*.svg")}
    for file in made:
        kept = pictures.PICTURES / file.name
        assert (words(file), fills(file)) == (words(kept), fills(kept)), f"{file.name}: run python -m tests.pictures"
    readme = (pictures.PICTURES.parents[1] / "README.md").read_text("utf-8")
    assert {f"docs/pictures/{file.name}" for file in made} <= set(re.findall(r"!\[[^\]]+\]\((.+?)\)", readme))


def test_wrong_uses_are_refused(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan.save(tmp_path / "plan.json")
    file = str(tmp_path / "plan.json")
    for arguments, said in (
        (["simulate", file, "--svg", str(tmp_path / "x.png")], "end"),
        (["simulate", file, "--svg", str(tmp_path / "missing" / "x.svg")], "missing"),
        (["simulate", file, "--schedule", "gpipe", "--svg", str(tmp_path / "x.svg")], "own schedule"),
        (["plan", "nanogpt", "--world", "2", "--svg", str(tmp_path / "x.svg")], "--sweep"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
        assert not list(tmp_path.glob("x.*"))
    with pytest.raises(PlanError, match="nothing to draw"):
        sweep_picture([{"fits": False}], tmp_path / "x.svg", "")


def test_without_matplotlib_the_way_out_is_said(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(PlanError, match="not installed") as refusal:
        memory_picture(plan, tmp_path / "m.svg")
    assert "autoptd[plot]" in str(refusal.value)
