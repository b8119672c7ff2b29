"""Text layout: tables without lines, sections, names of parts, and numbers in readable units."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoptd.plans.data import PlanData
from autoptd.text import printable

WIDTH = 100
GIB = 2**30
_ROWS = 4000  # most rows of a report; rich takes about a millisecond for each
_CELL = 2000  # most characters of a cell
_REST = "…  further rows are omitted here: --json has all of them"


class _PrintableRows(Table):
    """A table of strings that may come from files: each cell is one printable line of limited length."""

    left_out = 0

    def add_row(self, *cells: Any, **how: Any) -> None:
        if self.row_count >= _ROWS:
            self.left_out += 1
            return
        super().add_row(*(_cell(cell) if isinstance(cell, str) else cell for cell in cells), **how)


def _cell(text: str) -> str:
    return printable(text if len(text) <= _CELL else f"{text[:_CELL]}…", keep="")


def columns(*names: str, gap: int = 2, whole: bool = False) -> Table:
    """Return a table without lines. Columns whose name ends in `>` are right-aligned; with `whole` these never wrap."""
    made = _PrintableRows(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="")
    for column in names:
        justify = "right" if column.endswith(">") else "left"
        kept = whole and justify == "right"
        made.add_column(column.removesuffix(">"), justify=justify, overflow="fold", no_wrap=kept)  # type: ignore[arg-type]
    return made


def section(title: str, content: Table | None) -> list[RenderableType]:
    """Return a blank line, the title, and the table indented; nothing if there is no table."""
    return [] if content is None else ["", Text(_cell(title)), Padding(content, (0, 0, 0, 2))]


def render(parts: Sequence[RenderableType], width: int) -> str:
    """Return tables and text as plain, `printable` text of at most `width` columns, at most `_ROWS` rows."""
    sink = io.StringIO()
    console = Console(file=sink, width=width, color_system=None, force_terminal=False, markup=False, highlight=False)
    room = _ROWS
    for part in parts:
        table = part.renderable if isinstance(part, Padding) else part
        console.print(Text(printable(part.plain)) if isinstance(part, Text) else part)
        room -= table.row_count if isinstance(table, Table) else 1
        if room <= 0 or (isinstance(table, _PrintableRows) and table.left_out):
            console.print(_REST)
            break
    return printable("\n".join(line.rstrip() for line in sink.getvalue().split("\n")).rstrip("\n")) + "\n"


def words(name: str) -> str:
    """Return a name with spaces: `pipeline_bubble` -> `pipeline bubble`."""
    return name.replace("_", " ")


def part_name(name: str, *plans: PlanData) -> str:
    """Return the name of a part of the step time; communication within a stage is named after the plans' axes."""
    return f"{stage_axes(*plans)} communication" if name == "tp_communication" else words(name)


def stage_axes(*plans: PlanData) -> str:
    """Return the axes that communicate within a stage of any of the plans: `tp`, `tp, ep`."""
    axes = [axis for axis in ("tp", "cp", "ep") if any(getattr(plan.mesh, axis) > 1 for plan in plans)]
    return ", ".join(axes or ["tp"])


def seconds(value: float) -> str:
    """Return a time with three digits in a suitable unit: `0.0123` -> `12.3 ms`. A difference keeps its sign."""
    size = abs(value)
    for unit, step in (("s", 1.0), ("ms", 1e-3)):
        if size >= step:
            return f"{value / step:.3g} {unit}" if size / step < 1000 else f"{value / step:,.0f} {unit}"
    return f"{value / 1e-6:.3g} µs"


def gib(nbytes: float) -> str:
    """Return bytes as `79.65 GiB`, small ones in MiB or KiB. A difference keeps its sign."""
    if abs(nbytes) >= GIB / 10:
        return f"{nbytes / GIB:.2f} GiB"
    return f"{nbytes / 2**20:.1f} MiB" if abs(nbytes) >= 2**20 / 10 or not nbytes else f"{nbytes / 1024:.1f} KiB"


def rate(value: float) -> str:
    """Return a rate with three digits: `212k`, `1.58M`, `987`."""
    for unit, step in (("M", 1e6), ("k", 1e3)):
        if value >= step:
            return f"{value / step:.3g}{unit}" if value / step < 1000 else f"{value / step:,.0f}{unit}"
    return f"{value:.3g}"


def signed(value: float, text: str) -> str:
    """Return the text of a value with `+` if it is positive; that of a negative value has its sign already."""
    return f"+{text}" if value > 0 else text
