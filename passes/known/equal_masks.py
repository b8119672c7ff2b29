"""Masks that were computed twice, `x[~mask]` and `y[~mask]`, and `masked_select` as an index.

torch knows two selections to have equally many rows if one tensor is the mask of both. So the first mask of equal ones
takes the place of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

_SELECTS = (torch.masked_select, Tensor.masked_select)
_PLACES = (torch.where, Tensor.where, torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
_PURE = re.compile(  # functions that give the same for the same operands
    r"(__)?r?(invert|and|or|xor|eq|ne|lt|le|gt|ge|add|sub|mul|truediv|floordiv|div|mod|pow|neg|abs)(__)?"
    r"|less(_equal)?|greater(_equal)?|not_equal|(logical|bitwise)_(not|and|or|xor)|is(nan|inf|finite|in)"
    r"|bool|int|long|float|double|half|bfloat16|to|type|clone|contiguous|detach"
    r"|all|any|sum|cumsum|mean|amax|amin|argmax|argmin|norm|square|sqrt|exp|log|sigmoid|clamp|round|floor|remainder"
    r"|(un)?squeeze|expand(_as)?|view|reshape|(un)?flatten|transpose|permute|movedim|t|roll|flip|__getitem__"
)


class EqualMasks:
    """The computations of the masks of a trace, and the first mask of each that selected rows."""

    def __init__(self) -> None:
        self._keys = WeakIdKeyDictionary()  # mask -> its computation, and its version then
        self._first: dict[Hashable, Tensor] = {}
        self._read: dict[int, Tensor] = {}  # keeps what computations name by its id

    def selecting(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
        """Return a call, one that selects rows as an index by the first mask that is equal to its own."""
        given = dict(zip(("input", "mask"), args, strict=False)) | dict(kwargs) if func in _SELECTS else {}
        if given.keys() == {"input", "mask"}:
            x, mask, kwargs = given["input"], given["mask"], {}
            shape = torch.broadcast_shapes(x.shape, mask.shape)
            if mask.shape != shape:
                spread = mask.expand(shape)
                self.note(spread, Tensor.expand, (mask, shape), {})
                mask = spread
            func, args = Tensor.__getitem__, (x.expand(shape), mask)
        if func == Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return func, (args[0], self._equal(args[1])), kwargs
        if func in _PLACES and len(args) == 1 and not kwargs:
            return func, (self._equal(args[0]),), kwargs
        return func, args, kwargs

    def note(self, made: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Remember how a mask, or what one may be computed from, was computed."""
        name = getattr(func, "__name__", "")
        if isinstance(made, Tensor) and made not in self._keys and _PURE.fullmatch(name) and "out" not in kwargs:
            given, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
            key = (name.strip("_"), *(self._key(x) if isinstance(x, Tensor) else _plain(x) for x in given), str(spec))
            self._keys[made] = key, made._version

    def _key(self, x: Tensor) -> Hashable:
        key, version = self._keys.get(x, (None, -1))
        if key is not None and version == x._version:
            found: Hashable = key
            return found
        self._read[id(x)] = x
        return id(x), x._version

    def _equal(self, mask: Tensor) -> Tensor:
        """Return the first mask of the same computation, if neither was written to."""
        key, version = self._keys.get(mask, (None, -1))
        if key is None or version != mask._version:
            return mask
        first = self._first.setdefault(key, mask)
        return first if self._keys[first][1] == first._version else mask


def _plain(x: Any) -> Hashable:
    """Return what equal values have in common; of an object that may change, nothing.

    Sizes are those of the example: a selection of several tensors makes them equal.
    """
    if isinstance(x, slice):
        return "slice", *map(_plain, (x.start, x.stop, x.step))
    if isinstance(x, torch.SymInt):
        return x.node.hint
    plain = x is None or x is ... or isinstance(x, (bool, int, float, str, torch.dtype, torch.device))
    return (type(x).__name__, x) if plain else object()
