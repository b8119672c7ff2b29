"""Losses that are modules without trained parameters, whose buffers are constants of the program."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

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


def constants(loss: object, dtype: torch.dtype, known: Container[int]) -> dict[int, Tensor]:
    """Return the buffers of a loss that is a module, floating-point ones in `dtype`, by the ids of those that it has.
    `known`: ids of tensors of the model, which a loss may hold."""
    own = loss.buffers() if isinstance(loss, nn.Module) else ()
    return {id(x): x.detach().to(dtype if x.is_floating_point() else x.dtype) for x in own if id(x) not in known}
