"""Warnings of what reads a planned model's tensors once their trained values are elsewhere.

    par.train_step(batch)
    model(x), model.layer(x)                         evaluates the values that training began with
    model.state_dict(), torch.save(model), copy.deepcopy(model)
    averaged.update_parameters(model)                averages them, as an average by hand does
    clip_grad_norm_(model.parameters(), 1.0)         clips gradients that are None
    optimizer.step()                                 of an optimizer of the model's own tensors: steps nothing

While a model is behind, the dicts of its modules' parameters and buffers say who reads them. What only writes does not
count, and dicts are plain again once values are loaded: torch.compile and exports meet no others.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, ItemsView, Sequence, ValuesView
from functools import cache
from types import FrameType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from autoptd.errors import InputsError

_WRITES = {"_apply", "zero_grad", "requires_grad_", "_functional_call"}  # functions of torch that read no values
_PASSED_ON = {"torch", "copy", "pickle", "contextlib"}  # packages whose functions read for their caller
_LOADS = "_load_from_state_dict"
LOADED = "model.load_state_dict(par.state_dict()) first"
_TEXTS = {  # by a function of torch or of `copy` that reads
    "_call_impl": f"the model is called with the values that training began with: for those of now, call "
    f"par.eval_step, or {LOADED}",
    "state_dict": "this state_dict has the values that training began with, and par.state_dict() has those of now: "
    "save that, or load it into the model first",
    "__deepcopy__": f"the model is copied with the values that training began with: for those of now, call {LOADED}",
    "__reduce__": f"the model is saved with the values that training began with: for those of now, call {LOADED}",
}
_OTHERS = (
    "the model's own parameters and buffers have the values that training began with, and no gradients: for the values "
    f"of now, call {LOADED}; par.gradients() and par.grad_norm are of the last step, and clip_norm= limits the norm"
)


_TRAINED_BY = WeakIdKeyDictionary()  # parameter -> a weak reference to the OldValues that has it
_STEPPED_BY = WeakIdKeyDictionary()  # the same, of the program whose step was the last


class OldValues:
    """The tensors of some modules, of which `trained` are trained elsewhere, and may be behind."""

    def __init__(self, modules: Sequence[nn.Module], trained: Sequence[Tensor], is_behind: Callable[[], bool]) -> None:
        self._held, self.is_behind = [vars(module) for module in modules], is_behind
        self._trained = trained
        _TRAINED_BY.update({p: ref(self) for p in trained})
        self._said: set[tuple[int, int]] = set()  # lines that were warned of since the last step

    def watch(self) -> None:
        """Warn of whoever reads the tensors from now on, while they are behind: the program steps."""
        _refuse_steps_of_old_values()
        _STEPPED_BY.update({p: ref(self) for p in self._trained})
        self._said = set()
        for held, kind in self._dicts():
            if not isinstance(held[kind], _Tensors) or self not in held[kind].of:
                held[kind] = _Tensors(held[kind], self)

    def overtaken(self) -> tuple[Tensor | None, bool]:
        """Return a parameter that another program has trained since this one's last step, and if both have the same."""
        found = [(p, _STEPPED_BY[p]()) for p in self._trained if p in _STEPPED_BY]
        behind = {old for _, old in found if old is not None and old is not self and old.is_behind()}
        p, other = next(((p, old) for p, old in found if old in behind), (None, None))
        return p, other is not None and {*map(id, other._trained)} == {*map(id, self._trained)}

    def leave(self) -> None:
        """Let the modules have plain dicts again: their tensors have other values now."""
        for held, kind in self._dicts():
            if isinstance(held[kind], _Tensors):
                held[kind] = held[kind].without(self)

    def _dicts(self) -> list[tuple[dict[str, Any], str]]:
        return [(held, kind) for held in self._held for kind in ("_parameters", "_buffers")]

    def read(self, reader: str, frame: FrameType | None) -> None:
        """Warn of a reader, a function of `_Tensors` that this frame has called. Reads of the package do not count."""
        names, depth = {reader}, 4  # of the frames between a warning and this one
        while frame is not None and _package(frame) in _PASSED_ON:
            names.add(frame.f_code.co_name)
            frame, depth = frame.f_back, depth + 1
        if frame is None or _package(frame) == "autoptd" or not names.isdisjoint(_WRITES):
            return
        if _LOADS in names:
            self.leave()
            return
        outer, steps = frame.f_back, 1
        while outer is not None:  # the outermost call of a module is where the user's loop calls the model
            if _package(outer) == "autoptd":
                return
            if outer.f_code.co_name == "_call_impl" and outer.f_back is not None:
                names.add("_call_impl")
                frame, depth, steps = outer, depth + steps, 0
            outer, steps = outer.f_back, steps + 1
        while _package(frame) == "torch" and frame.f_back is not None:
            frame, depth = frame.f_back, depth + 1
        where = id(frame.f_code), frame.f_lineno
        if where not in self._said:
            self._said.add(where)
            if self.is_behind():
                warnings.warn(next((t for n, t in _TEXTS.items() if n in names), _OTHERS), stacklevel=depth)
            else:
                self.leave()


class _Tensors(dict[str, Any]):
    """A module's parameters or buffers. Copies are plain dicts."""

    __slots__ = ("of",)

    def __init__(self, tensors: dict[str, Any], *of: OldValues) -> None:
        super().__init__(tensors)
        self.of: tuple[OldValues, ...] = (*of, *(tensors.of if isinstance(tensors, _Tensors) else ()))

    def without(self, one: OldValues) -> dict[str, Any]:
        """Return the same tensors, which are no longer those of `one`."""
        left = [each for each in self.of if each is not one]
        made = _Tensors(dict(self), *left)
        return made if left else dict(self)

    def _read(self, reader: str) -> None:
        for each in self.of:
            each.read(reader, sys._getframe(2))

    def __getitem__(self, key: str) -> Any:
        self._read("__getitem__")
        return super().__getitem__(key)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._read("items")
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._read("values")
        return super().values()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        self._read("__deepcopy__")
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        self._read("__reduce__")
        return dict, (dict(self),)


def old_values_of(p: Tensor) -> OldValues | None:
    """Return what has a parameter that the program planned last with it trains; None if there is no such."""
    return found() if (found := _TRAINED_BY.get(p)) is not None else None


@cache
def _refuse_steps_of_old_values() -> RemovableHandle:
    return register_optimizer_step_pre_hook(_refuse_old_values)


def _refuse_old_values(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Raise InputsError if an optimizer steps parameters without gradients, which a program trains elsewhere."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.grad is not None for p in parameters):  # plain training, whose values the next step of the program sees
        return
    if any(old.is_behind() for old in {old for old in map(old_values_of, parameters) if old is not None}):
        raise InputsError(
            "this optimizer has the model's own parameters, and train_step has updated those that are trained: "
            "neither its step nor its options and schedulers change anything",
            where=f"{type(optimizer).__name__}.step()",
            fix="leave it out: give parallelize optimizer=, optimizer_options= and parameter_groups=, and "
            "schedulers par.optimizer",
        )


def level_outside() -> int:
    """Return the `stacklevel` of a warning by the caller that points to the line outside of the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _package(frame) in _PASSED_ON | {"autoptd"}:
        frame, level = frame.f_back, level + 1
    return level


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
