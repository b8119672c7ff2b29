"""Refuse models whose Python state changes on every call (random draws, counters): a trace would freeze that state."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from autoptd.errors import AutoptdError, UnsupportedOp
from autoptd.passes.custom_grad.hooks import ForwardHooks, keeping
from autoptd.passes.left_tensors import Attribute
from autoptd.passes.random.skipped_layers import equal_programs
from autoptd.passes.trace.loss import Loss

_NUMBERS = (bool, int, float)


@contextmanager
def refuse_own_draws(model: nn.Module) -> Iterator[None]:
    """Wrap a trace. Raises UnsupportedOp if it advanced a random generator: of Python, of NumPy or a module's own."""
    before = _states(model)
    yield
    for name, state in _states(model).items():
        if name in before and state != before[name]:
            raise UnsupportedOp(
                f"forward draws random numbers with {name}: the program would repeat the draws of the trace",
                where=type(model).__name__,
                fix="draw them outside the model and pass them as an input; nn.Dropout is supported",
            )


def _states(model: nn.Module) -> dict[str, Any]:
    """Return the states of the global generators by the Python module that draws from them, and of a model's own."""
    found: dict[str, Any] = {"Python's random module": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, key, *rest = numpy.random.get_state()
        found["numpy.random"] = kind, key.tobytes(), *rest
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if (state := _state_of(value)) is not None:
                found[f"{name}.{key}".lstrip(".")] = state
    return found


def _state_of(value: object) -> object:
    """Return the state of a random generator; None of anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    return None


def refuse_counters(
    model: nn.Module, root: Loss, hooks: ForwardHooks, trace: Callable[[], ExportedProgram]
) -> ExportedProgram:
    """Return the trace of `root`, which wraps `model`. Raises UnsupportedOp if every pass changes a Python number, or
    reads a tensor that the pass before left in an attribute, or a hook keeps something from pass to pass.

    A number that only the first pass sets, such as a length, is a cache. A second trace, made if needed, tells. It has
    something that no op takes for each tensor that the first pass left.
    """
    before, held, (found, after, kept) = _numbers(model), hooks.state(), _traced(model, root, hooks, trace)
    changed: dict[Attribute, object] = {key: value for key, value in after.items() if before.get(key) != value}
    left, collects = root.left.found, hooks.collects or kept != held
    if not changed and not left and not collects:
        return found
    with _as_left(model, changed | left):
        try:
            other, second, again = _traced(model, root, hooks, trace)
        except Exception as error:
            if not left or not isinstance(error, AutoptdError | AttributeError | TypeError):
                raise (keeping(hooks) if collects else error) from error
            names = ", ".join(f"{name}.{key}".lstrip(".") for name, key in left)
            raise UnsupportedOp(
                f"forward reads {names} of the pass before, where it leaves a tensor that depends on data: the program "
                "would hold that of the trace",
                where=names,
                fix="keep it in a buffer (register_buffer), written to by self.name.copy_(…) under no_grad; or return "
                "it and pass it as an input",
            ) from error
    if collects and (kept != again or not equal_programs(found, other)):
        raise keeping(hooks)
    for key, value in changed.items():
        if second.get(key) != value:
            where = ".".join(filter(None, key))
            raise UnsupportedOp(
                f"forward changes {where}, a Python number, in every pass: the program would hold that of the trace",
                where=where,
                fix="pass it as an input, or count outside forward",
            )
    return found


@contextmanager
def _as_left(model: nn.Module, values: Mapping[Attribute, object]) -> Iterator[None]:
    """Give attributes the values that a pass left, within: torch.export restores those that a trace changed."""
    modules = dict(model.named_modules())
    held = {(name, key): vars(modules[name])[key] for name, key in values if key in vars(modules[name])}
    for (name, key), value in values.items():
        object.__setattr__(modules[name], key, value)
    try:
        yield
    finally:
        for name, key in values:
            if (name, key) in held:
                object.__setattr__(modules[name], key, held[name, key])
            elif key in vars(modules[name]):
                object.__delattr__(modules[name], key)


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


def _traced(
    model: nn.Module, root: nn.Module, hooks: ForwardHooks, trace: Callable[[], ExportedProgram]
) -> tuple[ExportedProgram, Mapping[tuple[str, str], object], object]:
    """Return the trace, and the Python state of the model and of its hooks at the end of forward."""
    seen: list[tuple[Mapping[tuple[str, str], object], object]] = []
    hook = root.register_forward_hook(lambda *_: seen.append((_numbers(model), hooks.state())))
    try:
        return trace(), *seen[-1]
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
