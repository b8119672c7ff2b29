"""Reads of tensors while a model is traced, which torch.export gets wrong or refuses.

`x.data` is `x.detach()`: the same numbers without a gradient, and writes to it are writes to x. torch.export makes a
constant of it, which would not change with the steps.

`torch.div(x, y, out=z)` is `z.copy_(torch.div(x, y))`, a plain write.

A number read from a constant, as in `if (mask == causal).all():`, is computed (`recipes.py`). A constant is what torch
makes of numbers and sizes alone. Sizes that the number depends on become the numbers of the example inputs, as they do
for branches on sizes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes  # private; seen in 2.13.0
from torch.utils.weak import WeakIdKeyDictionary

from autoptd.errors import UnsupportedOp
from autoptd.passes.data_checks import passing
from autoptd.passes.fake_numbers import numbers_read_as
from autoptd.passes.known.equal_masks import EqualMasks
from autoptd.passes.known.of_sizes import OF_SIZES, is_known
from autoptd.passes.known.shared_arrays import copied
from autoptd.passes.normalise.functionalize import KEEP_STATE
from autoptd.passes.recipes import Recipe, each_leaf, leaves, same_at_every_size, size_of, takes_sizes

_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_NUMBERS = {
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.item,
    Tensor.tolist,
    Tensor.__format__,
}
OF_NUMBERS = {torch.div, torch.floor_divide, torch.true_divide, torch.add, torch.sub, torch.mul, torch.remainder}
MAKES = {  # functions that make a tensor of numbers and sizes
    *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros, torch.tensor),
    torch.as_tensor,
    *(torch.tril_indices, torch.triu_indices, torch.scalar_tensor, *OF_NUMBERS),
}
# functions that make a tensor of the shape and dtype of another
OF_SHAPES = {
    *(torch.ones_like, torch.zeros_like, torch.full_like, torch.empty_like),
    *(Tensor.new_ones, Tensor.new_zeros, Tensor.new_full, Tensor.new_tensor, Tensor.new_empty),
}
WRITES = re.compile(r"__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__|.*[^_]_")


class TracedReads(TorchFunctionMode):
    """Mode in which `.data` and numbers of constants are read as in eager PyTorch."""

    def __init__(self, left_out: set[str]) -> None:
        super().__init__()
        self.left_out = left_out  # places of checks of data
        self.recipes = WeakIdKeyDictionary()  # constant -> its Recipe
        self.masks = EqualMasks()

    def __enter__(self) -> TracedReads:
        self._sizes = numbers_read_as(self.number_of)
        self._sizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._sizes.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # torch.cond calls dynamo, which would trace this mode too
            return func(*args, **kwargs)
        if func == _DATA:
            return args[0].detach()
        if func == _SET_DATA:
            if _memory(args[0]) == _memory(args[1]) and args[0].shape == args[1].shape:  # the end of `x.data += y`
                return None
            raise UnsupportedOp("forward assigns to x.data of a tensor", fix=KEEP_STATE)
        if func in (torch.tensor, Tensor.new_tensor):  # they copy
            args = copied(args)
        if func is torch.tensor and isinstance(args[0], Tensor):  # a copy, where torch.export would read numbers
            return args[0].detach().clone().to(**{k: v for k, v in kwargs.items() if k in ("dtype", "device")})
        func, args, kwargs = self.masks.selecting(func, args, kwargs)
        if func in _NUMBERS and args[0] in self.recipes:
            if (found := self.read(func, *args)) is not None:
                return found
        elif func == Tensor.__bool__ and (answer := passing(self.left_out)) is not None:
            return answer
        made = _written_out(func, args, kwargs)
        if made is None:
            made = (OF_SIZES[func] if is_known(func, args, kwargs) else func)(*args, **kwargs)
        self.masks.note(made, func, args, kwargs)
        self.note(made, func, args, kwargs)
        return made

    def note(self, made: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Remember how a constant was made; forget those that share memory with one that is written to."""
        given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        if given and (WRITES.fullmatch(func.__name__) or kwargs.get("inplace") or "out" in kwargs):
            known = all(x in self.recipes for x in given) and given[0] is args[0] and "out" not in kwargs
            after = self.recipe(partial(_written, func), args, kwargs, args[0].shape) if known else None
            for x in (given[0], *(x for x in leaves(kwargs.get("out")) if isinstance(x, Tensor))):
                self.forget(x)
            if after is not None:
                self.recipes[args[0]] = after
        elif all(x in self.recipes for x in given[func in OF_SHAPES :]) and (given or func in MAKES):
            parts = list(enumerate(made)) if isinstance(made, (tuple, list)) else []
            recipe = self.recipe(func, args, kwargs, getattr(made, "shape", ()))
            for i, part in parts:
                if isinstance(part, Tensor) and part not in self.recipes:
                    of_inputs, shape = recipe.of_inputs, tuple(part.shape)
                    self.recipes[part] = Recipe(operator.getitem, (recipe, i), of_inputs=of_inputs, shape=shape)
            if isinstance(made, Tensor) and made not in self.recipes:
                self.recipes[made] = recipe
                if not made.ndim and made.dtype == torch.int64:
                    self.recipes[made] = replace(recipe, number=self._size(func, args, kwargs))

    def recipe(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[Any] = ()
    ) -> Recipe:
        """Return the recipe of a call of constants, or of a tensor of which only its shape is read."""

        def known(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if func in OF_SHAPES and x is args[0]:
                return Recipe(torch.zeros, (tuple(x.shape),), {"dtype": x.dtype}, shape=tuple(x.shape))
            number = self.recipes[x].number if func in MAKES or x is not args[0] else None
            return self.recipes[x] if number is None or not takes_sizes(func) else number

        args, kwargs = each_leaf(known, (tuple(args), dict(kwargs)))
        parts = (x for x in leaves((args, kwargs)) if isinstance(x, Recipe))
        return Recipe(func, tuple(args), kwargs, any(part.of_inputs for part in parts), tuple(shape))

    def _size(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | SymInt | None:
        """Return the integer that a call makes of sizes."""
        numbers = [self.recipes[x].number if isinstance(x, Tensor) and x in self.recipes else x for x in args]
        return size_of(getattr(func, "__name__", ""), numbers, kwargs)

    def read(self, func: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """Return what a call reads from a constant, as numbers; None if it is not known."""
        recipe = self.recipes[x]
        if recipe.number is not None:
            return recipe.number if func is Tensor.item else None
        call = Recipe(func, (recipe, *args))
        with eager():
            found = self._without_draws(lambda: same_at_every_size(call))
        return self.computed(call) if found is None else found

    def number_of(self, x: Tensor) -> int | float | bool | SymInt | None:
        """Return the number that a constant of one element is, for code of torch that takes it as a size."""
        if x not in self.recipes:
            return None
        number = self.recipes[x].number
        return self.read(Tensor.item, x) if number is None else number

    def size(self, symbol: SymInt) -> int:
        """Return a size that a number depends on: that of the example inputs, which stops being a symbol."""
        return int(symbol)

    def computed(self, recipe: Recipe) -> Any:
        """Return what a recipe makes, as real tensors and numbers; None if it draws random numbers."""
        with eager():
            return self._without_draws(lambda: recipe.value(self.size))

    def _without_draws(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function; None if it draws random numbers, which it does not use up."""
        before = torch.get_rng_state()
        found = function()
        drawn = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
        return None if drawn else found

    def forget(self, written: Tensor) -> None:
        """Forget how a tensor was made, and all that share memory with it."""
        memory = _memory(written)
        for x in [x for x in self.recipes if _memory(x) == memory]:
            del self.recipes[x]


def _written_out(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor passed as `out=` after a copy of the result to it; None where torch does anything else."""
    out = kwargs.get("out")
    given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not isinstance(out, Tensor) or (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return None
    made = func(*args, **{name: x for name, x in kwargs.items() if name != "out"})
    if not isinstance(made, Tensor) or made.shape != out.shape:
        return None
    with eager():
        fits = torch.can_cast(made.dtype, out.dtype)
    return out.copy_(made) if fits else None


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


def _memory(x: Tensor) -> int:
    """Return what identifies the memory of a tensor, also within `torch.vmap` (private to torch; seen in 2.13.0)."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.untyped_storage()._cdata
