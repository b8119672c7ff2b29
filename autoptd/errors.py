"""One tree of errors: each says what is wrong (with the numbers), where, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from autoptd.printable import printable

_INDENT = "\n" + " " * 9  # of lines after the first: a string of a file cannot begin a line of its own


class AutoptdError(Exception):
    """Base of every error that autoptd raises at a user.

    `what` is one sentence; `where` a module path, file and line, field or stage; `fix` the way out. All of it is
    `printable`, whatever file its words come from.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = (printable(text, keep="\n\t") for text in (what, where, fix))
        lines = [self.what]
        lines += [f"  where  {line}" for line in self.where.splitlines()]
        lines += [f"  fix    {self.fix}"] if fix else []
        super().__init__("\n".join(line.replace("\n", _INDENT) for line in lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), *self.args), self.__dict__


class InputsError(AutoptdError, ValueError):
    """No example inputs, inputs that do not suit the model, or a batch that does not suit the plan."""


class TraceError(AutoptdError):
    """The model cannot be traced into one graph."""


class UnsupportedOp(TraceError):
    """An op that cannot be part of a traced program, such as one whose size depends on data."""


class PlanError(AutoptdError, ValueError):
    """A plan, or a wish given with `fix=`, that is not possible for this model and world."""


class CannotVerify(AutoptdError, RuntimeError):
    """A plan that could not be held to the plain model: it is neither verified nor found wrong."""


class SigningError(AutoptdError, ValueError):
    """A key that cannot be read or is of another kind, or a signature without the package for it."""


class PlanFileError(AutoptdError, ValueError):
    """A plan file that is corrupt, foreign, of another version, or of another model."""


class DoesNotFit(AutoptdError):
    """No plan of the searched space fits into the memory of the devices."""


class CheckpointError(AutoptdError, RuntimeError):
    """A checkpoint that cannot be written or read, is damaged, or is of another model."""


class ClusterError(AutoptdError, ValueError):
    """An unknown cluster name or a bad cluster file."""


class ModelError(AutoptdError, ValueError):
    """An unknown model name or a path that holds no model."""


class RuntimeFault(AutoptdError, RuntimeError):
    """A rank failed while running a plan."""


class OutOfMemory(RuntimeFault):
    """A rank ran out of memory; it says which category is more than was predicted, and which change would fit."""


def _again(kind: type[AutoptdError], text: str) -> AutoptdError:
    """An error that was pickled: its text is made already."""
    error = kind.__new__(kind, text)
    error.args = (text,)
    return error


def nearest(name: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """`did you mean 'a' or 'b'? known: a, b, c`, for a name that was not found.

    meant: part of a name that is used elsewhere -> the known name for it; the first that is found counts.
    """
    names = sorted(known)
    plain = name.lower().replace("-", "_")
    close = [ours for part, ours in (meant or {}).items() if part in plain and ours in names][:1]
    close = close or difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    guess = "did you mean " + " or ".join(repr(c) for c in close) + "? " if close else ""
    return f"{guess}known: {', '.join(names)}"
