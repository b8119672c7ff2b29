"""Read a pickle as data. Nothing is imported, and nothing is called but what the caller lists.

A pickle is a program for a machine with a stack and a memo. Its instructions are decoded by `pickletools`, and those
that plain data needs are followed here; every other one ends the reading. A name stands for what `known` has under its
exact (module, qualified name). Work and memory are at most proportional to the length of the pickle: what is called may
not copy one long argument again and again, and keys are never nested, so that hashing one is quick.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Name = tuple[str, str]
LONGEST = 1 << 26  # bytes of a pickle
_SIZED = (str, bytes, list, tuple, dict, set)
_SCALARS = (str, int, float, bool, bytes, type(None))
_COPIED = 16  # elements of arguments for each byte of the pickle, at most


@dataclass(frozen=True)
class Maker:
    """What an allowed name does where it is called. `make` raises ValueError or TypeError for other arguments."""

    make: Callable[..., Any]


@dataclass(eq=False)
class NotedCall:
    """A call that is only noted: `name(*args)`, and the state that was set on its result."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = field(default=None)


def noted(name: str) -> Maker:
    """Notes calls of a name."""
    return Maker(lambda *args: NotedCall(name, args))


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
            raise ValueError(f"the pickle names {module!s:.60}.{name!s:.60}, which does not belong there")
        return self._known[module, name]

    def _made(self, maker: Maker, args: tuple[Any, ...]) -> Any:
        self._budget -= len(args) + sum(len(each) for each in args if isinstance(each, _SIZED))
        if self._budget < 0:
            raise ValueError("the pickle makes far more than it holds")
        return maker.make(*args)

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _popped(self, count: int) -> tuple[Any, ...]:
        items = tuple(self._stack[-count:])
        if len(items) < count:
            raise ValueError("the pickle takes what it never put down")
        del self._stack[-count:]
        return items


def _of(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"the pickle uses a {type(value).__name__} as a {kind.__name__}")
    return value


def checked_key(key: Any) -> Any:
    """A key, or an element of a set. Raises ValueError where hashing it might take long."""
    flat = isinstance(key, tuple) and len(key) <= 16 and all(isinstance(each, _SCALARS) for each in key)
    if not (flat or isinstance(key, (*_SCALARS, NotedCall))):
        raise ValueError(f"the pickle has a key of type {type(key).__name__}")
    return key


def _set_state(value: Any, state: Any) -> None:
    """On a noted call; and `_metadata`, which the state of a module has."""
    if isinstance(value, NotedCall):
        value.state = state
    elif type(value) is OrderedDict and isinstance(state, dict) and list(state) == ["_metadata"]:
        value._metadata = state["_metadata"]  # type: ignore[attr-defined]
    else:
        raise ValueError(f"the pickle sets attributes of a {type(value).__name__}")


def read_pickle(data: bytes, known: Mapping[Name, Any], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value of a pickle. `persistent` gives what an identifier of something outside of it stands for.

    Raises ValueError for whatever is not plain data, of `known` names and calls.
    """
    if len(data) > LONGEST:
        raise ValueError(f"the pickle has {len(data)} bytes, more than the {LONGEST} that one may have")
    machine = _Machine(known, persistent or _nothing_outside, _COPIED * len(data))
    try:
        return machine.run(data)
    except ValueError:
        raise
    except (LookupError, TypeError, ArithmeticError, AttributeError, RecursionError, MemoryError) as error:
        raise ValueError(f"the pickle is damaged: {type(error).__name__}: {error}") from error


def _nothing_outside(_: Any) -> Any:
    raise ValueError("the pickle refers to something outside of it")
