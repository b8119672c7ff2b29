"""Why nothing fits, as a person reads it."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from autoptd.answers.infeasibility import UNWRITTEN, Conflict
from autoptd.explain.choices import short
from autoptd.explain.tables import WIDTH, columns, gib, rate, render, seconds, section
from autoptd.fold_names import ranges

_STAGES = 4  # told one by one


def conflict_text(found: Conflict, width: int = WIDTH) -> str:
    """What cannot be had together, what is missing where, and the ways out with their step times."""
    parts: list[RenderableType] = [Text(_blame(found)), *map(Text, _missing(found))]
    table = columns("", "step>", "tokens/s>", "plan", gap=1 if width < WIDTH else 2, whole=True)
    for remedy in found.remedies:
        said = remedy.plan.predicted
        note = " (predicted only)" if remedy.kind == UNWRITTEN and remedy.plan.not_runnable else ""
        table.add_row(remedy.what, seconds(said.step_time_s), rate(said.tokens_per_s), short(remedy.plan) + note)
    parts += section("Ways out, each one planned", table if found.remedies else None)
    if not found.remedies and not found.untried:
        parts.append(Text("no single change that was tried is a way out"))
    if found.untried:
        parts.append(Text(f"no time to try: {', '.join(found.untried)} (--why takes the time)"))
    return render(parts, width)


def _blame(found: Conflict) -> str:
    pins = [f"{name}={text}" for name, text in found.pins.items()]
    if not pins:
        return "no pin is to blame: with nothing fixed there is no room either"
    if len(pins) == 1 and found.minimal:
        return f"{pins[0]} alone leaves no room; without it there is"
    together = f"{', '.join(pins)} together leave no room"
    return f"{together}; without any one of them there is" if found.minimal else f"of these some do: {', '.join(pins)}"


def _missing(found: Conflict) -> list[str]:
    if found.leanest is None:
        return []
    missing = found.missing_bytes
    over = [i for i, nbytes in enumerate(missing) if nbytes]
    head = f"leanest as asked: {short(found.leanest)}, on devices of {gib(found.device_bytes)}"
    if len({missing[i] for i in over}) == 1 or len(over) > _STAGES:
        most = max(missing)
        text = (
            f"stages {ranges(over)} lack up to {gib(most)}" if len(over) > 1 else f"stage {over[0]} lacks {gib(most)}"
        )
        return [f"{head}: {text}"]
    return [f"{head}: " + ", ".join(f"stage {i} lacks {gib(missing[i])}" for i in over)]
