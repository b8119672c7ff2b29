"""What commands share: output, progress, JSON, the width of the terminal, the model that a plan is of."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import Any

from autoptd.cli.arguments import UsageError
from autoptd.errors import AutoptdError
from autoptd.printable import printable


def progress_of(arguments: argparse.Namespace) -> Any:
    """Where to report to: the terminal, or nowhere with `--json`."""
    from autoptd.progress import Silent, progress_on

    return Silent() if arguments.json else progress_on(sys.stderr)


def show(text: str, *, on_error: bool = False) -> None:
    """Write text for people, `printable` and with a newline at its end: no string of a file reaches a terminal raw."""
    stream = sys.stderr if on_error else sys.stdout
    stream.write(printable(text if text.endswith("\n") else f"{text}\n"))


def print_json(value: object) -> None:
    """One JSON value, keys sorted."""
    show(json.dumps(value, indent=1, sort_keys=True))


def error_data(error: AutoptdError) -> dict[str, Any]:
    """An error for machines."""
    return {"type": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}


def width() -> int:
    """Columns to write in: the terminal's, at most 140; 100 where standard output is none."""
    return max(40, min(140, shutil.get_terminal_size((100, 24)).columns)) if sys.stdout.isatty() else 100


def model_of(given: str | None, planned: str) -> str:
    """The model's name: given, or the plan's where it is shipped. Raises UsageError."""
    from autoptd.models.load import model_names

    if given is None and planned not in model_names():
        raise UsageError(f"the plan is for {planned!r}, which is no shipped model", fix="say which: --model MODEL")
    return given or planned
