"""Fake CPU tensors, with shapes but no data, on which a model of any size is traced.

The meta device would lose the values of constants that `forward` creates, such as the index of `x[..., [-1]]`.
`FakeTensorMode` is private to torch (seen in 2.13.0); no other file of autoptd imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch._dynamo.config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode


def fake_cpu() -> FakeTensorMode:
    """Return a context manager in which new tensors take no memory."""
    return FakeTensorMode(shape_env=ShapeEnv())


def without_shape_cache() -> AbstractContextManager[None]:
    """Return a context manager in which new fake modes do not cache shapes by op and arguments.

    An entry with symbolic sizes costs more to make than it saves, as equal modules are traced once anyway: gpt2 is
    traced in 1.1 s instead of 1.6, llama3-8b in 1.4 instead of 1.7.
    """
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    return patched


class DataAsDetach(TorchFunctionMode):
    """Mode in which `x.data` is `x.detach()`: the same numbers without a gradient, as are writes.

    torch.export makes a constant of what `.data` returns, which would not change with the steps.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _DATA:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
