"""What moves on in Python while a model runs: a trace would hold its first state for ever."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from autoptd.errors import UnsupportedOp

T = TypeVar("T")
_NUMBERS = (bool, int, float)


@contextmanager
def refuse_own_draws(model: nn.Module) -> Iterator[None]:
    """Around a trace. Raises UnsupportedOp where the global generator of Python or NumPy has moved on."""
    before = _states()
    yield
    for name, state in _states().items():
        if name in before and state != before[name]:
            raise UnsupportedOp(
                f"forward draws random numbers with {name}: a program would repeat those of the trace for ever",
                where=type(model).__name__,
                fix="draw them outside the model and pass them as an input; nn.Dropout is supported",
            )


def _states() -> dict[str, Any]:
    """Of generators, by the module that draws from them."""
    found: dict[str, Any] = {"Python's random module": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, key, *rest = numpy.random.get_state()
        found["numpy.random"] = kind, key.tobytes(), *rest
    return found


def refuse_counters(model: nn.Module, root: nn.Module, trace: Callable[[], T]) -> T:
    """The trace of `root`, around a model. Raises UnsupportedOp for a number on a module that every pass changes.

    What the first pass alone sets, as a length that it has seen, is a cache; only then is there a second trace.
    """
    before, found, after = _numbers(model), *_traced(model, root, trace)
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    if not changed:
        return found
    modules = dict(model.named_modules())
    for (name, key), value in changed.items():  # torch.export puts back what it found
        setattr(modules[name], key, value)
    _, again = _traced(model, root, trace)
    for (name, key), value in changed.items():
        setattr(modules[name], key, before[name, key]) if (name, key) in before else delattr(modules[name], key)
        if again.get((name, key)) != value:
            where = f"{name}.{key}".lstrip(".")
            raise UnsupportedOp(
                f"forward changes {where}, a Python number, in every pass: a program would hold that of the trace",
                where=where,
                fix="pass it as an input, or count outside forward",
            )
    return found


def _traced(model: nn.Module, root: nn.Module, trace: Callable[[], T]) -> tuple[T, Mapping[tuple[str, str], object]]:
    """The trace, and the numbers at the end of forward."""
    seen: list[Mapping[tuple[str, str], object]] = []
    hook = root.register_forward_hook(lambda *_: seen.append(_numbers(model)))
    try:
        return trace(), seen[-1]
    finally:
        hook.remove()


def _numbers(model: nn.Module) -> dict[tuple[str, str], object]:
    """Of all modules, by the module's name and their own."""
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in _NUMBERS and value == value  # no NaN
    }
