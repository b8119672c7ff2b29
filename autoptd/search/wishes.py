"""What a person fixes by hand, checked before any search: `fix={"tp": 8, "recompute": "none", "splits": {…}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoptd.errors import PlanError, nearest
from autoptd.passes.placements import parse_placement

_ONE = ("cp", "ep", "virtual")  # axes that the runtime cannot run yet: 1 or nothing
_COUNTS = ("dp", "micro", "pp", "tp")
_ALLOWED: dict[str, tuple[int | str, ...]] = {"recompute": ("auto", "none", "full"), "zero": (0, 1)}
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
    if fix is not None and not isinstance(fix, Mapping):
        raise PlanError(f"fix is {_shown(fix)}, not a mapping", where="fix", fix="give for example fix={'tp': 8}")
    fix = dict(fix or {})
    for name in fix:
        if name not in KNOWN:
            raise PlanError(f"{name!r} cannot be fixed", where=f"fix[{name!r}]", fix=nearest(str(name), KNOWN))
    for name in _ONE:
        if fix.get(name, 1) != 1:
            raise PlanError(f"{name} {fix[name]!r} cannot be run yet", where=f"fix[{name!r}]", fix="leave it out")
    if fix.get("schedule", "1f1b") != "1f1b":
        raise PlanError(f"schedule {fix['schedule']!r} cannot be run yet", where="fix['schedule']", fix="use '1f1b'")
    sequence = fix.get("sequence_parallel", True)
    if not isinstance(sequence, bool):
        raise PlanError(f"sequence_parallel is {sequence!r}", where="fix['sequence_parallel']", fix="True or False")
    for name in _COUNTS:
        if name in fix:
            require_count(fix[name], name, f"fix[{name!r}]")
    for name, allowed in _ALLOWED.items():
        if name in fix and not any(fix[name] == a and type(fix[name]) is type(a) for a in allowed):
            known = ", ".join(map(repr, allowed))
            raise PlanError(f"{name} {fix[name]!r} is not possible", where=f"fix[{name!r}]", fix=f"possible: {known}")
    return Wishes({n: fix[n] for n in _SEARCHED if n in fix}, _read_splits(fix.get("splits", {})), sequence)


def require_count(value: object, what: str, where: str = "", of: str = "") -> None:
    """Raise PlanError unless `value` is a whole number from 1; `of` says what it counts."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        counted = f": {of}" if of else ""
        raise PlanError(
            f"{what} is {_shown(value)}", where=where or what, fix=f"give a whole number of at least 1{counted}"
        )


def _read_splits(splits: object) -> dict[str, str]:
    """Parameter-name pattern -> placement, each one readable."""
    if not isinstance(splits, Mapping) or not all(isinstance(pattern, str) for pattern in splits):
        raise PlanError(f"splits is {_shown(splits)}", where="fix['splits']", fix="give {'*.q_proj.weight': 'S0'}")
    for pattern, text in splits.items():
        try:
            parse_placement(text if isinstance(text, str) else _shown(text))
        except ValueError as error:
            what, _, how = str(error).partition("; ")
            raise PlanError(what, where=f"fix['splits'][{pattern!r}]", fix=how) from error
    return dict(splits)


def _shown(value: object) -> str:
    """A value as a message quotes it: plain ones themselves, of others the type."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"of type {type(value).__name__}"
