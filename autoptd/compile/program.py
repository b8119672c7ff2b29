"""A plan's sharding read back onto the traced graph, and the program emitted from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoptd.codegen.emit import Program, StageSpec, emit_program
from autoptd.compile.traced import TracedModel, check_loss
from autoptd.passes.opcall import Sizes
from autoptd.passes.sharding.context_parallel import TokenSplits, split_tokens
from autoptd.passes.sharding.context_parallel_graph import cut_tokens
from autoptd.passes.sharding.expert_parallel_graph import split_experts, whole_experts
from autoptd.passes.sharding.own_prelude import own_tokens
from autoptd.passes.sharding.sharding import (
    Sharding,
    from_text,
)
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.plans.consistency import check_derived, check_sizes
from autoptd.plans.model import Plan


def read_sharding(source: TracedModel, plan: Plan) -> Sharding:
    """Return the plan's sharding of this graph. Raises PlanFileError."""
    plan.check_graph(source.graph_hash)
    check_loss(source, plan.mesh.dp, plan.schedule.microbatches)
    if source.folded.statistics.count and plan.schedule.microbatches > 1:
        raise source.folded.statistics.refusal()
    check_sizes(plan, source.folded)
    by_name = {str(s): s for s in source.folded.traced.sizes}
    values = {by_name[n]: v for n, v in plan.sizes.items() if n in by_name}
    if plan.mesh.cp > 1 and SEQUENCE in values:  # tp splits the tokens of one cp rank
        values[SEQUENCE] //= plan.mesh.cp
    sizes = Sizes(values, BATCH)
    sharding = from_text(
        source.folded,
        plan.mesh.tp,
        sizes,
        plan.strategies,
        {k: list(v) for k, v in plan.boundaries.items()},
        plan.splits.parameters,
    )
    check_derived(plan, source.folded, sharding)
    return sharding


def make_program(source: TracedModel, plan: Plan, sharding: Sharding) -> Program:
    """Emit the program of a plan. Raises PlanError if tokens cannot be split over cp ranks, or experts with them."""
    specs = [StageSpec(s.first, s.last, plan.policies(s)) for s in plan.stages]
    folded = source.folded
    if plan.mesh.cp > 1:
        splits = token_splits(source, plan)
        if (error := whole_experts(folded, splits, plan.mesh.ep)) is not None:
            raise error
        folded, sharding = cut_tokens(folded, splits, sharding)
    folded = own_tokens(folded, sharding)
    if plan.mesh.ep > 1:
        folded, sharding = split_experts(folded, plan.mesh.ep, sharding, plan.mesh.etp)
    program = emit_program(folded, sharding, specs, plan.model, **emission_options(plan))
    return replace(program, files={**program.files, "plan.json": plan.to_json()})


def emission_options(plan: Plan) -> dict[str, Any]:
    """Return the options of emitted code that a plan chooses: keywords of `emit_program` and `name_blocks`."""
    return {
        "loss_in_place": plan.method.loss == "in_place",
        "regather": plan.method.gathers == "again" and plan.mesh.tp > 1,
        "fast_dropout": plan.method.dropout == "fast",
        "rings": plan.method.rings and plan.mesh.tp > 1,
        "sizes": plan.sizes,
    }


def token_splits(source: TracedModel, plan: Plan) -> TokenSplits:
    """Return how each op handles the tokens of a cp rank. Raises PlanError if one cannot."""
    tokens, mesh = plan.sizes.get(str(SEQUENCE), 1), plan.mesh
    return split_tokens(source.folded, mesh.cp, tokens, plan.method.context, mesh.tp)
