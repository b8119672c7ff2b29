"""The tree of errors. Each says what is wrong (with the numbers), where, and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from autoptd.text import printable

_INDENT = "\n" + " " * 9  # before continuation lines, so that text from a file cannot pose as a line of the error


class AutoptdError(Exception):
    """Base of every error that autoptd raises for its user.

    `what` is one sentence; `where` a module path, file and line, field or stage; `fix` the way out. All three are made
    `printable`, because they may quote files.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = (printable(text, keep="\n\t") for text in (what, where, fix))
        lines = [self.what]
        lines += [f"  where  {line}" for line in self.where.splitlines()]
        lines += [f"  fix    {self.fix}"] if fix else []
        super().__init__("\n".join(line.replace("\n", _INDENT) for line in lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), *self.args), self.__dict__


class InputsError(AutoptdError, ValueError):
    """Missing example inputs, inputs that the model does not accept, or a batch that does not match the plan."""


class TraceError(AutoptdError):
    """The model cannot be traced into one graph."""


class UnsupportedOp(TraceError):
    """An op that cannot be part of a traced program, such as one whose size depends on data."""


class PlanError(AutoptdError, ValueError):
    """A plan or an argument that is not possible for this model and world."""


class CannotVerify(AutoptdError, RuntimeError):
    """A plan that could not be compared with the plain model; it is neither verified nor found wrong."""


class SigningError(AutoptdError, ValueError):
    """A key that cannot be read or is not ed25519, or a missing `cryptography` package."""


class PlanFileError(AutoptdError, ValueError):
    """A file that cannot be written, or a plan file that is corrupt, foreign, or of another version or model."""


class DoesNotFit(AutoptdError):
    """No plan in the search space fits into the memory of the devices."""


class CheckpointError(AutoptdError, RuntimeError):
    """A checkpoint that cannot be written or read, is damaged, or belongs to another model."""


class ClusterError(AutoptdError, ValueError):
    """An unknown cluster name or a bad cluster file."""


class ModelError(AutoptdError, ValueError):
    """An unknown model name or a path that holds no model."""


class RuntimeFault(AutoptdError, RuntimeError):
    """A rank failed while running a plan."""


class OutOfMemory(RuntimeFault):
    """A rank ran out of memory. Names the category that exceeds its prediction, and a change that would fit."""


def _unpickled(kind: type[AutoptdError], text: str) -> AutoptdError:
    """Rebuild an error from its formatted text."""
    error = kind.__new__(kind, text)
    error.args = (text,)
    return error


def nearest(name: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """Return `did you mean 'a' or 'b'? known: a, b, c` for an unknown name.

    meant: part of a name used by other systems -> the known name; the first that matches counts.
    """
    names = sorted(known)
    plain = name.lower().replace("-", "_")
    close = [ours for part, ours in (meant or {}).items() if part in plain and ours in names][:1]
    close = close or difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    guess = "did you mean " + " or ".join(repr(c) for c in close) + "? " if close else ""
    return f"{guess}known: {', '.join(names)}"
