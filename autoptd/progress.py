"""Progress display while a plan is made.

The functions from model to plan take a `Progress`: `with progress.stage("trace"): …` around each step,
`progress.count(done, of)` within one whose length is known, `progress.say("…")` for what it has found so far, and
`progress.note("…")` for a line of text that stays.

    a terminal or notebook   the running steps with the time since they began, and, of counted ones, the time that is
                             left (in a notebook with ipywidgets); the seconds of finished steps
    elsewhere                finished steps in the log "autoptd", at level INFO, which Python shows on request
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol, TextIO, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from autoptd.text import printable

_NAME = 44  # most characters of the running steps, so that 80 columns hold the line
_Item = TypeVar("_Item")
_LOG = logging.getLogger("autoptd")


class Progress(Protocol):
    """Interface that `plan` and `parallelize` report to."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Enclose one step of the work, named by a verb phrase; steps may nest."""

    def count(self, done: int, of: int) -> None:
        """Say how far the running step is."""

    def say(self, text: str) -> None:
        """Say what the running step has found so far."""

    def note(self, text: str) -> None:
        """Show one line of text."""


class Silent:
    """A `Progress` that shows nothing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def count(self, done: int, of: int) -> None:
        return None

    def say(self, text: str) -> None:
        return None

    def note(self, text: str) -> None:
        return None


class Logged(Silent):
    """A `Progress` in the log: finished steps with their seconds, and notes."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        _LOG.info("%s: %.1f s", printable(name, keep=""), time.monotonic() - start)

    def note(self, text: str) -> None:
        _LOG.info("%s", printable(text, keep=""))


@dataclass
class _Step:
    """A running step: when it began, how far it is, and what it has found."""

    name: str
    start_s: float
    done: int = 0
    of: int = 0
    found: str = ""


class Terminal:
    """A `Progress` on a terminal or in a notebook: one line for the running steps, and one for each finished step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._running: list[_Step] = []
        self._spinner = Spinner("dots")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        step = _Step(printable(name, keep=""), time.monotonic())
        self._running.append(step)
        if self._live is None and _redraws(self._console):
            self._live = Live(self, console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        try:
            yield
        finally:
            self._running.pop()
            if not self._running and self._live is not None:
                self._live.stop()
                self._live = None
        indent = "  " * len(self._running)
        self._console.print(Text(f"{indent}{step.name}  {time.monotonic() - step.start_s:.1f} s", style="dim"))

    def count(self, done: int, of: int) -> None:
        if self._running:
            self._running[-1].done, self._running[-1].of = done, of

    def say(self, text: str) -> None:
        if self._running:
            self._running[-1].found = printable(text, keep="")

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text, keep="")))

    def __rich__(self) -> RenderableType:
        """Return the line of the running steps: their names, and of the outermost that is counted what is left."""
        names = " · ".join(step.name for step in self._running)
        parts = [names if len(names) <= _NAME else f"…{names[1 - _NAME :]}"]
        now_s = time.monotonic()
        counted = next((step for step in self._running if step.done), None)
        if counted is not None:
            left_s = (now_s - counted.start_s) * (counted.of / counted.done - 1)
            parts.append(f"{counted.done} of {counted.of}, about {left_s:.0f} s left")
        parts += [step.found for step in self._running[-1:] if step.found]
        first_s = self._running[0].start_s if self._running else now_s
        line = f"{'  '.join(parts)}  {now_s - first_s:.0f} s"
        self._spinner.update(text=Text(line, no_wrap=True, overflow="ellipsis"))
        return self._spinner


def _redraws(console: Console) -> bool:
    """Return whether a console can change a line: in a notebook that takes ipywidgets, for which rich warns."""
    return not console.is_jupyter or find_spec("ipywidgets") is not None


def counted(progress: Progress, name: str, items: Collection[_Item]) -> Iterator[_Item]:
    """Yield items within one step, which counts them."""
    with progress.stage(name):
        for done, item in enumerate(items, 1):
            yield item
            progress.count(done, len(items))


def progress_on(stream: TextIO) -> Progress:
    """Return a `Terminal` if `stream` is one or belongs to a notebook, otherwise `Logged`."""
    console = Console(file=stream)
    in_notebook = "ipykernel" in sys.modules and stream in (sys.stdout, sys.stderr)
    return Terminal(Console() if in_notebook else console) if in_notebook or stream.isatty() else Logged()


def progress_of(value: Progress | bool | None) -> Progress:
    """Return the `Progress` that a keyword stands for: True is what fits standard error, False and None the log."""
    if value is True:  # standard error is None or closed in a process without a terminal
        return Logged() if getattr(sys.stderr, "closed", True) else progress_on(sys.stderr)
    return value or Logged()
