"""`autoptd explain` and `autoptd compare`: a plan, the reasons for its choices, and its differences from another."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from autoptd.cli.arguments import UsageError
from autoptd.cli.costs import add_cost_arguments, asks_cost, cost_question
from autoptd.cli.output import model_of, print_json, progress_of, show, width
from autoptd.cli.traced import ModelToPlan
from autoptd.outputs import refuse_unwritable, write_whole

if TYPE_CHECKING:
    from autoptd.plans.model import Plan
    from autoptd.progress import Progress

DONE, NO = 0, 1


def run_explain(arguments: argparse.Namespace) -> int:
    """Print a plan; with `--memory` its memory formulas, with `--op` the alternatives to one choice,
    with `--ops` the time by module and kernel."""
    from autoptd.explain.plan import explain, fullest_rank, headline, prediction
    from autoptd.plans.model import Plan

    reports = [name for name in ("memory", "op", "ops") if getattr(arguments, name)]
    if len(reports) > 1:
        raise UsageError(f"--{reports[0]} and --{reports[1]} are two different reports", fix="give one of them")
    if reports and (asked := asks_cost(arguments)):
        raise UsageError(f"{asked} is not for --{reports[0]}", fix="leave it out")
    plan, costs = Plan.load(arguments.plan), cost_question(arguments)
    if arguments.svg:
        from autoptd.report.pictures import memory_picture

        if reports:
            raise UsageError(f"--svg draws the memory of a plan, and --{reports[0]} is text", fix="give one of them")
        memory_picture(plan, Path(arguments.svg))
    if arguments.memory:
        return _memory(arguments, plan)
    if arguments.op:
        return _op(arguments, plan)
    if arguments.ops:
        return _ops(arguments, plan)
    if arguments.json:
        texts = {"headline": headline(plan), "prediction": prediction(plan), "memory": fullest_rank(plan)}
        print_json({**texts, "cost": costs.of(plan).to_data(), "plan": json.loads(plan.to_json())})
    else:
        show(explain(plan, width(), arguments.all, costs))
        if arguments.svg:
            show(f"\npicture saved to {arguments.svg}")
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


def _ops(arguments: argparse.Namespace, plan: Plan) -> int:
    traced = _model(arguments, plan, progress_of(arguments)).traced().for_batch(plan.batch)
    from autoptd.answers.op_costs import op_costs
    from autoptd.answers.op_costs_text import op_costs_data, op_costs_text
    from autoptd.answers.parameter_totals import parameter_totals

    found = op_costs(plan, traced), parameter_totals(plan, traced)
    if arguments.json:
        print_json(op_costs_data(plan, *found))
    else:
        show(op_costs_text(plan, *found, width(), arguments.all))
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


def add_report_arguments(report: argparse.ArgumentParser, model_help: str) -> None:
    """Add the options of `report`."""
    report.add_argument("plan", metavar="PLAN", help="a plan file")
    report.add_argument("-o", "--out", metavar="FILE", help="default: the plan's name with .html, in this folder")
    add_cost_arguments(report)
    report.add_argument("--why", action="store_true", help="what other placements would cost; traces the model")
    report.add_argument("--model", metavar="MODEL", help=f"for --why: {model_help} (default: the plan's)")


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
    write_whole(out, plan.to_html(reasons, cost_question(arguments)))
    if arguments.json:
        print_json({"page": str(out)})
    else:
        show(f"written to {out}")
    return DONE


def run_compare(arguments: argparse.Namespace) -> int:
    """Print two plans side by side, or write them as a page with `--html`; the exit code is 0 if they are equal."""
    from autoptd.explain.compare import compare, comparison_data
    from autoptd.plans.model import Plan

    a, b, costs = Plan.load(arguments.a), Plan.load(arguments.b), cost_question(arguments)
    if arguments.html:
        from autoptd.report.page import comparison_page

        write_whole(Path(arguments.html), comparison_page(a, b, costs=costs))
    if arguments.json:
        print_json(comparison_data(a, b, costs))
    else:
        show(compare(a, b, width=width(), costs=costs))
        if arguments.html:
            show(f"\nwritten to {arguments.html}")
    return DONE if a == b else NO
