"""Pictures for documents, as SVG: the timeline and the memory of a plan, a sweep, time against memory.

They need matplotlib (`pip install 'autoptd[plot]'`). Equal data give equal bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoptd.cost_models.memory import CONFIDENCE, MOST_MEASURED
from autoptd.errors import PlanError
from autoptd.explain.plan import headline
from autoptd.explain.tables import GIB, words
from autoptd.outputs import refuse_unwritable, write_whole
from autoptd.plans.data import PlanData
from autoptd.report.drawing import KINDS, UNITS, drawing
from autoptd.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORWARD, _BACKWARD, _AGAIN, _WAITS, _UPDATE = "#4c8dd6", "#2c5f9e", "#b3541e", "#8a5cc2", "#4b7f39"
_STACK = ("#2f6fb7", "#d08a1d", "#4b8f45", "#8a5cc2", "#b3541e", "#3a8f94", "#a23b6e", "#77808b")
_BEYOND: dict[str, Any] = {"facecolor": "none", "edgecolor": "#57606a", "linewidth": 0}
_EVENTS = 800  # most of a picture
_STYLE = {
    "svg.hashsalt": "autoptd",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.usetex": False,
}


def refuse_unpictured(file: Path) -> None:
    """Raise PlanError or PlanFileError if a picture cannot be made, before anything is computed for it."""
    if file.suffix.lower() != ".svg":
        raise PlanError(f"pictures are SVG, and {file.name} is not", where="--svg", fix="name a file that ends in .svg")
    refuse_unwritable(file)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        fix = "pip install 'autoptd[plot]', or write an HTML page: autoptd report PLAN"
        raise PlanError("pictures need matplotlib, which is not installed", where="--svg", fix=fix) from None


def timeline_picture(plan: PlanData, file: Path) -> None:
    """Write the simulated step of a plan. Raises PlanError for a step with too many passes to draw."""
    drawn = drawing(plan, _EVENTS)
    if drawn is None:
        raise PlanError(
            "the step has too many passes to draw, or the plan has no times of its stages",
            where="schedule.microbatches",
            fix="plan with a smaller batch: the steady state repeats",
        )
    with _figure(file, height=1.4 + 0.22 * len(drawn["ranks"])) as axes:
        scale = drawn["seconds"] / UNITS
        for rank, row in enumerate(drawn["ranks"]):
            spans: dict[str, list[tuple[float, float]]] = {}
            for i in range(0, len(row), 5):
                kind, chunk, _, start, length = row[i : i + 5]
                for color, at, share in _colored(KINDS[kind], drawn["shares"][rank][chunk]):
                    if share > 0:
                        spans.setdefault(color, []).append(((start + at * length) * scale, share * length * scale))
            for color, own in spans.items():
                axes.broken_barh(own, (rank - 0.42, 0.84), facecolors=color, linewidth=0)
        if drawn["hidden"]:
            start, end = (at * scale for at in drawn["hidden"])
            axes.axvspan(start, end, color="#eeeeee", linewidth=0)
            axes.text((start + end) / 2, len(drawn["ranks"]) / 2 - 0.5, "the same again", ha="center", va="center")
        axes.set(xlim=(0, drawn["seconds"]), ylim=(len(drawn["ranks"]) - 0.5, -0.5))
        axes.set(xlabel="seconds", ylabel="pipeline rank", title=_title(plan))
        names = {
            _FORWARD: "forward", _BACKWARD: "backward", _AGAIN: "recomputation", _WAITS: "communication that waits",
            _UPDATE: "optimizer",
        }  # fmt: skip
        axes.set_yticks(_labelled(len(drawn["ranks"])))
        _legend(axes, [(name, {"color": color}) for color, name in names.items()])


def _colored(kind: str, shares: Sequence[float]) -> Iterator[tuple[str, float, float]]:
    """Yield color, start and length of each part of a pass, relative to its length."""
    ahead_tp, again, back_tp = shares
    match kind:
        case "F":
            yield _FORWARD, 0.0, 1 - ahead_tp
            yield _WAITS, 1 - ahead_tp, ahead_tp
        case "B":
            yield _AGAIN, 0.0, again
            yield _BACKWARD, again, 1 - again - back_tp
            yield _WAITS, 1 - back_tp, back_tp
        case "W":
            yield _BACKWARD, 0.0, 1.0
        case _:
            yield (_UPDATE if kind == "STEP" else _WAITS), 0.0, 1.0


def memory_picture(plan: PlanData, file: Path) -> None:
    """Write the memory of one rank of each pipeline rank, by category, against its device."""
    rows = plan.predicted.memory
    names = sorted({name for row in rows for name in row}, key=lambda name: -max(row.get(name, 0) for row in rows))
    with _figure(file, height=1.6 + 0.24 * len(rows)) as axes:
        left, places = [0.0] * len(rows), range(len(rows))
        for name, color in zip(names, _STACK, strict=False):
            sizes = [row.get(name, 0) / GIB for row in rows]
            axes.barh(places, sizes, left=left, color=color, height=0.8)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        beyond = [(MOST_MEASURED - 1) * size for size in left]
        axes.barh(places, beyond, left=left, height=0.8, hatch="////", **_BEYOND)
        for rank in places:
            at = plan.device_of(rank).memory_bytes / GIB
            axes.plot([at, at], [rank - 0.45, rank + 0.45], color="#b42318", linewidth=1.5)
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="GiB of one rank", ylabel="pipeline rank", title=_title(plan))
        axes.set_yticks(_labelled(len(rows)))
        marks = [(words(name), {"color": color}) for name, color in zip(names, _STACK, strict=False)]
        below = (f"below this with {CONFIDENCE:.0%} confidence", {"hatch": "////", **_BEYOND})
        _legend(axes, [*marks, below, ("memory of the device", {"color": "#b42318"})])


def sweep_picture(points: Sequence[Mapping[str, Any]], file: Path, title: str) -> None:
    """Write the points of a sweep: tokens/s over its first name, and each point's share of perfect scaling.

    `points`: what `SweepPoint.to_data` returns. Raises PlanError if no point fits."""
    fitting = [point for point in points if point["fits"]]
    if not fitting:
        raise PlanError("no point of the sweep fits: there is nothing to draw", where="--svg")
    from matplotlib.ticker import EngFormatter

    labels = [", ".join(f"{name} {value}" for name, value in point["values"].items()) for point in fitting]
    with _figure(file, height=1.4 + 0.3 * len(fitting)) as axes:
        rates = [point["tokens_per_s"] for point in fitting]
        axes.barh(range(len(rates)), rates, color=_FORWARD, height=0.7)
        for place, (point, rate) in enumerate(zip(fitting, rates, strict=True)):
            scaling = point["scaling_efficiency"]
            note = f"{rate:,.0f}" + (f"  {scaling:.0%} of perfect scaling" if scaling is not None else "")
            axes.annotate(note, (rate, place), (4, 0), textcoords="offset points", va="center")
        axes.set(xlim=(0, 1.45 * max(rates)), ylim=(len(rates) - 0.5, -0.5), xlabel="tokens/s", title=printable(title))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_yticks(range(len(rates)), [printable(label, keep="") for label in labels])


def frontier_picture(points: Sequence[Mapping[str, Any]], file: Path, title: str) -> None:
    """Write step time against the memory that a device must have. `points`: those of `Frontier.to_data`."""
    with _figure(file, height=4.0) as axes:
        memory, time_s = ([point[name] for point in points] for name in ("device_bytes", "step_time_s"))
        gib = [nbytes / GIB for nbytes in memory]
        axes.step(gib, time_s, where="post" if gib == sorted(gib) else "pre", color=_BACKWARD, marker="o")
        names = []
        for number, (point, x, y) in enumerate(zip(points, gib, time_s, strict=True), 1):
            axes.annotate(str(number), (x, y), (4, 3), textcoords="offset points")
            names.append(f"{number}  {printable(point['plan'], keep='')}")
        axes.figure.text(1.01, 0.9, "\n".join(names), va="top", fontsize=8)
        axes.set(xlabel="GiB that a device must have", ylabel="seconds a step", title=printable(title))
        axes.set_ylim(bottom=0)


def _title(plan: PlanData) -> str:
    return printable(headline(plan), keep="").replace("$", "\\$")


def _labelled(rows: int) -> range:
    """Return the rows whose numbers are written: at most 16, equally far apart."""
    return range(0, rows, -(-rows // 16))


def _legend(axes: Axes, marks: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Write names below the axes, each with a patch in its style."""
    from matplotlib.patches import Patch

    handles = [Patch(label=name, **style) for name, style in marks]
    columns = -(-len(handles) // -(-len(handles) // 5))  # rows of equal length, at most 5 wide
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


@contextmanager
def _figure(file: Path, height: float) -> Iterator[Axes]:
    """Yield the axes of a figure, 8 inches wide, which is then written."""
    refuse_unpictured(file)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(8, height), layout="constrained")
        yield figure.subplots()
        found = io.BytesIO()
        figure.savefig(found, format="svg", metadata={"Date": None, "Creator": "autoptd"}, bbox_inches="tight")
    write_whole(file, found.getvalue())
