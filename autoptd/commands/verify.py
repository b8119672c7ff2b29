"""`autoptd verify`: run all ranks of a plan in this process, beside the plain model, and certify it."""

from __future__ import annotations

import argparse
from pathlib import Path

from autoptd.commands.output import model_of, print_json, progress_of, show, width

DONE, NO = 0, 1


def add_arguments(parser: argparse.ArgumentParser, model_help: str) -> None:
    """Of the command."""
    parser.add_argument("plan", metavar="PLAN", help="a plan file; if it is verified, the certificate is stored there")
    parser.add_argument("--model", metavar="MODEL", help=f"{model_help} (default: the plan's, if shipped)")
    parser.add_argument("--inputs", metavar="CALL", help="module:callable that returns the example inputs of the plan")
    parser.add_argument("--loss", metavar="CALL", help="module:callable that is the loss, where forward gives none")
    parser.add_argument("--targets", metavar="CALL", help="module:callable that returns what the loss takes besides")
    parser.add_argument("--full", action="store_true", help="with all layers and microbatches; takes longer")
    parser.add_argument("--all", action="store_true", help="show every parameter")


def run_verify(arguments: argparse.Namespace) -> int:
    """0 where the plan computes what the model computes, 1 where not. Raises what `verify_plan` raises."""
    from autoptd.plans import Plan, refuse_unwritable

    plan = Plan.load(arguments.plan)
    refuse_unwritable(Path(arguments.plan))
    from autoptd.models.load import load_callable, load_inputs, load_model
    from autoptd.verification.report import data, text
    from autoptd.verification.verdict import verify_plan

    progress = progress_of(arguments)
    name = model_of(arguments.model, plan.model)
    with progress.stage("make the model, without weights"):
        model, _ = load_model(name)
    inputs = load_inputs(arguments.inputs) if arguments.inputs else None
    loss = load_callable(arguments.loss) if arguments.loss else None
    targets = load_inputs(arguments.targets) if arguments.targets else None
    found = verify_plan(plan, model, loss=loss, targets=targets, inputs=inputs, full=arguments.full, progress=progress)
    if found.certificate is not None:
        plan.model_copy(update={"certificate": found.certificate}).save(arguments.plan)
    if arguments.json:
        print_json(data(found))
    else:
        show(text(found, width(), every=arguments.all))
        if found.certificate is not None:
            show(f"certificate stored in {arguments.plan}")
    return DONE if found.agrees else NO
