"""A verdict as text and as JSON data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from autoptd.explain.plan import headline
from autoptd.explain.tables import columns, render, section
from autoptd.text import fold_table
from autoptd.verification.compare import TOLERANCE
from autoptd.verification.verdict import Verdict

_SHOWN = 8  # faults listed one by one


def text(verdict: Verdict, width: int, *, every: bool = False) -> str:
    """Return the report in at most `width` columns. `every`: a row for each parameter, layers not folded."""
    parts: list[RenderableType] = [headline(verdict.plan), _ran(verdict), *_shown(verdict)]
    parts += section("Proved", _lines(verdict.proved))
    parts += section(f"Largest differences from the plain model, {verdict.steps} steps", _differences(verdict, every))
    parts += section("What is wrong, the first cause first", _faults(verdict))
    return render([*parts, "", _conclusion(verdict)], width)


def _ran(verdict: Verdict) -> str:
    plan = verdict.subject.plan
    return f"{plan.world} rank{'s' if plan.world > 1 else ''} in one process, in float64, running the emitted program"


def _shown(verdict: Verdict) -> Iterator[RenderableType]:
    if verdict.subject.shown:
        yield f"made smaller: {', '.join(verdict.subject.shown)}"
    if verdict.made:
        yield f"generated inputs: {'; '.join(verdict.made)}"


def _lines(lines: tuple[str, ...]) -> Table | None:
    if not lines:
        return None
    table = Table.grid()
    for line in lines:
        table.add_row(line)
    return table


def _differences(verdict: Verdict, every: bool) -> Table | None:
    found = verdict.compared
    if found is None:
        return None
    table = columns("", "gradient>", "after the step>", whole=True)
    rows = {name: (_number(off.difference), _difference_of(found.state, name)) for name, off in found.gradients.items()}
    rows |= {name: ("", _number(off.difference)) for name, off in found.state.items() if name not in rows}
    listed = list(rows.items()) if every else list(_by_place(rows))
    for name, (gradient, state) in listed:
        table.add_row(name, gradient, state)
    table.add_row("loss", _number(found.loss.difference), "")
    table.add_row("gradient norm", _number(found.norm.difference), "")
    return table


def _by_place(rows: dict[str, tuple[str, str]]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield rows with the layers folded; each folded name has the largest number of its members."""
    for line, _ in fold_table((name, "") for name in rows):
        members = [texts for name, texts in rows.items() if fold_matches(line, name)]
        yield line, (_largest(g for g, _ in members), _largest(s for _, s in members))


def fold_matches(line: str, name: str) -> bool:
    """Return whether a folded name such as `h.{0..3}.weight` includes a name."""
    mine, theirs = _split(line), name.split(".")
    return len(mine) == len(theirs) and all(
        a == b or (a.startswith("{") and b in _members(a)) for a, b in zip(mine, theirs, strict=True)
    )


def _split(line: str) -> list[str]:
    """Split a folded name at its dots, except those within braces."""
    parts, depth = [""], 0
    for letter in line:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "." and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _members(braces: str) -> set[str]:
    found: set[str] = set()
    for run in braces.strip("{}").split(","):
        first, _, last = run.partition("..")
        found |= {str(n) for n in range(int(first), int(last or first) + 1)}
    return found


def _largest(texts: Iterator[str]) -> str:
    given = [text for text in texts if text]
    return max(given, key=float, default="")


def _difference_of(table: dict[str, Any], name: str) -> str:
    return _number(table[name].difference) if name in table else ""


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _faults(verdict: Verdict) -> Table | None:
    if not verdict.faults:
        return None
    table = columns("where", "what")
    for where, what in verdict.faults[:_SHOWN]:
        table.add_row(where, what)
    if len(verdict.faults) > _SHOWN:
        table.add_row("", f"and {len(verdict.faults) - _SHOWN} more")
    return table


def _conclusion(verdict: Verdict) -> str:
    if verdict.agrees:
        return (
            f"verified: the plan computes what the model computes; the largest difference is {verdict.difference:.1e} "
            f"(up to {TOLERANCE:g} counts as rounding)"
        )
    where, what = verdict.faults[0]
    return f"NOT the same as the plain model: {where}: {what.splitlines()[0]}"


def data(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as JSON data."""
    found = verdict.compared
    tables = {} if found is None else {"gradients": found.gradients, "parameters": found.state}
    return {
        "agrees": verdict.agrees,
        "ranks": verdict.subject.plan.world,
        "steps": verdict.steps,
        "shown": list(verdict.subject.shown),
        "inputs": list(verdict.made),
        "proved": list(verdict.proved),
        "faults": [{"where": where, "what": what} for where, what in verdict.faults],
        "largest_difference": verdict.difference if found is not None else None,
        **{kind: {name: off.difference for name, off in table.items()} for kind, table in tables.items()},
    }
