"""One op as the rules see it: its target, its arguments with tensors as shapes, its results. No fx graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

import sympy
import torch

Size: TypeAlias = "int | sympy.Expr"


@dataclass(frozen=True)
class TensorInfo:
    """Global (unsplit) shape, in ints and sympy expressions; dtype; whether a gradient flows to it."""

    shape: tuple[Size, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Stretched(TensorInfo):
    """A tensor of which at most `most` elements are there at once."""

    most: int = 0


@dataclass(frozen=True)
class OpCall:
    """`target(*args, **kwargs)`: tensors replaced by TensorInfo (also inside lists), sizes by ints or sympy."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorInfo, ...] = ()

    @cached_property
    def operands(self) -> tuple[TensorInfo, ...]:
        """Every tensor argument in order of appearance, lists flattened, repeats kept."""
        return tuple(_tensors((self.args, tuple(self.kwargs.values()))))

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """A positional-or-keyword argument of the op's schema."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)


def _tensors(value: Any) -> Iterator[TensorInfo]:
    if isinstance(value, TensorInfo):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


@dataclass(frozen=True)
class Sizes:
    """Concrete values of the symbols, and which symbol counts samples (dp splits those, no other axis)."""

    values: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    batch: sympy.Symbol | None = None

    def __call__(self, size: Size) -> int:
        """The number that a size stands for. Raises ValueError if a symbol has no value."""
        if isinstance(size, int):
            return size
        number = _polynomial(size, self.values)
        if number is not None and number.denominator == 1:
            return int(number)
        value = sympy.sympify(size).subs(self.values)
        if not value.is_Integer:
            raise ValueError(f"size {size} has no value: {value}")
        return int(value)

    def divisible(self, size: Size, ranks: int, groups: int = 1) -> bool:
        """Whether a dim of this size can be cut into `groups` × `ranks` equal slices on a model-parallel axis."""
        if not isinstance(size, int) and self.batch is not None and self.batch in size.free_symbols:
            return False
        number = self(size)
        return number % groups == 0 and (number // groups) % ranks == 0 and number // groups >= ranks


def _polynomial(size: sympy.Expr, values: Mapping[sympy.Symbol, int]) -> Fraction | None:
    """The value of sums, products and whole powers, some forty times as fast as substitution; None for all else."""
    if size.is_Symbol:
        known = values.get(size)
        return Fraction(known) if isinstance(known, int) else None
    if size.is_Rational:
        return Fraction(int(size.p), int(size.q))
    if not (size.is_Add or size.is_Mul or (size.is_Pow and size.args[1].is_Integer)):
        return None
    parts = [_polynomial(part, values) for part in size.args]
    if any(part is None for part in parts):
        return None
    first, *others = (part for part in parts if part is not None)
    if size.is_Pow:
        return first ** int(others[0]) if first or others[0] >= 0 else None
    for part in others:
        first = first + part if size.is_Add else first * part
    return first
