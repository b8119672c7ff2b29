"""Tensors with shapes and a CPU device but no data: what a model is traced on, whatever its size.

Tracing on the meta device instead would lose the values of constants that a forward makes, such as `x[..., [-1]]`.
`FakeTensorMode` is private to torch (seen in 2.13.0); nothing else of ours imports it.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def fake_cpu() -> FakeTensorMode:
    """A context in which new tensors take no memory."""
    return FakeTensorMode(shape_env=ShapeEnv())
