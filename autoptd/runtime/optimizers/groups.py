"""Assignment of a model's parameters to optimizers and groups, from the arguments of `parallelize`."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoptd.errors import PlanError, nearest
from autoptd.runtime.optimizers.named import NAMED, READS, Factory, Reads, construct
from autoptd.runtime.optimizers.separable import check_elementwise, check_separable
from autoptd.runtime.optimizers.several import SeveralOptimizers

_FORM = 'give for example {"names": ["*.bias", "*norm*"], "weight_decay": 0.0}'


@dataclass(frozen=True)
class ParameterGroup:
    """Patterns of parameter names in the model, and the optimizer options of these parameters.

    `optimizer`: a name or a factory; None for the optimizer that updates each of them otherwise.
    """

    names: tuple[str, ...]
    options: Mapping[str, Any]
    optimizer: str | Factory | None = None

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
                "a parameter group is a mapping of name patterns and optimizer options", where=where, fix=_FORM
            )
        for pattern in patterns:
            if not fnmatch.filter(known, pattern):
                near = difflib.get_close_matches(pattern, known, 3, 0.3) or known[:3]
                names = f"names are those of model.named_parameters(), such as {', '.join(near)}"
                raise PlanError(f"no trainable parameter is called {pattern!r}", where=where, fix=names)
        options = {key: value for key, value in group.items() if key not in ("names", "optimizer")}
        if "params" in options:
            raise PlanError("parameter groups list names, not params", where=where, fix="remove params")
        optimizer = group.get("optimizer")
        if optimizer is not None and not callable(optimizer) and optimizer not in NAMED:
            fix = (nearest(optimizer, NAMED) if isinstance(optimizer, str) else ", ".join(NAMED)) + "; or a callable"
            raise PlanError(f"unknown optimizer {optimizer!r}", where=where, fix=fix)
        found.append(ParameterGroup(tuple(patterns), options, optimizer))
    return tuple(found)


@dataclass(frozen=True)
class TorchGroup:
    """One of torch's parameter groups: the names of its parameters in the whole model, and its own options.

    `optimizer`: its index in `Chosen.optimizers`. `place`: of the `ParameterGroup` that it comes from, -1 for none.
    """

    optimizer: int
    names: tuple[str, ...]
    options: Mapping[str, Any]
    place: int


@dataclass(frozen=True)
class Chosen:
    """The optimizers of a model: each with its options, and the parameter groups of all, in one order on all ranks."""

    optimizers: tuple[tuple[str | Factory, Mapping[str, Any]], ...]
    groups: tuple[TorchGroup, ...]
    reads: tuple[Reads, ...] = field(default=())

    def names(self, reads: Reads) -> tuple[str, ...]:
        """Return the names of parameters whose optimizer reads them in this way, in the groups' order."""
        return tuple(n for group in self.groups if self.reads[group.optimizer] == reads for n in group.names)

    def build(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        """Construct the optimizer of some of the model's parameters, those that a rank updates.

        Each rank has every group, so that schedulers see the same groups on all ranks: a group without parameters on
        this rank holds an empty one. Raises PlanError for a group's option that its optimizer does not have.
        """
        made = [self._build(i, parameters) for i in range(len(self.optimizers))]
        for place in dict.fromkeys(group.place for group in self.groups):
            here = [group for group in self.groups if group.place == place]
            known = {key: value for group in here for key, value in made[group.optimizer].defaults.items()}
            for key in here[0].options if place >= 0 else ():
                if key not in known:
                    names = " and ".join(dict.fromkeys(type(made[group.optimizer]).__name__ for group in here))
                    where = f"parameter_groups[{place}]"
                    raise PlanError(f"{names} has no option {key!r}", where=where, fix=nearest(key, known))
        if len(made) == 1:
            return made[0]
        return SeveralOptimizers(made, [group.optimizer for group in self.groups])

    def _build(self, index: int, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        (optimizer, options), given = self.optimizers[index], []
        for group in self.groups:
            if group.optimizer == index:
                wanted = set(group.names)
                empty = nn.Parameter(torch.empty(0, 0) if self.reads[index] == "whole" else torch.empty(0))
                mine = [p for name, p in parameters.items() if name in wanted] or [empty]
                given.append({"params": mine, **group.options})
        try:
            return construct(optimizer, given if len(self.groups) > 1 else given[0]["params"], options)
        except ValueError as error:
            if not parameters or isinstance(error, PlanError):  # wrong options
                raise
            raise _unsuitable(optimizer, error) from error


def _unsuitable(optimizer: str | Factory, error: Exception) -> PlanError:
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "the optimizer")
    return PlanError(
        f"{name} cannot update these parameters: {error}",
        where="optimizer",
        fix='give the others an optimizer of their own, as {"names": […], "optimizer": "adamw"} in parameter_groups; '
        'optimizer="muon" does so for all but hidden matrices',
    )


def choose(
    optimizer: str | Factory,
    options: Mapping[str, Any],
    groups: Sequence[ParameterGroup] = (),
    parameters: Iterable[str] = (),
    hidden: Collection[str] = (),
) -> Chosen:
    """Assign each parameter its optimizer and its group.

    `hidden`: matrices between embedding and head, which alone a named optimizer with a `rest` updates; the options of
    that rest are a mapping under its name. Parameters outside all groups come first. Raises PlanError, also for an
    optimizer that cannot work on several ranks.
    """
    rest = NAMED[optimizer].rest if isinstance(optimizer, str) else ""
    own = {key: value for key, value in options.items() if not rest or key != rest}
    of_rest = options.get(rest, {}) if rest else {}
    if not isinstance(of_rest, Mapping):
        fix = f'give a mapping, such as {{"lr": 0.02, "{rest}": {{"lr": 3e-4}}}}'
        raise PlanError(f"the options of {rest} are {of_rest!r}", where=f"optimizer_options[{rest!r}]", fix=fix)
    optimizers: list[tuple[str | Factory, Mapping[str, Any]]] = [(optimizer, own)]
    optimizers += [(rest, of_rest)] if rest else []
    members: dict[tuple[int, int], list[str]] = {(-1, 0): []}
    for place, group in enumerate(groups):
        if group.optimizer is not None and all(known is not group.optimizer for known, _ in optimizers):
            optimizers.append((group.optimizer, {}))
        if group.optimizer is not None:
            members[place, _index(group.optimizer, optimizers)] = []
    for name in parameters:
        place = next((i for i, group in enumerate(groups) if group.holds(name)), -1)
        asked = groups[place].optimizer if place >= 0 else None
        index = _index(asked, optimizers) if asked is not None else int(bool(rest) and name not in hidden)
        members.setdefault((place, index), []).append(name)
    for place in range(len(groups)):
        if not any(key[0] == place for key in members):
            members[place, 0] = []
    if rest and not any(index == 1 for _, index in members):
        members[-1, 1] = []
    found = tuple(
        TorchGroup(index, tuple(members[place, index]), groups[place].options if place >= 0 else {}, place)
        for place, index in sorted(members)
    )
    chosen = Chosen(tuple(optimizers), found)
    reads = tuple(_reads(chosen, i) for i in range(len(optimizers)))
    return Chosen(chosen.optimizers, found, reads)


def _index(optimizer: str | Factory, among: Sequence[tuple[str | Factory, Mapping[str, Any]]]) -> int:
    return next(i for i, (known, _) in enumerate(among) if known is optimizer or known == optimizer)


def _reads(chosen: Chosen, index: int) -> Reads:
    """Return how an optimizer reads parameters, from its class, or once a trial has shown that it keeps them apart."""
    optimizer, options = chosen.optimizers[index]
    if isinstance(optimizer, str):
        return READS[NAMED[optimizer].make]  # type: ignore[index]
    groups = [group for group in chosen.groups if group.optimizer == index]

    def build(parameters: list[nn.Parameter]) -> Optimizer:
        if len(chosen.groups) == 1:
            return construct(optimizer, parameters, options)
        empty = [[nn.Parameter(torch.empty(0, 0))] for _ in groups[1:]]
        return construct(
            optimizer,
            [{"params": mine, **g.options} for g, mine in zip(groups, [parameters, *empty], strict=True)],
            options,
        )

    made = build([nn.Parameter(torch.zeros(2, 2))])
    kind = type(made)
    if kind in READS:
        return READS[kind]
    check_separable(build, kind.__name__)
    if not getattr(kind, "elementwise", False):
        return "whole"
    check_elementwise(build, kind.__name__)
    return "elementwise"
