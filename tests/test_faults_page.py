"""Every silent fault of the table is planted by a test, and the page shows the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import faults


def test_every_fault_is_planted_and_the_page_is_fresh() -> None:
    assert faults.mistakes() == []


def test_a_fault_without_a_test_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(faults.FAULTS["loss"], "sign", "the loss is maximised")
    wrong = faults.mistakes()
    assert "nothing plants 'sign'" in wrong and any("stale" in w for w in wrong)


def test_marks_of_functions_and_parameters_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text(
        "@pytest.mark.fault('one', 'two')\n"
        "@pytest.mark.parametrize('plant', [pytest.param(a, 3, marks=pytest.mark.fault('three')), b])\n"
        "def test_x(plant): ...\n"
        "@pytest.mark.fault('none')\n"
        "def helper(): ...\n",
        "utf-8",
    )
    monkeypatch.setattr(faults, "TESTS", tmp_path)
    where = "test_some.py::test_x"
    assert faults.planted() == {"one": [where], "two": [where], "three": [f"{where}[a, 3]"]}
