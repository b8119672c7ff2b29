"""Tell code of a model that only shows a value, which prints it, logs it, or checks it before it goes on."""

from __future__ import annotations

import ast
import linecache
import re
from functools import cache
from itertools import islice
from types import FrameType

_SHOWS = re.compile(
    r"print|log|debug|info|warn|error|exception|critical|check|assert|expect|raise|record", re.IGNORECASE
)


def only_shown(frame: FrameType) -> bool:
    """Return whether code is within a statement that only prints, logs or checks: `print(f"{n}")`, `raise …`,
    `with record_function(f"{n}"):`."""
    at = frame.f_lineno, 10**6
    if hasattr(frame.f_code, "co_positions"):  # Python 3.11
        line, _, column, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
        at = (line, column) if line is not None and column is not None else at
    around = [n for n in _statements(frame.f_code.co_filename) if (n.lineno, n.col_offset) <= at <= _end(n)]
    found = max(around, key=lambda n: (n.lineno, n.col_offset), default=None)
    if isinstance(found, (ast.Raise, ast.Assert)):
        return True
    calls = [item.context_expr for item in found.items] if isinstance(found, ast.With) else []
    calls += [found.value] if isinstance(found, ast.Expr) else []
    return bool(calls) and all(isinstance(call, ast.Call) and _SHOWS.search(_called(call)) for call in calls)


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


@cache
def _statements(file: str) -> list[ast.stmt]:
    """Return the statements of a file; none of one that cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    return [n for n in ast.walk(tree) if isinstance(n, ast.stmt)]


def _end(statement: ast.stmt) -> tuple[int, int]:
    return statement.end_lineno or statement.lineno, statement.end_col_offset or 10**6
