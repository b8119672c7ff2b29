"""The search on a folded graph, and its answer written as a plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from autoptd.codegen.blocks import name_blocks
from autoptd.compile.host_notes import activation_notes, host_bytes, host_notes, offload_notes
from autoptd.compile.notes import answer_notes, batch_notes, device_of, memory_notes
from autoptd.compile.traced import TracedModel, check_loss
from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.step_times import times_to_data
from autoptd.errors import AutoptdError, DoesNotFit, PlanError
from autoptd.layout.execution import ExecutionOptions
from autoptd.layout.size_conditions import SAMPLES, refuse_other_sizes
from autoptd.passes.fold import Folded
from autoptd.passes.sharding.sharding import (
    Sharding,
    activation_splits,
    parameter_splits,
    to_text,
)
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.plans.consistency import collectives, modules
from autoptd.plans.data import Collectives, MeshSizes, OtherPlan, Predicted, Schedule, Splits, StagePlan
from autoptd.plans.model import Plan
from autoptd.progress import Progress
from autoptd.search.constraints.named import pin_notes
from autoptd.search.constraints.options import Constraints
from autoptd.search.constraints.without_effect import idle_notes
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.evaluate import Staged, exposed_end_s, rank_times, sums_of
from autoptd.search.pipeline.stage_parameters import loss_of
from autoptd.search.planner import EFFORT, Planner, Task
from autoptd.search.runners_up import Answer, RunnerUp


def samples_of(batch: int | None, world: int) -> int:
    """Return the samples of a step."""
    return batch or 8 * world


def make_plan(
    source: TracedModel,
    *,
    world: int,
    cluster: Cluster,
    batch: int | None,
    precision: str,
    optimizer: str,
    constraints: Constraints,
    progress: Progress,
    exact: bool = False,
    time_limit_s: float | None = None,
    others: bool = False,
) -> Plan:
    """Search for the fastest plan and return it. Raises PlanError, DoesNotFit.

    batch: samples per step over all ranks; None for 8 × world. exact: search without a limit on effort. others: plan
    the runners-up too.
    """
    notes = list(source.notes)
    size = samples_of(batch, world)
    notes += [] if batch is not None else [f"batch was not given: 8 × world = {size} samples"]
    sizes = {str(symbol): n for symbol, n in source.sizes.items()} | {SAMPLES: size}
    refuse_other_sizes(source.folded.traced.conditions, sizes, PlanError)
    name_blocks(source.folded)  # raises TraceError for names that clash with those of emitted modules
    tasks = []
    for way in constraints.ways or (constraints,):
        way = way.on(cluster.device.kind)
        task = Task(
            source.folded,
            cluster,
            world,
            size,
            source.sizes,
            precision,
            optimizer,
            way,
            effort=None if exact else EFFORT,
            time_limit_s=time_limit_s or math.inf,
            others=others,
        )
        tasks.append(task)
    idle = idle_notes(tasks[0].constraints, world)
    check_loss(source, dp=constraints.mesh.get("dp"), microbatches=size / int(constraints.mesh.get("micro", 1)))
    task, answer = _best(source, tasks, progress)
    notes += [*idle, *pin_notes(source.folded, task.constraints, answer.staged.candidate.tp)]
    notes += memory_notes(answer.staged, cluster)
    notes += offload_notes(answer.staged, cluster) + activation_notes(answer.staged, cluster)
    notes += host_notes(answer.staged, cluster)
    notes += batch_notes(answer.staged, size)
    notes += answer_notes(source, answer)
    return _to_plan(source, task, answer, tuple(notes))


def _best(source: TracedModel, tasks: Sequence[Task], progress: Progress) -> tuple[Task, Answer]:
    """Return the fastest answer to any of several tasks on one model. Raises an error if there is none."""
    found, errors = list[tuple[Task, Answer]](), list[AutoptdError]()
    for task in tasks:
        try:
            found.append((task, Planner(task, progress, source.known).answer()))
        except (PlanError, DoesNotFit) as error:
            errors.append(error)
    if not found:
        raise next((error for error in errors if isinstance(error, DoesNotFit)), errors[0])
    task, best = min(found, key=lambda each: each[1].staged.seconds)
    answers = [answer for _, answer in found]
    bound_s = min(answer.staged.seconds * (1 - answer.gap) for answer in answers)
    considered, visited = (sum(getattr(answer, name) for answer in answers) for name in ("considered", "visited"))
    gap = max(0.0, 1 - bound_s / best.staged.seconds)
    return task, replace(best, gap=gap, considered=considered, visited=visited)


def _to_plan(source: TracedModel, task: Task, answer: Answer, notes: tuple[str, ...]) -> Plan:
    staged, folded = answer.staged, source.folded
    candidate, sharding = staged.candidate, staged.sharded.sharding
    strategies, boundaries = to_text(folded, sharding)
    plan = Plan(
        model=source.name,
        graph_hash=source.graph_hash,
        world=task.world,
        cluster=task.cluster,
        batch=task.batch,
        sizes={str(s): int(n) for s, n in {BATCH: candidate.micro, **task.sizes}.items()},
        precision=task.precision,  # type: ignore[arg-type]
        optimizer=task.optimizer,  # type: ignore[arg-type]
        mesh=_mesh(candidate),
        schedule=_schedule(candidate),
        zero=candidate.zero,
        loss_averaging=folded.traced.averaging,
        statistics=folded.statistics.count,
        updates=source.updates,
        system=task.constraints.system,
        whole=tuple(sorted(staged.chunks.whole.shapes)),
        method=_execution_options(staged, sharding, folded),
        stages=tuple(
            _stage(folded, run, policies, _common_policy(staged), device_of(staged, task.cluster, k))
            for k, (run, policies) in enumerate(zip(staged.solution.boundaries, staged.solution.policies, strict=True))
        ),
        segments=tuple(s.name for s in folded.segments),
        splits=Splits(parameters=parameter_splits(folded, sharding), activations=activation_splits(folded, sharding)),
        strategies=strategies,
        boundaries={k: tuple(v) for k, v in boundaries.items()},
        collectives={kind: Collectives(**data) for kind, data in collectives(folded, sharding).items()},
        predicted=_predicted(source, task, staged),
        others=tuple(map(_other, answer.runners_up)),
        notes=notes,
    )
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"choices": plan.choices})})


def _mesh(c: Candidate) -> MeshSizes:
    return MeshSizes(dp=c.dp, tp=c.tp, pp=c.pp, cp=c.cp, ep=c.ep, etp=c.etp)  # type: ignore[arg-type]


def _schedule(c: Candidate) -> Schedule:
    return Schedule(kind=c.schedule, microbatches=c.microbatches, virtual=c.virtual)  # type: ignore[arg-type]


def _other(found: RunnerUp) -> OtherPlan:
    c = found.candidate
    return OtherPlan(
        choice=found.choice,  # type: ignore[arg-type]
        mesh=_mesh(c),
        micro=c.micro,
        schedule=_schedule(c),
        zero=c.zero,
        step_time_s=found.seconds if math.isfinite(found.seconds) else None,
        least_s=found.least_s if math.isfinite(found.least_s) else None,
    )


def _common_policy(staged: Staged) -> str:
    """Return the policy of most recomputed segments."""
    counts = Counter(policy for stage in staged.solution.policies for policy in stage.values())
    return min(counts, key=lambda policy: (-counts[policy], policy), default="full")


def _stage(folded: Folded, run: tuple[int, int], policies: Mapping[int, str], common: str, device: str) -> StagePlan:
    first, last = run
    recomputed = tuple(sorted(policies))
    mixed = tuple(policies[i] for i in recomputed) if set(policies.values()) - {common} else ()
    return StagePlan(
        first=first,
        last=last,
        modules=modules(folded, first, last),
        recompute=recomputed,
        device=device,
        policies=mixed,  # type: ignore[arg-type]
    )


def _predicted(source: TracedModel, task: Task, staged: Staged) -> Predicted:
    candidate, m = staged.candidate, staged.candidate.microbatches
    ranks = [staged.route.of(staged.stages, rank) for rank in range(candidate.pp)]
    slowest = max(range(candidate.pp), key=lambda rank: sum(s.forward_s + s.backward_s for s in ranks[rank]))
    chunks = ranks[slowest]
    recompute, copies = sum(s.recompute_s for s in chunks), sum(s.copies_s for s in chunks)
    tp = sum(s.forward_tp_s + s.backward_tp_s for s in chunks)
    sharding = sum(s.sharding_s for s in chunks)
    work = sum(s.forward_s + s.backward_s for s in chunks)
    parts = {
        "compute": m * max(0.0, work - tp - recompute - copies - sharding),
        "recompute": m * recompute,
        "tp_communication": m * tp,
        "dp_communication": m * sharding + exposed_end_s(staged, slowest),
        "optimizer": staged.ends[slowest].step_s,
    }
    parts |= ({"activation_copies": m * copies} if copies else {}) | (
        {"loss_sums": staged.ahead_s} if staged.ahead_s else {}
    )
    idle = staged.seconds - sum(parts.values())
    parts["pipeline_bubble"] = idle if idle > 1e-9 * staged.seconds else 0.0  # less is rounding of the sum
    flop = source.known.flops(tuple(task.sizes.items())) * task.batch
    tokens = task.batch * float(task.sizes.get(SEQUENCE, 1))
    ranks_of = zip(task.cluster.pools, task.cluster.pool_ranks(task.world), strict=True)
    peak = sum(ranks * pool.device.matmul_flops_per_s.of(task.precision) for pool, ranks in ranks_of)
    return Predicted(
        step_time_s=staged.seconds,
        tokens_per_s=tokens / staged.seconds,
        mfu=flop / (staged.seconds * peak),
        memory_bytes=int(max(m.needed for m in staged.memory)),
        time_s=parts,
        memory=tuple({k: int(v) for k, v in m.to_data().items()} for m in staged.memory),
        model_flops_per_step=flop,
        times=times_to_data(rank_times(staged), staged.route.shape),
        host=host_bytes(staged, task.cluster),
    )


def _execution_options(staged: Staged, sharding: Sharding, folded: Folded) -> ExecutionOptions:
    """Return the options of the search that a plan keeps, with those that its stages and its loss decide."""
    method = staged.method
    decided = {
        "recompute": _common_policy(staged),
        "loss": loss_of(method, folded, sharding),
        "sums": sums_of(folded.loss_form, staged.candidate),
        "offload": staged.offload,
    }
    kept = {f.name: getattr(method, f.name) for f in fields(ExecutionOptions)}
    return ExecutionOptions(**{**kept, **decided})
