"""`autoptd verify`: run all ranks of a plan in this process, beside the plain model, and certify it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from autoptd.cli.output import model_of, print_json, progress_of, show, width

if TYPE_CHECKING:
    from torch import nn

    from autoptd.plans.model import Plan

DONE, NO = 0, 1
_SMALL_BYTES = 2**30


def add_arguments(parser: argparse.ArgumentParser, model_help: str) -> None:
    """Add the arguments of `autoptd verify`."""
    parser.add_argument("plan", metavar="PLAN", help="a plan file; after success the certificate is stored in it")
    parser.add_argument("--model", metavar="MODEL", help=f"{model_help} (default: the plan's, if shipped)")
    parser.add_argument("--inputs", metavar="CALL", help="module:callable that returns the example inputs of the plan")
    parser.add_argument("--loss", metavar="CALL", help="module:callable that is the loss, if forward returns none")
    parser.add_argument("--targets", metavar="CALL", help="module:callable that returns the targets of the loss")
    parser.add_argument("--full", action="store_true", help="run all layers and microbatches; takes longer")
    parser.add_argument("--all", action="store_true", help="show every parameter")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--sign", metavar="KEY", help="sign the certificate: a private ed25519 key, a PEM file")
    keys.add_argument("--signed-by", metavar="KEY", help="only check that this public key signed the certificate")


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify a plan; the exit code is 0 if it computes what the model computes. Raises what `verify_plan` raises."""
    from autoptd.outputs import refuse_unwritable
    from autoptd.plans.model import Plan
    from autoptd.plans.signing import private_key, sign

    plan = Plan.load(arguments.plan)
    if arguments.signed_by:
        return _check(plan, arguments)
    refuse_unwritable(Path(arguments.plan))
    key = private_key(Path(arguments.sign)) if arguments.sign else None
    from autoptd.models.load import load_callable, load_inputs, load_model
    from autoptd.verification.report import data, text
    from autoptd.verification.verdict import verify_plan

    progress = progress_of(arguments)
    name = model_of(arguments.model, plan.model)
    with progress.stage("make the model, without weights"):
        model, _ = load_model(name)
    if ":" in name and _bytes(model) <= _SMALL_BYTES:  # what its code computes, such as tables in buffers, has values
        model, _ = load_model(name, "cpu")
    inputs = load_inputs(arguments.inputs) if arguments.inputs else None
    loss = load_callable(arguments.loss) if arguments.loss else None
    targets = load_inputs(arguments.targets) if arguments.targets else None
    found = verify_plan(plan, model, loss=loss, targets=targets, inputs=inputs, full=arguments.full, progress=progress)
    if found.certificate is not None:
        made = found.certificate if key is None else sign(found.certificate, key)
        plan.model_copy(update={"certificate": made}).save(arguments.plan)
    if arguments.json:
        print_json(data(found))
    else:
        show(text(found, width(), every=arguments.all))
        if found.certificate is not None:
            show(f"certificate stored in {arguments.plan}; it proves {made.proves}")
    return DONE if found.agrees else NO


def _bytes(model: nn.Module) -> int:
    return sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))


def _check(plan: Plan, arguments: argparse.Namespace) -> int:
    """Check the stored certificate alone. Raises PlanFileError if it is of another plan, or has another signature."""
    from autoptd.plans.signing import check_signature

    plan.check_certificate()
    check_signature(plan.certificate, Path(arguments.signed_by))
    assert plan.certificate is not None
    if arguments.json:
        print_json({"signed_by": arguments.signed_by, "certificate": plan.certificate.model_dump(mode="json")})
    else:
        show(f"the certificate in {arguments.plan} is signed by {arguments.signed_by}")
    return DONE
