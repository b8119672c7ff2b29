"""Optimizers over flat pieces: any elementwise one, because a piece is a 1-D part of a parameter."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from autoptd.errors import PlanError, nearest

Factory: TypeAlias = Callable[[list[Any]], Optimizer]  # of parameters, or torch's parameter groups if there are any

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


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters by patterns of their names in the model, and what the optimizer does otherwise with them."""

    names: tuple[str, ...]
    options: Mapping[str, Any]

    def holds(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)


def read_groups(given: Iterable[Mapping[str, Any]], parameters: Iterable[str]) -> tuple[ParameterGroup, ...]:
    """`[{"names": ["*.bias", "*norm*"], "weight_decay": 0.0}, …]`; a parameter belongs to the first that names it.

    Raises PlanError for anything else, and for a pattern that no parameter has.
    """
    known, found = list(parameters), []
    for place, group in enumerate(given):
        where = f"parameter_groups[{place}]"
        names = group.get("names") if isinstance(group, Mapping) else None
        patterns = [names] if isinstance(names, str) else names
        if not isinstance(patterns, (list, tuple)) or not patterns or not all(isinstance(p, str) for p in patterns):
            raise PlanError(
                "a parameter group is a mapping with patterns of names and the options that differ",
                where=where,
                fix='give for example {"names": ["*.bias", "*norm*"], "weight_decay": 0.0}',
            )
        for pattern in patterns:
            if not fnmatch.filter(known, pattern):
                near = difflib.get_close_matches(pattern, known, 3, 0.3) or known[:3]
                names = f"names are those of model.named_parameters(), such as {', '.join(near)}"
                raise PlanError(f"no trainable parameter is called {pattern!r}", where=where, fix=names)
        options = {key: value for key, value in group.items() if key != "names"}
        if "params" in options:
            raise PlanError("parameters are named, not given", where=where, fix="leave out params")
        found.append(ParameterGroup(tuple(patterns), options))
    return tuple(found)


def grouped(named: Iterable[tuple[str, nn.Parameter]], groups: Sequence[ParameterGroup]) -> list[Any]:
    """What an optimizer is made on: parameters, or torch's parameter groups, the rest first.

    Every rank has every group, so that schedulers see the same ones everywhere: an empty parameter fills one that
    has nothing here.
    """
    members: list[list[nn.Parameter]] = [[] for _ in range(len(groups) + 1)]
    for name, parameter in named:
        members[next((i for i, group in enumerate(groups, 1) if group.holds(name)), 0)].append(parameter)
    filled = [mine or [nn.Parameter(torch.empty(0))] for mine in members]
    if not groups:
        return list(filled[0])
    options = ({}, *(group.options for group in groups))
    return [{"params": mine, **own} for mine, own in zip(filled, options, strict=True)]


def make_optimizer(optimizer: str | Factory, given: list[Any], **kwargs: Any) -> Optimizer:
    """AdamW or SGD by name, with torch's own keywords and its fused kernel, or what a factory returns.

    `given`: as `grouped` makes it.

    An update that looks at more than one element at a time (LAMB, Muon, Adafactor, L-BFGS) would see pieces instead of
    parameters: anything but torch's elementwise optimizers is refused unless its class says `elementwise = True`.
    Raises PlanError.
    """
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
    for place, group in enumerate(given):
        for key in group if isinstance(group, dict) else ():
            if key != "params" and key not in made.defaults:
                raise PlanError(
                    f"{type(made).__name__} has no option {key!r}",
                    where=f"parameter_groups[{place - 1}]",
                    fix=nearest(key, made.defaults),
                )
    return made
