"""Progress is shown on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autoptd.progress import Silent, Terminal, progress_on


def test_nothing_is_printed_to_a_pipe():
    stream = io.StringIO()
    progress = progress_on(stream)
    with progress.stage("trace"):
        progress.note("a fact")
    assert isinstance(progress, Silent)
    assert stream.getvalue() == ""


def test_a_terminal_shows_nested_steps_and_notes():
    stream = io.StringIO()
    progress = Terminal(Console(file=stream, width=80))
    with progress.stage("search"):
        progress.note("12 meshes")
        with progress.stage("tp 8"):
            pass
    lines = [line.split("  ") for line in stream.getvalue().splitlines()]
    assert [next(part for part in line if part) for line in lines] == ["12 meshes", "tp 8", "search"]


def test_a_step_that_fails_is_not_reported_as_done():
    stream = io.StringIO()
    progress = Terminal(Console(file=stream, width=80))
    with pytest.raises(ValueError, match="bad"), progress.stage("trace"):
        raise ValueError("bad")
    assert "trace" not in stream.getvalue()
    with progress.stage("again"):
        pass
    assert "again" in stream.getvalue()
