"""Parameters of a model by module: their number and bytes, and how much of them tp and ep split."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from autoptd.compile.traced import TracedModel
from autoptd.cost_models.memory import COMPUTE_BYTES
from autoptd.plans.model import Plan

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


@dataclass(frozen=True)
class ModuleParameters:
    """Parameters of equal modules together. `module`: the path, with `*` for the numbers of several.

    `numel`: elements, in one copy of the model; `nbytes`: trained ones in the compute type. `share`: of all elements.
    `split`, `spread`: shares of the module's elements that tp splits, and that ep spreads over ranks. `frozen`: share
    that is not trained. A parameter under several names counts once.
    """

    module: str
    numel: int
    nbytes: int
    share: float
    split: float
    spread: float
    frozen: float

    def to_data(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return asdict(self)


def parameter_totals(plan: Plan, traced: TracedModel) -> list[ModuleParameters]:
    """Return a row per module that holds parameters itself, the largest first."""
    placed = plan.splits.parameters
    parameters = {name: p for name, p in traced.model.named_parameters() if name in placed}
    paths = {name: name.rpartition(".")[0] or name for name in parameters}
    several: dict[str, set[str]] = {}
    for path in paths.values():
        several.setdefault(_NUMBER.sub("*", f"{path}.")[:-1], set()).add(path)
    experts = traced.known.facts.experts if plan.mesh.ep > 1 else frozenset[str]()
    compute = COMPUTE_BYTES[plan.precision]
    whole = sum(p.numel() for p in parameters.values()) or 1
    rows = []
    for pattern, alike in several.items():
        mine = {name: p for name, p in parameters.items() if paths[name] in alike}
        numel = sum(p.numel() for p in mine.values())

        def share_of(names: set[str], of: int = numel, own: dict[str, Any] = mine) -> float:
            return sum(own[name].numel() for name in names) / of if of else 0.0

        rows.append(
            ModuleParameters(
                module=pattern if len(alike) > 1 else next(iter(alike)),
                numel=numel,
                nbytes=sum(p.numel() * (compute if p.requires_grad else p.itemsize) for p in mine.values()),
                share=numel / whole,
                split=share_of({name for name in mine if placed[name].startswith("S")}),
                spread=share_of({name for name in mine if name in experts}),
                frozen=share_of({name for name, p in mine.items() if not p.requires_grad}),
            )
        )
    return sorted(rows, key=lambda row: (-row.numel, row.module))
