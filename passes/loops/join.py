"""The op that stands, in a traced graph, for the end of a loop over samples: the pieces of all of them, concatenated.

    join(pieces, count, dim)      pieces 0 … of the `count` there are in any batch, one after another in `dim`

The trace has as many pieces as its example has samples; the size of the result is that of a batch of any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

_LIBRARY = torch.library.Library("autoptd_loops", "FRAGMENT")
_LIBRARY.define("join(Tensor[] pieces, SymInt count, int dim) -> Tensor", tags=(torch.Tag.flexible_layout,))
JOIN = torch.ops.autoptd_loops.join.default


def _joined(pieces: Sequence[Tensor], count: Any, dim: int) -> Tensor:
    shape = list(pieces[0].shape)
    shape[dim] = shape[dim] * count
    return pieces[0].new_empty(shape)


_LIBRARY.impl("join", _joined, "CompositeExplicitAutograd")
_LIBRARY.impl("join", _joined, "Meta")


def turns_counted(pieces: list[Any]) -> Any:
    """Return the length of a list, as a size of the batch if a loop over samples is traced and has added to it."""
    given = [x for x in pieces if isinstance(x, Tensor)]
    if len(given) == len(pieces) and has_torch_function(given):
        return handle_torch_function(turns_counted, given, pieces)
    return len(pieces)
