"""Values that code reads from outside itself, by where they are, to tell whether they have changed."""

from __future__ import annotations

import enum
import functools
import inspect
import numbers
import weakref
from collections import deque
from collections.abc import Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

KINDS = (bool, int, float, str)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
_MOST = 1000  # elements of an array that are compared one by one
_BYTES = 64  # of a tensor that are compared: a change by `.data` has no version


class Inside:
    """The content of a place: a list, a dict, or an object, whose attributes are its own, in slots or of its class."""

    def __init__(self, holder: Holder, key: Any) -> None:
        self.holder, self.key = holder, key
        self.first = self.value()

    def value(self) -> Any:
        """Return what is there now."""
        found = value_at(self.holder, self.key)
        found = found() if isinstance(found, weakref.ref) else found
        return found.__self__ if isinstance(found, MethodType) else found

    def get(self, key: Any, default: object) -> object:
        """Return what it has at a key or a place, or an attribute; properties and other descriptors do not run."""
        value = self.value()
        if isinstance(value, Mapping):
            return value.get(key, default)
        if isinstance(value, (list, tuple, deque)):
            return value[key] if isinstance(key, int) and key < len(value) else default
        own = getattr(value, "__dict__", {})
        if key in own:
            return own[key]
        found = next((vars(cls)[key] for cls in type(value).__mro__ if key in vars(cls)), default)
        return getattr(value, key, default) if isinstance(found, MemberDescriptorType) else found


class Variable:
    """The value that a context variable has, whatever the key."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self.variable = variable

    def get(self, key: Any, default: object) -> object:
        """Return its value in the present context."""
        try:
            return self.variable.get()  # or its own default
        except LookupError:
            return default


Holder = Mapping[Any, Any] | Sequence[Any] | CellType | Inside | Variable


@dataclass(frozen=True)
class ReadValue:
    """A value at a key of a mapping, such as the attributes of an object, in a list, or in a closure's cell."""

    name: str
    holder: Holder
    key: Any
    value: object  # a number, a string, a list of them, a module, a Length, or the TensorValue of a tensor

    @property
    def place(self) -> tuple[int, str]:
        """Identity of the place: equal for two values that are found in two ways."""
        holder = self.holder.first if isinstance(self.holder, Inside) else self.holder
        return id(vars(holder) if isinstance(holder, nn.Module) else holder), repr(self.key)

    def now(self) -> object:
        """Return the present value, or ABSENT."""
        now = value_at(self.holder, self.key)
        return Length.of(now) if isinstance(self.value, Length) and isinstance(now, Sized) else now

    def differs(self) -> bool:
        """Return whether the value is another one than when it was noted."""
        now = self.now()
        if isinstance(self.value, TensorValue):
            return self.value.differs(now)
        if now is self.value or self.value is ABSENT:
            return now is not self.value
        return (now if isinstance(now, Length) else plain(now)) != self.value


@dataclass(frozen=True)
class Length:
    """The number of elements of a list or a dict."""

    kind: str
    elements: int

    @classmethod
    def of(cls, value: Sized) -> Length:
        return cls(type(value).__name__, len(value))

    def __repr__(self) -> str:
        return f"a {self.kind} of {self.elements}"


class TensorValue:
    """A tensor's values: its version, and some bytes if it is in host memory."""

    def __init__(self, x: Tensor) -> None:
        self.of, self._version, self._bytes = x, _version(x), sampled_bytes(x).clone()

    @property
    def key(self) -> tuple[int, bytes]:
        """Its version and the bytes, for comparison with other values of the same tensor."""
        return self._version, bytes(self._bytes.tolist())

    def __repr__(self) -> str:
        return f"a tensor of shape {list(self.of.shape)}"

    def differs(self, now: object) -> bool:
        """Return whether `now` has other values. A tensor on a device is the same if it is the same object."""
        if now is self.of and _version(self.of) != self._version:
            return True
        if not isinstance(now, Tensor):
            return True
        if type(now) not in (Tensor, nn.Parameter, nn.Buffer):  # left behind by a trace
            return False
        mine = sampled_bytes(now)
        return now.shape != self.of.shape or (len(mine) == len(self._bytes) and not torch.equal(mine, self._bytes))


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


def plain(value: object) -> object:
    """Return a copy of numbers, strings, and lists, sets and arrays of them; of what else may be compared, the value;
    else ABSENT."""
    if type(value) in KINDS or value is None or is_code(value) or isinstance(value, enum.Enum):
        return value
    if isinstance(value, numbers.Number):
        return value
    if type(value).__module__ == "numpy" and isinstance(tolist := getattr(value, "tolist", None), BuiltinFunctionType):
        size = getattr(value, "size", 1)  # of large arrays some elements
        return tolist() if size < _MOST else [*value.shape, value.flat[:: size // _BYTES | 1].tolist()]  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple, deque)) and all(type(x) in KINDS for x in value):
        return [*value]
    if isinstance(value, (set, frozenset)) and all(type(x) in KINDS for x in value):
        return frozenset(value)
    return ABSENT


def is_code(value: object) -> bool:
    """Return whether a value is a function, a class, a property or the like."""
    return inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, property | functools.partial)


def value_at(holder: Holder, key: Any) -> object:
    """Return what is at a place now, or ABSENT."""
    if isinstance(holder, Mapping | Inside | Variable):
        return holder.get(key, ABSENT)
    if not isinstance(holder, CellType):
        return holder[key] if key < len(holder) else ABSENT
    try:
        return holder.cell_contents
    except ValueError:  # not assigned yet
        return ABSENT
