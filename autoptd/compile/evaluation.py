"""The program of an evaluation: metrics of a model's outputs, on the ranks and parameters of a training plan.

The model is traced once more with metrics in place of the loss (`passes/objectives/metrics.py`). The graph up to the
outputs is that of training, but its segments may be numbered otherwise, and what comes after the outputs is new. So the
tensors of the new graph are split by the search's own integer program, with every parameter where the plan put it, and
its segments go to the stages that hold their parameters:

    parameters    split as in the plan, on the stages of the plan
    stages        segments in order; each to a stage that holds all parameters it reads, none without a segment
    mesh, micro   those of the plan

Nothing else of the plan is searched again, and what the plan does not allow is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy

from autoptd.codegen.emit import Program
from autoptd.compile.layout import input_tensors, make_layout
from autoptd.compile.program import make_program
from autoptd.compile.traced import TracedModel
from autoptd.errors import AutoptdError, InputsError, PlanError
from autoptd.layout.layout import Layout
from autoptd.layout.size_conditions import Conditions
from autoptd.passes.evaluation.difference import Difference
from autoptd.passes.objectives.metrics import Metrics
from autoptd.passes.sharding.sharding import Sharding, parameter_splits, to_text
from autoptd.passes.trace.traced import SEQUENCE
from autoptd.plans.consistency import modules
from autoptd.plans.data import Splits, StagePlan
from autoptd.plans.model import Plan
from autoptd.search.sharding.cache import ShardingQuery
from autoptd.search.sharding.strategies import experts_on_tp

_LOSS_FIX = (
    "evaluate the loss of each sample by par.evaluate, which runs the model in eval mode; or the plain model in one "
    "process: model.load_state_dict(par.state_dict())"
)
_FIX = "evaluate with fewer outputs of inner layers, or evaluate the plain model with par.state_dict()"


@dataclass(frozen=True)
class EvaluationProgram:
    """The program of some metrics, and what the runtime reads of it."""

    source: TracedModel
    program: Program
    layout: Layout
    metrics: Metrics


def make_evaluation(source: TracedModel, plan: Plan, metrics: Metrics) -> EvaluationProgram:
    """Trace metrics of a planned model and emit their program.

    The model is in eval mode. Raises InputsError or UnsupportedOp for metrics without a value of each sample; PlanError
    if the plan's stages do not hold the parameters that the outputs are computed from.
    """
    if source.evaluated is None:
        raise _kept()
    shapes = {name: x.shape for name, x in input_tensors(source).items()}
    found = source.evaluated(replace(metrics, fixed=source.folded.traced.fixed_dims))
    found = replace(found, folded=replace(found.folded, unused_parameters=()))  # which the plan may split
    values = {symbol: plan.sizes[str(symbol)] for symbol in source.folded.traced.sizes}
    places = found.folded.traced.sizes.items()  # of sizes that the loss may tie to others, and metrics may not
    sizes = {str(symbol): int(sympy.sympify(shapes[name][dim]).subs(values)) for symbol, (name, dim) in places}
    plan = plan.model_copy(update={"sizes": sizes})
    sharding = _sharding(found, plan)
    splits = Splits(parameters=parameter_splits(found.folded, sharding), activations={})
    stages = tuple(
        StagePlan(first=first, last=last, modules=modules(found.folded, first, last), device=stage.device)
        for stage, (first, last) in zip(plan.stages, _runs(source, found, plan), strict=True)
    )
    changes = {
        "method": replace(plan.method, loss="kept", gathers="kept", sums="none"),
        "graph_hash": found.graph_hash,
        "stages": stages,
        "splits": splits,
        "segments": tuple(s.name for s in found.folded.segments),
        "strategies": to_text(found.folded, sharding)[0],  # its layout lists the sizes that they split
        "boundaries": {},
        "updates": (),
    }
    own = plan.model_copy(update=changes)
    return EvaluationProgram(found, make_program(found, own, sharding), make_layout(found, own), metrics)


def check_evaluates(source: TracedModel) -> Conditions:
    """Return the conditions on a batch, beside those of training, under which an evaluation step, which drops nothing,
    is what the model computes in eval mode. Raises InputsError if it is not."""
    if source.parted is None:
        raise _kept()
    try:
        found = source.parted()
    except InputsError:
        raise
    except AutoptdError as error:
        raise InputsError(
            f"what the model computes in eval mode is unknown: {error.what}", where=error.where, fix=_LOSS_FIX
        ) from error
    if isinstance(found, Difference):
        places = (("in training", found.step), ("in eval mode", found.model))
        raise InputsError(
            "the model computes its loss in another way in eval mode than in training, which eval_step runs; these "
            "are the first ops that only one of both has",
            where="\n".join(f"{when}: {place}" for when, place in places if place),
            fix=_LOSS_FIX,
        )
    return found


def _kept() -> PlanError:
    return PlanError("this model was read from a kept trace", fix="trace the module itself: autoptd.trace(model)")


def _sharding(found: TracedModel, plan: Plan) -> Sharding:
    """Return the cheapest splits of the evaluated graph that leave every parameter where the plan put it."""
    mesh, placed = plan.mesh, plan.splits.parameters
    names = _parameters(found, 0, len(found.folded.segments) - 1)
    split = {name: text for name, text in placed.items() if name in names and text.startswith("S")}
    values = {symbol: plan.sizes[str(symbol)] for symbol in found.sizes}
    if mesh.cp > 1 and SEQUENCE in values:
        values[SEQUENCE] //= mesh.cp
    experts = experts_on_tp(mesh.tp, mesh.ep, mesh.etp, found.known.facts.expert_counts if mesh.ep > 1 else ())
    query = ShardingQuery(
        cluster=plan.cluster,
        tp=mesh.tp,
        micro=plan.micro,
        values=tuple(values.items()),
        microbatches=plan.schedule.microbatches,
        static_bytes=0.0,
        cp=mesh.cp,
        kernels=plan.method.kernels,
        context=plan.method.context if mesh.cp > 1 else "ring",
        fast_dropout=plan.method.drops_fast(mesh.cp),
        pins=tuple(split.items()) if mesh.tp > 1 else (),
        whole=tuple(sorted(names - set(split))) if mesh.tp > 1 else (),
        experts=experts,
    )
    _, sharded = found.known.sharded(query)
    if isinstance(sharded, AutoptdError):
        raise PlanError(
            f"the metrics cannot be computed with the plan's placements of parameters: {sharded.what}",
            where=sharded.where,
            fix=_FIX,
        ) from sharded
    for name, text in parameter_splits(found.folded, sharded.sharding).items():
        if (text if text.startswith("S") else "") != split.get(name, ""):
            raise PlanError(f"the metrics need {name} as {text}, and the plan has it as {placed[name]}", fix=_FIX)
    return sharded.sharding


def _runs(source: TracedModel, found: TracedModel, plan: Plan) -> list[tuple[int, int]]:
    """Return the first and last segment of each stage. Raises PlanError if no run of segments fits a stage."""
    held = [_parameters(source, stage.first, stage.last) for stage in plan.stages]
    held[0] |= {source.folded.traced.parameters[n.name] for n in source.folded.unused_parameters}
    names = found.folded.traced.parameters
    needs = [{names[p.name] for p in segment.parameters} for segment in found.folded.segments]
    ends = _ends(needs, held)
    if ends is None:
        apart = next((s.name for s, need in zip(found.folded.segments, needs, strict=True) if _in_none(need, held)), "")
        where = apart or f"{len(needs)} pieces of the model for {len(held)} stages"
        raise PlanError(
            "the metrics need parameters that no single stage of the plan holds in the order of the model",
            where=where,
            fix=_FIX,
        )
    starts = [0, *(end + 1 for end in ends[:-1])]
    return list(zip(starts, ends, strict=True))


def _in_none(need: set[str], held: Sequence[set[str]]) -> bool:
    return not any(need <= have for have in held)


def _ends(needs: Sequence[set[str]], held: Sequence[set[str]]) -> list[int] | None:
    """Return the last segment of each stage; segments as early as their parameters allow. None if none fits."""
    segments, stages = len(needs), len(held)
    # reach[k]: ends e of stage k such that segments 0 … e fit stages 0 … k, each with one at least; with the end before
    reach: list[dict[int, int]] = []
    for k, have in enumerate(held):
        ends: dict[int, int] = {}
        for before in reversed([-1] if k == 0 else sorted(reach[k - 1])):
            for end in range(before + 1, segments):
                if not needs[end] <= have:
                    break
                ends.setdefault(end, before)
        reach.append(ends)
    if segments - 1 not in reach[-1]:
        return None
    found = [segments - 1]
    for k in range(stages - 1, 0, -1):
        found.append(reach[k][found[-1]])
    return found[::-1]


def _parameters(source: TracedModel, first: int, last: int) -> set[str]:
    names = source.folded.traced.parameters
    return {names[p.name] for s in source.folded.segments[first : last + 1] for p in s.parameters}
