"""A plan for readers who do not know its terms: each term of the first lines, and its meaning in this plan."""

from __future__ import annotations

from collections.abc import Iterator

from autoptd.cost_models.memory import CONFIDENCE, MOST_MEASURED
from autoptd.explain.choices import offloaded, recompute_text
from autoptd.explain.plan import SCHEDULES
from autoptd.plans.data import PlanData

_SCHEDULES = {
    "gpipe": "all forward passes of a step come first, then all backward passes",
    "1f1b": "each stage alternates one forward and one backward pass, so that few microbatches are in memory",
    "interleaved": "each stage alternates one forward and one backward pass, on several pieces of the model in turn, "
    "so that stages wait less for each other",
    "zero-bubble": "gradients of weights are computed while a stage would wait",
    "zero-bubble-v": "gradients of weights are computed while a stage would wait; each has a piece of the model's "
    "first half and one of its second, in opposite order",
}
_ZERO = {
    1: "the state of the optimizer is",
    2: "the state of the optimizer and the gradients are",
    3: "parameters, gradients and the state of the optimizer are",
}


def in_words(plan: PlanData) -> Iterator[tuple[str, str]]:
    """Yield the terms of a plan's first lines with their meaning; those without effect on this plan are left out."""
    mesh, options = plan.mesh, plan.method
    yield f"{plan.world:,} × {plan.cluster.name}", _devices(plan)
    length = f" of {plan.sizes['s']:,} tokens" if "s" in plan.sizes else ""
    yield (
        f"a step of {plan.batch:,} samples",
        f"every update of the weights is computed from {plan.batch:,} samples{length}",
    )
    each = plan.batch // mesh.dp
    most = "" if plan.batch % mesh.dp == 0 else "or one more "
    if mesh.dp > 1:
        apart = ", apart from its experts" if mesh.ep > 1 else ""
        share = f"each trains on {each:,} {most}of the {plan.batch:,} samples, and their gradients are summed"
        yield f"dp {mesh.dp}, data parallel", f"{mesh.dp:,} copies of the model{apart}: {share}"
    if mesh.tp > 1:
        yield f"tp {mesh.tp}, tensor parallel", f"layers are split over {mesh.tp} devices, which exchange data in each"
    if mesh.cp > 1:
        yield f"cp {mesh.cp}, context parallel", f"the tokens of each sample are split over {mesh.cp} devices"
    if mesh.ep > 1:
        spread = f"experts are spread over {mesh.ep} devices, and tokens are sent to those of their experts"
        yield f"ep {mesh.ep}, expert parallel", spread
    if mesh.pp > 1:
        pieces = f", of {plan.schedule.virtual} pieces each" if plan.schedule.virtual > 1 else ""
        passed = "one after the other, each sends its results to the next"
        yield f"pp {mesh.pp}, pipeline parallel", f"the model is cut into {mesh.pp} stages{pieces}: {passed}"
    if plan.zero and mesh.dp > 1:
        over = f"groups of {options.shards} copies" if options.shards else "the copies of the model"
        yield f"ZeRO-{plan.zero}", f"{_ZERO[plan.zero]} divided among {over}, instead of whole in each"
    count = plan.schedule.microbatches
    if count > 1:
        share = (
            f"a copy takes its samples {plan.micro} at a time, {count:,} times a step"
            if mesh.dp > 1
            else (f"samples are taken {plan.micro} at a time, {count:,} times a step")
        )
        yield f"microbatches of {plan.micro}", share
    if mesh.pp > 1:
        yield SCHEDULES.get(plan.schedule.kind, plan.schedule.kind), _SCHEDULES[plan.schedule.kind]
    if (again := recompute_text(plan)) != "none":
        yield (
            f"recompute {again}",
            f"{_kept_elsewhere(plan)} instead of kept in memory; a segment is a piece of a layer",
        )
    if any(options.offload):
        yield f"{offloaded(options)} offloaded", "so much of the state of the optimizer is in the memory of the host"
    yield (
        "MFU",
        "the share of the devices' peak rate of matrix products that the model itself, without recomputation, takes",
    )
    sure = (
        f"{CONFIDENCE:.0%} of published runs needed less than {MOST_MEASURED:.2f} times the memory predicted for them"
    )
    yield f"with {CONFIDENCE:.0%} confidence", sure


def _kept_elsewhere(plan: PlanData) -> str:
    policies = {policy for stage in plan.stages for policy in plan.policies(stage).values()}
    ways = ["moved to the host"] * ("offload" in policies)
    ways += ["computed again in the backward pass"] * bool(policies - {"offload"})
    return f"results of the forward pass are {' or '.join(ways)}"


def _devices(plan: PlanData) -> str:
    pools = zip(plan.cluster.pools, plan.cluster.pool_ranks(plan.world), strict=True)
    devices = " and ".join(f"{count:,} {pool.device.name}" for pool, count in pools)
    levels = plan.cluster.levels
    inner = levels[0].ranks if len(levels) > 1 else None
    nodes = f", {inner} in a node" if inner and inner < plan.world else ""
    return f"{devices}{nodes}"
