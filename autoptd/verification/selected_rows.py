"""The mask whose true elements are the rows of a tensor, in the plain model: an expert gets the rows that chose it.

    i, t = torch.where(mask)      a row for each true element of the mask, in their order
    h = expert(x[t])              so are they: a result of as many rows, computed from rows of the mask

A program computes all rows, and draws numbers for all. The plain model takes those of its rows. A tensor that is taken
for rows by mistake draws other numbers than the program, which a comparison shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

_INDICES = (torch.where, torch.nonzero, torch.argwhere, Tensor.nonzero, Tensor.argwhere, Tensor.where)


class SelectedRows:
    """The masks of the tensors that hold selected rows, and of the indices of such rows."""

    def __init__(self) -> None:
        self._masks = WeakIdKeyDictionary()

    def mask(self, x: Tensor) -> Tensor | None:
        """Return the mask whose true elements are the rows of dim 0, of which the tensor has as many."""
        mask = self._masks.get(x)
        return mask if mask is not None and x.ndim and x.shape[0] == int(mask.sum()) else None

    def note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """Remember what a call has made."""
        given = [x for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, Tensor)]
        if func in _INDICES and len(given) == 1:
            mask: Tensor | None = given[0] != 0
        elif func is Tensor.__getitem__ or func in (torch.masked_select, Tensor.masked_select):
            mask = next((x for x in given[1:] if x.dtype is torch.bool), None)
        else:
            mask = None
        if mask is None:
            mask = next((self._masks[x] for x in given if x in self._masks), None)
        if mask is not None:
            rows = int(mask.sum())
            for x in pytree.tree_leaves(made):
                if isinstance(x, Tensor) and rows in x.shape:
                    self._masks[x] = mask
