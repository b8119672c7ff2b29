"""Prediction of an existing plan on another cluster, without a search: same splits, cuts and recomputation."""

from __future__ import annotations

from autoptd.compile.program import read_sharding
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES
from autoptd.cost_models.paths import is_even
from autoptd.passes.trace.traced import SEQUENCE
from autoptd.plans.model import Plan
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.chunk_cost import ChunkCosts
from autoptd.search.pipeline.evaluate import StageSolution, simulated, timed
from autoptd.search.sharding.cache import ShardingQuery
from autoptd.search.sharding.kind_cost import PARTIAL
from autoptd.search.sharding.strategies import experts_on_tp


def sharding_query_of(plan: Plan, traced: TracedModel, cluster: Cluster | None = None) -> ShardingQuery:
    """Return the query of the splits problem that a plan's splits answer, for its own cluster or another."""
    mesh, sizes = plan.mesh, {symbol: plan.sizes[str(symbol)] for symbol in traced.sizes}
    if SEQUENCE in sizes:
        sizes[SEQUENCE] //= mesh.cp
    return ShardingQuery(
        cluster=cluster or plan.cluster,
        tp=plan.mesh.tp,
        micro=plan.micro,
        values=tuple(sizes.items()),
        microbatches=plan.schedule.microbatches,
        static_bytes=COMPUTE_BYTES[plan.precision] + 4 * MAIN_BYTES[plan.precision],
        cp=plan.mesh.cp,
        experts=experts_on_tp(mesh.tp, mesh.ep, mesh.etp, traced.known.facts.expert_counts if mesh.ep > 1 else ()),
        kernels=plan.method.kernels,
        attention=plan.method.attention,
        fp8=plan.method.fp8,
        permutation=plan.method.permutation,
        context=plan.method.context,
        fast_dropout=plan.method.drops_fast(mesh.cp),
        policies=tuple(policy for policy in PARTIAL if policy in plan.partial),
        world=0 if is_even(cluster or plan.cluster, plan.mesh.tp, 1) else plan.world,
    )


def step_time_on(plan: Plan, traced: TracedModel, cluster: Cluster) -> float:
    """Return the seconds of a step of `plan` on `cluster`, simulated with the plan's action lists.

    Whether the plan fits is not checked. Raises PlanFileError for the plan of another graph.
    """
    return simulated(timed(*chunks_of(plan, traced, cluster), ())).seconds


def chunks_of(plan: Plan, traced: TracedModel, cluster: Cluster | None = None) -> tuple[ChunkCosts, StageSolution]:
    """Return the costs that a plan was predicted from, and its stages, for its own cluster or another.

    Raises PlanFileError for the plan of another graph.
    """
    where = cluster or plan.cluster
    tensors = traced.known.tensors(sharding_query_of(plan, traced, where))
    kinds = [pool.device.name for pool in where.pools]
    devices = [plan.route.of(plan.stages, rank)[0].device for rank in range(plan.mesh.pp)]
    candidate = Candidate(
        dp=plan.mesh.dp,
        tp=plan.mesh.tp,
        pp=plan.mesh.pp,
        micro=plan.micro,
        microbatches=plan.schedule.microbatches,
        zero=plan.zero,
        recompute="auto",
        cp=plan.mesh.cp,
        ep=plan.mesh.ep,
        etp=plan.mesh.etp,
        schedule=plan.schedule.kind,
        virtual=plan.schedule.virtual,
        pools=tuple(map(kinds.index, devices)) if where.others else (),
    )
    sharded = tensors.priced(read_sharding(traced, plan))
    chunks = ChunkCosts(tensors, sharded, candidate, _method(plan), plan.precision, plan.optimizer)
    solution = StageSolution(
        tuple((stage.first, stage.last) for stage in plan.stages), tuple(plan.policies(stage) for stage in plan.stages)
    )
    return chunks, solution


def _method(plan: Plan) -> SearchOptions:
    schedule = plan.schedule
    return SearchOptions(
        **vars(plan.method),
        cp=plan.mesh.cp,
        ep=plan.mesh.ep,
        etp=plan.mesh.etp,
        virtual=schedule.virtual,
        schedule=schedule.kind,
    )
