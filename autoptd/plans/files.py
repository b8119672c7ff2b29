"""Errors of a plan file, with one line per mistake."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pydantic import ValidationError

from autoptd.cost_models.complaints import brief, describe_mistakes, quoted
from autoptd.errors import PlanFileError
from autoptd.plans.checks import Inconsistent
from autoptd.plans.data import FORMAT, VERSION, PlanData

_SHOWN = 8  # mistakes listed one by one
REMAKE = "make the plan again with `autoptd plan MODEL -o FILE`"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object. Raises ValueError if a key occurs twice."""
    data = dict(pairs)
    if len(data) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {quoted(key)} occurs twice in one object")
    return data


def check_head(data: Any, where: str) -> None:
    """Raise PlanFileError for another format or version. Called first: a foreign file is not a plan with mistakes."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        known = isinstance(data, dict) and "format" in data
        found = f"its format is {quoted(data['format'])}, not {FORMAT!r}" if known else "it has no field `format`"
        raise PlanFileError(f"this is not an autoptd plan: {found}", where=where, fix=REMAKE)
    version = data.get("version")
    if type(version) is int and version > VERSION:
        fix = f"update autoptd, or {REMAKE}"
        what = f"the plan has version {brief(str(version))}; this autoptd reads {VERSION}"
        raise PlanFileError(what, where=where, fix=fix)
    if type(version) is not int or version != VERSION:
        what = f"the plan's version is {quoted(version)}; this autoptd reads {VERSION}"
        raise PlanFileError(what, where=where, fix=REMAKE)


def mistakes(error: ValidationError) -> tuple[list[str], int]:
    """Return lines for the first mistakes, and the number of all. Valid fields are then checked for contradictions."""
    if error.error_count() == 1:
        cause = error.errors(include_url=False)[0].get("ctx", {}).get("error")
        if isinstance(cause, Inconsistent):
            return [f"{path}: {what}" for path, what in cause.faults[:_SHOWN]], len(cause.faults)
    return describe_mistakes(error, PlanData).splitlines()[:_SHOWN], error.error_count()


def refusal(lines: list[str], mistakes: int, where: str) -> PlanFileError:
    shown = [line if len(line) <= 240 else f"{line[:240]} …" for line in lines]
    if mistakes > len(lines):
        shown.append(f"and {mistakes - len(lines)} more")
    count = "a mistake" if mistakes == 1 else f"{mistakes} mistakes"
    what = f"the plan {where} has {count}" if where else f"the plan has {count}"
    return PlanFileError(what, where="\n".join(shown), fix=f"correct the fields, or {REMAKE}")
