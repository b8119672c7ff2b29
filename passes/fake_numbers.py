"""Numbers that torch reads from fake tensors while a model is traced, as sizes in `x.view(n, -1)` are.

`fake_impls` and `_local_scalar_dense` are private to torch (seen in 2.13.0).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_impls

_READ = torch.ops.aten._local_scalar_dense.default


def numbers_read_as(number_of: Callable[[Tensor], Any]) -> AbstractContextManager[Any]:
    """Return a context manager in which the number of a fake tensor is what `number_of` says, unless that is None."""
    plain = fake_impls.op_implementations_dict[_READ]

    def read(mode: Any, func: Any, x: Tensor) -> Any:
        found = number_of(x)
        return plain(mode, func, x) if found is None else found

    return patch.dict(fake_impls.op_implementations_dict, {_READ: read})
