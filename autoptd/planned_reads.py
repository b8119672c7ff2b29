"""Values that the code of a model or a loss reads from outside itself: attributes, globals, variables in closures.

Code is not run. A value counts as read if the code names it: as an attribute, a global, a free variable, a default, or
a string that is a key of a dict. Functions and methods of the user's that it names are followed; values of libraries do
not count.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import itertools
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.passes.kept.python_values import is_users
from autoptd.read_values import (
    ABSENT,
    KINDS,
    Holder,
    Inside,
    Length,
    ReadValue,
    TensorValue,
    Variable,
    is_code,
    plain,
    value_at,
)

_LIBRARIES = {"torch", "torchvision", "transformers", "autoptd", "numpy", *sys.stdlib_module_names} - {"__main__"}
_DEPTH = 4  # objects, dicts and lists in others
_MOST = 1000  # elements of a list or dict that are looked at one by one
_NAMESPACES = ("types", "argparse", "_thread")  # modules of classes that have any attributes
_LONGEST = 80  # of a string that may be a key
_CACHED = functools._lru_cache_wrapper
_OPERATORS = frozenset(
    ("__call__", "__getitem__", "__getattr__", "__iter__", "__len__", "__float__", "__mul__", "__rmul__")
)


def methods_of(modules: Iterable[nn.Module]) -> list[FunctionType]:
    """Return `forward` of all classes of modules but torch's, and the methods that these name, and so on."""
    classes = dict.fromkeys(type(module) for module in modules)
    return _reached([f for kind in classes for f in _methods(kind)], frozenset(("forward", "__call__")))


def _reached(methods: Iterable[tuple[str, FunctionType]], names: frozenset[str]) -> list[FunctionType]:
    """Return the methods that have one of these names, or are named by one of those, and so on."""
    left, found = {id(f): (name, f) for name, f in methods}, list[FunctionType]()
    while more := [left.pop(key)[1] for key, (name, _) in [*left.items()] if name in names]:
        found += more
        names |= names_in(more)
    return found


def names_in(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Return the names and strings in some functions."""
    return frozenset().union(*(_names(function.__code__) for function in functions))


def functions_of(loss: object) -> list[FunctionType]:
    """Return the functions that a loss consists of: for an object its methods; for a module none."""
    if isinstance(loss, functools.partial):
        return functions_of(loss.func)
    if isinstance(loss, FunctionType):
        return [loss]
    if isinstance(loss, nn.Module | type) or not callable(loss):
        return []
    name = _name(loss) if isinstance(loss, MethodType) else "__call__"
    owner = _owner(loss)
    return _reached(_methods(owner if isinstance(owner, type) else type(owner)), frozenset((name,)))


def _name(method: MethodType) -> str:
    """Return the name by which the object of a method has it."""
    held = ((name, x) for kind in type(method.__self__).__mro__ for name, x in vars(kind).items())
    return next((name for name, x in held if x is method.__func__), getattr(method.__func__, "__name__", ""))


def _owner(function: object) -> object:
    return function.__self__ if isinstance(function, MethodType) else function


class Reader:
    """Finds the values that code reads, and follows the functions that it comes upon, each once, but libraries'."""

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        self.functions, self._left = dict[int, FunctionType](), list[FunctionType]()
        self._seen: dict[tuple[int, frozenset[str]], int] = {}  # objects and the names that were looked for; how deep
        self._follow(functions)

    def _follow(self, functions: Iterable[FunctionType]) -> None:
        for f in functions:
            if id(f) not in self.functions and (f.__module__ or "").partition(".")[0] not in _LIBRARIES:
                self.functions[id(f)] = f
                self._left.append(f)

    def of_functions(self, loss: object) -> Iterator[ReadValue]:
        """Yield the values that the functions read, and those that a loss which is no function holds."""
        if not isinstance(loss, nn.Module | FunctionType) and not isinstance(_owner(loss), nn.Module):
            yield from self._of_value("loss", {"loss": loss}, "loss", names_in(functions_of(loss)))
        while self._left:
            function = self._left.pop()
            names = _names(function.__code__)
            for name, holder, key in _places(function):
                yield from self._of_value(name, holder, key, names)

    def of_module(self, name: str, module: nn.Module, names: frozenset[str]) -> Iterator[ReadValue]:
        """Yield the numbers and strings among a module's attributes, what else code with these names reads of them, and
        what its hooks and a `forward` of its own read."""
        own, inside = vars(module), Inside({"": module}, "")
        simple = (key for key, x in own.items() if type(x) in KINDS and not key.startswith("_"))
        for key in dict.fromkeys((*simple, *_attributes(module, names | {"forward"}))):
            if key not in _MODULE_KEYS:
                yield from self._of_value(f"{name}.{key}".lstrip("."), own if key in own else inside, key, names)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number in hooks:
                yield from self._of_value(f"a hook of {name or 'the model'}", hooks, number, frozenset())

    def _of_value(
        self, name: str, holder: Holder, key: Any, names: frozenset[str], depth: int = _DEPTH
    ) -> Iterator[ReadValue]:
        """Yield a value, or the values in a list, a dict or an object that code with these names reads."""
        value = value_at(holder, key)
        if _of_library(value) or value is ABSENT:
            return
        if isinstance(value, Tensor):
            if not value.is_meta:
                yield ReadValue(name, holder, key, TensorValue(value))
        elif isinstance(value, nn.Module):
            yield ReadValue(name, holder, key, value)
        elif (held := plain(value)) is not ABSENT:
            if held == held:
                yield ReadValue(name, holder, key, held)
            yield from self._of_code(name, value, names, depth)
        elif depth:
            yield from self._within(name, Inside(holder, key), names, depth)

    def _within(self, name: str, inside: Inside, names: frozenset[str], depth: int) -> Iterator[ReadValue]:
        """Yield the elements of a list, the values at the keys of a dict that code names (or at all keys if it takes
        them all or names none), the attributes of an object; also those named that are not there yet."""
        value, holder, key = inside.first, inside.holder, inside.key
        if isinstance(value, (list, tuple, deque)):
            yield ReadValue(name, holder, key, Length.of(value))
            for place in range(min(len(value), _MOST)):
                yield from self._of_value(f"{name}[{place}]", inside, place, names, depth - 1)
        elif isinstance(value, Mapping):
            every = not names.isdisjoint(("keys", "values", "items"))
            if every:
                yield ReadValue(name, holder, key, Length.of(value))
            every = every or names.isdisjoint(value.keys())
            read = (x for x in list(value) if every or x in names or (type(x) in KINDS and type(x) is not str))
            for each in itertools.islice(read, _MOST):
                yield from self._of_value(f"{name}[{each!r}]", inside, each, names, depth - 1)
            if depth > _DEPTH - 2:
                absent = sorted(x for x in names - value.keys() if x.replace("/", "").isidentifier())
                yield from (ReadValue(f"{name}[{each!r}]", inside, each, ABSENT) for each in absent)
        elif isinstance(value, ContextVar):
            now = Variable(value)
            present = now.get("", ABSENT) is not ABSENT
            held = self._of_value(f"{name}.get()", now, "", names, depth - 1)
            yield from held if present else (ReadValue(f"{name}.get()", now, "", ABSENT),)
        elif isinstance(value, (Tensor, nn.Module)):  # of a weak reference
            yield from self._of_value(f"{name}()", {"": value}, "", names, depth)
        else:
            yield from self._of_object(name, inside, names, depth - 1)

    def _of_code(self, name: str, value: object, names: frozenset[str], depth: int) -> Iterator[ReadValue]:
        """Yield what code holds: attributes of a class, the object of a method, arguments of a partial function."""
        if isinstance(value, FunctionType):
            self._follow((value,))
        elif isinstance(value, _CACHED):
            yield from self._of_code(name, value.__wrapped__, names, depth)
        elif isinstance(value, functools.partial) and depth:
            names |= names_in(functions_of(value))
            for values in (value.args, value.keywords):
                for key in range(len(values)) if isinstance(values, tuple) else values:
                    yield from self._of_value(f"{name}'s {key}", values, key, names, depth - 1)
            yield from self._of_code(name, value.func, names, depth)
        elif isinstance(value, MethodType):
            yield from self._of_code(name, value.__func__, names, depth)
            if depth and not isinstance(value.__self__, nn.Module):
                inside = Inside({"": value.__self__}, "")
                yield from self._of_object(name, inside, names | {_name(value)}, depth - 1)
        elif (
            isinstance(value, type) and depth and not issubclass(value, enum.Enum | torch.autograd.Function)
        ):  # which run as is
            own = vars(value)
            self._follow(_reached(_methods(value), names) if _is_followed(value) else ())
            for key in [k for k, x in own.items() if k in names and not k.startswith("__") and not is_code(x)]:
                yield from self._of_value(f"{name}.{key}", own, key, names, depth - 1)

    def _of_object(self, name: str, inside: Inside, names: frozenset[str], depth: int) -> Iterator[ReadValue]:
        """Yield the attributes of an object that code with these names reads, itself or by the object's methods."""
        value = inside.first
        if _is_followed(type(value)):
            reached = _reached(_methods(type(value)), names | _OPERATORS)
            self._follow(reached)
            names |= names_in(reached)
        if self._seen.get((id(value), names), -1) >= depth:
            return
        self._seen[id(value), names] = depth
        present = _attributes(value, names)
        for key in present:
            yield from self._of_value(f"{name}.{key}", inside, key, names, depth)
        if depth > _DEPTH - 2 and (_is_followed(type(value)) or type(value).__module__ in _NAMESPACES):
            absent = (key for key in sorted(names.difference(present)) if not hasattr(type(value), key))
            yield from (ReadValue(f"{name}.{key}", inside, key, ABSENT) for key in absent)


def _attributes(value: object, names: frozenset[str]) -> list[str]:
    """Return an object's attributes of some names, in order; those of its class only if they are data."""
    shared = {k: x for cls in type(value).__mro__ if _is_followed(cls) for k, x in vars(cls).items()}
    data = (k for k, x in shared.items() if isinstance(x, MemberDescriptorType) or not is_code(x))
    return sorted(k for k in {*getattr(value, "__dict__", {}), *data} & names if not k.startswith("__"))


def _places(function: FunctionType) -> Iterator[tuple[str, Holder, Any]]:
    """Yield where a function has values from outside: globals, variables of functions around it, default arguments, its
    attributes, and the environment."""
    code, known, given = function.__code__, function.__globals__, function.__defaults__ or ()
    yield from ((name, known, name) for name in sorted(_globals(code)) if name in known)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell, None
    named = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    yield from ((name, given, place) for place, name in enumerate(named))
    for held in (function.__kwdefaults__ or {}, vars(function)):
        yield from ((name, held, name) for name in held)
    if not (names := _names(code)).isdisjoint(("environ", "getenv")):
        yield from ((name, os.environ, name) for name in sorted(names & os.environ.keys()))


def _methods(kind: type) -> list[tuple[str, FunctionType]]:
    """Return the methods and properties of a class and of those that it is made of, but torch's, by their names."""
    classes = [each for each in kind.__mro__ if _is_followed(each) or not _is_torchs(each)]
    found = [(name, f) for each in classes for name, f in vars(each).items() if name != "__init__"]
    held = ((name, each) for name, f in found if is_code(f) for each in _decorated(f))
    return [(name, f) for name, f in held if isinstance(f, FunctionType)]


def _decorated(method: object) -> Iterator[object]:
    """Yield the function of a method or a property, and those that its decorators hold."""
    left = [method]
    for _ in range(_DEPTH):
        held = [x for f in left for x in _held(f)]
        yield from left
        left = held


def _held(method: object) -> list[object]:
    """Return the functions that a descriptor, a function that keeps results or a decorator has."""
    given = [getattr(method, name, None) for name in ("func", "fget", "__func__", "__wrapped__")]
    cells = [value_at(cell, None) for cell in getattr(method, "__closure__", None) or ()]
    return [x for x in (*given, *cells) if isinstance(x, FunctionType | _CACHED) and not _is_torchs(x)]


def _is_torchs(code: Any) -> bool:
    return (code.__module__ or "").partition(".")[0] in ("torch", "builtins")


def _is_followed(kind: type) -> bool:
    """Return whether the methods of objects of a class are looked at: of the user's, of optimizers and schedulers."""
    return is_users(kind.__module__) or kind.__module__.startswith("torch.optim")


def _names(code: CodeType) -> frozenset[str]:
    """Return the names and strings in some code and in the functions inside it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    strings = (x for x in code.co_consts if isinstance(x, str) and len(x) < _LONGEST and "\n" not in x)
    return frozenset(code.co_names).union(strings, *inner)


def _globals(code: CodeType) -> frozenset[str]:
    """Return the globals that some code and the functions inside it read. Attributes may have the same names."""
    own = (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return frozenset(own).union(*(_globals(each) for each in code.co_consts if isinstance(each, CodeType)))


def _of_library(value: object) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    return inspect.isclass(value) and value.__module__.partition(".")[0] in _LIBRARIES | {"builtins"}


_MODULE_KEYS = frozenset(vars(nn.Module())) - {"training"}
