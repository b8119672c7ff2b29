"""The input of the search, and the candidates that it leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import UPDATE_COSTS
from autoptd.errors import PlanError
from autoptd.passes.fold import Folded
from autoptd.passes.graph import op_name, source_line
from autoptd.passes.opcall import Sizes
from autoptd.passes.sharding.expert_parallel_graph import rows_stay_apart, rows_that_leave
from autoptd.passes.sharding.expert_regions import check_experts, expert_regions, experts_of
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.search.constraints.named import allowed
from autoptd.search.constraints.options import ALLOWED, Constraints, SearchOptions, schedules_and_chunks
from autoptd.search.meshes import Candidate, MeshLimits, around, candidates, divisors
from autoptd.search.sharding.strategies import rounded_on_own_tokens

_TOKENS = 131072  # in the largest microbatch that is considered
_CHUNKS = 32  # of a model of few blocks, which may be smaller than one
_RANKS_OF_CONTEXT = 64  # largest cp that is considered
EFFORT = 200  # default number of cuts that are simulated beyond the first of each candidate


@dataclass(frozen=True)
class Task:
    """A planning problem: model, devices, batch and constraints.

    `effort`: cuts beyond the first of each candidate that may be simulated; None: as many as exactness takes.
    `time_limit_s`: the search ends after this time, provided that it has found a plan. `others`: plan the runners-up.
    """

    folded: Folded
    cluster: Cluster
    world: int
    batch: int
    sizes: Mapping[sympy.Symbol, int]  # value of every symbol except b
    precision: str
    optimizer: str
    constraints: Constraints
    effort: int | None = EFFORT
    time_limit_s: float = float("inf")
    others: bool = False


def candidate_space(task: Task, method: SearchOptions, has_attention: bool) -> Sequence[Candidate]:
    """Return every candidate that the constraints of a task leave open.

    `method`: the options of the task, constraints by name included; `has_attention`: whether the model has fused
    attention, which cp needs. Raises PlanError if no candidate is left.
    """
    fixed = task.constraints.fixed
    mesh, searched = dict(task.constraints.mesh), task.constraints.searched
    cps: tuple[int, ...] = (method.cp,)
    if "cp" in searched and "cp" not in fixed and has_attention:
        length = task.sizes.get(SEQUENCE, 1)
        most = min(_RANKS_OF_CONTEXT, max(1, length // task.constraints.tokens))
        cps = tuple(d for d in divisors(task.world) if d <= most and length % (2 * d) == 0) or (1,)
    if task.world % cps[0]:
        raise PlanError(
            f"world {task.world} is not divisible by cp {cps[0]}",
            where="fix['cp']",
            fix=f"use cp {around(cps[0], divisors(task.world))}",
        )
    if task.world % method.ep:
        raise PlanError(
            f"world {task.world} is not divisible by ep {method.ep}",
            where="fix['ep']",
            fix=f"use ep {around(method.ep, divisors(task.world))}",
        )
    if method.fp8 and (slow := [p.device.name for p in task.cluster.pools if p.device.matmul_flops_per_s.fp8 is None]):
        raise PlanError(
            f"{slow[0]} has no rate of products in fp8",
            where="assume['fp8']",
            fix="leave fp8 out, name another cluster, or give its file `fp8` in [device.matmul_flops_per_s]",
        )
    if method.ep > 1:
        check_experts(task.folded, method.ep)
        if method.shards:
            raise PlanError(
                "experts on ranks of their own are not sharded in groups",
                where="fix['ep']",
                fix="leave out shards or ep",
            )
    mixed, sizes = experts_of(task.folded) > 1, Sizes(task.sizes, BATCH)
    apart = mixed and task.constraints.sequence_parallel and rows_stay_apart(task.folded, sizes)
    if "etp" in fixed:
        _check_etp(task, method.etp, apart)
    apart = apart and rows_that_leave(task.folded, sizes) is None
    apart = apart and rounded_on_own_tokens(task.folded, 2, sizes) is None
    node = task.cluster.gpus_per_node or task.world
    widest = max(node, -(-task.world // task.batch))  # tp leaves the node only if there are fewer samples than nodes
    tp_sizes = {d for d in divisors(task.world) if d <= (task.constraints.max_tp or widest)}
    if isinstance(mesh.get("tp"), int):
        tp_sizes.add(int(mesh["tp"]))
    schedules, virtuals = schedules_and_chunks(task.constraints, task.folded.loss_form.outer is not None)
    zeros: tuple[int, ...] = (1, 0, 2, 3) if "zero" in mesh or "zero" in searched else (1, 0)
    zeros = tuple(zero for zero in zeros if task.constraints.allows("zero", zero))
    if method.offload:
        _check_offload(task)
        mesh |= {"pp": len(method.offload)} if len(method.offload) > 1 else {}
        zeros = tuple(zero for zero in zeros if zero < 3)
    groups = [d for d in divisors(node) if d > 1] if "shards" in searched and "shards" not in fixed else []
    limits = MeshLimits(
        world=task.world,
        batch=task.batch,
        segments=len(task.folded.segments),
        chunks=max([_CHUNKS, *(unit.count for unit in task.folded.units)]),  # of at least one of many blocks each
        tp_sizes=tuple(sorted(tp_sizes)),
        zeros=zeros,
        recomputes=_recomputes(task.constraints),
        max_micro=max(8, _TOKENS // max(1, task.sizes.get(SEQUENCE, 1))),
        cps=cps,
        eps=(method.ep,) if "ep" in fixed else tuple(divisors(experts_of(task.folded))),
        etps=(method.etp,) if "etp" in fixed else (0, 1) if apart else (0,),
        tokens=task.sizes.get(SEQUENCE, 1),
        schedules=tuple(schedules),
        virtuals=tuple(virtuals),
        shards=(method.shards, *groups),
        offload=max(method.offload, default=0.0),
        pool_ranks=task.cluster.pool_ranks(task.world) if task.cluster.others else (),
        one_microbatch=bool(task.folded.statistics.count),
        uneven=task.folded.traced.averaging == "global" and not task.constraints.system,  # others have whole ones
    )
    found = candidates(_of_one_microbatch(task, limits, mesh), mesh)
    return allowed(task.folded, method, _among(task.constraints, found))


def _recomputes(constraints: Constraints) -> tuple[str, ...]:
    if "recompute" in constraints.mesh:
        return tuple(map(str, ALLOWED["recompute"]))
    return tuple(constraints.among.get("recompute", ("auto",)))


def _among(constraints: Constraints, found: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the candidates whose values are among those that are allowed. Raises PlanError if there are none."""
    kept = [c for c in found if all(getattr(c, name) in values for name, values in constraints.among.items())]
    if found and not kept:
        raise PlanError(
            f"no mesh of these constraints can be run as {constraints.system}",
            where="as_",
            fix="fix fewer dimensions, or leave as_ out",
        )
    return kept


def _check_offload(task: Task) -> None:
    """Raise PlanError for an optimizer that updates whole parameters, and for shares of other pipeline ranks."""
    pp, shares = task.constraints.mesh.get("pp"), task.constraints.method.offload
    if len(shares) > 1 and pp not in (None, len(shares)):
        raise PlanError(
            f"offload has {len(shares)} shares for {pp} pipeline ranks", where="fix['offload']", fix="give one for each"
        )
    if UPDATE_COSTS[task.optimizer].whole != "none":
        raise PlanError(
            f"{task.optimizer} updates whole parameters, which the device does",
            where="fix['offload']",
            fix="leave offload out, or take an optimizer that updates elements, such as adamw",
        )


def _check_etp(task: Task, etp: int, apart: bool) -> None:
    """Raise PlanError unless `etp` tp ranks may share each expert."""
    tp = task.constraints.mesh.get("tp")
    if etp not in (1, tp) if tp else etp < 1:
        raise PlanError(
            f"etp {etp}: each expert is shared by all tp ranks or by none",
            where="fix['etp']",
            fix=f"use etp 1 or {tp}" if isinstance(tp, int) and tp > 1 else "use etp 1, or fix tp to it",
        )
    if etp == 1 and tp != 1 and not apart:
        one = "sequence_parallel is off" if not task.constraints.sequence_parallel else "they may depend on each other"
        one = one if any(map(expert_regions, task.folded.segments)) else "no experts are found in the model"
        raise PlanError(
            f"etp 1: tp ranks cannot each compute the rows of experts for their own tokens: {one}",
            where="fix['etp']",
            fix="leave etp out, or fix tp to 1",
        )
    if etp == 1 and tp != 1 and (node := rows_that_leave(task.folded, Sizes(task.sizes, BATCH))):
        raise PlanError(
            f"etp 1: {op_name(node)} gives rows of each tp rank's own tokens, and what comes after the layer, such as "
            "the loss, reads those of all tokens",
            where=source_line(node),
            fix="leave etp out, or fix tp to 1",
        )
    if etp == 1 and tp != 1 and (node := rounded_on_own_tokens(task.folded, 2, Sizes(task.sizes, BATCH))):
        raise PlanError(
            f"etp 1 in fp64: {op_name(node)} would round partial values", where=source_line(node), fix="leave etp out"
        )


def _of_one_microbatch(task: Task, limits: MeshLimits, mesh: Mapping[str, int | str]) -> MeshLimits:
    """Return the limits. Raises UnsupportedOp if only several microbatches are left to samples that need each other."""
    if limits.one_microbatch:
        try:
            candidates(limits, mesh)
        except PlanError:
            candidates(replace(limits, one_microbatch=False), mesh)
            raise task.folded.statistics.refusal() from None
    return limits
