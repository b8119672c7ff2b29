"""`len(x)` of a tensor, as a size of the trace.

Python makes an int of what `len` returns, so the tracer would take the length of the example for that of every batch.
While a model is traced, the modules in which its code is written have a `len` of their own, which returns `x.size(0)`
for tensors: the same number outside a trace.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_LIBRARIES = frozenset({"autoptd", "torch"})  # whose own modules call `len` of sequences, or with ints expected


def tensor_len(x: Any) -> Any:
    """Return `len(x)`, of a tensor as a size that may be symbolic."""
    return x.size(0) if isinstance(x, Tensor) and x.ndim else builtins.len(x)


@contextmanager
def symbolic_len(model: nn.Module, loss: Callable[..., Any] | None = None) -> Iterator[None]:
    """Give the packages of the model's classes and of the loss `tensor_len` for `len`; take it back at the end.

    Modules with a `len` of their own keep it.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    names = {cls.__module__ for cls in classes} | {getattr(loss, "__module__", None) or type(loss).__module__}
    roots = {name.partition(".")[0] for name in names} - _LIBRARIES - sys.stdlib_module_names
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in roots]
    changed = [vars(module) for module in modules if "len" not in vars(module)]
    for space in changed:
        space["len"] = tensor_len
    try:
        yield
    finally:
        for space in changed:
            del space["len"]
