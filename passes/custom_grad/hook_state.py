"""Python state that a hook holds or reaches: what may outlive a forward pass.

Numbers and sizes of containers in closures, defaults, bound objects and global variables, followed a few levels deep.
Tensors count as present only: which tensors a pass reads is seen in its trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_DEEPEST = 5
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset, deque)


def code_of(hook: Any) -> object:
    """Return the code that a hook runs, equal for functions that differ only in what they hold."""
    match hook:
        case partial():
            return code_of(hook.func)
        case MethodType():
            return code_of(hook.__func__)
        case FunctionType():
            return hook.__code__
    return type(hook)


def state_of(value: object, depth: int = 0) -> object:
    """Return the state behind a value, in a form that is equal for equal states."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor) or depth == _DEEPEST:
        return type(value).__name__
    match value:
        case Mapping():
            return {repr(k): state_of(x, depth + 1) for k, x in value.items()}
        case set() | frozenset():
            return len(value)
        case list() | tuple() | deque():
            return [state_of(x, depth + 1) for x in value]
    return [type(value).__name__, *(state_of(x, depth + 1) for x in _reached(value))]


def _reached(value: Any) -> Iterator[object]:
    """Yield what a function, or an object of the user's class, holds."""
    match value:
        case partial():
            yield from (value.func, value.args, value.keywords)
        case MethodType():
            yield from (value.__func__, value.__self__)
        case FunctionType():
            yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
            yield from (value.__defaults__, value.__kwdefaults__)
            found = (value.__globals__.get(name) for name in value.__code__.co_names)
            yield from (x for x in found if isinstance(x, (*_CONTAINERS, dict, int, float)))
        case nn.Module():
            yield {k: x for k, x in vars(value).items() if not k.startswith("_")}
        case _ if hasattr(value, "__dict__") and not isinstance(value, type):
            yield vars(value)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
