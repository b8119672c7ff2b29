"""Progress is shown on a terminal, and nowhere else."""

from __future__ import annotations

import io
import re
import time
import warnings

import pytest
import torch
from rich.console import Console

import autoptd
from autoptd.progress import Logged, Silent, Terminal, progress_of, progress_on


def test_nothing_is_printed_to_a_pipe():
    stream = io.StringIO()
    progress = progress_on(stream)
    with progress.stage("trace"):
        progress.note("a fact")
    assert isinstance(progress, Logged)
    assert stream.getvalue() == ""


def test_elsewhere_finished_steps_are_in_the_log(caplog: pytest.LogCaptureFixture):
    progress = progress_of(None)
    with caplog.at_level("INFO", "autoptd"):
        with progress.stage("trace\x1b"):
            progress.count(1, 2)
            progress.note("a fact")
        with pytest.raises(ValueError, match="bad"), progress.stage("search"):
            raise ValueError("bad")
    assert [re.sub(r"[0-9.]+ s", "# s", record.message) for record in caplog.records] == ["a fact", "trace\\x1b: # s"]


def test_a_counted_step_says_how_long_it_still_takes(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    progress = Terminal(Console(file=stream, width=80, force_terminal=True, color_system=None))
    with progress.stage("sweep 4 points"):
        progress.count(3, 4)
        with progress.stage("plan world=64"), progress.stage("search 18,715 ways to run on 64 devices"):
            progress.say("best so far 3 s")
            time.sleep(0.4)  # the line is written anew every eighth of a second
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n").splitlines()
    shown = [line for line in lines if "left" in line]
    assert any("search 18,715 ways" in line for line in shown)
    assert all(len(line.rstrip()) <= 80 for line in shown)
    assert re.search(r"3 of 4, about \d+ s left", shown[-1])


def test_a_notebook_without_widgets_shows_finished_steps_and_no_warning(monkeypatch: pytest.MonkeyPatch):
    console = Console(file=io.StringIO(), force_jupyter=True)
    shown: list[str] = []
    monkeypatch.setattr(console, "print", lambda text: shown.append(text.plain))
    monkeypatch.setattr("autoptd.progress.find_spec", lambda name: None)
    progress = Terminal(console)
    with warnings.catch_warnings(record=True) as warned, progress.stage("plan"), progress.stage("trace"):
        warnings.simplefilter("always")
        progress.count(1, 2)
        time.sleep(0.5)  # a line would be written anew every eighth of a second
    assert not warned
    assert [re.sub(r"[0-9.]+ s", "# s", line) for line in shown] == ["  trace  # s", "plan  # s"]


def test_plan_says_the_best_that_it_has_found():
    said: list[str] = []

    class Says(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    inputs = {"input": torch.zeros(4, 64)}
    plan = autoptd.plan(model, world=8, inputs=inputs, loss=lambda out: out.sum(), cluster="dgx-h100", progress=Says())
    assert said[-1] == f"best so far {plan.predicted.step_time_s:.3g} s a step"


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_without_standard_error_progress_is_logged(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch):
    if stream is not None:
        stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    assert isinstance(progress_of(True), Logged)
