"""Comparable descriptions of the module state that a forward pass may depend on besides its arguments.

Two modules with equal descriptions run the same Python: same classes, flags, shapes and attributes, in every
submodule. Attributes that differ between otherwise equal modules (a layer's index) are left out of the description and
watched instead: reads of them during a forward pass are recorded, and only the attributes read must agree.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor, nn

_ATOMS = (
    type(None),
    bool,
    int,
    str,
    bytes,
    float,
    complex,
    SymInt,
    enum.Enum,
    type,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_OWN = frozenset(vars(nn.Module())) - {"training", "_non_persistent_buffers_set"}  # attributes of every module
_LARGEST = 20_000  # values visited in the state of one module; a module with more is not described


class Unknown(Exception):
    """Raised for state that cannot be compared; the module is then traced in full."""


class Same:
    """An object compared by identity. The reference keeps it alive, so that its id is not reused."""

    __slots__ = ("object",)

    def __init__(self, value: object) -> None:
        self.object = value

    def __hash__(self) -> int:
        return id(self.object)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.object is self.object


def atom(value: object) -> Hashable:
    """Return a key that compares a plain value by type and content. Raises Unknown for anything else."""
    if isinstance(value, SymInt):
        return SymInt, value.node.expr
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # -0.0 is not 0.0
    if isinstance(value, _ATOMS):
        return type(value), value
    raise Unknown(type(value).__name__)


def describe(root: nn.Module, watched: AttributeWatch) -> Hashable:
    """Return the state that `root(...)` depends on besides its arguments and watched attributes. Raises Unknown.

    Objects other than plain values, containers and submodules are compared by identity.
    """
    return _StateReader(root, watched, deep=False).all()


def state(root: nn.Module) -> Hashable:
    """Return the state with the contents of objects and closures. A pass without side effects leaves it equal."""
    return _StateReader(root, None, deep=True).all()


class _StateReader:
    def __init__(self, root: nn.Module, watched: AttributeWatch | None, *, deep: bool) -> None:
        self.modules = {id(vars(m)): name for name, m in root.named_modules()}
        self.root, self.watched, self.deep = root, watched, deep
        self.seen: dict[int, int] = {}
        self.alive: list[object] = []  # the objects in `seen`, so that their ids are not reused

    def all(self) -> Hashable:
        return tuple(self._module(name, m) for name, m in self.root.named_modules(remove_duplicate=False))

    def _module(self, name: str, module: nn.Module) -> Hashable:
        skipped = self.watched.names(module) if self.watched is not None else frozenset()
        attributes = []
        for key, value in vars(module).items():
            if key in _OWN and value and key.startswith(("_forward", "_backward")):
                raise Unknown("hooks")
            if key not in _OWN and key not in skipped:
                attributes.append((key, self.value(value)))
        tensors = [(n, self._tensor(t)) for n, t in (*module._parameters.items(), *module._buffers.items())]
        return name, self.modules[id(vars(module))], Same(type(module)), tuple(attributes), tuple(tensors)

    def _tensor(self, tensor: Tensor | None) -> Hashable:
        if tensor is None:
            return None
        kind = isinstance(tensor, nn.Parameter), tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad
        return (Same(tensor), *kind) if self.deep else kind

    def value(self, value: object) -> Hashable:
        if len(self.seen) > _LARGEST:
            raise Unknown("more state than can be compared")
        if isinstance(value, _ATOMS):
            return atom(value)
        if isinstance(value, nn.Module):
            if id(vars(value)) not in self.modules:
                raise Unknown("a module outside root")
            return "module", self.modules[id(vars(value))]
        if id(value) in self.seen:
            return "seen", self.seen[id(value)]
        self.seen[id(value)] = len(self.seen)
        self.alive.append(value)
        return self._compound(value)

    def _compound(self, value: Any) -> Hashable:
        kind = Same(type(value))
        match value:
            case Tensor():
                return Same(value)
            case list() | tuple():
                return kind, tuple(map(self.value, value)), self._inside(value)
            case set() | frozenset():
                return kind, frozenset(map(self.value, value))
            case dict():
                return kind, tuple((self.value(k), self.value(v)) for k, v in value.items()), self._inside(value)
            case functools.partial():
                return kind, self.value(value.func), self.value(value.args), self.value(value.keywords)
            case types.MethodType():
                return kind, self.value(value.__func__), self.value(value.__self__)
            case types.FunctionType():
                return Same(value), self._closure(value) if self.deep else None
            case types.ModuleType():
                return Same(value)
        return Same(value), self._inside(value)

    def _inside(self, value: object) -> Hashable:
        """Return the attributes of an object if it has a `__dict__` and the description is deep."""
        held = getattr(value, "__dict__", None)
        if not self.deep or not isinstance(held, dict):
            return None
        return tuple((name, self.value(v)) for name, v in held.items())

    def _closure(self, function: types.FunctionType) -> Hashable:
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.value(cell.cell_contents))
            except ValueError:  # an empty cell
                cells.append(None)
        return tuple(cells), self.value(vars(function))


# ---- watching attributes ----

Read = tuple[int, str]  # (id of the module's vars, attribute name)


@dataclass
class AttributeWatch:
    """The watched attributes, and those read so far. Modules are identified by the id of their `vars`."""

    read: set[Read] = field(default_factory=set)
    watched: dict[int, frozenset[str]] = field(default_factory=dict)  # module -> names of its watched attributes
    several: set[int] = field(default_factory=set)  # modules that share their structure with another one

    def names(self, module: nn.Module) -> frozenset[str]:
        return self.watched.get(id(vars(module)), frozenset())


class _Watched:
    """Descriptor of an instance attribute that records reads. `default`: the class's own value, if it has one."""

    def __init__(self, name: str, read: set[Read], default: object) -> None:
        self.name, self.read, self.default = name, read, default

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is not None:
            held = vars(instance)
            self.read.add((id(held), self.name))
            if self.name in held:
                return held[self.name]
        if self.default is _MISSING:
            raise AttributeError(self.name)
        bind = getattr(type(self.default), "__get__", None)
        return self.default if bind is None else bind(self.default, instance, owner)

    def __set__(self, instance: object, value: object) -> None:
        vars(instance)[self.name] = value

    def __delete__(self, instance: object) -> None:
        del vars(instance)[self.name]


_MISSING = object()
Caller = Callable[..., Any]  # (module, its class's __call__, args, kwargs) -> the call's result


def watch_of(model: nn.Module) -> AttributeWatch:
    """Return the attributes to watch: those in which modules of one structure differ."""
    watch = AttributeWatch()
    structures = _structures(model)
    for module in model.modules():
        names, several = structures[id(module)]
        own = frozenset(n for n in names if not hasattr(getattr(type(module), n, None), "__set__"))
        if own:
            watch.watched[id(vars(module))] = own
        if several:
            watch.several.add(id(vars(module)))
    return watch


@contextmanager
def watching(
    model: nn.Module, watch: AttributeWatch, called: Callable[[nn.Module], bool], caller: Caller
) -> Iterator[None]:
    """Record reads of watched attributes within, and route calls of the modules that `called` selects through `caller`.

    The modules' classes are changed in place, not replaced: forward may compare `type(module)`.
    """
    classes: dict[type, set[str]] = {}
    for module in model.modules():
        if type(module) is not nn.Module and (watch.names(module) or called(module)):
            classes.setdefault(type(module), set()).update(watch.names(module))
    before = {(c, name): vars(c).get(name, _MISSING) for c, names in classes.items() for name in ("__call__", *names)}

    def call(module: nn.Module, *args: object, **kwargs: object) -> object:
        return caller(module, original, args, kwargs)

    def original(module: nn.Module, *args: object, **kwargs: object) -> object:
        """Call a module as its class does without the change."""
        found = (before.get((c, "__call__"), vars(c).get("__call__", _MISSING)) for c in type(module).__mro__)
        own: Any = next(f for f in found if f is not _MISSING)
        return own(module, *args, **kwargs)

    try:
        for (c, name), _ in before.items():
            default = inspect.getattr_static(c, name, _MISSING)
            setattr(c, name, call if name == "__call__" else _Watched(name, watch.read, default))
        yield
    finally:
        for (c, name), own in before.items():
            if own is _MISSING:
                delattr(c, name)
            else:
                setattr(c, name, own)


def _structures(model: nn.Module) -> Mapping[int, tuple[frozenset[str], bool]]:
    """Return, by module id: plain attributes in which modules of its structure differ, and if there are several."""
    number: dict[int, int] = {}
    numbers: dict[Hashable, int] = {}
    values: dict[int, dict[str, set[Hashable]]] = {}

    def visit(module: nn.Module) -> int:
        if id(module) in number:
            return number[id(module)]
        children = tuple((n, visit(m)) for n, m in module._modules.items() if m is not None)
        tensors = (*module._parameters.items(), *module._buffers.items())
        shapes = tuple((n, None if t is None else tuple(t.shape)) for n, t in tensors)
        own = numbers.setdefault((type(module), shapes, children), len(numbers))
        number[id(module)] = own
        for name, value in vars(module).items():
            if name != "training" and name not in _OWN and isinstance(value, _ATOMS):
                values.setdefault(own, {}).setdefault(name, set()).add(atom(value))
        return own

    visit(model)
    count = Counter(number.values())
    differ = {own: frozenset(n for n, seen in found.items() if len(seen) > 1) for own, found in values.items()}
    return {module: (differ.get(own, frozenset()), count[own] > 1) for module, own in number.items()}
