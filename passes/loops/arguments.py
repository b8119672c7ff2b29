"""Arguments of ops, and conditions on sizes, that the recording of loops over experts reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from torch import Tensor


def asks_for_any(expr: sympy.Basic, size: sympy.Symbol) -> bool:
    """Return whether a condition says if a number of rows is zero, or if it is not."""
    if not isinstance(expr, sympy.core.relational.Relational) or expr.free_symbols != {size}:
        return False
    rate = sympy.diff(expr.lhs - expr.rhs, size)
    answers = [expr.subs(size, n) for n in (0, 1, 2)]
    return bool(rate.is_number) and answers[1] == answers[2] != answers[0]


def is_zero(args: Sequence[Any]) -> bool:
    """Return whether an op's second argument is the number 0."""
    return len(args) == 2 and isinstance(args[1], int) and args[1] == 0


def size_of(x: Tensor, dim: Any) -> int | None:
    """Return the size of a dim, if both are numbers."""
    size = x.shape[dim] if isinstance(dim, int) else None
    return size if isinstance(size, int) else None


def moved(classes: tuple[int, int] | None, name: str, args: Sequence[Any]) -> tuple[int, int] | None:
    """Return where the dim of classes is after an op; None if that is not known."""
    if classes is None or name in ("squeeze", "unsqueeze", "view", "reshape", "flatten", "t"):
        return None
    order = list(range(args[0].ndim))
    if name == "permute":
        order = [d % len(order) for d in (args[1] if isinstance(args[1], (tuple, list)) else args[1:])]
    elif name == "transpose":
        a, b = (d % len(order) for d in args[1:])
        order[a], order[b] = order[b], order[a]
    return order.index(classes[0]), classes[1]
