"""Plans that are found again are those that would be made again; whatever a plan depends on, another is not found."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
import autoptd.compile
from autoptd import kept_plans
from autoptd.cost_models.cluster import Cluster
from autoptd.search.planner import Planner


class Small(nn.Module):
    def __init__(self, width: int = 64, name: str = "inner") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(width, 4 * width))
        self.outer = nn.Linear(4 * width, width)
        self.named = name

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(getattr(self, self.named)(x))
        return nn.functional.mse_loss(self.outer(hidden), target)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPTD_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each search."""
    count: list[int] = []
    honest = Planner.answer
    monkeypatch.setattr(Planner, "answer", lambda self: count.append(1) or honest(self))  # type: ignore[func-returns-value]
    return count


@dataclass(frozen=True)
class _Counted:
    n: int = 0


def traced(model: nn.Module | None = None, width: int = 64) -> autoptd.TracedModel:
    inputs = {"x": torch.zeros(2, width), "target": torch.zeros(2, width)}
    return autoptd.trace(model or Small(width), inputs=inputs)


def plan(model: autoptd.TracedModel | None = None, **asked: Any) -> autoptd.Plan:
    return autoptd.plan(model or traced(), **{"world": 4, "cluster": "dgx-h100", "batch": 32, **asked})


def test_a_plan_is_found_again(kept: Path, searches: list[int]) -> None:
    first, second = plan(), plan()
    assert first == second and len(searches) == 1
    (path,) = kept.glob("*.json")
    assert autoptd.Plan.load(path) == first


ROOMY = Cluster.load("dgx-h100")
OTHERS: dict[str, dict[str, Any]] = {
    "world": {"world": 2},
    "batch": {"batch": 64},
    "batch left out": {"batch": None},
    "optimizer": {"optimizer": "sgd"},
    "cluster": {"cluster": "dgx-a100-80gb"},
    "memory": {"cluster": ROOMY.model_copy(update={"device": ROOMY.device.model_copy(update={"memory_bytes": 2**38})})},
    "fix": {"fix": {"tp": 1}},
    "headroom": {"fix": {"headroom": 0.1}},
    "splits": {"fix": {"splits": {"outer.weight": "B"}}},
    "include": {"include": ["zero"]},
    "exact": {"exact": True},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_question_is_another_plan(name: str, kept: Path, searches: list[int]) -> None:
    model = traced()
    plan(model)
    plan(model, **OTHERS[name])
    assert len(searches) == 2
    plan(model, **OTHERS[name])
    assert len(searches) == 2


def _wider() -> nn.Module:
    return Small(128)


def _renamed() -> nn.Module:
    return Small(name="other")


def test_another_precision_is_another_plan(kept: Path, searches: list[int]) -> None:
    inputs = {"x": torch.zeros(2, 64), "target": torch.zeros(2, 64)}
    for precision in ("bf16", "fp32"):
        plan(autoptd.trace(Small(), inputs=inputs, precision=precision), precision=precision)
    assert len(searches) == 2


def _frozen() -> nn.Module:
    model = Small()
    model.outer.requires_grad_(False)
    return model


@pytest.mark.parametrize(("make", "width"), [(_wider, 128), (_renamed, 64), (_frozen, 64)])
def test_another_model_is_another_plan(
    make: Callable[[], nn.Module], width: int, kept: Path, searches: list[int]
) -> None:
    plan()
    plan(traced(make(), width))
    assert len(searches) == 2


def test_a_change_of_the_program_is_another_plan(
    kept: Path, searches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan()
    before = kept_plans._program()
    monkeypatch.setattr(kept_plans, "_program", lambda: [*before[:-1], "sympy 0"])
    plan()
    assert len(searches) == 2


def test_every_file_of_the_program_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs, rules and constants lie in three packages, as text and as data."""
    seen: list[str] = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: seen.append(str(self)) or read(self))  # type: ignore[func-returns-value]
    kept_plans._program.__wrapped__()
    names = {"/".join(Path(path).parts[-2:]) for path in seen}
    wanted = {"search/planner.py", "passes/fold.py", "cost_models/simulate.py", "clusters/dgx-h100.toml"}
    assert wanted <= names


def test_what_the_machine_decides_is_not_kept(kept: Path, searches: list[int]) -> None:
    for _ in range(2):
        plan(time_limit_s=30.0)
    assert len(searches) == 2 and not list(kept.glob("*"))


def test_what_anothers_op_decides_is_not_kept(kept: Path, searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """How an op without a rule may be split is found by running it, and its code is none of ours."""
    for own, files in ((False, 0), (True, 1)):
        monkeypatch.setattr(autoptd.compile, "discovered", lambda _, own=own: {"an op": own})
        plan()
        assert len(list(kept.glob("*"))) == files


def test_nothing_is_kept_where_that_is_off(
    tmp_path: Path, searches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPTD_CACHE", "OFF")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        plan()
    assert len(searches) == 2 and not list(tmp_path.iterdir())


def test_the_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPTD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_plans.folder() == tmp_path / "autoptd"


def test_a_damaged_file_is_written_anew(kept: Path, searches: list[int]) -> None:
    first = plan()
    (path,) = kept.glob("*.json")
    path.write_text(path.read_text("utf-8")[:100], "utf-8")
    assert plan() == first and len(searches) == 2
    assert plan() == first and len(searches) == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPTD_CACHE", str(tmp_path / "file" / "plans"))
    assert plan() == plan()


def test_the_oldest_make_room(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "_MOST", 2)
    found = autoptd.Plan.from_json(plan().to_json())
    for path in kept.glob("*.json"):
        path.unlink()
    (kept / "notes.json").write_text("{}")  # not one of ours
    a, b, c = (letter * 64 for letter in "abc")
    for number, key in enumerate((a, b)):
        kept_plans.keep(key, found)
        os.utime(kept / f"{key}.json", (number, number))
    kept_plans.find(a)  # asked for just now
    kept_plans.keep(c, found)
    assert {path.stem for path in kept.glob("*.json")} == {a, c, "notes"}


def test_what_is_not_known_to_be_complete_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        kept_plans._plain([object()])


def test_sets_and_tables_have_no_order() -> None:
    a, b = {"x": frozenset("abcdef"), "y": 1}, {"y": 1, "x": frozenset("fedcba")}
    assert kept_plans._plain(a) == kept_plans._plain(b)
    assert kept_plans._plain(replace(_Counted(), n=1)) != kept_plans._plain(_Counted())
