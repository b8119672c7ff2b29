"""Reads of tensors while a model is traced, which torch.export gets wrong or refuses.

`x.data` is `x.detach()`: the same numbers without a gradient, and writes to it are writes to x. torch.export makes a
constant of it, which would not change with the steps.

A number read from a constant, as in `if (mask == causal).all():`, is computed. A constant is what torch makes of
numbers and sizes alone. Sizes that it depends on become the numbers of the example inputs, as they do for branches
on sizes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes  # private; seen in 2.13.0
from torch.utils.weak import WeakIdKeyDictionary

from autoptd.passes.data_checks import passing
from autoptd.passes.known.covariance import COVARIANCES

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_NUMBERS = {
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.item,
    Tensor.tolist,
    Tensor.__format__,
}
MAKES = {  # functions that make a tensor of numbers and sizes
    *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros, torch.tensor),
    torch.as_tensor,
    *(torch.tril_indices, torch.triu_indices),
}
WRITES = re.compile(r"__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__|.*[^_]_")


@dataclass(frozen=True, eq=False)
class Recipe:
    """The call that made a constant, in whose arguments constants are replaced by their own recipes."""

    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    of_inputs: bool = False  # depends on the values of inputs that are known

    def value(self, size: Callable[[torch.SymInt], int]) -> Any:
        """Return what the call makes, at the sizes that `size` gives."""

        def number(x: Any) -> Any:
            if isinstance(x, Recipe):
                return x.value(size)
            return size(x) if isinstance(x, torch.SymInt) else x

        args, kwargs = pytree.tree_map(number, (self.args, dict(self.kwargs or {})))
        return self.func(*args, **kwargs)


class TracedReads(TorchFunctionMode):
    """Mode in which `.data` and numbers of constants are read as in eager PyTorch."""

    def __init__(self, left_out: set[str]) -> None:
        super().__init__()
        self.left_out = left_out  # places of checks of data
        self.recipes = WeakIdKeyDictionary()  # constant -> its Recipe

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
        if func in COVARIANCES and not {"fweights", "aweights"} & kwargs.keys():
            return COVARIANCES[func](*args, **kwargs)
        if func in _NUMBERS and args[0] in self.recipes:
            found = self.computed(Recipe(func, (self.recipes[args[0]], *args[1:])))
            if found is not None:
                return found
        elif func == Tensor.__bool__ and (answer := passing(self.left_out)) is not None:
            return answer
        made = func(*args, **kwargs)
        self.note(made, func, args, kwargs)
        return made

    def note(self, made: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Remember how a constant was made; forget those that share memory with one that is written to."""
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if given and (WRITES.fullmatch(func.__name__) or kwargs.get("inplace") or "out" in kwargs):
            known = all(x in self.recipes for x in given) and given[0] is args[0] and "out" not in kwargs
            after = self.recipe(partial(_written, func), args, kwargs) if known else None
            for x in (given[0], *pytree.tree_leaves(kwargs.get("out"))):
                self.forget(x)
            if after is not None:
                self.recipes[args[0]] = after
        elif all(x in self.recipes for x in given) and (given or func in MAKES):
            recipe = self.recipe(func, args, kwargs)
            parts = list(enumerate(made)) if isinstance(made, (tuple, list)) else []
            for i, part in parts:
                if isinstance(part, Tensor) and part not in self.recipes:
                    self.recipes[part] = Recipe(operator.getitem, (recipe, i), of_inputs=recipe.of_inputs)
            if isinstance(made, Tensor) and made not in self.recipes:
                self.recipes[made] = recipe

    def recipe(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recipe:
        """Return the recipe of a call of constants."""

        def known(x: Any) -> Any:
            return self.recipes[x] if isinstance(x, Tensor) else x

        args, kwargs = pytree.tree_map(known, (tuple(args), dict(kwargs)))
        assert isinstance(args, tuple)
        parts = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Recipe))
        return Recipe(func, args, kwargs, any(part.of_inputs for part in parts))

    def size(self, symbol: torch.SymInt) -> int:
        """Return a size that a number depends on: that of the example inputs, which stops being a symbol."""
        return int(symbol)

    def computed(self, recipe: Recipe) -> Any:
        """Return what a recipe makes, as real tensors and numbers; None if it draws random numbers."""
        with eager():
            before = torch.get_rng_state()
            found = recipe.value(self.size)
            drawn = not torch.equal(before, torch.get_rng_state())
            torch.set_rng_state(before)
        return None if drawn else found

    def forget(self, written: Tensor) -> None:
        """Forget how a tensor was made, and all that share memory with it."""
        if written not in self.recipes:
            return
        memory = written.untyped_storage()._cdata
        for x in [x for x in self.recipes if x.untyped_storage()._cdata == memory]:
            del self.recipes[x]


def _written(func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return a constant after a call that writes to it."""
    found = x.clone()
    func(found, *args, **kwargs)
    return found


@contextmanager
def eager() -> Iterator[None]:
    """Compute with real tensors within a trace."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
