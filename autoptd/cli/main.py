"""The command line: `autoptd plan | explain | compare | simulate | emit | verify | models | clusters | …`.

Exit codes: 0 done; 1 the answer is no (nothing fits, plans or results differ); 2 bad usage or input, or internal error.
With `--json` standard output is one JSON value; after an error, an `{"error": …}` object.

Modules that need torch are imported inside the command that needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from autoptd.cli import checkpoint, doctor, simulate
from autoptd.cli.arguments import (
    FIXED,
    SWEPT,
    Parser,
    Together,
    UsageError,
    count,
    module_name,
    read_assume,
    read_fix,
    read_split,
    read_sweep,
    seconds,
)
from autoptd.cli.costs import add_cost_arguments
from autoptd.cli.explain import add_report_arguments, run_compare, run_explain, run_report
from autoptd.cli.fault import internal_error, show_traceback
from autoptd.cli.output import (
    OutputError,
    drop_output,
    error_data,
    flush,
    model_of,
    own_output,
    print_json,
    progress_of,
    readable_warnings,
    reports,
    show,
    usable_streams,
    width,
)
from autoptd.cli.plan import run_plan
from autoptd.cli.verify import add_arguments as add_verify_arguments
from autoptd.cli.verify import run_verify
from autoptd.errors import AutoptdError, DoesNotFit
from autoptd.passes.gc_pause import without_collector
from autoptd.search.constraints.assumed import ASSUMABLE, SYSTEM_NAMES
from autoptd.text import wrapped

DONE, NO, BAD = 0, 1, 2
_MODEL_HELP = (
    "a shipped name (autoptd models), a Hugging Face config.json or its folder, a cached Hub id org/name, or "
    "module:callable"
)
_ALL_HELP = "show every stage, activation and op"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    usable_streams()
    atexit.register(gc.freeze)  # without it, Python's last garbage collection at exit takes 1.5 s
    try:
        arguments = _parser().parse_args(argv)
        code = _run(arguments)
        flush()
        return code
    except OutputError as error:
        show_traceback(error)
        drop_output()
        _report(error, as_json=False)
        return BAD
    except AutoptdError as error:
        show_traceback(error)
        _report(error, as_json="--json" in argv)
        return NO if isinstance(error, DoesNotFit) else BAD
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        drop_output()
        return DONE
    except KeyboardInterrupt:
        show("autoptd: interrupted", on_error=True)
        exec("")  # where SIGINT came within exec() of a string, `python -m` would end by it and not with this code
        return 130
    except Exception as error:  # noqa: BLE001  bugs and model code raise any type; uncaught, Python exits with 1: "no"
        show_traceback(error)
        _report(internal_error(error), as_json="--json" in argv)
        return BAD


def _run(arguments: argparse.Namespace) -> int:
    """Return the command's exit code. Raises InternalError if the model's own code calls sys.exit."""
    try:
        with without_collector(), readable_warnings(), own_output():
            code: int = arguments.run(arguments)
            return code
    except SystemExit as error:
        raise internal_error(error) from error


def _report(error: AutoptdError, *, as_json: bool) -> None:
    if as_json:
        try:
            print_json({"error": error_data(error)})
            flush()
        except OSError:  # the exit code says it
            drop_output()
    else:
        show(f"autoptd: {error}", on_error=True)


# --- commands -----------------------------------------------------------------------------------------------------


def _emit(arguments: argparse.Namespace) -> int:
    from autoptd.models.load import load_model
    from autoptd.plans.model import Plan

    plan = Plan.load(arguments.plan)
    name = model_of(arguments.model, plan.model)
    _refuse_folder(Path(arguments.out))
    progress = progress_of(arguments)
    with progress.stage("make the model, without weights"):
        model, _ = load_model(name)
    import autoptd.api

    parallel = autoptd.api.parallelize(
        model,
        world=plan.world,
        plan=plan,
        seq=plan.sizes.get("s"),
        signed_by=arguments.signed_by,
        progress=progress,
    )
    parallel.emit(arguments.out)
    files = sorted(str(path) for path in Path(arguments.out).rglob("*.py"))
    if arguments.json:
        print_json({"files": files})
    else:
        show("\n".join(files))
    return DONE


def _export(arguments: argparse.Namespace) -> int:
    from autoptd.cli.export import run

    return run(arguments)


def _models(arguments: argparse.Namespace) -> int:
    from autoptd.models.load import describe_models

    _list(describe_models(), as_json=arguments.json)
    return DONE


def _clusters(arguments: argparse.Namespace) -> int:
    from autoptd.cost_models.cluster import Cluster

    clusters = [Cluster.load(name) for name in Cluster.names()]
    if arguments.json:
        print_json({cluster.name: cluster.to_data() for cluster in clusters})
    else:
        show("\n\n".join(wrapped(cluster.describe(), width(), indent=10) for cluster in clusters))
    return DONE


def _profile(arguments: argparse.Namespace) -> int:
    from autoptd.cli.profile import profile, text

    source = Path(arguments.source) if arguments.source else None
    if source and (arguments.processes or arguments.points or arguments.time_limit is not None):
        fix = "leave out --processes, --points and --time-limit, or leave out --from"
        raise UsageError("--from measures nothing", fix=fix)
    out, points = Path(arguments.out), Path(arguments.points) if arguments.points else None
    found = profile(
        out,
        points=points,
        source=source,
        limit_s=arguments.time_limit or 120.0,
        processes=arguments.processes,
        show=not arguments.json,
    )
    if found is None:  # rank 0 of torchrun reports
        return DONE
    cluster, record, rows = found
    if arguments.json:
        data = {"cluster": cluster.to_data(), "fit": [row.to_data() for row in rows], "saved": str(out)}
        print_json(data | {"skipped": [f"{skipped.case}: {skipped.why}" for skipped in record.skipped]})
    else:
        show(text(cluster, record, rows, out, points))
    return DONE


# --- parts of several commands ------------------------------------------------------------------------------------


def _list(table: dict[str, str], *, as_json: bool) -> None:
    """Print a row per name and text, wrapped only on a terminal."""
    if as_json:
        print_json(table)
        return
    column = max(map(len, table)) + 2
    for name, text in table.items():
        lines = textwrap.wrap(text, width() - column) if reports().isatty() else [text]
        show(f"{name:{column}}" + f"\n{'':{column}}".join(lines))


def _refuse_folder(path: Path) -> None:
    """Raise UsageError if no files can be written into the folder `path`, which need not exist yet."""
    fix = "give a folder that you may write to, or that can be created"
    if path.exists() and not path.is_dir():
        raise UsageError(f"cannot write into {path}: it is a file", where=str(path), fix=fix)
    standing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write into {path}: no permission in {standing}", where=str(path), fix=fix)


def _parser() -> Parser:
    from autoptd.cli.export import add_arguments

    parser = Parser(prog="autoptd", allow_abbrev=False)
    parser.description = "Plan how to train a PyTorch model on many devices, see what it costs, and write the program."
    parser.epilog = "exit codes: 0 done; 1 the answer is no (nothing fits, plans differ); 2 bad usage or internal error"
    parser.add_argument("--version", action="version", version=f"autoptd {version('autoptd')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False)
        made.set_defaults(run=run, parser=made)
        made.add_argument("--json", action="store_true", help="print JSON")
        return made

    plan = command("plan", run_plan, "find the fastest plan that fits")
    plan.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    plan.add_argument("--world", type=count, metavar="N", help="number of devices (required unless swept)")
    plan.add_argument(
        "--cluster",
        metavar="NAME",
        help="a shipped name (autoptd clusters) or a .toml file (default: this machine's GPUs, or dgx-h100)",
    )
    plan.add_argument("--batch", type=count, metavar="N", help="samples per step over all devices (default: 8 × world)")
    plan.add_argument("--seq", type=count, metavar="N", help="tokens per sample (default: the model's own, up to 4096)")
    plan.add_argument(
        "--precision", choices=["bf16", "fp16", "fp32", "fp64"], default="bf16", help="compute type (default: bf16)"
    )
    plan.add_argument(
        "--loss-averaging",
        choices=["global", "per-microbatch", "per-microbatch-over-dp"],
        default="global",
        metavar="HOW",
        help="global (default): the loss of the whole batch, or an error; else terms that are no sums are averaged "
        "over microbatches, of one dp rank (per-microbatch) or of all together (per-microbatch-over-dp)",
    )
    plan.add_argument(
        "--optimizer",
        choices=["adamw", "sgd", "lion", "adafactor", "muon"],
        default="adamw",
        help="default: %(default)s",
    )
    fixed = f"fix options, as tp=8,zero=2: {', '.join(FIXED)}"
    plan.add_argument("--fix", type=read_fix, action=Together, metavar="K=V,…", help=fixed)
    assumed = f"predict only, with options that no generated program can run: {', '.join(ASSUMABLE)}"
    plan.add_argument("--assume", type=read_assume, action=Together, metavar="K=V,…", help=assumed)
    system = "search only what this system's arguments can express, as it would run"
    plan.add_argument("--as", dest="as_", choices=SYSTEM_NAMES, help=system)
    _add_constraints(plan)
    _add_answers(plan)
    add_cost_arguments(plan)
    plan.add_argument("-o", "--out", metavar="FILE", help="save the plan as JSON")
    plan.add_argument("--others", action="store_true", help="plan the runners-up too, and keep them in the plan")
    plan.add_argument(
        "--html", metavar="FILE", help="write a report as an HTML page, with runners-up and costs of constraints"
    )
    plan.add_argument("--all", action="store_true", help=_ALL_HELP)
    explain = command("explain", run_explain, "show a plan: what it does and what it costs")
    explain.add_argument("plan", metavar="PLAN", help="a plan file")
    explain.add_argument("--all", action="store_true", help=_ALL_HELP)
    explain.add_argument("--svg", metavar="FILE", help="save a picture of the memory; needs matplotlib")
    explain.add_argument("--memory", action="store_true", help="show memory as formulas; traces the model")
    explain.add_argument("--op", metavar="NAME", help="show the alternatives to its split; traces the model")
    explain.add_argument("--ops", action="store_true", help="show the time by module and kernel; traces the model")
    explain.add_argument(
        "--model", metavar="MODEL", help=f"for --memory, --op, --ops: {_MODEL_HELP} (default: the plan's)"
    )
    add_cost_arguments(explain)
    add_report_arguments(
        command("report", run_report, "write a plan as an HTML page that needs no server"), _MODEL_HELP
    )
    compare = command("compare", run_compare, "show two plans side by side")
    compare.add_argument("a", metavar="A", help="a plan file")
    compare.add_argument("b", metavar="B", help="another plan file")
    compare.add_argument("--html", metavar="FILE", help="also write them side by side as an HTML page")
    add_cost_arguments(compare)
    simulate.add_arguments(
        command("simulate", simulate.run_simulate, "simulate one step of a plan and show where its time goes")
    )
    emit = command("emit", _emit, "write the program of each stage as Python files")
    emit.add_argument("plan", metavar="PLAN", help="a plan file")
    emit.add_argument("--model", metavar="MODEL", help=f"{_MODEL_HELP} (default: the plan's, if shipped)")
    emit.add_argument("-o", "--out", required=True, metavar="FOLDER", help="folder for the files")
    emit.add_argument("--signed-by", metavar="KEY", help="the public key with which the certificate must be signed")
    add_verify_arguments(
        command("verify", run_verify, "run all ranks of a plan in this process and compare with the plain model"),
        _MODEL_HELP,
    )
    export = command("export", _export, "write a plan for Megatron-LM, for torch.distributed alone, or as a table")
    add_arguments(export, _MODEL_HELP)
    checkpoint.add_arguments(command("checkpoint", checkpoint.run_checkpoint, "inspect, check or export a checkpoint"))
    profile = command("profile", _profile, "measure this machine and write its cluster file")
    profile.add_argument("-o", "--out", default="cluster.toml", metavar="FILE", help="default: %(default)s")
    profile.add_argument("--time-limit", type=seconds, metavar="S", help="approximate time to measure (default: 120)")
    profile.add_argument("--processes", type=count, metavar="N", help="default: one per GPU, or 2 without GPUs")
    profile.add_argument("--points", metavar="FILE", help="save all measured points as JSON")
    profile.add_argument("--from", dest="source", metavar="FILE", help="fit saved points instead of measuring")
    doctor.add_arguments(
        command("doctor", doctor.run, "check versions, devices, links, clocks, ports and files before a run")
    )
    command("models", _models, "list the shipped models")
    command("clusters", _clusters, "list the shipped clusters")
    return parser


def _add_constraints(plan: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that constrain modules and parameters, or extend or limit the search."""
    plan.add_argument(
        "--split",
        type=read_split,
        action="append",
        metavar="PATTERN=P",
        help="placement of parameters on the tp axis: '*.q_proj.weight=S0'; repeatable",
    )
    plan.add_argument(
        "--cut",
        type=module_name,
        action="append",
        metavar="MODULE",
        help="a stage begins at this module; once for each stage but the first",
    )
    plan.add_argument(
        "--whole",
        type=module_name,
        action="append",
        metavar="PATTERN",
        help="modules that are split neither by tp nor across stages; repeatable",
    )
    plan.add_argument("--exact", action="store_true", help="search until no better plan can exist; for small models")
    plan.add_argument("--time-limit", type=seconds, metavar="S", help="seconds to search after the first plan is found")


def _add_answers(plan: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that answer something other than one plan."""
    many = plan.add_mutually_exclusive_group()
    many.add_argument(
        "--sweep",
        type=read_sweep,
        action="append",
        metavar="K=V,V,…",
        help="plan for each value, as world=8,16 or 8..64 (8 and its doubles), and print a table; twice: for all "
        f"pairs. K: {', '.join(SWEPT)}",
    )
    many.add_argument("--pareto", action="store_true", help="the fastest plan for less and less device memory")
    many.add_argument("--pins", action="store_true", help="the cost of each constraint: the plan without it")
    many.add_argument("--sensitivity", action="store_true", help="the best plan if a rate or the memory is 20%% off")
    plan.add_argument("--svg", metavar="FILE", help="with --sweep or --pareto: save a picture; needs matplotlib")
    plan.add_argument("--why", action="store_true", help="if nothing fits: try every remedy, however long it takes")


if __name__ == "__main__":
    sys.exit(main())
