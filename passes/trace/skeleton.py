"""A copy of a model without data, which is traced in its stead."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.passes.trace.loss import loss_of as loss_of
from autoptd.passes.trace.traced import PRECISIONS


def skeleton(model: nn.Module, precision: str, device: str, mode: AbstractContextManager[Any]) -> nn.Module:
    """A copy of the model without data, floating-point parameters in `precision`; tied parameters stay tied.

    Parameters and buffers are made under `mode`; tensors that are neither keep their values, but for those that are
    computed from others (the weight of a weight-normed layer): these are computed anew, or refused when they are read.
    """
    dtype = PRECISIONS[precision]
    memo: dict[int, Any] = {}
    with mode:
        for x in computed_tensors(model):
            memo[id(x)] = nn.Parameter(torch.empty(x.shape, dtype=dtype, device=device))
        for p in model.parameters():
            kept = dtype if p.is_floating_point() else p.dtype
            memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=kept, device=device), requires_grad=p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty(b.shape, dtype=b.dtype, device=device)
    return copy.deepcopy(model, memo)


def computed_tensors(model: nn.Module) -> list[Tensor]:
    """Attributes of modules that need a gradient and are no parameters."""
    values = [value for module in model.modules() for value in vars(module).values()]
    return [x for x in values if isinstance(x, Tensor) and x.requires_grad]


def without_caches(model: nn.Module) -> nn.Module:
    """Turn off what a Hugging Face model keeps for generating text after this pass: its loss never reads it."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
    return model
