"""Errors of a user's own code: which ones are reported as such, and how."""

from __future__ import annotations

import traceback

USER_ERRORS = (  # that a user's own code may raise
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def place_of(error: BaseException) -> str:
    """Return `file:line` of an error's innermost frame, or of the mistake that Python cannot read."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def remedy_of(error: BaseException) -> str:
    """Return the way out of an error in the user's own code, as far as it tells one."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install {error.name.partition('.')[0]}, or import it where it is used"
    return "correct the code there"
