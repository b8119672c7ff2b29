"""`autoptd plan`: one plan, or an answer from many: a sweep, time against memory, sensitivity, why nothing fits."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoptd.cli.arguments import UsageError, all_fixed
from autoptd.cli.costs import asks_cost, cost_question
from autoptd.cli.output import error_data, print_json, progress_of, show, width
from autoptd.cli.traced import ModelToPlan
from autoptd.errors import DoesNotFit
from autoptd.outputs import refuse_unwritable, write_whole

if TYPE_CHECKING:
    from autoptd.answers.constraint_costs import DroppedPins
    from autoptd.answers.query import PlanQuery
    from autoptd.plans.model import Plan
    from autoptd.progress import Progress

DONE, NO = 0, 1
_WHY_S = 8.0, 2.0  # without --why, infeasibility is explained until the first since the start, and at least the second
_PARETO_S = 60.0
_SWEPT = 2  # most names of a sweep


def run_plan(arguments: argparse.Namespace) -> int:
    """Run `autoptd plan`; return its exit code. Raises UsageError, and what planning raises."""
    arguments.started = time.monotonic()
    arguments.fix = all_fixed(arguments)
    swept = _swept(arguments)
    _check(arguments, swept)
    progress = progress_of(arguments)
    query = _query(arguments, swept, progress)
    try:
        if swept:
            return _sweep(arguments, query, swept, progress)
        if arguments.pareto:
            return _pareto(arguments, query, progress)
        return _one(arguments, query, progress)
    except DoesNotFit as error:
        return _refused(arguments, query, error, progress)


def _swept(arguments: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    swept: dict[str, tuple[Any, ...]] = {}
    for name, values in arguments.sweep or ():
        if name in swept:
            raise UsageError(f"{name} is swept twice", fix="give all its values in one --sweep")
        swept[name] = values
    if len(swept) > _SWEPT:
        raise UsageError(f"{len(swept)} names are swept", where="--sweep", fix=f"sweep at most {_SWEPT}")
    return swept


def _check(arguments: argparse.Namespace, swept: dict[str, tuple[Any, ...]]) -> None:
    """Raise UsageError for conflicting options, PlanFileError if the plan could not be saved."""
    given = {"world": arguments.world, "batch": arguments.batch, "seq": arguments.seq, "cluster": arguments.cluster}
    given |= arguments.fix
    for name in swept:
        if given.get(name) is not None:
            raise UsageError(f"{name} is both swept and given", where=f"--sweep {name}=", fix="leave one out")
    if arguments.world is None and "world" not in swept:
        raise UsageError("the following arguments are required: --world", fix="see `autoptd plan --help`")
    many = "--sweep" if swept else "--pareto" if arguments.pareto else ""
    for option, asked in (("-o", arguments.out), ("--html", arguments.html), ("--others", arguments.others)):
        if asked and many:
            raise UsageError(f"{many} makes many plans, and {option} is for one", fix="leave out one of the two")
    if arguments.pins and not arguments.fix:
        raise UsageError("--pins is for constraints, and none is given", fix="add --fix, --split, --cut, …")
    others = [name for name in ("pareto", "pins", "sensitivity") if getattr(arguments, name)]
    if others and (asked := asks_cost(arguments)):
        raise UsageError(f"{asked} is not for --{others[0]}", fix="leave it out")
    for file in filter(None, (arguments.out, arguments.html)):
        refuse_unwritable(Path(file))
    if arguments.svg:
        from autoptd.report.pictures import refuse_unpictured

        if not many:
            raise UsageError(
                "--svg is for --sweep and --pareto", fix="draw a saved plan: autoptd simulate PLAN --svg FILE"
            )
        refuse_unpictured(Path(arguments.svg))


def _query(arguments: argparse.Namespace, swept: dict[str, tuple[Any, ...]], progress: Progress) -> PlanQuery:
    """Return the query, with its model traced for the longest samples; everything quick is checked first.

    Raises ModelError, ClusterError, PlanError, and what tracing raises.
    """
    model = ModelToPlan(
        arguments.model,
        seq=max(swept["seq"]) if "seq" in swept else arguments.seq,
        precision=arguments.precision,
        loss_averaging=arguments.loss_averaging,
        progress=progress,
    )
    from autoptd.answers.query import PlanQuery
    from autoptd.cost_models.cluster import Cluster
    from autoptd.cost_models.local_cluster import default_cluster
    from autoptd.search.constraints.assumed import by_keyword
    from autoptd.search.constraints.systems import read_system

    clusters = [Cluster.load(name) for name in swept.get("cluster", (arguments.cluster,)) if name]
    cluster = clusters[0] if clusters else default_cluster()
    fix, assume = by_keyword(arguments.fix)
    read_system(arguments.as_, fix, assume)
    traced = model.traced()
    costs, unit = cost_question(arguments), "tokens" if traced.seq else "samples"
    for each in clusters or [cluster]:
        costs.check(traced.name, unit, each)
    world = max((arguments.world or 0, *swept.get("world", ())))
    batch = arguments.batch or 8 * world  # the same at every point of a sweep over devices
    options = {
        "optimizer": arguments.optimizer,
        "exact": arguments.exact,
        "time_limit_s": arguments.time_limit,
        "as_": arguments.as_,
    }
    if arguments.others or arguments.html:
        options["others"] = True
    return PlanQuery(traced, world, cluster, batch, arguments.fix, options, model.name)


def _one(arguments: argparse.Namespace, query: PlanQuery, progress: Progress) -> int:
    plan = replace(query, batch=arguments.batch).plan(progress)  # without a batch, the plan notes its default
    if arguments.out:
        plan.save(arguments.out)
    pins: list[DroppedPins] = []
    if arguments.pins or (arguments.html and arguments.fix):
        from autoptd.answers.constraint_costs import pin_costs

        pins = pin_costs(query, plan, progress)
    if arguments.html:
        from autoptd.answers.constraint_costs import pin_rows
        from autoptd.answers.op_alternatives import parameter_reasons

        costs, reasons = cost_question(arguments), parameter_reasons(plan, query.traced, progress)
        write_whole(Path(arguments.html), plan.to_html(reasons, costs, pin_rows(pins)))
    if arguments.sensitivity:
        from autoptd.answers.sensitivity import sensitivity, sensitivity_text

        return _show_rows(arguments, query, plan, "reactions", sensitivity(query, plan, progress), sensitivity_text)
    if arguments.pins:
        from autoptd.answers.constraint_costs import pins_text

        return _show_rows(arguments, query, plan, "without", pins, pins_text)
    costs = cost_question(arguments)
    if arguments.json and costs.is_asked:
        print_json({"plan": json.loads(plan.to_json()), "cost": costs.of(plan).to_data()})
    elif arguments.json:
        show(plan.to_json())
    else:
        from autoptd.explain.plan import explain

        show(explain(plan, width(), arguments.all, costs))
        if saved := list(filter(None, (arguments.out, arguments.html))):
            show(f"\nsaved to {' and '.join(saved)}")
    return DONE


def _sweep(arguments: argparse.Namespace, query: PlanQuery, over: dict[str, Any], progress: Progress) -> int:
    from autoptd.answers.sweep import sweep
    from autoptd.answers.sweep_text import sweep_text

    points = sweep(query, over, costs=cost_question(arguments), progress=progress)
    notes = []
    if arguments.batch is None and "batch" not in over:
        of = f"{query.world}, the largest world, at every point" if len(over.get("world", ())) > 1 else str(query.world)
        notes.append(f"batch was not given: {query.batch} samples, 8 × {of}")
    if arguments.svg:
        from autoptd.report.pictures import sweep_picture

        sweep_picture([point.to_data() for point in points], Path(arguments.svg), _title(query, over))
    if arguments.json:
        print_json({"points": [point.to_data() for point in points], "notes": notes})
    else:
        show(sweep_text(_title(query, over), points, notes, width()))
    return DONE if any(point.fits for point in points) else NO


def _pareto(arguments: argparse.Namespace, query: PlanQuery, progress: Progress) -> int:
    from autoptd.answers.pareto import frontier, pareto_text

    found = frontier(query, time_limit_s=_PARETO_S, progress=progress)
    if arguments.svg:
        from autoptd.report.pictures import frontier_picture

        frontier_picture(found.to_data()["points"], Path(arguments.svg), _title(query))
    if arguments.json:
        print_json(found.to_data())
    else:
        show(pareto_text(_title(query), found, width()))
    return DONE


def _show_rows(
    arguments: argparse.Namespace,
    query: PlanQuery,
    plan: Plan,
    key: str,
    rows: Sequence[Any],
    text: Callable[[str, Sequence[Any], int], str],
) -> int:
    """Print what was found about a plan: its rows under `key` as JSON, or as `text`."""
    from autoptd.explain.choices import short

    if arguments.json:
        chosen = {"plan": short(plan), "step_time_s": plan.predicted.step_time_s}
        print_json({"chosen": chosen, key: [row.to_data() for row in rows]})
    else:
        show(text(_title(query), rows, width()))
    return DONE


def _refused(arguments: argparse.Namespace, query: PlanQuery, error: DoesNotFit, progress: Progress) -> int:
    """Print the error, then its cause and remedies; return the exit code."""
    from autoptd.answers.infeasibility import conflict
    from autoptd.answers.infeasibility_text import conflict_text

    given = [name for name in ("batch", "seq") if getattr(arguments, name) is not None]
    if not arguments.json:
        show(f"autoptd: {error}\n\n", on_error=True)
    until_s, least_s = _WHY_S
    limit_s = math.inf if arguments.why else max(least_s, until_s - (time.monotonic() - arguments.started))
    found = conflict(query, given, time_limit_s=limit_s, progress=progress)
    if arguments.json:
        print_json({"error": error_data(error) | {"why": found.to_data()}})
    else:
        show(conflict_text(found, width()), on_error=True)
    return NO


def _title(query: PlanQuery, swept: Collection[str] = ()) -> str:
    """Return what all points have in common: `gpt2 on 8 × dgx-h100: batch 64, s 1024, bf16, adamw, tp=2`."""
    from autoptd.answers.constraint_costs import pin_texts

    where = " × ".join(
        text for name, text in (("world", str(query.world)), ("cluster", query.cluster.name)) if name not in swept
    )
    parts = [] if "batch" in swept else [f"batch {query.batch}"]
    parts += [f"s {query.traced.seq}"] if query.traced.seq and "seq" not in swept else []
    parts += [query.traced.precision, str(query.options.get("optimizer", "adamw"))]
    parts += [text for name, text in pin_texts(query.fix) if name not in swept]
    return f"{query.name}{f' on {where}' if where else ''}: {', '.join(parts)}"
