"""The text of a sweep: a table for terminals of 80 columns or more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from autoptd.answers.sweep import PAYS, SweepPoint, reason, shown
from autoptd.errors import AutoptdError
from autoptd.explain.choices import short
from autoptd.explain.tables import GIB, WIDTH, columns, rate, render, seconds


def sweep_text(title: str, points: Sequence[SweepPoint], notes: Sequence[str], width: int) -> str:
    """Return a table with a row per point, then remarks; at most `width` columns."""
    names = list(points[0].values)
    heads = [*(f"{name}>" for name in names), *(f"{head}>" for head in _heads(points[0], width)), "plan"]
    table = columns(*heads, gap=1 if width < WIDTH else 2, whole=True)
    refused: list[str] = []
    for point in points:
        values = [shown(value) for value in point.values.values()]
        if isinstance(point.found, AutoptdError):
            if (why := reason(point.found)) not in refused:
                refused.append(why)
            cells = ["–"] * (len(heads) - len(names) - 1)
            table.add_row(*values, *cells, f"none [{refused.index(why) + 1}]")
        else:
            cells = list(_numbers(point, points, width).values())
            table.add_row(*values, *cells, short(point.found))
    parts: list[RenderableType] = [Text(title), *map(Text, notes), "", Padding(table, (0, 0, 0, 1))]
    remarks = [f"[{i}] {text}" for i, text in enumerate(refused, 1)] + _verdict(points)
    return render([*parts, *([""] if remarks else []), *map(Text, remarks)], width)


def _heads(point: SweepPoint, width: int) -> list[str]:
    priced = ["cost", "per Gtok"] if point.price_per_hour is not None else []
    spent = [] if priced and width < WIDTH else ["device·s"]  # proportional to the cost
    compared = ["scaling", "added"] if "world" in point.values else ["speed"]
    return ["step", "tokens/s", "MFU", "GiB", *spent, *priced, *compared]


def _numbers(point: SweepPoint, points: Sequence[SweepPoint], width: int) -> dict[str, str]:
    """Return column head -> cell of a point that fits."""
    assert point.plan is not None and point.device_seconds is not None
    predicted = point.plan.predicted
    base = next(p.plan for p in points if p.plan is not None)
    cells = {
        "step": seconds(predicted.step_time_s),
        "tokens/s": rate(predicted.tokens_per_s),
        "MFU": f"{predicted.mfu:.1%}",
        "GiB": f"{predicted.memory_bytes / GIB:.1f}",
        "device·s": rate(point.device_seconds),
        "cost": f"{point.cost_per_step or 0.0:,.3g}",
        "per Gtok": f"{point.cost_per_billion_tokens or 0.0:,.3g}",
        "scaling": f"{point.efficiency or 0.0:.0%}",
        "added": "–" if point.added is None else f"{point.added:.0%}{'' if point.pays else '!'}",
        "speed": f"{predicted.tokens_per_s / base.predicted.tokens_per_s:.2f}×",
    }
    return {head: cells[head] for head in _heads(point, width)}


def _verdict(points: Sequence[SweepPoint]) -> list[str]:
    """Return a remark on the numbers of devices at which adding more no longer pays."""
    stops = [point for point in points if not point.pays]
    if not stops:
        return []
    worlds = ", ".join(str(point.values["world"]) for point in stops)
    return [
        f"! at {worlds} devices, each added device brings less than {PAYS:.0%} of the throughput per device at the "
        f"first point: adding more no longer pays"
    ]
