"""Refuse models whose Python state changes on every call (random draws, counters): a trace would freeze that state."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map

from autoptd.errors import AutoptdError, InputsError, UnsupportedOp
from autoptd.passes.custom_grad.hooks import ForwardHooks, keeping
from autoptd.passes.graph import updated_values
from autoptd.passes.kept.copies import ModelCopy
from autoptd.passes.kept.left_tensors import Left
from autoptd.passes.kept.python_values import KEEPERS, Holder, Name, copied, frozen, holders, label, refill, values_of
from autoptd.passes.random.skipped_layers import equal_programs
from autoptd.passes.trace.loss import Loss
from autoptd.passes.trace.trace_errors import refuse_caught_errors
from autoptd.passes.trace.traced import Traced


@contextmanager
def refuse_own_draws(model: nn.Module) -> Iterator[None]:
    """Wrap a trace. Raises UnsupportedOp if it advanced a global random generator of Python or NumPy.

    Of other generators, `refuse_changes` finds that their states change.
    """
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


def refuse_changes(
    copies: ModelCopy, root: Loss, hooks: ForwardHooks, trace: Callable[[], ExportedProgram], kept: set[Name]
) -> ExportedProgram:
    """Return the trace of `root`, which wraps a copy. Raises UnsupportedOp if the second pass is not as the first.

    That is where every pass changes a Python value (`python_values.py`), a pass reads a tensor that the pass before
    left in one, or a value that the first pass sets decides what the second computes. What only the first pass sets,
    such as a length, is a cache. A second trace, made if needed, tells. It has something that no op takes for each
    tensor that the first pass left. Python values are afterwards as before. `kept`: gets the names of these tensors.
    """
    model, joined = copies.model, copies.joined()
    start = _Values.of(model, root)
    try:
        found, first = _traced(model, root, trace, start, joined)
        left = root.left.found
        kept.update(left)
        changed = first.changed_since(start)
        if not changed and not left and not hooks.collects:
            return found
        for name in changed:  # torch.export has undone what modules hold
            if first.holders[name].restored:
                first.put(name, first.held[name])
        for name, stand_in in left.items():
            first.put(name, stand_in)
        try:
            again, second = _traced(model, root, trace, first, joined)
        except Exception as error:
            if hooks.collects:
                raise keeping(hooks) from error
            if not left or not isinstance(error, AutoptdError | AttributeError | TypeError):
                raise
            names = ", ".join(map(label, left))
            raise UnsupportedOp(
                f"forward reads {names} of the pass before, where it leaves a tensor that depends on data or on "
                "sizes, or is drawn: the program would hold that of the trace",
                where=names,
                fix="keep it in a buffer (register_buffer), written to by self.name.copy_(…) under no_grad; or return "
                "it and pass it as an input; make a table of sizes, such as a mask, anew in every pass",
            ) from error
        twice = second.changed_since(first) & changed
        if hooks.collects and (twice or not equal_programs(found, again)):
            raise keeping(hooks)
        for name in twice:
            raise UnsupportedOp(
                f"forward changes {label(name)}, a Python value, in every pass: the program would hold that of the "
                "trace",
                where=label(name),
                fix="pass it as an input, or count and draw outside forward",
            )
        if not equal_programs(found, again):
            names = ", ".join(map(label, sorted(changed))) or "what a pass leaves"
            raise UnsupportedOp(
                f"forward computes something else in its second pass than in its first, which changes {names}: the "
                "program would repeat one of them",
                where=names,
                fix="set it outside forward, or pass what differs as an input",
            )
        return found
    finally:
        start.put_back(_Values.of(model, root))


@dataclass(eq=False)
class _Values:
    """Python values at one time, by name.

    `held`: the objects; `copies`: these with lists and dictionaries copied, but what modules hold, which torch.export
    restores; `states`: what `frozen` makes of them.
    """

    holders: dict[Name, Holder] = field(default_factory=dict)
    held: dict[Name, object] = field(default_factory=dict)
    copies: dict[Name, object] = field(default_factory=dict)
    states: dict[Name, object] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, root: Loss) -> _Values:
        found, known = cls(), dict[int, object]()
        for holder in holders(model, root.objective.callable_of(model)):
            for name, value in values_of(holder):
                state = frozen(value, known)
                if state is None and not isinstance(value, (*KEEPERS, Left)):
                    continue
                found.holders[name], found.held[name], found.states[name] = holder, value, state
                if not holder.restored:
                    found.copies[name] = copied(value)
        return found

    def changed_since(self, before: _Values) -> set[Name]:
        """Return the names of the numbers that differ, on their own or in containers."""
        return {name for name, state in self.states.items() if state is not None and before.states.get(name) != state}

    def put(self, name: Name, value: object) -> None:
        self.holders[name].put(name[1], value)

    def put_back(self, now: _Values) -> None:
        """Give each holder what it had, of which it has `now` other objects or other elements."""
        for name in now.held.keys() - self.held.keys():
            now.holders[name].drop(name[1])
        for name, value in self.held.items():
            if now.held.get(name) is not value:
                self.put(name, value)
            refill(value, self.copies.get(name, value))


@contextmanager
def write_assigned_buffers(root: nn.Module) -> Iterator[None]:
    """Wrap a trace of `root`, which wraps the model, and a loss that is a module: at the end of forward, write the
    tensors that it assigned to buffers into these. torch.export does so for the root's own buffers alone.

    Raises UnsupportedOp for a tensor of another shape or dtype, or one whose memory is also that of other state. The
    tensors are those that a trace puts in their place, so they are compared at the two ends of forward.
    """
    before: dict[str, Tensor] = {}

    def end(*_: object) -> None:
        after = dict(root.named_buffers(remove_duplicate=False))
        for path, x in after.items():
            if path not in before or x is before[path]:
                continue
            name = path.removeprefix("model.")
            old, held = before[path], {**before, **after, **dict(root.named_parameters())}
            others = [y.removeprefix("model.") for y, t in held.items() if y != path and shares_memory(x, t)]
            if others or x.shape != old.shape or x.dtype != old.dtype:
                what = f"that is also {others[0]}" if others else f"of {x.dtype} {list(x.shape)}"
                raise UnsupportedOp(
                    f"forward assigns a tensor {what} to the buffer {name}, of {old.dtype} {list(old.shape)}",
                    where=name,
                    fix=f"assign a new tensor of its shape and dtype, or write into it: self.{name}.copy_(…)",
                )
            owner, leaf = path.rpartition(".")[::2]
            root.get_submodule(owner)._buffers[leaf] = old.copy_(x)

    hooks = [
        root.register_forward_pre_hook(lambda *_: before.update(root.named_buffers(remove_duplicate=False))),
        root.register_forward_hook(end),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def refuse_updates(model: nn.Module, traced: Traced, *, evaluating: bool) -> None:
    """Raise an error for an updated buffer of the loss, one whose memory another buffer or parameter shares, and one
    that is updated in eval mode, unless nothing reads what it held and no checkpoint has it."""
    saved = model.state_dict(keep_vars=True)
    held = {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters())}
    for arg in updated_values(traced.graph.graph):
        name = traced.buffers.get(arg)
        if name is None:
            raise UnsupportedOp(
                "the loss writes to a buffer of its own, or a metric to one",
                fix="hold the buffer in the model; a metric returns values of each sample, which evaluate averages",
            )
        if other := next((n for n, x in held.items() if x is not held[name] and shares_memory(x, held[name])), ""):
            raise UnsupportedOp(
                f"forward updates the buffer {name}, which shares its memory with {other}",
                where=name,
                fix="register a tensor of its own under each name, by .clone()",
            )
        if evaluating and (name in saved or _is_read(traced.graph.graph, arg)):
            raise InputsError(
                f"forward updates the buffer {name} in eval mode too: one process would go on from its new value after "
                "an evaluation, which updates nothing here",
                where=name,
                fix="update it in training alone: if self.training: …",
            )


def _is_read(graph: fx.Graph, name: str) -> bool:
    """Return whether an op reads the values of a placeholder; `copy` has it for its shape."""
    node = next(n for n in graph.find_nodes(op="placeholder") if n.name == name)
    readers = (user for user in node.users if user.op != "output")
    return any(user.target is not torch.ops.aten.copy.default or user.args[1] is node for user in readers)


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return x is y or x.untyped_storage()._cdata == y.untyped_storage()._cdata


def _traced(
    model: nn.Module,
    root: Loss,
    trace: Callable[[], ExportedProgram],
    before: _Values,
    joined: Sequence[tuple[dict[str, Any], str, Any]],
) -> tuple[ExportedProgram, _Values]:
    """Return the trace, and the model's Python values at the end of forward.

    torch.export gives modules other lists and dictionaries, with what they held before; those that have changed are
    copied for that. But `joined`, which code holds too, stay in their places, with what they hold now.
    """
    seen: list[_Values] = []
    shared = {id(x) for *_, x in joined}

    def end(*_: object) -> None:
        values = _Values.of(model, root)
        for name in values.changed_since(before):
            if id(values.held[name]) not in shared:
                values.held[name] = tree_map(lambda x: x, values.held[name])
        seen.append(values)

    hook = root.register_forward_hook(end)
    try:
        with refuse_caught_errors():
            program = trace()
        return program, seen[-1]
    finally:
        hook.remove()
        for attributes, name, x in joined:
            attributes[name] = x
