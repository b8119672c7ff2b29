"""Attributes of a model's objects while a copy of the model runs in its place.

    loss=lambda out, y: F.cross_entropy(out, y) + model.aux

This loss holds the model itself, and would read what `aux` was when the copy was made. While the copy runs, the
model's modules and objects have the attributes of their copies: `aux` is what the copy's forward has set. So code that
calls a module of the model, or reads its parameters, calls and reads those of the copy.

A list cannot be another list: those that code holds by itself, as a global or in a closure, are not copied. They have
their elements back at the end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from autoptd.passes.custom_grad.hook_copies import copy_with_hooks
from autoptd.passes.kept.python_values import OF_MODULES, copied, holders, is_users, refill, values_of

one_at_a_time = threading.RLock()  # of threads: two would give back each other's attributes
_DEPTH, _MOST = 3, 1000  # of lists in lists, and elements of a list, that are looked at
Pairs = list[tuple[Any, Any]]  # objects, and what stands for each
_EARLIER: WeakKeyDictionary[nn.Module, Pairs] = WeakKeyDictionary()  # of a module that stands for others; None: itself


def stand_for(made: nn.Module, module: nn.Module, parts: Pairs | None = None) -> None:
    """Let code that holds a module have `made`, another one, wherever a copy of that is traced or run. `parts`: what of
    `made` stands for parts of the module."""
    others = [(x, y) for x, y in parts or [] if x is not module]
    _EARLIER[made] = [*_EARLIER.get(module, []), *others, (module, None)]


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a new module with the same attributes, parameters and children, which stands for the given one."""
    made = type(module).__new__(type(module))
    vars(made).update(vars(module))
    stand_for(made, module)
    return made


class ModelCopy:
    """A copy of a model and of a loss that is a module, and what of their objects stands for those of the model.

    Either may hold the other: a model that leaves a term on its loss, a loss with a hook on a layer."""

    def __init__(self, model: nn.Module, loss: Any, memo: Mapping[int, Any]) -> None:
        """`memo`: copies of some of the model's and the loss's tensors, by id, as `copy.deepcopy` takes them."""
        self._held = _held_by_code(model, loss)
        known: dict[int, Any] = {id(x): x for x in self._held} | dict(memo)
        self.model = copy_with_hooks(model, known)
        self.loss = copy_with_hooks(loss, known) if isinstance(loss, nn.Module) else loss
        originals: list[Any] = known.get(id(known), [])  # which deepcopy keeps alive
        self.pairs: Pairs = [(x, known[id(x)]) for x in originals if not isinstance(x, Tensor) and id(x) in known]
        for held in [x for x, _ in self.pairs if isinstance(x, nn.Module)]:
            for x, y in _EARLIER.get(held, []):
                if (made := known.get(id(held if y is None else y))) is not None:
                    self._replace(x, made)

    def _replace(self, x: object, made: object) -> None:
        """Let `made` be the copy of `x`, also where the loss is a module that registers `x`: not as its child there, as
        the loss may be a child of `made`."""
        own = {id(other) for y, other in self.pairs if y is x}
        for _, holder in self.pairs:
            children: dict[str, Any] = holder._modules if isinstance(holder, nn.Module) else {}
            for name in [name for name, child in children.items() if id(child) in own]:
                del children[name]
                object.__setattr__(holder, name, made)
        self.pairs += [(other, made) for y, other in self.pairs if y is x]
        self.pairs = [pair for pair in self.pairs if pair[0] is not x] + [(x, made)]

    def joined(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the attributes of the copy's modules that are lists which code holds too: (attributes, name, list)."""
        held = {id(x) for x in self._held}
        every = (vars(module) for module in self.model.modules())
        return [(attributes, name, x) for attributes in every for name, x in attributes.items() if id(x) in held]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Give the objects the attributes of their copies, for passes of the copy of the model and then of the loss."""
        with one_at_a_time:
            shared = [(x, vars(x), vars(made)) for x, made in self.pairs if _takes_attributes(x)]
            before = [(_elements(x), copied(_elements(x))) for x in self._held]
            try:
                for x, _, attributes in shared:
                    object.__setattr__(x, "__dict__", attributes)
                yield
            finally:
                for x, attributes, _ in shared:
                    object.__setattr__(x, "__dict__", attributes)
                for x, elements in before:
                    refill(x, elements)


def _takes_attributes(x: object) -> bool:
    """Return whether an object can be given the attributes of another."""
    try:
        object.__setattr__(x, "__dict__", vars(x))
    except (AttributeError, TypeError):
        return False
    return True


def _held_by_code(model: nn.Module, loss: object) -> list[Any]:
    """Return the lists, dictionaries and the like that functions, files and objects hold, also in others."""
    found: dict[int, Any] = {}
    others = [holder for holder in holders(model, loss) if not holder.restored]
    left = [x for holder in others for (_, key), x in values_of(holder) if key not in OF_MODULES]
    for _ in range(_DEPTH):
        left = [x for x in left if _stays(x) and id(x) not in found]
        found |= {id(x): x for x in left}
        held = [x.values() if isinstance(x, dict) else x for x in map(_elements, left)]
        left = [each for x in held if len(x) <= _MOST for each in x]
    return list(found.values())


def _stays(x: object) -> bool:
    """Return whether an object cannot be given what another one holds: also one of a class of the user's with slots."""
    return isinstance(x, (list, dict, deque, SimpleNamespace)) or (
        is_users(type(x).__module__) and not hasattr(x, "__dict__")
    )


def _elements(x: Any) -> Any:
    if isinstance(x, (list, dict, deque)):
        return x
    return vars(x) if isinstance(x, SimpleNamespace) else {}
