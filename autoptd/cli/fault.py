"""Unexpected exceptions of a command: reported as one error like any other, never by an exit code that is an answer.

With AUTOPTD_DEBUG=1 the traceback precedes the error.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from autoptd.errors import AutoptdError
from autoptd.text import printable

DEBUG = "AUTOPTD_DEBUG"


class InternalError(AutoptdError):
    """An unexpected exception: a bug of autoptd, or an error in a model's own code where none is expected."""


def internal_error(error: BaseException) -> InternalError:
    """Return the error for an unexpected exception; `where` is the innermost line of autoptd or of the model."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _of_library(f.filename)]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    if isinstance(error, SystemExit):
        return InternalError(f"the model's code called sys.exit({error})", where=where, fix="let it return")
    text = str(error).strip().splitlines()
    what = f"unexpected {type(error).__name__}" + (f": {text[0][:300]}" if text else "")
    return InternalError(what, where=where, fix=f"set {DEBUG}=1 for the traceback, and report it with the command")


def _of_library(file: str) -> bool:
    """Return whether a file belongs to Python or to another package than autoptd."""
    parts = Path(file).parts
    if "site-packages" in parts:
        return "autoptd" not in parts
    return file.startswith(("<", str(Path(os.__file__).parent)))


def show_traceback(error: BaseException) -> None:
    """Print the traceback to standard error if AUTOPTD_DEBUG is set."""
    if os.environ.get(DEBUG, "") not in ("", "0"):
        sys.stderr.write(printable("".join(traceback.format_exception(error))))
