"""Optimizers by name, and how each class of optimizer reads a parameter.

    elementwise  an element's update depends on that element alone: pieces of a flat buffer are updated
    whole        it depends on other elements of the same parameter: whole parameters are updated, at their owners

A class outside the table is elementwise if it says so (`elementwise = True`), else whole, once a trial has shown that
it updates each parameter by itself (`separable.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.optim import Optimizer

from autoptd.runtime.optimizers.lion import Lion

Factory: TypeAlias = Callable[..., Optimizer]  # called with parameters, or with torch's parameter groups
Reads: TypeAlias = Literal["elementwise", "whole"]


@dataclass(frozen=True)
class NamedOptimizer:
    """A class, its fastest kernel if a keyword chooses it, and the optimizer of all but hidden matrices if it is for
    those only."""

    make: Factory
    kernel: str = ""
    rest: str = ""


NAMED: Mapping[str, NamedOptimizer] = {
    "adamw": NamedOptimizer(torch.optim.AdamW, kernel="fused"),
    # torch's fused SGD fails if a parameter has its first gradient after others had momentum (seen in 2.13.0)
    "sgd": NamedOptimizer(torch.optim.SGD, kernel="foreach"),
    "lion": NamedOptimizer(Lion),
    "adafactor": NamedOptimizer(torch.optim.Adafactor),
    "muon": NamedOptimizer(torch.optim.Muon, rest="adamw"),
}

READS: Mapping[type[Optimizer], Reads] = {
    torch.optim.ASGD: "elementwise",
    torch.optim.Adadelta: "elementwise",
    torch.optim.Adafactor: "whole",
    torch.optim.Adagrad: "elementwise",
    torch.optim.Adam: "elementwise",
    torch.optim.AdamW: "elementwise",
    torch.optim.Adamax: "elementwise",
    torch.optim.Muon: "whole",
    torch.optim.NAdam: "elementwise",
    torch.optim.RAdam: "elementwise",
    torch.optim.RMSprop: "elementwise",
    torch.optim.Rprop: "elementwise",
    torch.optim.SGD: "elementwise",
    Lion: "elementwise",
}


def construct(optimizer: str | Factory, given: list[Any], options: Mapping[str, Any]) -> Optimizer:
    """Call a factory, or make a named optimizer with its keywords and its fastest kernel."""
    if callable(optimizer):
        return optimizer(given, **options)
    named = NAMED[optimizer]
    chosen = {"fused", "foreach"} & options.keys() or not named.kernel
    return named.make(given, **({} if chosen else {named.kernel: True}) | dict(options))
