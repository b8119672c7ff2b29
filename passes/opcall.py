"""Calls of ops in the form that rules read: target, arguments with shapes for tensors, results; no fx graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

import sympy
import torch

from autoptd.ops.random import DRAWS

Size: TypeAlias = "int | sympy.Expr"


def target_name(target: Any) -> str:
    """Return the name of an op without namespace and overload, or of a function: `linear` for `aten.linear.default`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name.split("::")[1])
    return getattr(target, "__name__", str(target))


def is_random(target: Any) -> bool:
    """Return whether an op draws from a random generator."""
    return target in DRAWS or (
        isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    )


@dataclass(frozen=True)
class TensorInfo:
    """Global (unsplit) shape in ints and sympy expressions, dtype, and whether the tensor requires a gradient."""

    shape: tuple[Size, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Chunked(TensorInfo):
    """A tensor that is computed in chunks: at most `max_elements` of its elements are allocated at once."""

    max_elements: int = 0


@dataclass(frozen=True)
class OpCall:
    """A call `target(*args, **kwargs)`, with TensorInfo for tensors (also in lists) and ints or sympy for sizes."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorInfo, ...] = ()

    @cached_property
    def operands(self) -> tuple[TensorInfo, ...]:
        """Every tensor argument in order of appearance, lists flattened, with repeats."""
        return tuple(_tensors((self.args, tuple(self.kwargs.values()))))

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument of the op's schema, given by position or by keyword."""
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
    """Values of the size symbols, and the symbol that counts samples (dp alone splits those)."""

    values: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    batch: sympy.Symbol | None = None

    def __call__(self, size: Size) -> int:
        """Return the value of a size. Raises ValueError if a symbol has no value."""
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
        """Return whether a model-parallel axis can split a dim of this size into `groups` × `ranks` equal slices."""
        if not isinstance(size, int) and self.batch is not None and self.batch in size.free_symbols:
            return False
        number = self(size)
        return number % groups == 0 and (number // groups) % ranks == 0 and number // groups >= ranks


def _polynomial(size: sympy.Expr, values: Mapping[sympy.Symbol, int]) -> Fraction | None:
    """Return the value of sums, products and integer powers, None for anything else (40 times as fast as `subs`)."""
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
