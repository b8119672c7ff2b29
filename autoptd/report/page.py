"""The page of a plan, and the page of two plans side by side."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from autoptd.explain.compare import comparison_tables, makes, verdict
from autoptd.explain.costs import AS_STATED, CostQuestion
from autoptd.plans.data import PlanData
from autoptd.report.drawing import drawing
from autoptd.report.facts import facts
from autoptd.text import printable

if TYPE_CHECKING:
    from jinja2 import Environment


def plan_page(
    plan: PlanData,
    reasons: Mapping[str, str] | None = None,
    costs: CostQuestion = AS_STATED,
    constraints: Sequence[tuple[str, str, str, str]] = (),
) -> str:
    """Return the report of a plan as one self-contained HTML page; the other arguments are those of `facts`."""
    return (
        _environment()
        .get_template("plan.html")
        .render(facts(plan, reasons, costs, constraints), drawing=_script_data(drawing(plan)))
    )


def comparison_page(
    a: PlanData, b: PlanData, names: tuple[str, str] = ("A", "B"), costs: CostQuestion = AS_STATED
) -> str:
    """Return two plans side by side as one self-contained HTML page."""
    return (
        _environment()
        .get_template("comparison.html")
        .render(
            title=verdict(a, b, names),
            made=makes(a, b, names),
            names=names,
            sides=[facts(plan, None, costs) for plan in (a, b)],
            drawings=[_script_data(drawing(plan)) for plan in (a, b)],
            tables=comparison_tables(a, b, costs),
        )
    )


def framed(page: str) -> str:
    """Return a page in a frame, for a notebook, whose own styles it leaves alone."""
    return f'<iframe title="plan" srcdoc="{html.escape(page)}" style="width:100%;height:48rem;border:0"></iframe>'


def _script_data(value: object) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _printable(value: object) -> object:
    """Escape characters of a plan's texts that are not printable."""
    return printable(value) if type(value) is str else value  # not of `Markup`


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    found = Environment(
        loader=PackageLoader("autoptd.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = files("autoptd.report") / "templates"
    found.globals["style"] = Markup((folder / "page.css").read_text("utf-8"))
    found.globals["script"] = Markup((folder / "timeline.js").read_text("utf-8"))
    found.filters["json"] = Markup
    return found
