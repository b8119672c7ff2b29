"""Output of all commands: text, progress, JSON, errors, terminal width; and the default of `--model`."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from autoptd.cli.arguments import UsageError
from autoptd.errors import AutoptdError
from autoptd.text import printable

_ASCII = dict(zip("×·÷–−…→≤≥█µ", ("x", "*", "/", "-", "-", "...", "->", "<=", ">=", "#", "u"), strict=True))


class OutputError(AutoptdError, OSError):
    """A standard output that cannot be written, as on a full disk."""


def usable_streams() -> None:
    """Have standard output and error take all text: characters that their encoding lacks as ASCII, and everything where
    a stream is closed."""
    codecs.register_error("autoptd-ascii", _in_ascii)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="autoptd-ascii")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing), error.end


def progress_of(arguments: argparse.Namespace) -> Any:
    """Return the progress display: on standard error, or none with `--json`."""
    from autoptd.progress import Silent, progress_on

    return Silent() if arguments.json else progress_on(sys.stderr)


def show(text: str, *, on_error: bool = False) -> None:
    """Write `printable` text that ends in a newline: strings from files must not reach the terminal raw.

    Raises BrokenPipeError where the reader of standard output has gone, OutputError where it cannot be written. What
    standard error does not take is lost: there is nowhere else to tell it.
    """
    text = printable(text if text.endswith("\n") else f"{text}\n")
    if on_error:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
        return
    with _written():
        reports().write(text)


def flush() -> None:
    """Write what standard output holds back. Raises what `show` raises."""
    with _written():
        reports().flush()


def drop_output() -> None:
    """Have Python lose what standard output still holds, instead of failing with it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), reports().fileno())


class OfOthers:
    """Standard output for code that is not ours, such as a model's: standard error takes what it prints, since reports
    go elsewhere: to `reports`."""

    def __init__(self, reports: TextIO) -> None:
        self.reports = reports

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


@contextmanager
def own_output() -> Iterator[None]:
    """Keep standard output for `show`: with `--json` it is one value, whatever a model prints."""
    with redirect_stdout(cast("TextIO", OfOthers(reports()))):
        yield


def reports() -> TextIO:
    """Return the stream of reports: standard output."""
    return getattr(sys.stdout, "reports", sys.stdout)


@contextmanager
def _written() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        what = f"cannot write to standard output: {error.strerror or error}"
        raise OutputError(what, fix="make room there, or write elsewhere") from error


@contextmanager
def readable_warnings() -> Iterator[None]:
    """Show autoptd's own warnings as one line each, not as Python does, with a path and a line of the source."""
    usual = warnings.showwarning

    def shown(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category.__module__.startswith("autoptd."):
            show(f"warning: {message}", on_error=True)
        else:
            usual(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.showwarning = shown
        yield


def print_json(value: object) -> None:
    """Print one JSON value with sorted keys."""
    show(json.dumps(value, indent=1, sort_keys=True))


def error_data(error: AutoptdError) -> dict[str, Any]:
    """Return an error as JSON data."""
    return {"type": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}


def width() -> int:
    """Return the width of a report: that of the terminal, between 40 and 140; 100 if standard output is no terminal."""
    return max(40, min(140, shutil.get_terminal_size((100, 24)).columns)) if reports().isatty() else 100


def model_of(given: str | None, planned: str) -> str:
    """Return the model's name: the given one, or the plan's if it is shipped. Raises UsageError."""
    from autoptd.models.load import model_names

    if given is None and planned not in model_names():
        raise UsageError(f"the plan is for {planned!r}, which is not a shipped model", fix="give it as --model MODEL")
    return given or planned
