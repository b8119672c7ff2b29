"""Notation of a view: the common refinement of two shapes, read from the left.

Both shapes are cut at the products of their leading sizes: (b, s, 24) and (b, s, 3, 4, 2) at b, bs, 3bs, 12bs and 24bs,
which gives `d0 d1 (d2 d3 d4) -> d0 d1 d2 d3 d4`. Sizes that do not divide each other give a factor of their greatest
common divisor, and the rest stays whole: (6, 6) and (4, 9) are `(d0 3) 6 -> (d0 2) 9`. Of tensors without elements,
(b, 0, 8) and (b, 0), only the dims that both begin with are factors: `d0 . . -> d0 .`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import sympy

from autoptd.passes.opcall import OpCall, Size


def view(call: OpCall) -> str:
    """Return the notation of a view between two shapes of equal size, such as `d0 (d1 d2) -> d0 d1 d2`."""
    if 0 in call.operands[0].shape:
        return _empty(call.operands[0].shape, call.outputs[0].shape)
    source, target = _Shape(call.operands[0].shape), _Shape(call.outputs[0].shape)
    count = 0
    while source.left() and target.left():
        a, b = source.rest, target.rest
        if not same(a, b) and quotient(a, b) is None and quotient(b, a) is None:
            # The finest factor is the common divisor; the rest of both dims stays whole until the products agree.
            common = sympy.gcd(a, b)
            if common.is_Integer and common > 1:
                source.take(f"d{count}", int(common))
                target.take(f"d{count}", int(common))
                count += 1
            _merge(source, target)
            continue
        step = a if quotient(b, a) is not None else b
        source.take(f"d{count}", step)
        target.take(f"d{count}", step)
        count += 1
    return f"{' '.join(source.text())} -> {' '.join(target.text())}"


def _empty(source: Sequence[Size], target: Sequence[Size]) -> str:
    """Return the notation of a view without elements: equal dims before any other are factors, the rest stays whole.

    Products of sizes say nothing here, since all of them are zero.
    """
    pairs = itertools.takewhile(lambda pair: pair[0] != 0 and same(*pair), zip(source, target, strict=False))
    alike = ["1" if size == 1 else f"d{i}" for i, (size, _) in enumerate(pairs)]
    return " -> ".join(" ".join([*alike, *"." * (len(shape) - len(alike))]) for shape in (source, target))


class _Shape:
    """One side of a view, read from the left: the finished dims, and the rest of the current one."""

    def __init__(self, shape: Sequence[Size]) -> None:
        self.shape = list(shape)
        self.dims: list[str] = []
        self.open: list[str] = []
        self.rest: Size = 1

    def left(self) -> bool:
        """Move on to the next dim larger than 1 if the current one is used up; return whether any size is left."""
        while self.rest == 1 and self.shape:
            self.rest = self.shape.pop(0)
            if self.rest == 1:
                self.dims.append("1")
        return self.rest != 1

    def take(self, name: str, size: Size) -> None:
        self.open.append(name)
        rest = quotient(self.rest, size)
        assert rest is not None, f"{size} does not divide {self.rest}"
        self.rest = rest
        if rest == 1:
            self.close()

    def whole(self) -> Size:
        """Append the rest of the dim as one whole factor; return its size."""
        rest, self.rest = self.rest, 1
        self.open.append(str(rest) if isinstance(rest, int) else ".")
        self.close()
        return rest

    def close(self) -> None:
        self.dims.append(self.open[0] if len(self.open) == 1 else f"({' '.join(self.open)})")
        self.open = []

    def text(self) -> list[str]:
        assert not self.open
        return self.dims + ["1" if size == 1 else "." for size in self.shape]


def _merge(source: _Shape, target: _Shape) -> None:
    """Take whole dims from the side that is behind until both sides have taken the same number of elements."""
    a, b = source.whole(), target.whole()
    while not same(a, b):
        behind_source = quotient(b, a) is not None or (isinstance(a, int) and isinstance(b, int) and a < b)
        if behind_source and source.left():
            a = a * source.whole()
        elif target.left():
            b = b * target.whole()
        elif source.left():
            a = a * source.whole()
        else:
            break


def same(a: Size, b: Size) -> bool:
    """Return whether two sizes are equal for all values of their symbols."""
    return a == b or (not (isinstance(a, int) and isinstance(b, int)) and sympy.expand(a - b) == 0)


@functools.cache
def quotient(a: Size, b: Size) -> Size | None:
    """Return a / b if that is a whole number for all values of the symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / b)
    numerator, denominator = sympy.fraction(sympy.together(quotient))
    if denominator != 1:
        return None
    return int(numerator) if numerator.is_Integer else numerator
