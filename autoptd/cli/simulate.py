"""`autoptd simulate`: one step of a plan, where its time goes, and the actions of each pipeline rank."""

from __future__ import annotations

import argparse
from pathlib import Path

from autoptd.cli.arguments import SCHEDULE_KINDS, UsageError, count
from autoptd.cli.costs import add_cost_arguments, cost_question
from autoptd.cli.output import print_json, show, width

DONE = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `autoptd simulate`."""
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    parser.add_argument(
        "--schedule",
        choices=SCHEDULE_KINDS,
        metavar="KIND",
        help=f"the schedule to simulate (default: the plan's): {', '.join(SCHEDULE_KINDS)}",
    )
    parser.add_argument("--virtual", type=count, metavar="N", help="equal chunks per rank (with interleaved)")
    parser.add_argument("--actions", action="store_true", help="show what each pipeline rank does, in order")
    parser.add_argument("--svg", metavar="FILE", help="save a picture of the timeline; needs matplotlib")
    add_cost_arguments(parser)
    parser.add_argument("--trace", metavar="FILE", help="save a trace for ui.perfetto.dev or chrome://tracing")


def run_simulate(arguments: argparse.Namespace) -> int:
    """Simulate a plan's step, print the report, and save what is asked. Raises what `simulate_plan` raises."""
    from autoptd.explain.timeline import action_lines, rank_names, refuse_untraceable, report, simulate_plan, summary
    from autoptd.outputs import refuse_unwritable, write_whole
    from autoptd.plans.model import Plan
    from autoptd.schedule import text

    if arguments.virtual is not None and arguments.schedule != "interleaved":
        raise UsageError("--virtual is for the interleaved schedule", fix="add --schedule interleaved")
    plan = Plan.load(arguments.plan)
    if arguments.trace:
        refuse_unwritable(Path(arguments.trace))
        refuse_untraceable(plan)
    if arguments.svg:
        from autoptd.report.pictures import timeline_picture

        if arguments.schedule or arguments.virtual:
            raise UsageError("--svg draws the plan's own schedule", fix="leave out --schedule and --virtual")
        timeline_picture(plan, Path(arguments.svg))
    schedule, timeline = simulate_plan(plan, arguments.schedule, arguments.virtual)
    costs = cost_question(arguments)
    if arguments.trace:
        from autoptd.cost_models.perfetto import trace_text

        write_whole(Path(arguments.trace), trace_text(timeline, rank_names(plan)))
    if arguments.json:
        data = summary(plan, schedule, timeline, costs)
        print_json(data | ({"actions": text(schedule)} if arguments.actions else {}))
    else:
        show(report(plan, schedule, timeline, arguments.schedule or plan.schedule.kind, width(), costs))
        if arguments.actions:
            show("\n" + "\n".join(action_lines(schedule, width())))
        if arguments.trace:
            show(f"\ntrace saved to {arguments.trace}; open it at ui.perfetto.dev")
        if arguments.svg:
            show(f"\npicture saved to {arguments.svg}")
    return DONE
