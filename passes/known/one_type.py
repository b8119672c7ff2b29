"""Tensors that a model makes in its own type, such as float32 masks, where they meet those of `precision`.

scores + mask                       bfloat16 + float32: float32, as torch promotes
probabilities @ values              float32 @ bfloat16, which torch refuses: cast to bfloat16, as autocast does
F.grid_sample(picture, places)      likewise refused: cast to float32, as torch promotes elsewhere
zeros.scatter_add(0, i, messages)   of the type of the first
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_PRODUCTS = ("linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "addmv", "einsum", "bilinear")
_LAYERS = (
    *("scaled_dot_product_attention", "multi_head_attention_forward", "layer_norm", "rms_norm", "group_norm", "prelu"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
_WIDENED = (
    *("cross_entropy", "nll_loss", "nll_loss_nd", "binary_cross_entropy", "huber_loss", "smooth_l1_loss"),
    *("grid_sample", "grid_sampler", "cdist", "lerp", "addcmul", "addcdiv", "bucketize", "searchsorted"),
)
_LIKE_FIRST = (
    *("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_put", "masked_scatter"),
    *("select_scatter", "slice_scatter", "diagonal_scatter"),
)
_CONVOLUTIONS = "conv"  # conv1d, conv_transpose2d, convolution


def multiplies(name: str) -> bool:
    """Return whether an op is a product, a convolution or an attention, whose operands are of one type."""
    return name in _PRODUCTS or name.startswith(_CONVOLUTIONS) or name == "scaled_dot_product_attention"


def takes_one_type(name: str) -> bool:
    """Return whether an op, or a function of torch, refuses operands of several float types."""
    plain = name.removesuffix("_") if not name.startswith("__") else name.strip("_").removeprefix("r")
    return plain in (*_LAYERS, *_WIDENED, *_LIKE_FIRST) or multiplies(plain)


class OneType(TorchFunctionMode):
    """Mode in which operands of the types `given` and `computed` that meet in such an op get one type."""

    def __init__(self, given: Collection[torch.dtype], computed: torch.dtype) -> None:
        super().__init__()
        self.given, self.computed = frozenset(given) - {computed}, computed
        self._checking = patch.object(nn.RNNBase, "check_input", self._checked(nn.RNNBase.check_input))

    def __enter__(self) -> OneType:
        self._checking.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._checking.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if takes_one_type(name) and not torch.compiler.is_dynamo_compiling():
            found = {x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            if self.computed in found and not self.given.isdisjoint(found):
                like = self._type_for(name.removesuffix("_"), args[0], found & self.given)
                cast = partial(self._cast, dtype=like)
                args, kwargs = pytree.tree_map_only(Tensor, cast, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def _type_for(self, name: str, first: Any, given: Collection[torch.dtype]) -> torch.dtype:
        if name in _LIKE_FIRST and isinstance(first, Tensor):
            return first.dtype
        return reduce(torch.promote_types, given, self.computed) if name in _WIDENED else self.computed

    def _cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype) if x.dtype in {*self.given, self.computed} else x

    def _checked(self, check: Callable[[nn.RNNBase, Tensor, Tensor | None], None]) -> Callable[..., None]:
        """Return the check of a recurrent layer's input, of one that is cast to the type of the weights next."""

        def checked(layer: nn.RNNBase, x: Tensor, sizes: Tensor | None) -> None:
            check(layer, self._cast(x, self.computed), sizes)

        return checked
