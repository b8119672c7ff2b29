"""Values that the code of a model or a loss reads from outside itself: attributes, globals, variables in closures.

Code is not run. A value counts as read if the code names it: as an attribute, a global, a free variable, or a string
that is a key of a dict. Values of libraries do not count.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

KINDS = (bool, int, float, str)
ABSENT = object()
_LIBRARIES = {"torch", "torchvision", "transformers", "autoptd", "numpy", *sys.stdlib_module_names} - {"__main__"}
_CALLS = 3  # functions called by functions, counted from the loss or from forward
_BYTES = 64  # of a tensor that are compared: a change by `.data` has no version


Holder = Mapping[Any, Any] | Sequence[Any] | CellType


@dataclass(frozen=True)
class ReadValue:
    """A value at a key of a mapping, such as the attributes of an object, in a list, or in a closure's cell."""

    name: str
    holder: Holder
    key: Any
    value: object  # a number, a string, a list of them, a module, or the TensorValue of a tensor

    def now(self) -> object:
        """Return the present value, or ABSENT."""
        return _value(self.holder, self.key)

    def differs(self) -> bool:
        """Return whether the value is another one than when it was noted."""
        now = self.now()
        if isinstance(self.value, TensorValue):
            return self.value.differs(now)
        return now is not self.value and plain(now) != self.value


class TensorValue:
    """A tensor's values: its version, and some bytes if it is in host memory."""

    def __init__(self, x: Tensor) -> None:
        self._of, self._version, self._bytes = x, _version(x), sampled_bytes(x).clone()

    def __repr__(self) -> str:
        return f"a tensor of shape {list(self._of.shape)}"

    def differs(self, now: object) -> bool:
        """Return whether `now` has other values. A tensor on a device is the same if it is the same object."""
        if now is self._of and _version(self._of) != self._version:
            return True
        if not isinstance(now, Tensor):
            return True
        if type(now) not in (Tensor, nn.Parameter, nn.Buffer):  # left behind by a trace
            return False
        mine = sampled_bytes(now)
        return now.shape != self._of.shape or (len(mine) == len(self._bytes) and not torch.equal(mine, self._bytes))


def sampled_bytes(x: Tensor) -> Tensor:
    """Return a view of some bytes of a tensor in host memory, over all of it; of others, of none."""
    if x.device.type != "cpu" or x.layout != torch.strided or not x.is_contiguous() or not x.numel():
        return torch.empty(0, dtype=torch.uint8)
    return some_bytes(x)


def some_bytes(x: Tensor) -> Tensor:
    """Return some bytes of a contiguous tensor, over all of it, as a view."""
    x = x.detach()
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1).view(torch.uint8)
    return flat[:: len(flat) // _BYTES | 1]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def of_module(name: str, module: nn.Module, names: frozenset[str]) -> Iterator[ReadValue]:
    """Yield the numbers and strings among a module's attributes, and what else code with these names reads of them."""
    own = vars(module)
    for key, value in own.items():
        path = f"{name}.{key}".lstrip(".")
        if type(value) in KINDS and (not key.startswith("_") or key in names) and key not in _MODULE_KEYS:
            yield from _noted(path, own, key)
        elif key in names and key not in _MODULE_KEYS:
            yield from _of_value(path, own, key, names)


def methods_of(modules: Iterable[nn.Module]) -> list[FunctionType]:
    """Return `forward` of all classes of modules but torch's, and the methods that these name, and so on."""
    classes = dict.fromkeys(type(module) for module in modules)
    left = {id(f): f for kind in classes for f in _methods(kind)}
    names, found = frozenset(("forward", "__call__")), list[FunctionType]()
    while more := [left.pop(key) for key, f in [*left.items()] if f.__name__ in names]:
        found += more
        names |= names_in(more)
    return found


def names_in(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Return the names and strings in some functions."""
    return frozenset().union(*(_names(function.__code__) for function in functions))


def of_functions(functions: Iterable[FunctionType], loss: object) -> Iterator[ReadValue]:
    """Yield the values that methods and a loss read, and functions that they call."""
    seen: set[int] = set()
    for function in functions:
        yield from _of_function(function, _CALLS, seen)
    yield from _of_callable(loss, _CALLS, seen)


def plain(value: object) -> object:
    """Return a copy of numbers, strings and lists of them; of what else may be compared, the value; else ABSENT."""
    if type(value) in KINDS or value is None or inspect.isroutine(value) or inspect.isclass(value):
        return value
    if isinstance(value, (list, tuple)) and all(type(x) in KINDS for x in value):
        return [*value]
    return ABSENT


def _noted(name: str, holder: Holder, key: Any) -> Iterator[ReadValue]:
    """Yield a number, string, module or tensor, or the modules and tensors in a list."""
    value = _value(holder, key)
    if isinstance(value, (list, tuple)) and any(isinstance(x, (Tensor, nn.Module)) for x in value):
        for place in range(len(value)):
            yield from _noted(f"{name}[{place}]", value, place)
    elif isinstance(value, nn.Module):
        yield ReadValue(name, holder, key, value)
    elif isinstance(value, Tensor):
        if not value.is_meta:
            yield ReadValue(name, holder, key, TensorValue(value))
    elif (held := plain(value)) is not ABSENT and held == held:
        yield ReadValue(name, holder, key, held)


def _of_value(name: str, holder: Holder, key: Any, names: frozenset[str]) -> Iterator[ReadValue]:
    """Yield a value, or the values in a dict or an object that code with these names reads."""
    value = _value(holder, key)
    if _of_library(value):
        return
    inside: Mapping[Any, Any] | None = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if isinstance(value, (Tensor, nn.Module)) or inspect.isroutine(value) or inside is None:
        yield from _noted(name, holder, key)
        return
    for each in list(inside):
        if each in names or (isinstance(value, Mapping) and type(each) in KINDS and type(each) is not str):
            where = f"{name}[{each!r}]" if isinstance(value, Mapping) else f"{name}.{each}"
            yield from _noted(where, inside, each)


def _of_callable(function: object, calls: int, seen: set[int]) -> Iterator[ReadValue]:
    if isinstance(function, functools.partial):
        yield from _of_callable(function.func, calls, seen)
        for values in (function.args, function.keywords):
            for key in range(len(values)) if isinstance(values, tuple) else values:
                yield from _noted(f"the loss's {key}", values, key)
    elif isinstance(function, FunctionType):
        yield from _of_function(function, calls, seen)
    elif isinstance(function, MethodType) or (callable(function) and not isinstance(function, (nn.Module, type))):
        owner = function.__self__ if isinstance(function, MethodType) else function
        called = function.__func__ if isinstance(function, MethodType) else type(function).__call__
        if isinstance(called, FunctionType):
            if not isinstance(owner, nn.Module):
                names = names_in(_methods(type(owner)))
                yield from _of_value("loss", {"loss": owner}, "loss", names)
            yield from _of_function(called, calls, seen)


def _of_function(function: FunctionType, calls: int, seen: set[int]) -> Iterator[ReadValue]:
    if id(function) in seen or (function.__module__ or "").partition(".")[0] in _LIBRARIES:
        return
    seen.add(id(function))
    names, known = _names(function.__code__), function.__globals__
    read = [(name, known, name) for name in sorted(_globals(function.__code__)) if name in known]
    cells: list[tuple[str, Any, Any]] = []
    if function.__closure__:
        cells = [(n, c, None) for n, c in zip(function.__code__.co_freevars, function.__closure__, strict=True)]
    for name, holder, key in (*read, *cells):
        value = _value(holder, key)
        yield from _of_value(name, holder, key, names)
        if isinstance(value, FunctionType) and calls:
            yield from _of_function(value, calls - 1, seen)


def _methods(kind: type) -> list[FunctionType]:
    classes = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("torch", "builtins")]
    found = [f for each in classes for name, f in vars(each).items() if name != "__init__"]
    return [f for f in (getattr(f, "__func__", f) for f in found) if isinstance(f, FunctionType)]


def _names(code: CodeType) -> frozenset[str]:
    """Return the names and strings in some code and in the functions inside it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union((x for x in code.co_consts if isinstance(x, str)), *inner)


def _globals(code: CodeType) -> frozenset[str]:
    """Return the globals that some code and the functions inside it read. Attributes may have the same names."""
    own = (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return frozenset(own).union(*(_globals(each) for each in code.co_consts if isinstance(each, CodeType)))


def _of_library(value: object) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    return inspect.isclass(value) and value.__module__.partition(".")[0] in _LIBRARIES | {"builtins"}


def _value(holder: Holder, key: Any) -> object:
    if isinstance(holder, Mapping):
        return holder.get(key, ABSENT)
    if not isinstance(holder, CellType):
        return holder[key] if key < len(holder) else ABSENT
    try:
        return holder.cell_contents
    except ValueError:  # not assigned yet
        return ABSENT


_MODULE_KEYS = frozenset(vars(nn.Module())) - {"training"}
