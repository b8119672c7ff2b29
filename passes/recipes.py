"""Constants of a trace: how they are made of numbers and sizes, and what they hold at any size.

A number read from a constant is one of three:

    a size         `torch.div(x.size(1), 4, rounding_mode="floor") - 1` is s // 4 - 1, and stays that
    the same       `(torch.ones(b, s) > 0).any()` is True for every batch
    of the example all else: the sizes that it depends on become numbers

A number is the same at every size if the constants that it is made of are: computed at three sizes, each is uniform
along the dims whose size changes, and equal otherwise. Only ops that have no threshold may make them (`_ANY_SIZE`), and
of symbols they are given sizes of new tensors alone: nothing then makes a difference at a fourth size. The diagonal of
`tril` or the end of a slice would: what they make is computed at the example's sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch.utils import _pytree as pytree

from autoptd.passes.known.numbers import example_of

LARGEST = 2**26  # elements of a constant that is computed at several sizes


@dataclass(frozen=True, eq=False)
class Recipe:
    """The call that made a constant, in whose arguments constants are replaced by their own recipes."""

    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    of_inputs: bool = False  # depends on the values of inputs that are known
    shape: tuple[Any, ...] = ()
    number: int | SymInt | None = None  # the integer that it is, if it is computed from sizes alone

    def given(self) -> list[Any]:
        """Return the arguments of the call, without the lists and slices that they are in."""
        return leaves((self.args, dict(self.kwargs)))

    def parts(self) -> list[Recipe]:
        """Return the recipes of the constants that it is made of."""
        return [x for x in self.given() if isinstance(x, Recipe)]

    def value(self, size: Callable[[SymInt], int], done: dict[Recipe, Any] | None = None) -> Any:
        """Return what the call makes, at the sizes that `size` gives. done: gets what all calls make."""
        done = {} if done is None else done

        def number(x: Any) -> Any:
            if isinstance(x, Recipe):
                return done[x] if x in done else x.value(size, done)
            return size(x) if isinstance(x, SymInt) else x

        args, kwargs = each_leaf(number, (self.args, dict(self.kwargs)))
        done[self] = self.func(*args, **kwargs)
        return done[self]


def each_leaf(function: Callable[[Any], Any], given: Any) -> Any:
    """Return nested arguments with a function applied to each, and to the parts of slices."""

    def leaf(x: Any) -> Any:
        return slice(*map(function, (x.start, x.stop, x.step))) if isinstance(x, slice) else function(x)

    return pytree.tree_map(leaf, given)


def leaves(given: Any) -> list[Any]:
    """Return nested arguments in one list, the parts of slices among them."""
    found = pytree.tree_leaves(given)
    return [part for x in found for part in ((x.start, x.stop, x.step) if isinstance(x, slice) else (x,))]


# ---- sizes ----


def size_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | SymInt | None:
    """Return the integer that a call on integers makes, sizes among them; None if that is not known."""
    mode = kwargs.get("rounding_mode")
    if not all(isinstance(x, (int, SymInt)) for x in args) or kwargs.keys() - {"rounding_mode", "dtype", "device"}:
        return None
    name = {"div": f"div_{mode}"}.get(name, name.strip("_"))
    if name == "div_trunc" and not all(_is_natural(x) for x in args):
        return None
    found = _OF_INTEGERS.get(name)
    return found(*args) if found is not None and len(args) == (1 if name in _OF_ONE else 2) else None


_OF_ONE = ("tensor", "scalar_tensor", "as_tensor", "neg", "clone", "detach", "long")
_OF_INTEGERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("tensor", "scalar_tensor", "as_tensor", "clone", "detach", "long"), lambda a: a),
    "neg": operator.neg,
    **dict.fromkeys(("div_trunc", "div_floor", "floor_divide", "floordiv"), operator.floordiv),
    "rfloordiv": lambda a, b: b // a,
    **dict.fromkeys(("add", "radd"), operator.add),
    **dict.fromkeys(("mul", "rmul", "multiply"), operator.mul),
    **dict.fromkeys(("sub", "subtract"), operator.sub),
    **dict.fromkeys(("rsub",), lambda a, b: b - a),
    **dict.fromkeys(("remainder", "mod"), operator.mod),
    **dict.fromkeys(("maximum", "max"), torch.sym_max),
    **dict.fromkeys(("minimum", "min"), torch.sym_min),
}


def _is_natural(x: int | SymInt) -> bool:
    return x >= 0 if isinstance(x, int) else bool(x.node.expr.is_nonnegative)


# ---- the same at every size ----

# functions whose integers are sizes of their result: uniform along a dim, it is so at any size
_SIZED = {
    *("ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "empty", "new_empty"),
    *("expand", "broadcast_to", "repeat", "tile", "view", "reshape", "unflatten"),
}
# functions that do the same at any size: no number that they are given is compared with one, as `tril`'s diagonal is
_ANY_SIZE = _SIZED | {
    *("ones_like", "zeros_like", "full_like", "empty_like", "arange", "tensor", "scalar_tensor"),
    *("gt", "ge", "lt", "le", "eq", "ne", "add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "neg", "abs"),
    *("and", "or", "xor", "invert", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_not"),
    *("to", "bool", "int", "long", "float", "double", "half", "type", "type_as", "where", "masked_fill", "clamp"),
    *("unsqueeze", "squeeze", "permute", "transpose", "flatten", "t", "contiguous", "clone", "detach"),
    *("any", "all", "amax", "amin", "max", "min", "item", "tolist"),
}
# the sizes at which constants are computed: of samples, and of further symbols, small or times the example's
_OF_SAMPLES = (1, 2, 5)
_OF_OTHERS = ((2, 3, 7), (3, 5, 2), (5, 7, 11), (7, 2, 5))
_MOVES = {"getitem", "view", "reshape", "expand", "unsqueeze", "clone", "contiguous", "permute"}


def same_at_every_size(recipe: Recipe) -> Any:
    """Return what a recipe makes if that is the same at every size; else None."""
    calls = list(_calls(recipe))
    if not all(map(_has_no_threshold, calls)):
        return None
    sizes = {x.node.expr: x for call in calls for x in call.given() if isinstance(x, SymInt)}
    if any(call.of_inputs for call in calls) or not all(map(_is_sized, calls)):
        return None
    for as_example in (False, True):
        trials = _trials(sizes, as_example)
        if trials is None or any(_too_large(call, at) for at in trials for call in calls):
            continue
        made: list[dict[Recipe, Any]] = []
        try:
            for at in trials:
                made.append({})
                recipe.value(lambda size, at=at: _at(size, at), made[-1])  # type: ignore[misc]
        except (RuntimeError, ValueError, IndexError, TypeError):  # sizes that the code does not take
            continue
        if _is_same(calls, made):
            return made[0][recipe]
    return None


def _is_same(calls: Sequence[Recipe], made: Sequence[Mapping[Recipe, Any]]) -> bool:
    """Return whether the last of some calls makes the same at every size. made: their results at some sizes."""
    least: dict[Recipe, float] = {}  # call that makes another constant at each size -> none of its numbers is below
    for call in calls:
        values = [found[call] for found in made]
        if least.keys().isdisjoint(call.parts()):
            if not _alike(values):
                least[call] = 0 if call.func is torch.arange else -math.inf
        elif not _settles(call, least, made) or not _alike(values):
            least[call] = _least(call, least)
    return calls[-1] not in least


def _settles(call: Recipe, least: Mapping[Recipe, float], made: Sequence[Mapping[Recipe, Any]]) -> bool:
    """Return whether a call makes the same of constants that are not: it selects of equal numbers, or all or none."""
    name, x = _name(call.func), call.args[0]
    if name == "getitem" and isinstance(x, Recipe) and x not in least:
        return all(bool((found[x] == found[x].flatten()[0]).all()) for found in made)
    if not isinstance(x, Recipe) or len(call.args) != 2 or not isinstance(number := call.args[1], (int, float)):
        return False
    return least[x] >= number if name in ("ge", "lt") else least[x] > number and name in ("gt", "le")


def _least(call: Recipe, least: Mapping[Recipe, float]) -> float:
    """Return what no number that a call makes is below."""
    name, x = _name(call.func), call.args[0]
    if not isinstance(x, Recipe) or x not in least:
        return -math.inf
    if name in _MOVES and all(part is x for part in call.parts()):
        return least[x]
    if name == "add" and len(call.args) == 2 and not call.kwargs and isinstance(call.args[1], (int, float)):
        return least[x] + call.args[1]
    return -math.inf


def _calls(recipe: Recipe) -> list[Recipe]:
    """Return all that a recipe is made of, each once and after what it is made of itself."""
    found: dict[Recipe, None] = {}

    def visit(call: Recipe) -> None:
        for x in call.parts():
            if x not in found:
                visit(x)
        found[call] = None

    visit(recipe)
    return list(found)


def takes_sizes(func: Callable[..., Any]) -> bool:
    """Return whether the integers that a function is given are sizes of its result."""
    return getattr(func, "__name__", "") in _SIZED


def _name(func: Callable[..., Any]) -> str:
    """Return the name of a function without underscores; of a write, that of the method that writes."""
    return getattr(func.args[0] if isinstance(func, partial) else func, "__name__", "").strip("_")


def _has_no_threshold(call: Recipe) -> bool:
    """Return whether a call does the same at any size; indices are ends, all of a dim, or constants."""
    name = _name(call.func)
    if name not in ("getitem", "setitem") or len(call.args) < 2:
        return name in _ANY_SIZE
    index = call.args[1]
    given = index if isinstance(index, tuple) else (index,)
    return all(x in (0, -1, None, ..., slice(None)) or isinstance(x, Recipe) for x in given)


def _is_sized(call: Recipe) -> bool:
    """Return whether the symbols that a call is given are sizes of its result."""
    symbols = [x for x in call.given() if isinstance(x, (SymInt, torch.SymFloat, torch.SymBool))]
    sized = takes_sizes(call.func) or (call.func is torch.arange and len(call.args) == 1)
    return all(sized and isinstance(x, SymInt) for x in symbols)


def _trials(sizes: Mapping[sympy.Expr, SymInt], as_example: bool) -> list[dict[sympy.Symbol, int]] | None:
    """Return three sizes for each symbol, at which no size stays the same; None if there are none."""
    found: list[dict[sympy.Symbol, int]] = [{}, {}, {}]
    others = 0
    for symbol in sorted({s for expr in sizes for s in expr.free_symbols}, key=str):
        given = next(x for expr, x in sizes.items() if symbol in expr.free_symbols)
        example = example_of(symbol, given)
        if example is None or others == len(_OF_OTHERS):
            return None
        size, of_samples = example
        times = _OF_SAMPLES if of_samples else tuple(n * (size if as_example else 1) for n in _OF_OTHERS[others])
        others += not of_samples
        for at, n in zip(found, times, strict=True):
            at[symbol] = n
    stays = any(len({expr.xreplace(at) for at in found}) == 1 for expr in sizes if expr.free_symbols)
    return None if stays else found


def _at(size: Any, at: Mapping[sympy.Symbol, int]) -> int:
    return int(size.node.expr.xreplace(at)) if isinstance(size, SymInt) else int(size)


def _too_large(call: Recipe, at: Mapping[sympy.Symbol, int]) -> bool:
    return math.prod(_at(n, at) for n in call.shape) > LARGEST


def _alike(values: Sequence[Any]) -> bool:
    """Return whether values are equal, tensors but for the sizes of dims along which they are uniform."""
    first = values[0]
    if isinstance(first, (tuple, list)):
        same = all(len(x) == len(first) for x in values)
        return same and all(_alike(parts) for parts in zip(*values, strict=True))
    if not isinstance(first, Tensor):
        return all(x == first for x in values)
    if any(x.ndim != first.ndim or not x.numel() for x in values):
        return False
    for dim in range(first.ndim):
        if len({x.shape[dim] for x in values}) > 1:
            starts = [x.narrow(dim, 0, 1) for x in values]
            if not all(torch.equal(x, start.expand_as(x)) for x, start in zip(values, starts, strict=True)):
                return False
            values = starts
    return all(torch.equal(x, values[0]) for x in values)
