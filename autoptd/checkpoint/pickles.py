"""Reader of pickles as data: nothing is imported, and only callables that the caller lists are called.

A pickle is a program for a machine with a stack and a memo. `pickletools` decodes its opcodes. Those that plain data
needs are executed here; any other one is an error. A global is looked up in `known` by its exact (module, qualified
name). Time and memory are at most proportional to the length of the pickle: the total size of arguments is limited, so
that no long argument is copied repeatedly, and keys are not nested, so that hashing one is quick.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Name = tuple[str, str]
LONGEST = 1 << 26  # bytes of a pickle, at most
_SIZED = (str, bytes, list, tuple, dict, set)
_SCALARS = (str, int, float, bool, bytes, type(None))
_COPIED = 16  # elements in arguments of all calls for each byte of the pickle, at most


@dataclass(frozen=True)
class Maker:
    """The implementation of an allowed callable. `make` raises ValueError or TypeError for invalid arguments."""

    make: Callable[..., Any]


@dataclass(eq=False)
class RecordedCall:
    """A call `name(*args)` that is recorded, not made, and the state that was set on its result."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = field(default=None)


def recorded(name: str) -> Maker:
    """Return a maker that records calls of a name."""
    return Maker(lambda *args: RecordedCall(name, args))


class _Machine:
    def __init__(self, known: Mapping[Name, Any], persistent: Callable[[Any], Any], budget: int) -> None:
        self._known, self._persistent, self._budget = known, persistent, budget
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, given, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            self._step(opcode.name, given)
        (result,) = self._stack
        return result

    def _step(self, name: str, given: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "BINFLOAT":
                stack.append(given)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8" | "BINBYTES" | "SHORT_BINBYTES":
                stack.append(given)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(self._popped(int(name[-1])))
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                self._memo[given] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[given])
            case "APPEND" | "APPENDS":
                items = self._since_mark() if name == "APPENDS" else self._popped(1)
                _of(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                pairs = self._since_mark() if name == "SETITEMS" else self._popped(2)
                target = _of(dict, stack[-1])
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    target[checked_key(key)] = value
            case "GLOBAL" | "STACK_GLOBAL":
                module, found = self._popped(2) if name == "STACK_GLOBAL" else given.split(" ")
                stack.append(self._named(module, found))
            case "REDUCE" | "NEWOBJ":
                maker, args = self._popped(2)
                stack.append(self._made(_of(Maker, maker), _of(tuple, args)))
            case "BUILD":
                (state,) = self._popped(1)
                _set_state(stack[-1], state)
            case "BINPERSID":
                stack.append(self._persistent(stack.pop()))
            case _:
                raise ValueError(f"the pickle has the instruction {name}, which plain data does not need")

    def _named(self, module: Any, name: Any) -> Any:
        if not (isinstance(module, str) and isinstance(name, str) and (module, name) in self._known):
            raise ValueError(f"the pickle names {module!s:.60}.{name!s:.60}, which is not allowed there")
        return self._known[module, name]

    def _made(self, maker: Maker, args: tuple[Any, ...]) -> Any:
        self._budget -= len(args) + sum(len(each) for each in args if isinstance(each, _SIZED))
        if self._budget < 0:
            raise ValueError("the pickle builds far more data than it holds")
        return maker.make(*args)

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _popped(self, count: int) -> tuple[Any, ...]:
        items = tuple(self._stack[-count:])
        if len(items) < count:
            raise ValueError("the pickle pops more values than its stack has")
        del self._stack[-count:]
        return items


def _of(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"the pickle uses a {type(value).__name__} as a {kind.__name__}")
    return value


def checked_key(key: Any) -> Any:
    """Return a key of a dict or element of a set. Raises ValueError if hashing it might take long."""
    flat = isinstance(key, tuple) and len(key) <= 16 and all(isinstance(each, _SCALARS) for each in key)
    if not (flat or isinstance(key, (*_SCALARS, RecordedCall))):
        raise ValueError(f"the pickle has a key of type {type(key).__name__}")
    return key


def _set_state(value: Any, state: Any) -> None:
    """Set the state of a recorded call, or `_metadata` of an OrderedDict, which `Module.state_dict` returns."""
    if isinstance(value, RecordedCall):
        value.state = state
    elif type(value) is OrderedDict and isinstance(state, dict) and list(state) == ["_metadata"]:
        value._metadata = state["_metadata"]  # type: ignore[attr-defined]
    else:
        raise ValueError(f"the pickle sets attributes of a {type(value).__name__}")


def read_pickle(data: bytes, known: Mapping[Name, Any], persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return the value of a pickle. `persistent` resolves persistent ids, as `persistent_load` does.

    Raises ValueError for anything but plain data and `known` globals.
    """
    if len(data) > LONGEST:
        raise ValueError(f"the pickle has {len(data)} bytes, more than the limit of {LONGEST}")
    machine = _Machine(known, persistent or _nothing_outside, _COPIED * len(data))
    try:
        return machine.run(data)
    except ValueError:
        raise
    except (LookupError, TypeError, ArithmeticError, AttributeError, RecursionError, MemoryError) as error:
        raise ValueError(f"the pickle is damaged: {type(error).__name__}: {error}") from error


def _nothing_outside(_: Any) -> Any:
    raise ValueError("the pickle has a persistent id, which plain data does not need")
