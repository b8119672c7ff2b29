"""Reads of tensors while a model is traced, which torch.export gets wrong or refuses.

`x.data` is `x.detach()`: the same numbers without a gradient, and writes to it are writes to x. torch.export makes a
constant of it, which would not change with the steps.

A number read from a constant, as in `if (mask == causal).all():`, is computed. A constant is what torch makes of
numbers and sizes alone. Sizes that it depends on become the numbers of the example inputs, as they do for branches
on sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes  # private; seen in 2.13.0
from torch.utils.weak import WeakIdKeyDictionary

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_NUMBERS = {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist}
_MAKES = {  # functions that make a tensor of numbers and sizes
    *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros, torch.tensor),
    *(torch.tril_indices, torch.triu_indices),
}
_WRITES = re.compile(r"__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__|.*[^_]_")
_Recipe = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


class TracedReads(TorchFunctionMode):
    """Mode in which `.data` and numbers of constants are read as in eager PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.recipes = WeakIdKeyDictionary()  # constant -> the call that made it

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # torch.cond calls dynamo, which would trace this mode too
            return func(*args, **kwargs)
        if func == _DATA:
            return args[0].detach()
        if func is torch.tensor and isinstance(args[0], Tensor):  # a copy, where torch.export would read numbers
            return args[0].detach().clone().to(**{k: v for k, v in kwargs.items() if k in ("dtype", "device")})
        if func in _NUMBERS and args[0] in self.recipes and (read := self._computed(func, args)) is not None:
            return read
        made = func(*args, **kwargs)
        self._note(made, (func, args, kwargs))
        return made

    def _note(self, made: Any, recipe: _Recipe) -> None:
        """Remember how a constant was made. A write to one may reach others, through views: forget them all."""
        func, args, kwargs = recipe
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not all(x in self.recipes for x in given):
            return
        if given and (_WRITES.fullmatch(func.__name__) or kwargs.get("inplace") or "out" in kwargs):
            self.recipes.clear()
        elif isinstance(made, Tensor) and made not in self.recipes and (given or func in _MAKES):
            self.recipes[made] = recipe

    def _computed(self, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return the number that is read; None if the constant is a random draw."""
        before = torch.get_rng_state()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            found = func(self._value(args[0]), *args[1:])
            drawn = not torch.equal(before, torch.get_rng_state())
            torch.set_rng_state(before)
        return None if drawn else found

    def _value(self, constant: Tensor) -> Tensor:
        """Return a constant at the sizes of the example inputs, which stop being symbols."""
        func, args, kwargs = self.recipes[constant]
        args, kwargs = pytree.tree_map(self._known, (tuple(args), dict(kwargs)))
        made: Tensor = func(*args, **kwargs)
        return made

    def _known(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._value(value)
        return int(value) if isinstance(value, torch.SymInt) else value
