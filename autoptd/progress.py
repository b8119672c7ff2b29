"""Progress display while a plan is made.

The functions from model to plan take a `Progress`: `with progress.stage("trace"): …` around each step, and
`progress.note("…")` for a line of text. A terminal shows a spinner for running steps, the seconds of finished ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

from autoptd.text import printable


class Progress(Protocol):
    """Interface that `plan` and `parallelize` report to."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Enclose one step of the work, named by a verb phrase; steps may nest."""

    def note(self, text: str) -> None:
        """Show one line of text."""


class Silent:
    """A `Progress` that shows nothing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self, text: str) -> None:
        return None


class Terminal:
    """A `Progress` on a terminal: running steps with a spinner, finished ones with their seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("")
        self._running: list[str] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        name = printable(name, keep="")
        self._show([*self._running, name])
        start = time.monotonic()
        try:
            yield
        finally:
            self._show(self._running[:-1])
        self._console.print(Text(f"{'  ' * len(self._running)}{name}  {time.monotonic() - start:.1f} s", style="dim"))

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text, keep="")))

    def _show(self, running: list[str]) -> None:
        self._running = running
        self._status.update(Text(" · ".join(running)))
        if running:
            self._status.start()
        else:
            self._status.stop()


def progress_on(stream: TextIO) -> Progress:
    """Return a `Terminal` if `stream` is one, otherwise `Silent`."""
    return Terminal(Console(file=stream)) if stream.isatty() else Silent()
