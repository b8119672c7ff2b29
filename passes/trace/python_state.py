"""Refuse models whose Python state changes on every call (random draws, counters): a trace would freeze that state."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from autoptd.errors import UnsupportedOp

T = TypeVar("T")
_NUMBERS = (bool, int, float)


@contextmanager
def refuse_own_draws(model: nn.Module) -> Iterator[None]:
    """Wrap a trace. Raises UnsupportedOp if it advanced the global random generator of Python or NumPy."""
    before = _states()
    yield
    for name, state in _states().items():
        if name in before and state != before[name]:
            raise UnsupportedOp(
                f"forward draws random numbers with {name}: the program would repeat the draws of the trace",
                where=type(model).__name__,
                fix="draw them outside the model and pass them as an input; nn.Dropout is supported",
            )


def _states() -> dict[str, Any]:
    """Return the states of the global generators by the Python module that draws from them."""
    found: dict[str, Any] = {"Python's random module": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, key, *rest = numpy.random.get_state()
        found["numpy.random"] = kind, key.tobytes(), *rest
    return found


def refuse_counters(model: nn.Module, root: nn.Module, trace: Callable[[], T]) -> T:
    """Return the trace of `root`, which wraps `model`. Raises UnsupportedOp if every pass changes a Python number.

    A number that only the first pass sets, such as a length, is a cache. A second trace, made if needed, tells.
    """
    before, found, after = _numbers(model), *_traced(model, root, trace)
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    if not changed:
        return found
    modules = dict(model.named_modules())
    for (name, key), value in changed.items():  # torch.export restores the attributes that a trace changed
        setattr(modules[name], key, value)
    _, second = _traced(model, root, trace)
    for (name, key), value in changed.items():
        setattr(modules[name], key, before[name, key]) if (name, key) in before else delattr(modules[name], key)
        if second.get((name, key)) != value:
            where = f"{name}.{key}".lstrip(".")
            raise UnsupportedOp(
                f"forward changes {where}, a Python number, in every pass: the program would hold that of the trace",
                where=where,
                fix="pass it as an input, or count outside forward",
            )
    return found


@contextmanager
def write_assigned_buffers(model: nn.Module, root: nn.Module) -> Iterator[None]:
    """Wrap a trace of `root`, which wraps `model`: at the end of forward, write the tensors that it assigned to buffers
    into these. torch.export does so for the root's own buffers alone.

    Raises UnsupportedOp for a tensor of another shape or dtype, or one whose memory is also that of other state. The
    tensors are those that a trace puts in their place, so they are compared at the two ends of forward.
    """
    before: dict[str, Tensor] = {}

    def end(*_: object) -> None:
        after = dict(model.named_buffers(remove_duplicate=False))
        for name, x in after.items():
            if name not in before or x is before[name]:
                continue
            old, held = before[name], {**before, **after, **dict(model.named_parameters())}
            others = [other for other, y in held.items() if other != name and shares_memory(x, y)]
            if others or x.shape != old.shape or x.dtype != old.dtype:
                what = f"that is also {others[0]}" if others else f"of {x.dtype} {list(x.shape)}"
                raise UnsupportedOp(
                    f"forward assigns a tensor {what} to the buffer {name}, of {old.dtype} {list(old.shape)}",
                    where=name,
                    fix=f"assign a new tensor of its shape and dtype, or write into it: self.{name}.copy_(…)",
                )
            owner, leaf = name.rpartition(".")[::2]
            model.get_submodule(owner)._buffers[leaf] = old.copy_(x)

    hooks = [
        root.register_forward_pre_hook(lambda *_: before.update(model.named_buffers(remove_duplicate=False))),
        root.register_forward_hook(end),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return x is y or x.untyped_storage()._cdata == y.untyped_storage()._cdata


def _traced(model: nn.Module, root: nn.Module, trace: Callable[[], T]) -> tuple[T, Mapping[tuple[str, str], object]]:
    """Return the trace, and the model's Python numbers at the end of forward."""
    seen: list[Mapping[tuple[str, str], object]] = []
    hook = root.register_forward_hook(lambda *_: seen.append(_numbers(model)))
    try:
        return trace(), seen[-1]
    finally:
        hook.remove()


def _numbers(model: nn.Module) -> dict[tuple[str, str], object]:
    """Return the number-valued attributes of all modules, by (module name, attribute)."""
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in _NUMBERS and value == value  # no NaN
    }
