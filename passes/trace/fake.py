"""Fake CPU tensors, with shapes but no data, on which a model of any size is traced.

The meta device would lose the values of constants that `forward` creates, such as the index of `x[..., [-1]]`.
`FakeTensorMode` is private to torch (seen in 2.13.0); no other file of autoptd imports it.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def fake_cpu() -> FakeTensorMode:
    """Return a context manager in which new tensors take no memory."""
    return FakeTensorMode(shape_env=ShapeEnv())
