"""A plan applied to a smaller model: the same decisions, op by op, without any search.

The smaller model must have the kept segments of the planned one, kind for kind, with the same ops in the same order, so
that each decision applies at the same place. Its legality at the new sizes is checked as for a plan file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoptd.compile.traced import TracedModel
from autoptd.errors import PlanError
from autoptd.passes.fold import Folded
from autoptd.passes.graph import op_name
from autoptd.passes.sharding.sharding import Sharding, activation_splits, ops_of, parameter_splits, to_text
from autoptd.plans.consistency import collectives, modules
from autoptd.plans.data import Collectives, Splits, StagePlan
from autoptd.plans.model import Plan
from autoptd.search.step_end.whole_updates import whole_updates

_DIFFERS = "the smaller model is cut into other segments than the planned one"


def carry(
    plan: Plan, sharding: Sharding, planned: Folded, kept: Sequence[int], small: TracedModel, sizes: Mapping[str, int]
) -> Plan:
    """Return the plan for the smaller model. Raises PlanError where the graphs differ.

    sharding: that of the plan on `planned`. kept: the segments of `planned` that `small` has. sizes: the values of the
    plan's symbols in `small`, and `microbatches`, `batch` and `dp`.
    """
    kinds = _kinds(planned, kept, small.folded)
    decided = Sharding(sharding.ranks, {mine: sharding.kinds[theirs] for mine, theirs in kinds.items()})
    strategies, boundaries = to_text(small.folded, decided)
    symbols = {name: n for name, n in sizes.items() if name not in ("microbatches", "batch", "dp")}
    mesh = plan.mesh.model_copy(update={"dp": sizes["dp"]})
    return plan.model_copy(
        update={
            "graph_hash": small.graph_hash,
            "statistics": small.folded.statistics.count,
            "updates": small.updates,
            "whole": tuple(sorted(whole_updates(small.folded, plan.optimizer).shapes)),
            "precision": "fp64",
            "sizes": {**plan.sizes, **symbols},
            "batch": sizes["batch"],
            "mesh": mesh,
            "world": mesh.ranks,
            "schedule": plan.schedule.model_copy(update={"microbatches": sizes["microbatches"]}),
            "stages": _stages(plan, kept, small.folded),
            "segments": tuple(s.name for s in small.folded.segments),
            "splits": Splits(
                parameters=parameter_splits(small.folded, decided), activations=activation_splits(small.folded, decided)
            ),
            "strategies": strategies,
            "boundaries": {kind: tuple(texts) for kind, texts in boundaries.items()},
            "collectives": {k: Collectives(**counted) for k, counted in collectives(small.folded, decided).items()},
        }
    )


def _kinds(planned: Folded, kept: Sequence[int], small: Folded) -> dict[str, str]:
    """Return kind of the smaller model -> kind of the planned one."""
    if len(kept) != len(small.segments):
        raise PlanError(
            f"{_DIFFERS}: {len(small.segments)} instead of {len(kept)}",
            where=", ".join(s.name for s in small.segments[:6]),
            fix="verify at full depth: --full",
        )
    found: dict[str, str] = {}
    for i, mine in zip(kept, small.segments, strict=True):
        theirs = planned.segments[i]
        ops, wanted = ([op_name(n) for _, n in ops_of(s)] for s in (mine, theirs))
        if found.setdefault(mine.kind, theirs.kind) != theirs.kind or ops != wanted:
            raise PlanError(_DIFFERS, where=f"{mine.name} is not {theirs.name}", fix="verify at full depth: --full")
    return found


def _stages(plan: Plan, kept: Sequence[int], small: Folded) -> tuple[StagePlan, ...]:
    """Return the plan's stages with the kept segments of each."""
    place = {old: new for new, old in enumerate(kept)}
    stages = []
    for stage in plan.stages:
        mine = [place[i] for i in range(stage.first, stage.last + 1) if i in place]
        recomputed = {place[i]: policy for i, policy in plan.policies(stage).items() if i in place}
        stages.append(
            stage.model_copy(
                update={
                    "first": mine[0],
                    "last": mine[-1],
                    "modules": modules(small, mine[0], mine[-1]),
                    "recompute": tuple(recomputed),
                    "policies": tuple(recomputed.values()) if stage.policies else (),
                }
            )
        )
    return tuple(stages)
