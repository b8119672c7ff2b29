"""`len(x)` of a tensor and `int(n / 4)` of a size, as sizes of the trace, which are numbers to `isinstance`.

Python makes an int of what `len` and `int` return, so the tracer would take the length of the example for that of every
batch. While a model is traced, the modules in which its code is written have a `len` of their own, which returns
`x.size(0)` for tensors: the same number outside a trace. Where the number of samples would become a number without it,
and in loops over samples, they have an `int` and a `float` of their own too; such loops have a `range` and an
`enumerate`.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch.utils._sympy.functions import TruncToInt

from autoptd.passes.kept.python_values import is_users
from autoptd.passes.loops.join import turns_counted
from autoptd.passes.loops.turn_numbers import turn_enumerate, turn_range, turn_zip
from autoptd.passes.normalise.size_functions import in_sympy

_LIBRARIES = frozenset({"autoptd", "torch"})  # whose own modules call `len` of sequences, or with ints expected


def tensor_len(x: Any) -> Any:
    """Return `len(x)`, of a tensor as a size that may be symbolic; so of a list to which a loop over samples adds."""
    if isinstance(x, Tensor) and x.ndim:
        return x.size(0)
    return turns_counted(x) if isinstance(x, list) else builtins.len(x)


class _SizesToo(type):
    """The class of a class that its code takes for `int`, and that leaves sizes sizes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or not isinstance(args[0], (SymInt, SymFloat)):
            return builtins.int(*args, **kwargs)
        (x,) = args
        return x if isinstance(x, SymInt) else _whole(x)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, builtins.int)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.int)


class _FractionsToo(type):
    """The class of a class that its code takes for `float`, and that leaves sizes sizes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        sized = len(args) == 1 and isinstance(args[0], (SymInt, SymFloat))
        return torch.sym_float(args[0]) if sized else builtins.float(*args, **kwargs)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, builtins.float)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.float)


class SizeFloat(float, metaclass=_FractionsToo):
    """`float`, of sizes as sizes."""


class SizeInt(int, metaclass=_SizesToo):
    """`int`, of sizes as sizes."""


def size_isinstance(x: Any, kinds: Any) -> bool:
    """Return `isinstance(x, kinds)`, of sizes that they are numbers."""
    kind = _NUMBERS.get(type(x))
    return builtins.isinstance(x, kinds) or (kind is not None and builtins.isinstance(kind(0), kinds))


class _KindsToo(type):
    """The class of a class that its code takes for `type`, and for which sizes are numbers."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = builtins.type(*args, **kwargs)
        return _NUMBERS.get(found, found) if len(args) == 1 else found

    def __instancecheck__(cls, x: Any) -> bool:
        return builtins.isinstance(x, builtins.type)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.type)


class SizeType(metaclass=_KindsToo):
    """`type`, of sizes as of numbers."""


_NUMBERS: dict[type, type] = {SymInt: builtins.int, SymFloat: builtins.float, SymBool: builtins.bool}


def _whole(x: SymFloat) -> Any:
    """Return a quotient of sizes without its fraction: a product of sizes if it is one, such as b in b * 4 / 4.0."""
    whole = in_sympy(TruncToInt(x.node.expr))
    if whole.has(sympy.floor, sympy.ceiling, sympy.Float):
        return torch.sym_int(x)
    return x.node.shape_env.create_symintnode(whole, hint=builtins.int(x.node.hint))


@contextmanager
def symbolic_len(
    model: nn.Module, loss: Callable[..., Any] | None = None, sizes: bool = False, samples: int = 0
) -> Iterator[None]:
    """Give the packages of the model's classes and of the loss, and those that their files import and that compute with
    tensors, a `len`, `isinstance` and `type`, and take them back.

    sizes: also `SizeInt` for `int`, `SizeFloat` for `float`. samples: of recorded loops, for which `range` and
    `enumerate` number the turns, and a `zip`. Modules with such functions of their own keep them.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    names = {cls.__module__ for cls in classes} | {getattr(loss, "__module__", None) or type(loss).__module__}
    roots = _roots(_with_imported(names)) - _LIBRARIES - sys.stdlib_module_names
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in roots]
    numbers: dict[str, Any] = {"int": SizeInt, "float": SizeFloat} if sizes else {}
    turns: dict[str, Any] = (
        {"range": turn_range, "zip": turn_zip, "enumerate": turn_enumerate(samples)} if samples else {}
    )
    ours = {"len": tensor_len, "isinstance": size_isinstance, "type": SizeType, **numbers, **turns}
    changed = [(vars(module), name) for module in modules for name in ours if name not in vars(module)]
    for space, name in changed:
        space[name] = ours[name]
    try:
        yield
    finally:
        for space, name in changed:
            del space[name]


def _with_imported(names: Iterable[str]) -> set[str]:
    """Return modules and those that the user's import, and so on: the user's own, and others that import torch."""
    left, found = [*names], set[str]()
    while left:
        name = left.pop()
        if name in found or name not in sys.modules:
            continue
        found.add(name)
        if is_users(name):
            left += (each for each in _imported(name) if is_users(each) or "torch" in _roots(_imported(each)))
    return found


def _imported(name: str) -> set[str]:
    """Return the modules that a module has among its globals, or functions and classes of."""
    found = set[str]()
    for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
        if isinstance(value, ModuleType):
            found.add(value.__name__)
        elif isinstance(value, type | FunctionType) and isinstance(value.__module__, str):
            found.add(value.__module__)
    return found


def _roots(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}
