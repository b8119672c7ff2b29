"""Fake CPU tensors, with shapes but no data, on which a model of any size is traced.

The meta device would lose the values of constants that `forward` creates, such as the index of `x[..., [-1]]`.
`FakeTensorMode` and `fake_impls` are private to torch (seen in 2.13.0); no other file of autoptd imports them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def fake_cpu() -> FakeTensorMode:
    """Return a context manager in which new tensors take no memory."""
    return FakeTensorMode(shape_env=ShapeEnv())


def without_shape_cache() -> AbstractContextManager[None]:
    """Return a context manager in which new fake modes do not cache shapes by op and arguments.

    An entry with symbolic sizes costs more to make than it saves, as equal modules are traced once anyway: gpt2 is
    traced in 1.1 s instead of 1.6, llama3-8b in 1.4 instead of 1.7.
    """
    import torch._dynamo.config  # takes a second, which a search alone need not spend

    patched: AbstractContextManager[None] = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    return patched


# ---- ctc_loss, to which torch gives no shapes: its table of paths, which is no result, is as wide as a target


def _ctc_shapes(log_probs: Tensor, targets: Tensor, *unused: object) -> tuple[Tensor, Tensor]:
    """Return losses of each sample, and a table as wide as if all targets were as long as the longest may be."""
    steps, samples, _ = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, 2 * targets.shape[-1] + 1)


_META = torch.library.Library("aten", "IMPL", "Meta")
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_ctc_loss.Tensor", "Meta"):
    _META.impl("_ctc_loss.Tensor", _ctc_shapes)
    _META.impl("_ctc_loss_backward.Tensor", lambda grad, log_probs, *_: torch.empty_like(log_probs))


_OF_CLASSES = (  # losses that run_decompositions takes for a mean over samples, whatever they are
    *(torch.ops.aten.cross_entropy_loss.default, torch.ops.aten.nll_loss.default),
    *(torch.ops.aten.nll_loss2d.default, torch.ops.aten.nll_loss_nd.default),
)


def _class_loss_shape(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Return a loss for each label of x [samples, classes, …], or one for all."""
    shape = (*x.shape[:1], *x.shape[2:]) if x.ndim > 1 else ()
    labels = shape if target.is_floating_point() else target.shape
    for n, other in zip(shape, labels, strict=True):
        torch._check(n == other)
    return x.new_empty(() if reduction else shape)


def with_loss_shapes() -> AbstractContextManager[Any]:
    """Return a context manager in which fake tensors of losses have the right shapes."""

    def of_ctc(mode: FakeTensorMode, _: object, *args: Any, **__: object) -> tuple[Tensor, Tensor]:
        with mode:
            return _ctc_shapes(*args)

    def of_classes(mode: FakeTensorMode, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        with mode:
            return _class_loss_shape(given["self"], given["target"], given.get("reduction", 1))

    ours: dict[Any, Any] = {torch.ops.aten._ctc_loss.Tensor: of_ctc, **dict.fromkeys(_OF_CLASSES, of_classes)}
    return patch.dict(fake_impls.op_implementations_dict, ours)
