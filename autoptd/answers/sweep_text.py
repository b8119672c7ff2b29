"""The text of a sweep: a table for terminals of 80 columns or more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from autoptd.answers.sweep import PAYS, SweepPoint, reason, shown
from autoptd.errors import AutoptdError
from autoptd.explain.choices import short
from autoptd.explain.costs import large, money, number
from autoptd.explain.tables import GIB, WIDTH, columns, rate, render, seconds

_PER_BILLION = {"tokens": "per Gtok", "samples": "per Gsample"}


def sweep_text(title: str, points: Sequence[SweepPoint], notes: Sequence[str], width: int) -> str:
    """Return a table with a row per point, then remarks; at most `width` columns."""
    names = list(points[0].values)
    shown_heads = _heads(points, width)
    heads = [*(f"{name}>" for name in names), *(f"{head}>" for head in shown_heads), "plan"]
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
            numbers = _numbers(point, points)
            table.add_row(*values, *(numbers[head] for head in shown_heads), short(point.found))
    parts: list[RenderableType] = [Text(title), *map(Text, notes), "", Padding(table, (0, 0, 0, 1))]
    remarks = (
        [f"[{i}] {text}" for i, text in enumerate(refused, 1)] + _verdict(points) + _about_costs(points, shown_heads)
    )
    return render([*parts, *([""] if remarks else []), *map(Text, remarks)], width)


def _heads(points: Sequence[SweepPoint], width: int) -> list[str]:
    costs = [point.cost for point in points if point.cost is not None]
    unit = costs[0].unit if costs else "tokens"
    priced = [_PER_BILLION[unit]] if any(cost.per_billion is not None for cost in costs) else []
    run = ["days"] if any(cost.days is not None for cost in costs) else []
    narrow = width < WIDTH and bool(priced or run)
    spent = [] if narrow else ["device·s"]  # proportional to the costs
    priced = [*(["cost"] if not run else [] if narrow else ["total"]), *priced] if priced else []
    energy = ["MWh"] if any(cost.energy_mwh is not None for cost in costs) and width >= WIDTH else []
    compared = ["scaling", "added"] if "world" in points[0].values else ["speed"]
    return ["step", f"{unit}/s", "MFU", "GiB", *spent, *run, *priced, *energy, *compared]


def _numbers(point: SweepPoint, points: Sequence[SweepPoint]) -> dict[str, str]:
    """Return column head -> cell of a point that fits."""
    assert point.plan is not None and point.device_seconds is not None and point.cost is not None
    predicted, cost = point.plan.predicted, point.cost
    base = next(p.plan for p in points if p.plan is not None)
    several = len(_currencies(points)) > 1

    def paid(value: float | None) -> str:
        return "–" if value is None else money(value, cost.currency if several else "")

    return {
        "step": seconds(predicted.step_time_s),
        f"{cost.unit}/s": rate(predicted.tokens_per_s),
        "MFU": f"{predicted.mfu:.1%}",
        "GiB": f"{predicted.memory_bytes / GIB:.1f}",
        "device·s": rate(point.device_seconds),
        "days": "–" if cost.days is None else number(cost.days),
        "total": paid(cost.total),
        "cost": paid(cost.per_step),
        _PER_BILLION[cost.unit]: paid(cost.per_billion),
        "MWh": "–" if cost.energy_mwh is None else number(cost.energy_mwh),
        "scaling": f"{point.efficiency or 0.0:.0%}",
        "added": "–" if point.added is None else f"{point.added:.0%}{'' if point.pays else '!'}",
        "speed": f"{predicted.tokens_per_s / base.predicted.tokens_per_s:.2f}×",
    }


def _currencies(points: Sequence[SweepPoint]) -> list[str]:
    return sorted({p.cost.currency for p in points if p.cost is not None and p.cost.per_step is not None})


def _about_costs(points: Sequence[SweepPoint], heads: Sequence[str]) -> list[str]:
    """Return remarks on the length of the run, the currency, and the point that costs least per token."""
    costs = [point.cost for point in points if point.cost is not None]
    of_run = ", ".join(head for head in ("days", "total", "MWh") if head in heads)
    remarks = [f"{of_run}: of {large(cost.units)} {cost.unit}" for cost in costs[:1] if cost.units is not None]
    paid = [(c.per_billion, i) for i, p in enumerate(points) if (c := p.cost) and c.per_billion is not None]
    if len(_currencies(points)) == 1 and len(paid) > 1:
        least, i = min(paid)
        named = ", ".join(f"{name} {shown(value)}" for name, value in points[i].values.items())
        remarks.append(f"cheapest: {named}, {money(least, *_currencies(points))} per billion {costs[0].unit}")
    return remarks


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
