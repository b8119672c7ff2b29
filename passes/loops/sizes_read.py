"""Sizes that code outside of torch reads while a model is traced: branches on them, their text, Python's own numbers.

    if x.size(0) > 4: …       torch guards it, but for what two or more samples decide
    self.tables[f"{n}"]       torch writes the name of a symbol
    for i in range(n): …      a number of samples, where loops over them are recorded: that of the example

Each but the last is recorded as the relation that held.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Protocol
from unittest.mock import patch

import sympy
from torch import SymBool, SymInt

from autoptd.errors import UnsupportedOp
from autoptd.passes.loops.only_shown import only_shown
from autoptd.passes.loops.turn_numbers import Counted

Branches = dict[sympy.Basic, str]  # a relation of sizes that code of the model relied on -> its line


_NO_BRANCHES = ("autoptd.", "logging", "warnings")  # modules that take no branch of a model's on a text


@contextmanager
def recorded_branches(found: Branches) -> Iterator[None]:
    """Record what code outside of torch relies on: branches on sizes, and texts of them."""
    truth, shown = SymBool.__bool__, SymInt.__repr__

    def note(relation: sympy.Basic) -> bool:
        frame = _asking()
        if _of_torch(frame):
            return False
        place = traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        found.setdefault(relation, line_text(place))
        return True

    def taken(self: SymBool) -> bool:
        held = truth(self)
        note(self.node.expr if held else sympy.Not(self.node.expr))
        return held

    def is_read(size: SymInt, frame: FrameType) -> bool:
        silent = _module(frame).startswith(_NO_BRANCHES) or only_shown(frame)
        return size.node.hint is not None and not silent and note(sympy.Eq(size.node.expr, size.node.hint))

    def text(self: SymInt) -> str:
        return str(self.node.hint) if is_read(self, sys._getframe(1)) else shown(self)

    def formatted(self: SymInt, how: str) -> str:
        read = is_read(self, sys._getframe(1)) or (how and self.node.hint is not None)
        return format(self.node.hint, how) if read else shown(self)

    with ExitStack() as patches:
        patches.enter_context(patch.object(SymBool, "__bool__", taken))
        patches.enter_context(patch.object(SymInt, "__repr__", text))
        patches.enter_context(patch.object(SymInt, "__format__", formatted))
        yield


class Counts(Protocol):
    """Knowledge of which sizes depend on the number of samples."""

    def of_samples(self, size: Any) -> bool:
        """Return whether a size depends on the number of samples."""

    def size(self, symbol: SymInt) -> int:
        """Return a size that a number depends on."""


@contextmanager
def counted_by_hint(mode: Counts) -> Iterator[None]:
    """Count in Python to the number of samples of the example, as in `range(x.shape[0])`, without fixing it to that.

    Raises UnsupportedOp where Python takes it for a number otherwise: `math.gcd(x.shape[0], 4)`, `table[x.shape[0]]`.
    """
    index = SymInt.__index__

    def number(size: SymInt) -> int:
        frame = sys._getframe(1)
        if _of_torch(frame) or not mode.of_samples(size):
            return int(index(size))
        if not _module(frame).startswith("autoptd."):
            raise UnsupportedOp(
                "Python computes with the number of samples, as with a plain number",
                fix="compute with sizes by +, -, *, // and %, or fix the number in the model",
            )
        return mode.size(size)

    def times(multiply: Callable[[SymInt, Any], Any]) -> Callable[[SymInt, Any], Any]:
        def repeated(size: SymInt, x: Any) -> Any:
            repeats = isinstance(x, (list, tuple)) and mode.of_samples(size)
            return Counted(list(x) * mode.size(size)) if repeats else multiply(size, x)

        return repeated

    with ExitStack() as patches:
        for name in ("__index__", "__int__"):
            patches.enter_context(patch.object(SymInt, name, number))
        for name in ("__mul__", "__rmul__"):
            patches.enter_context(patch.object(SymInt, name, times(getattr(SymInt, name))))
        yield


def _asking() -> FrameType:
    """Return the frame that asks for what a size is: out of `SymInt.__bool__`, and of what wraps such functions."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (_module(frame) == "torch" or _module(frame).startswith("autoptd.passes.")):
        frame = frame.f_back
    return frame


def _of_torch(frame: FrameType) -> bool:
    return f"{_module(frame)}.".startswith("torch.")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def line_text(frame: traceback.FrameSummary) -> str:
    """Return a place in the user's code as text: its function, file, line and code."""
    return f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})  {frame.line}"
