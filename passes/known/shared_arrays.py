"""Arrays of NumPy whose memory tensors share: constants of a trace, unless the model changes them later in the pass.

h = layer(h * torch.as_tensor(a))
a *= 0.5                            the constant would change too, in the layers before
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoptd.errors import UnsupportedOp

_SHARES = ("from_numpy", "as_tensor", "asarray")


@contextmanager
def unchanged_arrays() -> Iterator[None]:
    """Check at the end of a pass that no array was changed after a tensor was made of it. Raises UnsupportedOp."""
    made: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def noting(make: Any) -> Any:
        def call(x: Any, *args: Any, **kwargs: Any) -> Tensor:
            if isinstance(x, np.ndarray):
                made.append((x, x.copy()))
            found: Tensor = make(x, *args, **kwargs)
            return found

        return call

    patches = [patch.object(torch, name, noting(getattr(torch, name))) for name in _SHARES]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
    if not all(np.array_equal(now, then, equal_nan=now.dtype.kind in "fc") for now, then in made):
        raise UnsupportedOp(
            "forward changes a NumPy array whose memory a tensor shares", fix="copy it: torch.tensor(array)"
        )


def copied(args: Any) -> Any:
    """Return arguments with copies of arrays, for a function that copies them in a plain pass."""
    return pytree.tree_map_only(np.ndarray, np.copy, args)
