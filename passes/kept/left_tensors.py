"""Tensors that a forward pass leaves in Python values (`python_values.py`), where the next pass may read them.

    self.mem = h.detach()           read by the next pass: state, which a traced program would not have
    self.last_loss = loss           not read
    self.mean = x.mean(1)           read later in the same pass

A trace sees one pass. It is made again with something in their place that no op takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from autoptd.passes.graph import ancestors
from autoptd.passes.kept.python_values import Name, holders, sequence_of, values_of
from autoptd.passes.opcall import is_random


@dataclass(eq=False)
class LeftTensors:
    """Stand-ins for the tensors that a pass left, by their names. No container: torch.export would restore it."""

    found: dict[Name, object] = field(default_factory=dict)

    @contextmanager
    def of(self, model: nn.Module, loss: object, inputs: Mapping[str, Tensor]) -> Iterator[None]:
        """Wrap a pass of a model and its loss, and find what it leaves."""
        before = _held_by(model, loss)
        yield
        self.found = _left_by(model, before, _held_by(model, loss), list(inputs.values()))


class Left:
    """Stand-in for a tensor that a pass left: no op takes it."""


_Values = dict[Name, tuple[object, list[object]]]


def _held_by(model: nn.Module, loss: object) -> _Values:
    """Return the values that are tensors or containers of tensors, with these tensors."""
    every = ((name, value, _held(value)) for held in holders(model, loss) for name, value in values_of(held))
    return {name: (value, held) for name, value, held in every if any(isinstance(x, Tensor) for x in held)}


def _left_by(model: nn.Module, before: _Values, after: _Values, inputs: Collection[Tensor]) -> dict[Name, object]:
    """Return the names of the tensors that a pass left and that another pass may leave otherwise, with stand-ins,
    shared as these are: tensors of data, of random numbers, or of what their names held before."""
    found: dict[Name, object] = {}
    shared: dict[int, object] = {}
    data = [*inputs, *(p for p in model.parameters() if p.requires_grad)]
    own = {id(p) for p in model.parameters()}  # as a recurrent layer lists them
    for name, (value, held) in after.items():
        _, old = before.get(name, (None, []))
        new = [x for x in held if isinstance(x, Tensor) and id(x) not in own and all(x is not y for y in old)]
        if any(_made_of(x, [*data, *(y for y in old if isinstance(y, Tensor))]) for x in new):
            found[name] = shared.setdefault(id(value), _stand_in(value))
    return found


def _stand_in(value: object) -> object:
    """Return what takes the place of a value: no tensor; or the same container, which hooks may hold too, of none."""
    match value:
        case dict():
            value.update(dict.fromkeys(value, Left()))
        case list() | deque():
            for i in range(len(value)):
                value[i] = Left()
        case tuple():
            return tuple(Left() for _ in value)
        case _:
            return Left()
    return value


def _held(value: object) -> list[object]:
    """Return what a container holds, or the value itself."""
    if isinstance(value, dict):
        return list(value.values())
    base = sequence_of(value)
    return list(base.__iter__(value)) if base else [value]


def _made_of(x: Tensor, given: Collection[Tensor]) -> bool:
    """Return whether a tensor is computed from one of others, or drawn, as far as a trace under way records that.

    The proxies of a trace, and its constants, are private to torch (seen in 2.13.0).
    """
    mode = get_proxy_mode()
    if mode is None:
        return True
    tracer: Any = mode.tracer
    node = _node(x, tracer)
    if node is None:
        return any(x is y for y in given)
    made_of = ancestors([node])
    constants = [getattr(tracer.root, str(n.target), None) for n in made_of if n.op == "get_attr"]
    return (
        not made_of.isdisjoint(_node(y, tracer) for y in given)
        or any(is_random(n.target) for n in made_of)
        or any(x is y for x in constants for y in given)
    )


def _node(x: Tensor, tracer: Any) -> fx.Node | None:
    found = get_proxy_slot(x, tracer, None)
    return None if found is None else found.proxy.node
