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

from autoptd.errors import PlanError
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
    """Call a factory, or make a named optimizer with its keywords and its fastest kernel.

    Raises PlanError for a factory whose optimizer has other parameters or groups than it was given: pieces of them on
    several ranks, whose shapes and places are not those of the model's.
    """
    if callable(optimizer):
        made = optimizer(given, **options)
        _check_groups(made, given)
        return made
    named = NAMED[optimizer]
    chosen = {"fused", "foreach"} & options.keys() or not named.kernel
    return named.make(given, **({} if chosen else {named.kernel: True}) | dict(options))


def _check_groups(made: Optimizer, given: list[Any]) -> None:
    wanted = [group["params"] for group in given] if isinstance(given[0], Mapping) else [given]
    groups = [group["params"] for group in getattr(made, "param_groups", [{"params": given}])]
    if [[*map(id, group)] for group in groups] == [[*map(id, group)] for group in wanted]:
        return
    passed, held = ({id(p) for group in each for p in group} for each in (wanted, groups))
    what = "puts parameters into groups of its own"
    if held != passed:
        what = "holds other parameters than those that it is given" if held - passed else "leaves out parameters"
    raise PlanError(
        f"the callable makes a {type(made).__name__} that {what}",
        where="optimizer",
        fix="give it all that the callable gets: lambda params: torch.optim.AdamW(params, lr=1e-3); and other options "
        "by name: parameter_groups=[{'names': [n for n, p in model.named_parameters() if p.ndim < 2], "
        "'weight_decay': 0.0}]",
    )
