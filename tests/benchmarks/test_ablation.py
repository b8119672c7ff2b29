"""The ablation of the search: every switch replaces a method that is there, and puts it back."""

from __future__ import annotations

import pytest

from autoptd.search.visit.candidate_queue import CandidateQueue
from autoptd.search.visit.visit import Visit
from benchmarks.ablation import SWITCHES, main, switched


def test_switches_replace_methods() -> None:
    for replacements in SWITCHES.values():
        before = {name: method_of(name) for name in replacements}
        with switched(replacements):
            assert all(method_of(name) is method for name, method in replacements.items())
        assert before == {name: method_of(name) for name in replacements}


def method_of(name: str) -> object:
    return getattr(Visit if hasattr(Visit, name) else CandidateQueue, name)


def test_a_line_for_every_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nanogpt", "--world", "4"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "nanogpt on 4 × dgx-h100" and len(lines) == len(SWITCHES)
    assert len({line.split(" s/step")[0].split()[-1] for line in lines}) == 1
