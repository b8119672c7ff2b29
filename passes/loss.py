"""The scalar that a model is trained to minimise, from whatever its forward pass returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from autoptd.errors import InputsError


class Loss(nn.Module):
    """The model, returning its loss alone: logits, caches and output classes are dropped before anything is planned."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return loss_of(self.model(**inputs), self.loss, inputs)


def loss_of(out: Any, loss: Callable[..., Tensor] | None, inputs: Mapping[str, Tensor]) -> Tensor:
    """The scalar to minimise, from what `forward` returned. Raises InputsError when there is none."""
    value: Tensor | None
    if loss is not None:
        value = loss(out, inputs) if _takes_two(loss) else loss(out)
    elif isinstance(out, Tensor):
        value = out
    elif isinstance(out, Mapping) and "loss" in out:
        value = out["loss"]
    elif getattr(out, "loss", None) is not None:
        value = out.loss
    elif isinstance(out, (tuple, list)):
        scalars = [x for x in out if isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point()]
        value = scalars[0] if len(scalars) == 1 else None
    else:
        value = None
    if not isinstance(value, Tensor) or value.ndim != 0:
        kind = f"a tensor of {value.ndim} dims" if isinstance(value, Tensor) else type(out).__name__
        raise InputsError(
            f"the model returns {kind}, which holds no scalar loss"
            if loss is None
            else f"loss returned {kind}, no scalar",
            fix="return a scalar, an object with .loss, or a mapping with 'loss'; or pass loss=lambda outputs: …",
        )
    return value


def _takes_two(loss: Callable[..., Tensor]) -> bool:
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 2
