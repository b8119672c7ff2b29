"""Optimizers over flat pieces. A piece is a 1-D part of a parameter, so the update must be elementwise."""

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

Factory: TypeAlias = Callable[[list[Any]], Optimizer]  # called with parameters, or with torch's parameter groups

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
    """Patterns of parameter names in the model, and the optimizer options of these parameters."""

    names: tuple[str, ...]
    options: Mapping[str, Any]

    def holds(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)


def read_groups(given: Iterable[Mapping[str, Any]], parameters: Iterable[str]) -> tuple[ParameterGroup, ...]:
    """Read `[{"names": ["*.bias", "*norm*"], "weight_decay": 0.0}, …]`; a parameter joins the first match.

    Raises PlanError for another form, and for a pattern that matches no parameter.
    """
    known, found = list(parameters), []
    for place, group in enumerate(given):
        where = f"parameter_groups[{place}]"
        names = group.get("names") if isinstance(group, Mapping) else None
        patterns = [names] if isinstance(names, str) else names
        if not isinstance(patterns, (list, tuple)) or not patterns or not all(isinstance(p, str) for p in patterns):
            raise PlanError(
                "a parameter group is a mapping of name patterns and optimizer options",
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
            raise PlanError("parameter groups list names, not params", where=where, fix="remove params")
        found.append(ParameterGroup(tuple(patterns), options))
    return tuple(found)


def grouped(named: Iterable[tuple[str, nn.Parameter]], groups: Sequence[ParameterGroup]) -> list[Any]:
    """Return the optimizer's argument: parameters, or torch's parameter groups, those outside all `groups` first.

    Every rank has every group, so that schedulers see the same groups on all ranks: a group without parameters on this
    rank holds an empty one.
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
    """Make AdamW or SGD by name, with torch's keywords and fused kernel, or call a factory. `given`: from `grouped`.

    An update that depends on more than one element (LAMB, Muon, Adafactor, L-BFGS) would see pieces instead of
    parameters. Raises PlanError for all but torch's elementwise optimizers and classes with `elementwise = True`.
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
            f"{type(made).__name__} is not known to work elementwise, but updates are of flat pieces of parameters",
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
