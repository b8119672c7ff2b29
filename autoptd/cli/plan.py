"""`autoptd plan`: one plan, or an answer made of many: a sweep, time against memory, sensitivity, why nothing fits."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoptd.cli.arguments import UsageError, all_fixed
from autoptd.cli.output import error_data, print_json, progress_of, show, width
from autoptd.errors import DoesNotFit

if TYPE_CHECKING:
    from autoptd.answers.query import PlanQuery
    from autoptd.plans.model import Plan
    from autoptd.progress import Progress

DONE, NO = 0, 1
_WHY_S = 8.0, 2.0  # until when, and how long at least, why nothing fits is looked for, unless --why takes the time
_PARETO_S = 60.0
_SWEPT = 2  # names at once


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan as the words of the command line say. Raises UsageError, and what planning raises."""
    arguments.started = time.monotonic()
    arguments.fix = all_fixed(arguments)
    swept = _swept(arguments)
    _check(arguments, swept)
    progress = progress_of(arguments)
    asked = _asked(arguments, swept, progress)
    try:
        if swept:
            return _sweep(arguments, asked, swept, progress)
        if arguments.pareto:
            return _pareto(arguments, asked, progress)
        return _one(arguments, asked, progress)
    except DoesNotFit as error:
        return _refused(arguments, asked, error, progress)


def _swept(arguments: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    swept: dict[str, tuple[Any, ...]] = {}
    for name, values in arguments.sweep or ():
        if name in swept:
            raise UsageError(f"{name} is swept twice", fix="name its values in one --sweep")
        swept[name] = values
    if len(swept) > _SWEPT:
        raise UsageError(f"{len(swept)} names are swept", where="--sweep", fix=f"sweep {_SWEPT} at once, at most")
    return swept


def _check(arguments: argparse.Namespace, swept: dict[str, tuple[Any, ...]]) -> None:
    """Words that do not go together. Raises UsageError, PlanFileError."""
    from autoptd.outputs import refuse_unwritable

    given = {"world": arguments.world, "batch": arguments.batch, "seq": arguments.seq, "cluster": arguments.cluster}
    given |= arguments.fix
    for name in swept:
        if given.get(name) is not None:
            raise UsageError(f"{name} is swept, and given as well", where=f"--sweep {name}=", fix="leave one out")
    if arguments.world is None and "world" not in swept:
        raise UsageError("the following arguments are required: --world", fix="see `autoptd plan --help`")
    many = "--sweep" if swept else "--pareto" if arguments.pareto else ""
    if arguments.out and many:
        raise UsageError(f"{many} makes many plans, and -o saves one", fix="plan the one you want by itself, with -o")
    if arguments.pins and not arguments.fix:
        raise UsageError("--pins is about choices made by hand, and there are none", fix="add --fix, --split, --cut, …")
    if arguments.price_per_gpu_hour is not None and not swept:
        raise UsageError("--price-per-gpu-hour is for --sweep", fix="add --sweep world=8,16,…")
    if arguments.out:
        refuse_unwritable(Path(arguments.out))


def _asked(arguments: argparse.Namespace, swept: dict[str, tuple[Any, ...]], progress: Progress) -> PlanQuery:
    """The question, its model traced, for the longest samples that are asked about; all that is quick is checked first.

    Raises ModelError, ClusterError, PlanError, and what tracing raises.
    """
    from autoptd.models.load import load_model

    with progress.stage("make the model, without weights"):
        model, name = load_model(arguments.model)
    import autoptd.api
    from autoptd.answers.query import PlanQuery
    from autoptd.cost_models.cluster import Cluster
    from autoptd.cost_models.local_cluster import default_cluster
    from autoptd.search.constraints.assumed import by_keyword
    from autoptd.search.constraints.options import read_constraints

    clusters = [Cluster.load(name) for name in swept.get("cluster", (arguments.cluster,)) if name]
    cluster = clusters[0] if clusters else default_cluster()
    fix, assume = by_keyword(arguments.fix)
    read_constraints(fix, arguments.include, assume)
    seq = max(swept["seq"]) if "seq" in swept else arguments.seq
    averaging = arguments.loss_averaging
    traced = autoptd.api.trace(
        model, seq=seq, precision=arguments.precision, progress=progress, loss_averaging=averaging
    )
    world = max((arguments.world or 0, *swept.get("world", ())))
    batch = arguments.batch or 8 * world  # of a sweep over devices the same at every point
    options = {
        "optimizer": arguments.optimizer,
        "include": arguments.include,
        "exact": arguments.exact,
        "time_limit_s": arguments.time_limit,
    }
    return PlanQuery(traced, world, cluster, batch, arguments.fix, options, name)


def _one(arguments: argparse.Namespace, asked: PlanQuery, progress: Progress) -> int:
    import autoptd.api
    from autoptd.search.constraints.assumed import by_keyword

    fix, assume = by_keyword(arguments.fix)
    plan = autoptd.api.plan(
        asked.traced,
        world=asked.world,
        cluster=asked.cluster,
        batch=arguments.batch,
        fix=fix,
        assume=assume,
        progress=progress,
        **asked.options,
    )
    plan = plan.model_copy(update={"model": asked.name})
    if arguments.out:
        plan.save(arguments.out)
    if arguments.sensitivity:
        return _sensitivity(arguments, asked, plan, progress)
    if arguments.pins:
        return _pins(arguments, asked, plan, progress)
    if arguments.json:
        show(plan.to_json())
    else:
        from autoptd.explain.plan import explain

        show(explain(plan, width(), arguments.all))
        if arguments.out:
            show(f"\nsaved to {arguments.out}")
    return DONE


def _sweep(arguments: argparse.Namespace, asked: PlanQuery, over: dict[str, Any], progress: Progress) -> int:
    from autoptd.answers.sweep import sweep
    from autoptd.answers.sweep_text import sweep_text

    points = sweep(asked, over, price_per_hour=arguments.price_per_gpu_hour, progress=progress)
    notes = []
    if arguments.batch is None and "batch" not in over:
        of = f"{asked.world}, the largest world, at every point" if len(over.get("world", ())) > 1 else str(asked.world)
        notes.append(f"batch was not given: {asked.batch} samples, 8 × {of}")
    if arguments.json:
        print_json({"points": [point.to_data() for point in points], "notes": notes})
    else:
        show(sweep_text(_title(asked, set(over)), points, notes, width()))
    return DONE if any(point.fits for point in points) else NO


def _pareto(arguments: argparse.Namespace, asked: PlanQuery, progress: Progress) -> int:
    from autoptd.answers.pareto import frontier, pareto_text

    found = frontier(asked, time_limit_s=_PARETO_S, progress=progress)
    if arguments.json:
        print_json(found.to_data())
    else:
        show(pareto_text(_title(asked), found, width()))
    return DONE


def _sensitivity(arguments: argparse.Namespace, asked: PlanQuery, plan: Plan, progress: Progress) -> int:
    from autoptd.answers.sensitivity import sensitivity, sensitivity_text
    from autoptd.explain.choices import short

    found = sensitivity(asked, plan, progress)
    if arguments.json:
        chosen = {"plan": short(plan), "step_time_s": plan.predicted.step_time_s}
        print_json({"chosen": chosen, "reactions": [reaction.to_data() for reaction in found]})
    else:
        show(sensitivity_text(_title(asked), found, width()))
    return DONE


def _pins(arguments: argparse.Namespace, asked: PlanQuery, plan: Plan, progress: Progress) -> int:
    from autoptd.answers.constraint_costs import pin_costs, pins_text
    from autoptd.explain.choices import short

    found = pin_costs(asked, plan, progress)
    if arguments.json:
        chosen = {"plan": short(plan), "step_time_s": plan.predicted.step_time_s}
        print_json({"chosen": chosen, "without": [row.to_data() for row in found]})
    else:
        show(pins_text(_title(asked), found, width()))
    return DONE


def _refused(arguments: argparse.Namespace, asked: PlanQuery, error: DoesNotFit, progress: Progress) -> int:
    """Tell the error, then what causes it and what would help."""
    from autoptd.answers.infeasibility import conflict
    from autoptd.answers.infeasibility_text import conflict_text

    given = [name for name in ("batch", "seq") if getattr(arguments, name) is not None]
    if not arguments.json:
        show(f"autoptd: {error}\n\n", on_error=True)
    until_s, least_s = _WHY_S
    limit_s = math.inf if arguments.why else max(least_s, until_s - (time.monotonic() - arguments.started))
    found = conflict(asked, given, time_limit_s=limit_s, progress=progress)
    if arguments.json:
        print_json({"error": error_data(error) | {"why": found.to_data()}})
    else:
        show(conflict_text(found, width()), on_error=True)
    return NO


def _title(asked: PlanQuery, but: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    """What every point has in common: `gpt2 on 8 × dgx-h100: batch 64, s 1024, bf16, adamw, tp=2`."""
    from autoptd.answers.constraint_costs import written

    where = " × ".join(
        text for name, text in (("world", str(asked.world)), ("cluster", asked.cluster.name)) if name not in but
    )
    parts = [] if "batch" in but else [f"batch {asked.batch}"]
    parts += [f"s {asked.traced.seq}"] if asked.traced.seq and "seq" not in but else []
    parts += [asked.traced.precision, str(asked.options.get("optimizer", "adamw"))]
    parts += [text for name, text in written(asked.fix) if name not in but]
    return f"{asked.name}{f' on {where}' if where else ''}: {', '.join(parts)}"
