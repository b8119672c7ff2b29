"""Losses that are modules without trained parameters, whose buffers are constants of the program."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from autoptd.errors import InputsError


def refuse_blank(loss: nn.Module) -> None:
    """Raise InputsError for a buffer without a value."""
    blank = [name for name, x in loss.named_buffers() if x.is_meta]
    if blank:
        raise InputsError(
            f"{', '.join(blank)} of the loss {type(loss).__name__} is on the meta device, without a value",
            where="loss",
            fix="make the loss outside torch.device('meta')",
        )


def converted(loss: nn.Module, dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """Return a copy with floating-point buffers in `dtype`, which holds what the given one holds of `model`."""
    memo: dict[int, Any] = {id(x): x for x in (*model.modules(), *model.parameters(), *model.buffers())}
    for x in loss.buffers():
        memo[id(x)] = x.detach().to(dtype) if x.is_floating_point() else x.detach()
    return copy.deepcopy(loss, memo)
