"""Python values that a model's code can keep from one pass to the next, by who holds them.

    self.step            an attribute of a module
    Model.step           an attribute of a class
    STEP                 a global of a file, or of code without one that `exec` ran
    n of hook            what a function holds: a variable of the function around it, a default argument, an attribute
    step of a Schedule   an attribute of an object of the user's

Files are those that define the model's classes and functions, and those of the user's that they import: installed
libraries hold caches and locks.
"""

from __future__ import annotations

import builtins
import copy
import functools
import itertools
import os
import random
import sys
import sysconfig
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

Name = tuple[str, str]  # path of a module, or what another holder is called, # and its id; and of what it holds

_CACHE = functools._lru_cache_wrapper
KEEPERS = (Tensor, list, dict, deque, _CACHE, type(None))  # may be, hold or become a tensor

_MOST = 10_000  # elements of a container or an array that are looked at
_DICTS = (dict, OrderedDict, defaultdict, Counter)  # others may make what they are asked for
_SEQUENCES = (list, tuple, deque, set, frozenset)
_OF_PYTHON = ("builtins", "itertools")
_SIMPLE = (bool, int, float, str, bytes, Tensor)
_NO_CODE = {type(None), *_SIMPLE, nn.Parameter, type, types.ModuleType}  # most values of a module; none holds functions
_PLAIN = ("argparse", "types")  # modules whose objects are namespaces
_LIBRARIES = ("autoptd", "torch")
_TRAINED = ("_parameters", "_buffers")
OF_MODULES = vars(nn.Module()).keys() - {"training"}  # such as hooks, of which most modules have none


@dataclass(frozen=True, eq=False)
class Holder:
    """A module, class, file, function or object, and the values that it holds.

    `restored`: torch.export undoes what a trace assigns to it, or does to its lists and dictionaries.
    """

    name: str
    values: Mapping[str, object]
    put: Callable[[str, object], None]
    drop: Callable[[str], None]
    restored: bool = False


def holders(model: nn.Module, loss: object = None) -> Iterator[Holder]:
    """Yield a model's modules, and the classes, files, functions, objects and other modules of its code and of a loss;
    the environment, which is looked at only."""
    classes: dict[type, None] = {}
    code: dict[int, Any] = {}
    _find_code([loss], code)
    keep = (lambda name, value: None), (lambda name: None)  # libraries set some of it once
    yield Holder("the environment", os.environ, *keep)
    loss_modules = loss.named_modules(prefix="loss") if isinstance(loss, nn.Module) else ()
    own = [*model.named_modules(), *loss_modules]
    known = {id(vars(module)) for _, module in own}  # as a copy and its original may have the same
    for name, module in own:
        put, drop = (functools.partial(f, module) for f in (object.__setattr__, object.__delattr__))
        yield Holder(name, vars(module), put, drop, restored=True)
        classes.update(dict.fromkeys(cls for cls in type(module).__mro__ if _is_own(cls)))
        _find_code([value for key, value in vars(module).items() if key not in OF_MODULES or value], code)
    for name, names in _globals(classes, code):
        yield Holder(name, names, names.__setitem__, names.__delitem__)
    for cls in classes:
        put, drop = (functools.partial(f, cls) for f in (setattr, delattr))
        yield Holder(f"class {cls.__module__}.{cls.__qualname__}", vars(cls), put, drop)
    for key, value in code.items():
        if isinstance(value, types.FunctionType):
            yield _of_function(value, f"function {value.__qualname__}#{key}")
        elif isinstance(value, nn.Module):
            yield from _of_module(value, key, known)
        else:
            put, drop = (functools.partial(f, value) for f in (setattr, delattr))
            yield Holder(f"object {type(value).__qualname__}#{key}", _fields(value) or {}, put, drop)


def _globals(classes: dict[type, None], code: dict[int, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the globals of classes, functions and objects, and of what these import of the user's, each with a name;
    add the classes that they define, and the code that these and they hold."""
    _find_code((x for cls in classes for x in list(vars(cls).values())), code)
    left: list[Any] = [*classes, *code.values()]
    seen: set[int] = set()
    while left:
        value = left.pop()
        for name, names in _globals_of(value, isinstance(value, type) and value in classes):
            if id(names) in seen:
                continue
            seen.add(id(names))
            yield name, names
            imported, own = list[Any](), list[Any]()
            for x in list(names.values()):
                (imported if _is_imported(x, names) else own).append(x)
            defined, known = [x for x in own if isinstance(x, type)], len(code)
            classes.update(dict.fromkeys(defined))
            _find_code((*own, *(x for cls in defined for x in list(vars(cls).values()))), code)
            left += (*imported, *list(code.values())[known:])


def _is_imported(value: Any, names: Mapping[str, Any]) -> bool:
    """Return whether a value of these globals is a module, or a function or class of others."""
    if not isinstance(value, types.FunctionType | type):
        return isinstance(value, types.ModuleType)
    return value.__module__ != names.get("__name__") and getattr(value, "__globals__", None) is not names


def _globals_of(value: Any, of_model: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the globals of the files that a module, class, function or object is of, and those of a function that
    `exec` made, each with a name. Installed files are looked at for classes of the model alone."""
    files = [value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)]
    if isinstance(value, types.FunctionType):  # a wrapper of functools has the wrapped function's file
        names = value.__globals__
        file = names.get("__name__")
        files.append(file)
        is_file = file in sys.modules and vars(sys.modules[file]) is names
        if not is_file and not _is_installed(names.get("__file__") or ""):
            yield f"globals of {value.__qualname__}#{id(names)}", names
    for file in files:
        if _may_be_own(file) and file in sys.modules and (of_model or is_users(file)):
            yield f"file {file}", vars(sys.modules[file])


def label(name: Name) -> str:
    """Return how an error names a value."""
    holder, key = name[0].partition("#")[0], name[1]
    return f"{key} of {holder}" if " " in holder else ".".join(filter(None, (holder, key)))


def values_of(held: Holder) -> Iterator[tuple[Name, object]]:
    """Yield what a holder keeps, but a module's parameters and buffers."""
    for key, value in list(held.values.items()):
        if key not in _TRAINED and not key.startswith("__") and (key not in OF_MODULES or value):
            yield (held.name, key), value


def frozen(value: object, known: dict[int, object]) -> object:
    """Return what decides in a Python value, for comparison: its numbers, strings, functions, classes, modules, and
    random states; None if it has none of these.

    `known`: results of the values that were asked for before, by id.
    """
    if isinstance(value, bool | int | float | complex | str):
        return value if value == value else "nan"
    if isinstance(value, types.FunctionType | types.MethodType):
        return getattr(value, "__code__", None)
    if isinstance(value, type):
        return value
    if isinstance(value, nn.Module):
        return id(value)
    if value is None or isinstance(value, Tensor | types.ModuleType):
        return None
    if id(value) not in known:
        known[id(value)] = None  # of a cycle
        known[id(value)] = _state_of(value) or _contents(value, known)
    return known[id(value)]


def copied(value: object) -> object:
    """Return a list or dictionary with the same elements, or the size of a function's cache; else the value itself."""
    if isinstance(value, _CACHE):
        return value.cache_info().currsize
    return copy.copy(value) if type(value) in (*_DICTS, list, deque) and len(value) <= _MOST else value  # type: ignore[arg-type]


def refill(value: Any, elements: Any) -> None:
    """Give a list or dictionary the elements that it had; empty a function's cache that has grown."""
    if isinstance(value, _CACHE):
        if value.cache_info().currsize != elements:
            value.cache_clear()
    elif type(value) in _DICTS:
        if value.keys() != elements.keys() or any(value[key] is not x for key, x in elements.items()):
            value.clear()
            value.update(elements)
    elif type(value) in (list, deque) and [*map(id, value)] != [*map(id, elements)]:
        value.clear()
        value.extend(elements)


def _state_of(value: object) -> object:
    """Return the state of a random generator, an iterator or an array; None of anything else."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        with _disable_current_modes():  # of a trace
            return value.get_state().numpy().tobytes()
    if isinstance(value, itertools.count | itertools.repeat):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        return repr(value.gi_frame and sorted(value.gi_frame.f_locals.items()))
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return repr(value.get_state(legacy=False))
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return value.tobytes() if value.size <= _MOST and value.dtype != object else None
    return None


def _contents(value: Any, known: dict[int, object]) -> object:
    held: list[tuple[object, object]]
    if isinstance(value, functools.partial):
        return _contents([value.args, value.keywords], known)
    if isinstance(value, Iterator) and type(value).__module__ in _OF_PYTHON:
        return _contents(_reduced(value), known)
    if type(value) in _DICTS:
        held = [(key, frozen(x, known)) for key, x in itertools.islice(value.items(), _MOST)]
    elif base := sequence_of(value):
        held = [(None, frozen(x, known)) for x in itertools.islice(base.__iter__(value), _MOST)]
    else:
        return None
    kept = tuple((key, x) for key, x in held if x is not None)
    return kept or None


def sequence_of(value: object) -> Any:
    """Return Python's own class of a list, tuple or set, as a subclass may count or yield something else, or refuse."""
    return next((kind for kind in _SEQUENCES if isinstance(value, kind)), None)


def _reduced(iterator: Iterator[Any]) -> tuple[Any, ...]:
    """Return what an iterator of Python's own would be pickled by: what it goes over, and how far it is."""
    try:
        made = iterator.__reduce__()
    except TypeError:  # such as that of a set
        return ()
    return made if isinstance(made, tuple) else ()


def _find_code(values: Iterable[Any], found: dict[int, Any]) -> None:
    """Add the functions, modules and objects of the user's classes among values, and those that they hold."""
    stack = list(values)
    seen: dict[int, Any] = {}  # containers, which may hold themselves
    while stack:
        value = stack.pop()
        if type(value) in _NO_CODE or id(value) in seen or id(value) in found:
            continue
        if isinstance(value, nn.Module):
            found[id(value)] = value
            stack += (
                x
                for m in value.modules()
                for key, x in vars(m).items()
                if key not in OF_MODULES or (x and key != "_modules")
            )
        elif isinstance(value, staticmethod | classmethod):
            stack.append(value.__func__)
        elif isinstance(value, types.MethodType):
            stack += value.__func__, value.__self__
        elif isinstance(value, property):
            stack += value.fget, value.fset
        elif isinstance(value, functools.partial):
            stack += value.func, *value.args, *value.keywords.values()
        elif type(value) in _DICTS and len(value) <= _MOST:  # such as hooks of a module
            seen[id(value)] = value
            stack += value.values()
        elif (base := sequence_of(value)) and base.__len__(value) <= _MOST:
            seen[id(value)] = value
            stack += (x for x in base.__iter__(value) if not isinstance(x, _SIMPLE))
        elif (held := _fields(value)) is not None:
            found[id(value)] = value
            stack += held.values()


def _fields(value: Any) -> Mapping[str, object] | None:
    """Return what a function holds from call to call, or the attributes of an object of the user's; else None."""
    if isinstance(value, types.FunctionType):
        return _values_of(value) if _may_be_own(value.__module__ or "") else None
    kind = type(value).__module__
    if not (kind in _PLAIN or is_users(kind)) or isinstance(value, Tensor | type | types.ModuleType):
        return None
    slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
    try:
        return vars(value)
    except TypeError:  # it has no __dict__
        return {name: getattr(value, name) for name in slots if hasattr(value, name)}


def _values_of(function: types.FunctionType) -> dict[str, object]:
    """Return what a function holds: variables of the functions around it, default arguments, and attributes."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    around = {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
    return {**vars(function), **_defaults(function), **around}


def _defaults(function: types.FunctionType) -> dict[str, object]:
    given = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
    return {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _of_function(function: types.FunctionType, name: str) -> Holder:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def put(name: str, value: object) -> None:
        if name in cells:
            cells[name].cell_contents = value
        elif name in vars(function):
            setattr(function, name, value)

    def drop(name: str) -> None:
        if name in cells:
            del cells[name].cell_contents
        else:
            vars(function).pop(name, None)

    return Holder(name, _values_of(function), put, drop)


def _of_module(root: nn.Module, number: int, known: set[int]) -> Iterator[Holder]:
    """Yield the modules of one that is not the model's, and their buffers, but those that are known."""
    for path, module in root.named_modules():
        if id(vars(module)) in known:
            continue
        known.add(id(vars(module)))
        put, drop = (functools.partial(f, module) for f in (object.__setattr__, object.__delattr__))
        name, buffers = ".".join(filter(None, (type(root).__qualname__, path))), module._buffers
        yield Holder(f"module {name}#{number}", vars(module), put, drop)
        yield Holder(f"buffers of {name}#{number}", buffers, buffers.__setitem__, buffers.__delitem__)  # type: ignore[arg-type]


def _is_own(cls: type) -> bool:
    """Return whether a class may be the user's. Python takes those of code that `exec` ran for its own."""
    is_executed = cls.__module__ == "builtins" and vars(builtins).get(cls.__name__) is not cls
    return is_executed or _may_be_own(cls.__module__)


def _may_be_own(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] not in (*_LIBRARIES, "builtins", "abc", "typing", "enum")


def is_users(module: str | None) -> bool:
    """Return whether a module is the user's: a script, a notebook, or a file outside of installed libraries."""
    if not isinstance(module, str) or module == "__main__":
        return module == "__main__"
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and module.partition(".")[0] not in _LIBRARIES and not _is_installed(file)


@functools.cache
def _is_installed(file: str) -> bool:
    paths = sysconfig.get_paths()
    return file.startswith((paths["stdlib"], paths["platstdlib"])) or any(map(_holds_installed, Path(file).parents))


@functools.cache
def _holds_installed(folder: Path) -> bool:
    """Return whether pip installs into a folder, which may be of another environment."""
    return folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info"))
