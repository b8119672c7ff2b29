"""A figure of one GPU with its bar, and tables of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """Figures of one case of a section. passed: None without a bar. problem: why there are no figures."""

    section: str
    name: str
    figures: Mapping[str, str] = field(default_factory=dict)
    passed: bool | None = None
    problem: str = ""

    @property
    def verdict(self) -> str:
        return {None: "", True: "pass", False: "MISS"}[self.passed]


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of one section's rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row.figures))
    bars = any(row.passed is not None for row in rows)
    head = ["", *columns, *([""] if bars else [])]
    lines = [head, ["---", *["---:"] * len(columns), *(["---"] if bars else [])]]
    for row in rows:
        cells = [row.figures.get(name, "") for name in columns]
        if row.problem:
            cells = [row.problem, *[""] * (len(columns) - 1)]
        lines.append([row.name, *cells, *([row.verdict] if bars else [])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
