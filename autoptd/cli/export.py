"""`autoptd export PLAN --to megatron|torch|json`: read the plan, make the model if needed, write the text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoptd.plans.model import Plan

TARGETS = ("json", "megatron", "torch")


def add_arguments(parser: argparse.ArgumentParser, model_help: str) -> None:
    """Add the arguments of `autoptd export`."""
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    parser.add_argument(
        "--to", choices=TARGETS, required=True, help="a table of tensors, Megatron-LM's arguments, or a program"
    )
    parser.add_argument("--model", metavar="MODEL", help=f"{model_help} (default: the plan's, if shipped)")
    parser.add_argument("-o", "--out", metavar="FILE", help="file to write (default: standard output)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return exit code 0. Raises PlanFileError, PlanError, UsageError, ModelError."""
    from autoptd.cli.output import show
    from autoptd.outputs import refuse_unwritable, write_whole
    from autoptd.plans.model import Plan

    if arguments.out:
        refuse_unwritable(Path(arguments.out))
    plan = Plan.load(arguments.plan)
    found = _exported(plan, arguments.to, arguments.model)
    text = f"{json.dumps(found['data'], indent=1, sort_keys=True)}\n" if arguments.json else found["text"]
    if not arguments.out:
        show(text)
        return 0
    write_whole(Path(arguments.out), found["text"])
    if arguments.json:
        show(text)
        return 0
    for what in found["differs"]:
        show(f"differs: {what}")
    show(f"saved to {arguments.out}")
    return 0


def _exported(plan: Plan, to: str, model: str | None) -> dict[str, Any]:
    """Return `text` (for a file), `data` (for JSON) and `differs`. The model is made only if it is used."""
    if to == "json":
        from autoptd.export.mapping import mapping

        table = mapping(plan)
        return {"text": f"{json.dumps(table, indent=1, sort_keys=True)}\n", "data": table, "differs": ()}
    if to == "megatron":
        from autoptd.export.megatron import megatron

        built = _model(plan, model, needed=False)
        said = megatron(plan, built, _graph(plan, built))
        return {"text": said.to_text(), "data": said.to_data(), "differs": said.differs}
    from autoptd.export.torch_program import torch_program

    program = torch_program(plan, _model(plan, model, needed=True))
    return {"text": program.to_text(), "data": program.to_data(), "differs": program.differs}


def _graph(plan: Plan, model: Any) -> Any:
    """Return the model's graph, which placements are compared by; None if there is nothing to compare, or no inputs."""
    from autoptd.api import trace
    from autoptd.errors import InputsError

    if model is None or plan.mesh.tp == 1:
        return None
    try:
        return trace(
            model, seq=plan.sizes.get("s"), precision=plan.precision, loss_averaging=plan.loss_averaging
        ).folded
    except InputsError:  # of a model whose inputs only its owner knows: the export says that it was not traced
        return None


def _model(plan: Plan, name: str | None, needed: bool) -> Any:
    """Return the model on meta; None if it is neither needed, nor given, nor shipped. Raises UsageError, ModelError."""
    from autoptd.cli.output import model_of
    from autoptd.models.load import load_model, model_names

    if name is None and not needed and plan.model not in model_names():
        return None
    return load_model(model_of(name, plan.model))[0]
