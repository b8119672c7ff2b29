"""Optimizers over flat pieces: any elementwise one, because a piece is a 1-D part of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from autoptd.errors import PlanError, nearest

Factory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]

NAMED: dict[str, Callable[..., Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def make_optimizer(optimizer: str | Factory, params: Sequence[nn.Parameter], **kwargs: Any) -> Optimizer:
    """AdamW or SGD by name, with torch's own keywords and its fused kernel, or what a factory returns.

    An update that looks at more than one element at a time (LAMB, Muon, Adafactor, L-BFGS) would see pieces instead of
    parameters: anything but torch's elementwise optimizers is refused unless its class says `elementwise = True`.
    Raises PlanError.
    """
    # torch refuses an empty list, and a stage may have nothing to train
    given = list(params) or [nn.Parameter(torch.empty(0))]
    if callable(optimizer):
        made = optimizer(given, **kwargs)
    elif optimizer in NAMED:
        made = NAMED[optimizer](given, **({} if "foreach" in kwargs else {"fused": True}) | kwargs)
    else:
        fix = nearest(optimizer, NAMED) + "; or pass a factory"
        raise PlanError(f"unknown optimizer {optimizer!r}", where="optimizer", fix=fix)
    if type(made) not in ELEMENTWISE and not getattr(type(made), "elementwise", False):
        raise PlanError(
            f"{type(made).__name__} is not known to work elementwise, and parameters are stepped in flat pieces",
            where="optimizer",
            fix="use one of "
            + ", ".join(c.__name__ for c in ELEMENTWISE)
            + "; or set `elementwise = True` on its class",
        )
    return made
