"""Checks of data in forward: `if tokens.sum() != features.numel(): raise`, `assert`, `torch._check`.

They are no part of training, and a trace does not know the data. A check is left out of the program if the statement
that asks does nothing but raise; the plan's notes name it.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import SymBool
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # private; seen in 2.13.0

_FOREIGN = ("torch", "autoptd", "contextlib", "functools")


@contextmanager
def without_data_checks(left_out: set[str]) -> Iterator[None]:
    """Trace without checks of sizes that depend on data; add their places to `left_out`."""
    asked, check = SymBool.__bool__, torch._check

    def answer(self: SymBool) -> bool:
        known = passing(left_out) if free_unbacked_symbols(self) else None
        return asked(self) if known is None else known

    def checked(cond: Any, message: Callable[[], str] | None = None) -> None:
        try:
            check(cond, message)
        except AssertionError:  # of torch itself, on sizes that depend on data
            left_out.add(_place(_caller()))

    with patch.object(SymBool, "__bool__", answer), patch.object(torch, "_check", checked):
        yield


def passing(left_out: set[str]) -> bool | None:
    """Return what a condition must be for the user's running statement not to raise; None if that is no check."""
    frame = _caller()
    if frame is None:
        return None
    for test, wanted in _checks(frame.f_code.co_filename):
        if test.lineno <= frame.f_lineno <= (test.end_lineno or test.lineno):
            found = _operand(test, wanted)
            if found is not None:
                left_out.add(_place(frame))
            return found
    return None


def _caller() -> FrameType | None:
    """Return the frame of the running line outside torch and autoptd."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _FOREIGN:
        frame = frame.f_back
    return frame


def _place(frame: FrameType | None) -> str:
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@functools.cache
def _checks(file: str) -> list[tuple[ast.expr, bool]]:
    """Return the conditions of a file's checks, with what they must be for the code to go on."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    found: list[tuple[ast.expr, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node.test, True))
        elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
            found.append((node.test, False))
    return found


def _operand(test: ast.expr, wanted: bool) -> bool | None:
    """Return what any operand of a condition must be for it to be as wanted; None if that differs among them."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return _operand(test.operand, not wanted)
        case ast.BoolOp():
            values = {_operand(value, wanted) for value in test.values}
            return values.pop() if len(values) == 1 else None
    return wanted
