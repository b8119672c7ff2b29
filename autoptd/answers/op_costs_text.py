"""The report of where a step's time goes, as text for terminals of 80 columns or more, and as JSON data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoptd.answers.op_costs import PASSES, OpCost, OpCosts
from autoptd.answers.parameter_totals import ModuleParameters
from autoptd.answers.quicker_kernels import ALL, QuickerKernel, quicker_kernels
from autoptd.explain.costs import large
from autoptd.explain.plan import headline, prediction, steps
from autoptd.explain.tables import WIDTH, columns, gib, render, seconds, section
from autoptd.plans.model import Plan

_ROWS, _LEAST = 16, 0.002  # most rows of a table without `all`, and the least share of a step that has one
_WIDEST = 130  # columns from which passes have columns of their own
_LEGEND = (
    "times of one step on an average device; pass: forward, backward, recomputed; peak, mem: achieved share of the "
    "device's matmul peak and of its memory bandwidth"
)


def op_costs_data(plan: Plan, costs: OpCosts, parameters: Sequence[ModuleParameters]) -> dict[str, Any]:
    """Return the report as JSON data: seconds of one step on an average device, FLOPs and bytes."""
    return {
        "step_time_s": costs.step_s,
        "mfu": plan.predicted.mfu,
        "ideal_s": costs.ideal_s,
        "rows": [row.to_data() | {"share": costs.share(row)} for row in costs.rows],
        "rest_s": costs.rest_s,
        "quicker": [found.to_data() for found in quicker_kernels(costs)],
        "parameters": [row.to_data() for row in parameters],
    }


def op_costs_text(
    plan: Plan, costs: OpCosts, parameters: Sequence[ModuleParameters], width: int = WIDTH, all: bool = False
) -> str:
    """Return the report; with `all`, every row."""
    quicker = quicker_kernels(costs)
    short = _Short([*(row.module for row in costs.rows), *(row.module for row in parameters)])
    parts: list[RenderableType] = [
        Text(headline(plan)),
        Text(steps(plan)),
        Text(f"{prediction(plan)}: at the devices' peak, its FLOPs would take {seconds(costs.ideal_s)}"),
        *(Text(_dearest(costs, row, quicker, short)) for row in costs.rows[:1]),
        *section("Time by module and kernel", _table(costs, short, width, all)),
        Text(_LEGEND),
    ]
    if quicker:
        parts += ["", Text("Quicker by the same cost models")]
        parts += [Padding(Text(_quicker(costs, found, short)), (0, 0, 0, 2)) for found in quicker]
    parts += section("Parameters by module", _parameter_table(plan, parameters, short, width, all))
    return render(parts, width)


def _dearest(costs: OpCosts, row: OpCost, quicker: Sequence[QuickerKernel], short: _Short) -> str:
    """Return the row that takes most, and why if another kernel would be quicker."""
    text = f"largest part: {row.kernel} in {short(row.module)}, {seconds(row.seconds)} or {costs.share(row):.0%}"
    text += " of the step"
    text += f", at {row.of_peak:.1%} of the peak" if row.flops else ""
    text += f" and {row.of_bandwidth:.0%} of the memory bandwidth" if row.nbytes else ""
    mine = (q for q in quicker if q.kernel == row.kernel and q.module in (row.module, ALL))
    return text + next((f": {q.cause}" for q in mine), "")


def _quicker(costs: OpCosts, found: QuickerKernel, short: _Short) -> str:
    return (
        f"{short(found.module)}, {found.kernel}: {seconds(found.then_s)} instead of {seconds(found.now_s)} by "
        f"{found.instead}, {found.saved_s / costs.step_s:.0%} of the step less; {found.cause}"
    )


def _table(costs: OpCosts, short: _Short, width: int, all: bool) -> Table:
    apart = [f"{name}>" for name in (*PASSES, "kernels")] if width >= _WIDEST else []
    work = ["FLOPs>", "bytes>"] if width >= WIDTH else []
    gap = 2 if width >= _WIDEST else 1
    heads = ["module", "kernel", "pass", *apart, *work, "time>", "share>", "peak>", "mem>"]
    table = columns(*heads, gap=gap)
    shown = costs.rows if all else [row for row in costs.rows[:_ROWS] if costs.share(row) >= _LEAST]
    for row in shown:
        each = [*(_time(getattr(row, f"{name}_s")) for name in PASSES), large(sum(row.kernels.values()))]
        table.add_row(
            short(row.module),
            row.kernel,
            row.passes,
            *each[: len(apart)],
            *(large(x) if x else "–" for x in (row.flops, row.nbytes)[: len(work)]),
            *_ends(costs, row.seconds),
            f"{row.of_peak:.1%}" if row.flops else "–",
            f"{row.of_bandwidth:.0%}" if row.nbytes else "–",
        )
    blank = [""] * (1 + len(apart) + len(work))
    if others := costs.rows[len(shown) :]:
        table.add_row(f"{len(others)} more rows (--all)", "", *blank, *_ends(costs, sum(r.seconds for r in others)))
    table.add_row("rest: dp, optimizer, idle", "", *blank, *_ends(costs, costs.rest_s))
    table.add_row("step", "", *blank, *_ends(costs, costs.step_s))
    return table


def _ends(costs: OpCosts, value: float) -> tuple[str, str]:
    return seconds(value), f"{value / costs.step_s if costs.step_s else 0.0:.1%}"


def _time(value: float) -> str:
    return seconds(value) if value else "–"


class _Short:
    """Paths without the part that most of them begin with, such as `model` in `model.layers.*.mlp`."""

    def __init__(self, paths: Iterable[str]) -> None:
        paths = set(paths)
        firsts = Counter(path.partition(".")[0] for path in paths if "." in path)
        prefix, times = firsts.most_common(1)[0] if firsts else ("", 0)
        cut = {path: path.removeprefix(f"{prefix}.") for path in paths}
        self._cut = cut if 2 * times > len(paths) and len(set(cut.values())) == len(paths) else {}

    def __call__(self, path: str) -> str:
        return self._cut.get(path, path)


def _parameter_table(plan: Plan, rows: Sequence[ModuleParameters], short: _Short, width: int, all: bool) -> Table:
    tp, ep = (["by tp>"] if plan.mesh.tp > 1 else []), (["by ep>"] if plan.mesh.ep > 1 else [])
    frozen = ["frozen>"] * any(row.frozen for row in rows)
    table = columns("module", "parameters>", "share>", "size>", *tp, *ep, *frozen, gap=1 if width < WIDTH else 2)
    shown = rows if all or len(rows) <= _ROWS else rows[: _ROWS - 1]
    for row in shown:
        table.add_row(
            short(row.module),
            f"{row.numel:,}",
            f"{row.share:.1%}",
            gib(row.nbytes),
            *(f"{row.split:.0%}" for _ in tp),
            *(f"{row.spread:.0%}" for _ in ep),
            *(f"{row.frozen:.0%}" for _ in frozen),
        )
    rest = rows[len(shown) :]
    if rest:
        numel = sum(row.numel for row in rest)
        table.add_row(f"{len(rest)} more rows (--all)", f"{numel:,}", f"{sum(row.share for row in rest):.1%}")
    table.add_row("all", f"{sum(row.numel for row in rows):,}", "", gib(sum(row.nbytes for row in rows)))
    return table
