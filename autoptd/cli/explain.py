"""`autoptd explain` and `autoptd compare`: a plan, the reasons for its choices, and its differences from another."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from autoptd.cli.arguments import UsageError
from autoptd.cli.output import model_of, print_json, progress_of, show, width
from autoptd.cli.traced import ModelToPlan
from autoptd.outputs import refuse_unwritable, write_whole

if TYPE_CHECKING:
    from autoptd.plans.model import Plan
    from autoptd.progress import Progress

DONE, NO = 0, 1


def run_explain(arguments: argparse.Namespace) -> int:
    """Print a plan; with `--memory` its memory formulas, with `--op` the alternatives to one choice."""
    from autoptd.explain.plan import explain, fullest_rank, headline, prediction
    from autoptd.plans.model import Plan

    if arguments.memory and arguments.op:
        raise UsageError("--memory and --op are two different reports", fix="give one of them")
    plan = Plan.load(arguments.plan)
    if arguments.svg:
        from autoptd.report.pictures import memory_picture

        memory_picture(plan, Path(arguments.svg))
    if arguments.memory:
        return _memory(arguments, plan)
    if arguments.op:
        return _op(arguments, plan)
    if arguments.json:
        texts = {"headline": headline(plan), "prediction": prediction(plan), "memory": fullest_rank(plan)}
        print_json({**texts, "plan": json.loads(plan.to_json())})
    else:
        show(explain(plan, width(), arguments.all))
    return DONE


def _memory(arguments: argparse.Namespace, plan: Plan) -> int:
    source = _model(arguments, plan, progress_of(arguments)).traced().for_batch(plan.batch)
    from autoptd.compile.program import read_sharding
    from autoptd.explain.memory import explain_memory, memory_data

    found = source, read_sharding(source, plan)
    if arguments.json:
        print_json(memory_data(plan, *found))
    else:
        show(explain_memory(plan, *found, width()))
    return DONE


def _op(arguments: argparse.Namespace, plan: Plan) -> int:
    progress = progress_of(arguments)
    traced = _model(arguments, plan, progress).traced()
    from autoptd.answers.op_alternatives import op_alternatives, op_alternatives_text

    found, left = op_alternatives(plan, traced, arguments.op, progress)
    if arguments.json:
        print_json({"found": [one.to_data() for one in found], "left_out": [slot.node for slot in left]})
    else:
        show(op_alternatives_text(plan, found, left, width()))
    return DONE


def _model(arguments: argparse.Namespace, plan: Plan, progress: Progress) -> ModelToPlan:
    """Return the plan's model, which is shipped or given by `--model`. Raises UsageError."""
    return ModelToPlan(
        model_of(arguments.model, plan.model),
        seq=plan.sizes.get("s"),
        precision=plan.precision,
        loss_averaging=plan.loss_averaging,
        progress=progress,
    )


def run_report(arguments: argparse.Namespace) -> int:
    """Write the report of a plan as an HTML page."""
    from autoptd.plans.model import Plan

    out = Path(arguments.out or Path(arguments.plan).with_suffix(".html").name)
    refuse_unwritable(out)
    plan, reasons = Plan.load(arguments.plan), None
    if arguments.why:
        progress = progress_of(arguments)
        traced = _model(arguments, plan, progress).traced()
        from autoptd.answers.op_alternatives import parameter_reasons

        reasons = parameter_reasons(plan, traced, progress)
    write_whole(out, plan.to_html(reasons))
    if arguments.json:
        print_json({"page": str(out)})
    else:
        show(f"written to {out}")
    return DONE


def run_compare(arguments: argparse.Namespace) -> int:
    """Print two plans side by side, or write them as a page with `--html`; the exit code is 0 if they are equal."""
    from autoptd.explain.compare import compare, comparison_data
    from autoptd.plans.model import Plan

    a, b = Plan.load(arguments.a), Plan.load(arguments.b)
    if arguments.html:
        from autoptd.report.page import comparison_page

        write_whole(Path(arguments.html), comparison_page(a, b))
    if arguments.json:
        print_json(comparison_data(a, b))
    else:
        show(compare(a, b, width=width()))
    return DONE if a == b else NO
