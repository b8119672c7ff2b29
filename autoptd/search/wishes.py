"""What a person fixes by hand, checked before any search: `fix={"tp": 8, "recompute": "none", "splits": {…}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoptd.errors import PlanError, nearest

_ONE = ("cp", "ep", "virtual")  # axes that the runtime cannot run yet: 1 or nothing
_SEARCHED = ("dp", "micro", "pp", "recompute", "tp", "zero")
KNOWN = (*_SEARCHED, *_ONE, "schedule", "sequence_parallel", "splits")


@dataclass(frozen=True)
class Wishes:
    """`mesh`: what `meshes.candidates` takes; `splits`: parameter-name pattern -> placement."""

    mesh: Mapping[str, int | str] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    sequence_parallel: bool = True  # whether tp may split the sequence


def read_wishes(fix: Mapping[str, Any] | None) -> Wishes:
    """Raises PlanError for an unknown name or a value that nothing here can run."""
    fix = dict(fix or {})
    for name in fix:
        if name not in KNOWN:
            raise PlanError(f"{name!r} cannot be fixed", where=f"fix[{name!r}]", fix=nearest(name, KNOWN))
    for name in _ONE:
        if fix.get(name, 1) != 1:
            raise PlanError(f"{name} {fix[name]!r} cannot be run yet", where=f"fix[{name!r}]", fix="leave it out")
    if fix.get("schedule", "1f1b") != "1f1b":
        raise PlanError(f"schedule {fix['schedule']!r} cannot be run yet", where="fix['schedule']", fix="use '1f1b'")
    splits = fix.get("splits", {})
    if not isinstance(splits, Mapping):
        raise PlanError(f"splits is {splits!r}", where="fix['splits']", fix="give {'*.q_proj.weight': 'S0'}")
    sequence = fix.get("sequence_parallel", True)
    if not isinstance(sequence, bool):
        raise PlanError(f"sequence_parallel is {sequence!r}", where="fix['sequence_parallel']", fix="True or False")
    return Wishes({n: fix[n] for n in _SEARCHED if n in fix}, dict(splits), sequence)
