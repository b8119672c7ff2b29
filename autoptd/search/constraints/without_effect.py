"""Constraints that can have no effect on any plan: refused, or noted in the plan if they are harmless.

A constraint such as `zero: 3` acts along an axis of the mesh. The other constraints may leave that axis one rank, by
fixing it (`dp: 1`) or by using up the world (`tp: 4, pp: 2` of 8). ZeRO 3 then saves no memory, contrary to what the
user expects, and is refused. On a world of one device every axis is one rank and nothing is refused, so that scripts
can be tried out there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoptd.errors import PlanError
from autoptd.search.constraints.options import Constraints

_AXES = ("cp", "dp", "pp", "tp")


@dataclass(frozen=True)
class ConstraintEffect:
    """A constraint, whether a value of it has an effect at all, and the axes that it acts along, flattened."""

    name: str
    asks: Callable[[Any], bool]
    axes: tuple[str, ...]
    refused: bool = True  # False: noted in the plan


ROWS = (
    ConstraintEffect("zero", lambda level: level >= 2, ("dp", "cp")),
    ConstraintEffect("zero", lambda level: level == 1, ("dp", "cp"), refused=False),
    ConstraintEffect("shards", lambda ranks: ranks > 1, ("dp", "cp")),
    ConstraintEffect("overlap", lambda streams: "dp" in streams, ("dp", "cp"), refused=False),
    ConstraintEffect("overlap", lambda streams: "tp" in streams, ("tp",), refused=False),
    ConstraintEffect("bucket_bytes", bool, ("dp", "cp"), refused=False),
    ConstraintEffect("gathers", lambda how: how == "again", ("tp",), refused=False),
    ConstraintEffect("sends", lambda how: how == "slices", ("tp",), refused=False),
    ConstraintEffect("sends", lambda how: how == "slices", ("pp",), refused=False),
    ConstraintEffect("virtual", lambda chunks: chunks > 1, ("pp",), refused=False),
    ConstraintEffect("schedule", lambda kind: kind != "1f1b", ("pp",), refused=False),
    ConstraintEffect("dispatch", lambda how: how != "rows", ("dp", "cp", "tp"), refused=False),
    ConstraintEffect("routing", lambda how: how != "balanced", ("dp", "cp", "tp"), refused=False),
    ConstraintEffect("overlap", lambda streams: "ep" in streams, ("dp", "cp", "tp"), refused=False),
    ConstraintEffect("context", bool, ("cp",), refused=False),
)


def idle_notes(constraints: Constraints, world: int) -> list[str]:
    """Return notes for the plan. Raises one PlanError for all constraints without effect that are refused."""
    single, values = _single(constraints, world), _values(constraints)
    found = [row for row in ROWS if row.name in values and row.asks(values[row.name]) and single.issuperset(row.axes)]
    if constraints.mesh.get("zero") == 0 and values.get("shards"):
        raise PlanError(
            f"shards {values['shards']} with zero 0: nothing is sharded",
            where="fix['shards']",
            fix="fix zero to 1, 2 or 3, or leave shards out",
        )
    messages = dict(_messages(found, values))
    refused = dict.fromkeys(row.name for row in found if row.refused and world > 1)
    if refused:
        raise PlanError(
            "; ".join(messages[name] for name in refused),
            where=", ".join(f"fix[{name!r}]" for name in refused),
            fix=f"leave out {', '.join(refused)}, or fix other sizes of the mesh",
        )
    return list(messages.values())


def _messages(found: list[ConstraintEffect], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for row in found:
        axes = " × ".join(row.axes)
        yield row.name, f"{row.name} {values[row.name]} can have no effect: it acts along {axes}, which is 1"


def _values(constraints: Constraints) -> dict[str, Any]:
    """Return the fixed values by name."""
    every = {**vars(constraints.method), **constraints.mesh}
    return {name: every[name] for name in constraints.asked if name in every}


def _single(constraints: Constraints, world: int) -> set[str]:
    """Return the axes that have one rank in every mesh that the constraints allow."""
    sizes = {name: int(constraints.mesh[name]) for name in _AXES if name in constraints.mesh}
    if "cp" in constraints.fixed or "cp" not in constraints.searched:
        sizes["cp"] = constraints.method.cp
    if constraints.max_tp == 1:
        sizes["tp"] = 1
    spent = math.prod(sizes.values()) == world
    return {name for name in _AXES if sizes.get(name, 1 if spent else 0) == 1}
