"""The ablation of the search: every switch replaces a method that is there, and puts it back."""

from __future__ import annotations

import pytest

from autoptd.search.planner import Planner
from benchmarks.ablation import SWITCHES, main, switched


def test_switches_replace_methods_of_the_planner() -> None:
    for replacements in SWITCHES.values():
        before = {name: getattr(Planner, name) for name in replacements}
        with switched(replacements):
            assert all(getattr(Planner, name) is method for name, method in replacements.items())
        assert before == {name: getattr(Planner, name) for name in replacements}


def test_a_line_for_every_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nanogpt", "--world", "4"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "nanogpt on 4 × dgx-h100" and len(lines) == len(SWITCHES)
    assert len({line.split(" s/step")[0].split()[-1] for line in lines}) == 1
