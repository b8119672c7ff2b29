"""Deep copies of models whose hooks belong to the copy.

    self.features = []
    layer.register_forward_hook(lambda module, args, out: self.features.append(out))

`copy.deepcopy` leaves functions as they are, so that this hook of a copy would write to the features of the original.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def copy_with_hooks(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a model. memo: copies of some of its tensors, by id, as `copy.deepcopy` takes them."""
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        for held in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in held.items():
                held[key] = bound_to(memo, hook)
    return made


def bound_to(copies: Mapping[int, Any], hook: Any) -> Any:
    """Return a hook that holds copies in place of what it holds, where there are some: id of an object -> its copy."""
    if id(hook) in copies:
        return copies[id(hook)]
    match hook:
        case FunctionType():
            return _function(copies, hook)
        case MethodType():
            return MethodType(hook.__func__, bound_to(copies, hook.__self__))
        case partial():
            named = {k: bound_to(copies, x) for k, x in hook.keywords.items()}
            return partial(bound_to(copies, hook.func), *(bound_to(copies, x) for x in hook.args), **named)
    return hook


def _function(copies: Mapping[int, Any], function: FunctionType) -> FunctionType:
    cells, given = function.__closure__ or (), function.__defaults__ or ()
    named = function.__kwdefaults__ or {}
    copies = {**copies, id(function): function}  # a function may hold itself
    new = [bound_to(copies, x) for x in (*map(_content, cells), *given, *named.values())]
    if all(x is y for x, y in zip(new, (*map(_content, cells), *given, *named.values()), strict=True)):
        return function
    held, defaults = new[: len(cells)], tuple(new[len(cells) : len(cells) + len(given)])
    closure = tuple(cell if x is _content(cell) else CellType(x) for cell, x in zip(cells, held, strict=True))
    made = FunctionType(function.__code__, function.__globals__, function.__name__, defaults or None, closure or None)
    made.__kwdefaults__ = dict(zip(named, new[len(cells) + len(given) :], strict=True)) or None
    vars(made).update(vars(function))
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _content(cell: CellType) -> Any:
    """Return what a cell holds; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
