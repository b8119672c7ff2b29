"""The command line: `autoptd plan | explain | compare | simulate | emit | models | clusters`.

Exit codes: 0 done; 1 the answer is no (nothing fits, the plans differ); 2 bad usage or bad input.
With `--json` standard output holds one JSON value, an `{"error": …}` object if things went wrong.

Whatever needs torch is imported inside the command that needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from autoptd.errors import AutoptdError, DoesNotFit, nearest
from autoptd.passes.collector import without_collector

DONE, NO, BAD = 0, 1, 2
SCHEDULE_KINDS = ("1f1b", "gpipe", "interleaved", "zero-bubble")

# What `--fix` takes, and how each value is read.
FIXABLE: dict[str, Callable[[str], object] | tuple[str, ...]] = {
    "dp": int,
    "tp": int,
    "pp": int,
    "cp": int,
    "micro": int,
    "virtual": int,
    "shards": int,
    "zero": int,
    "recompute": ("auto", "none", "selective", "ops", "full"),
    "schedule": SCHEDULE_KINDS,
    "overlap": ("dp", "p2p", "tp"),  # several, or none
    "kernels": ("eager", "fused", "compiled"),
    "attention": ("flash", "triton", "cudnn"),
    "loss": ("kept", "in_place"),
    "gathers": ("kept", "again"),
    "gradients": ("main", "compute", "both"),
    "bucket_bytes": int,
    "stages": ("balanced", "even"),
    "sends": ("whole", "slices"),
    "memory": ("check", "ignore"),
    "sequence_parallel": ("true", "false"),
}
_MODEL_HELP = "a shipped name (autoptd models), a Hugging Face config.json or its folder, or module:callable"
_ALL_HELP = "show every stage, activation and op as well"


class UsageError(AutoptdError, ValueError):
    """The command line itself is wrong."""


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and leave, so that every mistake is answered in one way."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=f"see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser().parse_args(argv)
        with without_collector():
            code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except AutoptdError as error:
        _tell(error, as_json="--json" in argv)
        return NO if isinstance(error, DoesNotFit) else BAD
    except BrokenPipeError:  # the reader, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        print("autoptd: interrupted", file=sys.stderr)
        return 130


def _tell(error: AutoptdError, *, as_json: bool) -> None:
    if as_json:
        _print_json(
            {"error": {"type": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}}
        )
    else:
        print(f"autoptd: {error}", file=sys.stderr)


# --- commands -----------------------------------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> int:
    from autoptd.models.load import load_model
    from autoptd.plans import refuse_unwritable

    if arguments.out:
        refuse_unwritable(Path(arguments.out))
    progress = _progress(arguments)
    with progress.stage("make the model, without weights"):
        model, name = load_model(arguments.model)
    import autoptd.api

    plan = autoptd.api.plan(
        model,
        world=arguments.world,
        cluster=arguments.cluster,
        batch=arguments.batch,
        seq=arguments.seq,
        precision=arguments.precision,
        optimizer=arguments.optimizer,
        fix=arguments.fix,
        progress=progress,
    )
    plan = plan.model_copy(update={"model": name})
    if arguments.out:
        plan.save(arguments.out)
    if arguments.json:
        sys.stdout.write(plan.to_json())
    else:
        from autoptd.explain import explain

        sys.stdout.write(explain(plan, _width(), arguments.all))
        if arguments.out:
            print(f"\nsaved to {arguments.out}")
    return DONE


def _explain(arguments: argparse.Namespace) -> int:
    from autoptd.explain import explain, headline, prediction
    from autoptd.plans import Plan

    plan = Plan.load(arguments.plan)
    if arguments.memory:
        return _explain_memory(arguments, plan)
    if arguments.json:
        _print_json({"headline": headline(plan), "prediction": prediction(plan), "plan": json.loads(plan.to_json())})
    else:
        sys.stdout.write(explain(plan, _width(), arguments.all))
    return DONE


def _explain_memory(arguments: argparse.Namespace, plan: Any) -> int:
    from autoptd.models.load import load_model

    name = _model_of(arguments, plan.model)
    progress = _progress(arguments)
    with progress.stage("make the model, without weights"):
        model, _ = load_model(name)
    from autoptd.explain_memory import explain_memory, memory_data, traced

    found = traced(plan, model, progress)
    if arguments.json:
        _print_json(memory_data(plan, *found))
    else:
        sys.stdout.write(explain_memory(plan, *found, _width()))
    return DONE


def _model_of(arguments: argparse.Namespace, planned: str) -> str:
    """The model's name: given, or the plan's where it is shipped. Raises UsageError."""
    from autoptd.models.load import model_names

    if arguments.model is None and planned not in model_names():
        raise UsageError(f"the plan is for {planned!r}, which is no shipped model", fix="say which: --model MODEL")
    return str(arguments.model or planned)


def _compare(arguments: argparse.Namespace) -> int:
    from autoptd.explain import compare, differences, verdict
    from autoptd.plans import Plan

    a, b = Plan.load(arguments.a), Plan.load(arguments.b)
    if arguments.json:
        _print_json({"same": a == b, "verdict": verdict(a, b), "differences": differences(a, b)})
    else:
        sys.stdout.write(compare(a, b, width=_width()))
    return DONE if a == b else NO


def _simulate(arguments: argparse.Namespace) -> int:
    from autoptd.plans import Plan, refuse_unwritable
    from autoptd.simulate import rank_names, report, simulate_plan, summary

    if arguments.virtual is not None and arguments.schedule != "interleaved":
        raise UsageError("--virtual is for the interleaved schedule", fix="add --schedule interleaved")
    plan = Plan.load(arguments.plan)
    if arguments.trace:
        refuse_unwritable(Path(arguments.trace))
    schedule, timeline = simulate_plan(plan, arguments.schedule, arguments.virtual)
    if arguments.trace:
        from autoptd.cost_models.perfetto import trace_text
        from autoptd.plans import write_whole

        write_whole(Path(arguments.trace), trace_text(timeline, rank_names(plan)))
    if arguments.json:
        _print_json(summary(plan, schedule, timeline))
    else:
        sys.stdout.write(report(plan, schedule, timeline, arguments.schedule or plan.schedule.kind, _width()))
        if arguments.trace:
            print(f"\ntrace saved to {arguments.trace}; open it at ui.perfetto.dev")
    return DONE


def _emit(arguments: argparse.Namespace) -> int:
    from autoptd.models.load import load_model
    from autoptd.plans import Plan

    plan = Plan.load(arguments.plan)
    name = _model_of(arguments, plan.model)
    _refuse_folder(Path(arguments.out))
    progress = _progress(arguments)
    with progress.stage("make the model, without weights"):
        model, _ = load_model(name)
    import autoptd.api

    parallel = autoptd.api.parallelize(model, world=plan.world, plan=plan, seq=plan.sizes.get("s"), progress=progress)
    parallel.emit(arguments.out)
    files = sorted(str(path) for path in Path(arguments.out).rglob("*.py"))
    if arguments.json:
        _print_json({"files": files})
    else:
        print("\n".join(files))
    return DONE


def _models(arguments: argparse.Namespace) -> int:
    from autoptd.models.load import describe_models

    _list(describe_models(), as_json=arguments.json)
    return DONE


def _clusters(arguments: argparse.Namespace) -> int:
    from autoptd.cost_models.cluster import Cluster

    clusters = [Cluster.load(name) for name in Cluster.names()]
    if arguments.json:
        _print_json({cluster.name: cluster.to_data() for cluster in clusters})
    else:
        print("\n\n".join(cluster.describe() for cluster in clusters))
    return DONE


def _profile(arguments: argparse.Namespace) -> int:
    from autoptd.profile.command import profile, text

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
    if found is None:  # another rank of torchrun tells
        return DONE
    cluster, record, rows = found
    if arguments.json:
        data = {"cluster": cluster.to_data(), "fit": [row.to_data() for row in rows], "saved": str(out)}
        _print_json(data | {"skipped": [f"{skipped.case}: {skipped.why}" for skipped in record.skipped]})
    else:
        sys.stdout.write(text(cluster, record, rows, out, points))
    return DONE


# --- what the commands share --------------------------------------------------------------------------------------


def _progress(arguments: argparse.Namespace) -> Any:
    from autoptd.progress import Silent, progress_on

    return Silent() if arguments.json else progress_on(sys.stderr)


def _list(table: dict[str, str], *, as_json: bool) -> None:
    """Name and text, a row each; wrapped on a terminal only."""
    if as_json:
        _print_json(table)
        return
    column = max(map(len, table)) + 2
    for name, text in table.items():
        lines = textwrap.wrap(text, _width() - column) if sys.stdout.isatty() else [text]
        print(f"{name:{column}}" + f"\n{'':{column}}".join(lines))


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1, sort_keys=True))


def _width() -> int:
    """Columns to write in: the terminal's, at most 140; 100 where standard output is none."""
    return max(40, min(140, shutil.get_terminal_size((100, 24)).columns)) if sys.stdout.isatty() else 100


def _refuse_folder(path: Path) -> None:
    """Raise UsageError if no files could be written into a folder at `path`, which may be yet to be made."""
    fix = "name a folder that is yours, or that can be made"
    if path.exists() and not path.is_dir():
        raise UsageError(f"cannot write into {path}: it is a file", where=str(path), fix=fix)
    standing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write into {path}: no permission in {standing}", where=str(path), fix=fix)


def read_fix(text: str) -> dict[str, object]:
    """`tp=8,overlap=dp,p2p` -> {"tp": 8, "overlap": ("dp", "p2p")}. Raises argparse's error for a bad one."""
    fixed: dict[str, object] = {}
    for item in re.sub(r",(?=\s*(?:dp|p2p|tp)\s*(?:,|$))", "+", text).split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise argparse.ArgumentTypeError(f"{item!r} is not NAME=VALUE, for example tp=8")
        if name not in FIXABLE:
            raise argparse.ArgumentTypeError(f"{name!r} cannot be fixed; {nearest(name, FIXABLE)}")
        if name in fixed:
            raise argparse.ArgumentTypeError(f"{name!r} is fixed twice")
        fixed[name] = _fixed_value(name, value)
    return fixed


def _fixed_value(name: str, value: str) -> object:
    kind = FIXABLE[name]
    if name == "overlap":
        return _streams(value)
    if name == "sequence_parallel" and value in ("true", "false"):
        return value == "true"
    if isinstance(kind, tuple):
        if value not in kind:
            raise argparse.ArgumentTypeError(f"{name} is one of {', '.join(kind)}, not {value!r}")
        return value
    least = 0 if name == "zero" else 1
    if not value.isascii() or not value.isdecimal() or int(value) < least:
        raise argparse.ArgumentTypeError(f"{name} is a whole number from {least}, not {value!r}")
    return kind(value)


def _streams(value: str) -> tuple[str, ...]:
    """`dp+p2p` or `none`: what runs beside compute."""
    streams = FIXABLE["overlap"]
    assert isinstance(streams, tuple)
    named = () if value == "none" else tuple(part.strip() for part in value.split("+"))
    if wrong := [part for part in named if part not in streams]:
        raise argparse.ArgumentTypeError(f"overlap is none, or some of {', '.join(streams)}, not {wrong[0]!r}")
    return named


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def seconds(text: str) -> float:
    """A positive time."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _parser() -> _Parser:
    parser = _Parser(prog="autoptd", allow_abbrev=False)
    parser.description = "Plan how to train a PyTorch model on many devices, see what it costs, and write the program."
    parser.epilog = "exit codes: 0 done; 1 the answer is no (nothing fits, the plans differ); 2 bad usage"
    parser.add_argument("--version", action="version", version=f"autoptd {version('autoptd')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False)
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="print JSON for machines")
        return made

    plan = command("plan", _plan, "find the fastest plan that fits")
    plan.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    plan.add_argument("--world", type=count, required=True, metavar="N", help="number of devices")
    plan.add_argument("--cluster", metavar="NAME", help="a shipped name (autoptd clusters) or a .toml file")
    plan.add_argument("--batch", type=count, metavar="N", help="samples per step over all devices (default 8 × world)")
    plan.add_argument("--seq", type=count, metavar="N", help="tokens per sample (default the model's own, up to 4096)")
    plan.add_argument("--precision", choices=["bf16", "fp32", "fp64"], default="bf16", help="default %(default)s")
    plan.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help="default %(default)s")
    plan.add_argument("--fix", type=read_fix, metavar="K=V,…", help=f"choices made by hand: {', '.join(FIXABLE)}")
    plan.add_argument("-o", "--out", metavar="FILE", help="save the plan as JSON")
    plan.add_argument("--all", action="store_true", help=_ALL_HELP)
    explain = command("explain", _explain, "show a plan: what it does and what it costs")
    explain.add_argument("plan", metavar="PLAN", help="a plan file")
    explain.add_argument("--all", action="store_true", help=_ALL_HELP)
    explain.add_argument("--memory", action="store_true", help="formulas of what occupies memory; traces the model")
    explain.add_argument("--model", metavar="MODEL", help=f"for --memory: {_MODEL_HELP} (default: the plan's)")
    compare = command("compare", _compare, "show two plans side by side")
    compare.add_argument("a", metavar="A", help="a plan file")
    compare.add_argument("b", metavar="B", help="another plan file")
    simulate = command("simulate", _simulate, "play a plan's step and show where its time goes")
    simulate.add_argument("plan", metavar="PLAN", help="a plan file")
    simulate.add_argument("--schedule", choices=SCHEDULE_KINDS, help="play another schedule (default the plan's)")
    simulate.add_argument("--virtual", type=count, metavar="N", help="chunks per rank, of equal work (interleaved)")
    simulate.add_argument("--trace", metavar="FILE", help="save a trace for ui.perfetto.dev or chrome://tracing")
    emit = command("emit", _emit, "write the program of each stage as Python files")
    emit.add_argument("plan", metavar="PLAN", help="a plan file")
    emit.add_argument("--model", metavar="MODEL", help=f"{_MODEL_HELP} (default: the plan's, if shipped)")
    emit.add_argument("-o", "--out", required=True, metavar="FOLDER", help="where the files go")
    profile = command("profile", _profile, "measure this machine and write its cluster file")
    profile.add_argument("-o", "--out", default="cluster.toml", metavar="FILE", help="default %(default)s")
    profile.add_argument("--time-limit", type=seconds, metavar="S", help="seconds to spend, about (default 120)")
    profile.add_argument("--processes", type=count, metavar="N", help="default one per GPU; without a GPU 2")
    profile.add_argument("--points", metavar="FILE", help="keep all measured points as JSON")
    profile.add_argument("--from", dest="source", metavar="FILE", help="fit kept points again, without measuring")
    command("models", _models, "list the shipped models")
    command("clusters", _clusters, "list the shipped clusters")
    return parser


if __name__ == "__main__":
    sys.exit(main())
