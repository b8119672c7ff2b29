"""A fault of ours in a command: one error like any other, never an exit code that is an answer.

Shown whole with AUTOPTD_DEBUG=1: the traceback first, then the error.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from autoptd.errors import AutoptdError
from autoptd.printable import printable

DEBUG = "AUTOPTD_DEBUG"


class InternalError(AutoptdError):
    """What no command expected: a fault of autoptd, or of a model's own code where nobody looks out for one."""


def internal_error(error: BaseException) -> InternalError:
    """One error in place of an unexpected exception; `where` is the innermost line of ours or of the model."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _of_library(f.filename)]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    if isinstance(error, SystemExit):
        return InternalError(f"the model's code left with sys.exit({error})", where=where, fix="let it return")
    text = str(error).strip().splitlines()
    what = f"unexpected {type(error).__name__}" + (f": {text[0][:300]}" if text else "")
    return InternalError(what, where=where, fix=f"set {DEBUG}=1 for the traceback, and report it with the command")


def _of_library(file: str) -> bool:
    """Whether a file belongs to Python or to a package that is not ours."""
    parts = Path(file).parts
    if "site-packages" in parts:
        return "autoptd" not in parts
    return file.startswith(("<", str(Path(os.__file__).parent)))


def show_traceback(error: BaseException) -> None:
    """On standard error, where the switch is set."""
    if os.environ.get(DEBUG, "") not in ("", "0"):
        sys.stderr.write(printable("".join(traceback.format_exception(error))))
