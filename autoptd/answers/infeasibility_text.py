"""The text of an infeasibility explanation."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from autoptd.answers.infeasibility import PREDICTED_ONLY, Conflict
from autoptd.explain.choices import short
from autoptd.explain.tables import WIDTH, columns, gib, rate, render, seconds, section
from autoptd.text import ranges

_STAGES = 4  # listed one by one


def conflict_text(found: Conflict, width: int = WIDTH) -> str:
    """Return the conflicting constraints, the shortfall of each stage, and a table of remedies with step times."""
    parts: list[RenderableType] = [Text(_blame(found)), *map(Text, _missing(found))]
    units = {remedy.plan.unit for remedy in found.remedies}
    table = columns("", "step>", f"{'/'.join(sorted(units))}/s>", "plan", gap=1 if width < WIDTH else 2, whole=True)
    for remedy in found.remedies:
        predicted = remedy.plan.predicted
        note = " (predicted only)" if remedy.kind == PREDICTED_ONLY and remedy.plan.not_runnable else ""
        table.add_row(
            remedy.what, seconds(predicted.step_time_s), rate(predicted.tokens_per_s), short(remedy.plan) + note
        )
    parts += section("Remedies, each with its plan", table if found.remedies else None)
    if not found.remedies and not found.untried:
        parts.append(Text("no single change that was tried makes a plan fit"))
    if found.untried:
        parts.append(Text(f"not tried for lack of time: {', '.join(found.untried)} (--why tries them)"))
    return render(parts, width)


def _blame(found: Conflict) -> str:
    pins = [f"{name}={text}" for name, text in found.pins.items()]
    if not pins:
        return "no constraint is to blame: no plan that fits was found without constraints either"
    if len(pins) == 1 and found.minimal:
        return f"no plan that fits was found with {pins[0]}; without it one fits"
    if not found.minimal:
        return f"no plan that fits was found with all of these: {', '.join(pins)}"
    return f"no plan that fits was found with {', '.join(pins)} together; without any one of them one fits"


def _missing(found: Conflict) -> list[str]:
    if found.least_memory is None:
        return []
    missing = found.missing_bytes
    over = [i for i, nbytes in enumerate(missing) if nbytes]
    head = f"least memory as asked: {short(found.least_memory)}, on devices of {gib(found.device_bytes)}"
    if len({missing[i] for i in over}) == 1 or len(over) > _STAGES:
        most = max(missing)
        text = (
            f"stages {ranges(over)} lack up to {gib(most)}" if len(over) > 1 else f"stage {over[0]} lacks {gib(most)}"
        )
        return [f"{head}: {text}"]
    return [f"{head}: " + ", ".join(f"stage {i} lacks {gib(missing[i])}" for i in over)]
