"""Tensors that a model makes in its own type, such as float32 masks, where they meet those of `precision`.

    scores + mask            bfloat16 + float32: float32, as torch promotes
    probabilities @ values   float32 @ bfloat16: refused by torch

The operands of products, norms, attention and recurrent layers are cast to `precision`, as torch.autocast does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_PRODUCTS = ("linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "addmv", "einsum", "bilinear")
_LAYERS = (
    *("scaled_dot_product_attention", "multi_head_attention_forward", "layer_norm", "rms_norm", "group_norm"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "cross_entropy", "nll_loss"),
)
_CONVOLUTIONS = "conv"  # conv1d, conv_transpose2d, convolution


def multiplies(name: str) -> bool:
    """Return whether an op is a product, a convolution or an attention, whose operands are of one type."""
    return name in _PRODUCTS or name.startswith(_CONVOLUTIONS) or name == "scaled_dot_product_attention"


def takes_one_type(name: str) -> bool:
    """Return whether an op, or a function of torch, refuses operands of several float types."""
    return name in _LAYERS or multiplies(name.strip("_").removeprefix("r"))


class OneType(TorchFunctionMode):
    """Mode in which operands of the types `given` are cast to `computed` where they meet one of that type."""

    def __init__(self, given: Collection[torch.dtype], computed: torch.dtype) -> None:
        super().__init__()
        self.given, self.computed = frozenset(given) - {computed}, computed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if takes_one_type(getattr(func, "__name__", "")) and not torch.compiler.is_dynamo_compiling():
            found = {x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            if self.computed in found and not self.given.isdisjoint(found):
                args, kwargs = pytree.tree_map_only(Tensor, self._cast, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.computed) if x.dtype in self.given else x
