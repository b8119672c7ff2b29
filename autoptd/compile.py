"""From a model to a folded graph, from a graph to a plan, and from a plan back to a program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch import Tensor, nn

from autoptd.codegen.emit import Program, StageSpec, emit_program
from autoptd.codegen.pieces import lay_out
from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES
from autoptd.cost_models.step_times import times_to_data
from autoptd.derived import check_derived, check_sizes, collectives, modules
from autoptd.errors import InputsError, PlanError, nearest
from autoptd.models.inputs import inputs_beside, model_name
from autoptd.passes.cut_tokens import cut_tokens
from autoptd.passes.fold import Folded, fold, graph_hash, held_tensors
from autoptd.passes.graph import infos
from autoptd.passes.loss import Objective, Targets, name_targets, read_objective
from autoptd.passes.modes import eval_notes
from autoptd.passes.normalise import normalise
from autoptd.passes.opcall import Sizes
from autoptd.passes.placements import parse_placement
from autoptd.passes.sharding import (
    Sharding,
    activation_splits,
    from_text,
    parameter_splits,
    to_text,
)
from autoptd.passes.token_splits import TokenSplits, split_tokens
from autoptd.passes.trace import BATCH, PRECISIONS, SEQUENCE, trace
from autoptd.passes.unwrap import compiled_notes, refuse_unsuitable, unwrap
from autoptd.plan_notes import answer_notes, device_of
from autoptd.plans import Collectives, Mesh, Method, Plan, Predicted, Schedule, Splits, Stage
from autoptd.progress import Progress
from autoptd.runtime.footprint import elements_of
from autoptd.runtime.layout import InputSpec, Layout, TensorSpec
from autoptd.runtime.mesh import Mesh as RankMesh
from autoptd.search.footprints import loss_of
from autoptd.search.held import parameter_dtypes
from autoptd.search.idle import idle_notes
from autoptd.search.known import Known
from autoptd.search.pins import pin_notes
from autoptd.search.planner import EFFORT, Answer, Planner, Task
from autoptd.search.staged import Staged, rank_times, sums_of
from autoptd.search.wishes import Wishes

_PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
AVERAGINGS = ("global", "per-microbatch")


@dataclass(frozen=True)
class TracedModel:
    """A model traced and folded: what `autoptd.trace` gives, and what `plan` and `parallelize` take in its place.

    Made once for many plans: what one plan works out (legal strategies, sharded models) is kept for the next in
    `known`, under everything that it depends on. The module must not change meanwhile.
    """

    model: nn.Module
    name: str
    folded: Folded
    graph_hash: str
    sizes: Mapping[sympy.Symbol, int]  # of every symbol but b
    precision: str
    known: Known = field(compare=False, repr=False)
    notes: tuple[str, ...] = ()  # what its plans say of the module that was given

    @property
    def objective(self) -> Objective:
        """How its loss is made of a batch."""
        return self.folded.traced.objective

    @property
    def loss_averaging(self) -> str:
        """What was asked for of a loss that cannot be that of the whole batch."""
        return self.folded.traced.averaging

    @property
    def seq(self) -> int | None:
        """Tokens of a sample; None where the model has no sequence."""
        return self.sizes.get(SEQUENCE)


def read_model(
    model: nn.Module,
    *,
    inputs: Mapping[str, Tensor] | None,
    loss: Callable[..., Tensor] | Objective | None,
    targets: Targets | None = None,
    seq: int | None,
    precision: str,
    progress: Progress,
    loss_averaging: str = "global",
) -> TracedModel:
    """Trace and fold. Raises InputsError without inputs and no way to make them; TraceError, UnsupportedOp."""
    if precision not in _PRECISIONS:
        raise PlanError(f"unknown precision {precision!r}", where="precision", fix=nearest(str(precision), _PRECISIONS))
    if loss_averaging not in AVERAGINGS:
        raise InputsError(
            f"loss_averaging is {loss_averaging!r}",
            where="loss_averaging",
            fix=nearest(str(loss_averaging), AVERAGINGS),
        )
    if not isinstance(model, nn.Module):
        raise InputsError(f"the model is {type(model).__name__}, not an nn.Module", fix="pass the module itself")
    notes = compiled_notes(model)
    model = unwrap(model)
    notes += eval_notes(model)
    refuse_unsuitable(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputsError("the model has no trainable parameter", fix="leave requires_grad=True on what is to train")
    if seq is not None and (not isinstance(seq, int) or isinstance(seq, bool) or seq < 1):
        raise InputsError(f"seq is {seq!r}", where="seq", fix="give the tokens of a sample, at least 1")
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InputsError(
            f"inputs is of type {type(inputs).__name__}, not a mapping",
            where="inputs",
            fix="pass inputs={'name': tensor, …} with the keywords that forward takes",
        )
    given = dict(inputs) if inputs is not None else inputs_beside(model, seq, name_targets(targets))
    objective, named = read_objective(loss, given, targets)
    objective, model = objective.joined(model)
    with progress.stage(f"trace {type(model).__name__}"):
        traced = trace(
            model,
            {**given, **named},
            loss=objective,
            precision=precision,
            averaging=loss_averaging,  # type: ignore[arg-type]
        )
    with progress.stage("normalise and fold the graph"):
        folded = fold(normalise(traced))
        digest = graph_hash(traced)
        known = Known(folded).read()
    sizes = {s: n for s, n in traced.example.items() if s != BATCH}
    if seq is not None and SEQUENCE in sizes:
        sizes[SEQUENCE] = seq
    return TracedModel(model, model_name(model), folded, digest, sizes, precision, known, tuple(notes))


def make_plan(
    source: TracedModel,
    *,
    world: int,
    cluster: Cluster,
    batch: int | None,
    precision: str,
    optimizer: str,
    wishes: Wishes,
    progress: Progress,
    exact: bool = False,
    time_limit_s: float | None = None,
) -> Plan:
    """Search, and write the answer down; or find it written down. Raises PlanError, DoesNotFit."""
    notes = list(source.notes)
    notes += [] if batch is not None else [f"batch was not given: 8 × world = {8 * world} samples"]
    notes += idle_notes(wishes, world)
    size = batch or 8 * world
    task = Task(
        source.folded,
        cluster,
        world,
        size,
        source.sizes,
        precision,
        optimizer,
        wishes,
        effort=None if exact else EFFORT,
        time_limit_s=time_limit_s or math.inf,
    )
    _check_loss(source, dp=wishes.mesh.get("dp"), microbatches=size / int(wishes.mesh.get("micro", 1)))
    answer = Planner(task, progress, source.known).answer()
    notes += pin_notes(source.folded, wishes, answer.staged.candidate.tp)
    notes += answer_notes(source, answer)
    return _written(source, task, answer, tuple(notes))


def _check_loss(source: TracedModel, dp: object, microbatches: float) -> None:
    """Raise what was found against a loss that only a batch in one microbatch has, unless it is one."""
    refused = source.folded.loss_form.refused
    if refused and not (dp == 1 and microbatches == 1):
        raise refused[0]


def _written(source: TracedModel, task: Task, answer: Answer, notes: tuple[str, ...]) -> Plan:
    staged, folded = answer.staged, source.folded
    candidate, sharding, method = staged.candidate, staged.sharded.sharding, staged.method
    strategies, boundaries = to_text(folded, sharding)
    return Plan(
        model=source.name,
        graph_hash=source.graph_hash,
        world=task.world,
        cluster=task.cluster,
        batch=task.batch,
        sizes={str(s): int(n) for s, n in {BATCH: candidate.micro, **task.sizes}.items()},
        precision=task.precision,  # type: ignore[arg-type]
        optimizer=task.optimizer,  # type: ignore[arg-type]
        mesh=Mesh(dp=candidate.dp, tp=candidate.tp, pp=candidate.pp, cp=method.cp),
        schedule=Schedule(kind=method.schedule, microbatches=candidate.microbatches, virtual=method.virtual),  # type: ignore[arg-type]
        zero=candidate.zero,
        loss_averaging="per-microbatch" if folded.traced.averaged else "global",
        method=Method(
            recompute=_common_policy(staged),  # type: ignore[arg-type]
            overlap=method.overlap,  # type: ignore[arg-type]
            kernels=method.kernels,  # type: ignore[arg-type]
            loss=loss_of(method, folded, sharding),  # type: ignore[arg-type]
            attention=method.attention,  # type: ignore[arg-type]
            gathers=method.gathers,  # type: ignore[arg-type]
            gradients=method.gradients,  # type: ignore[arg-type]
            bucket_bytes=method.bucket_bytes,
            shards=method.shards,
            sends=method.sends,  # type: ignore[arg-type]
            context=method.context,  # type: ignore[arg-type]
            sums=sums_of(folded.loss_form, candidate),
        ),
        stages=tuple(
            _stage(folded, run, policies, _common_policy(staged), device_of(staged, task.cluster, k))
            for k, (run, policies) in enumerate(zip(staged.solution.boundaries, staged.solution.policies, strict=True))
        ),
        segments=tuple(s.name for s in folded.segments),
        splits=Splits(parameters=parameter_splits(folded, sharding), activations=activation_splits(folded, sharding)),
        strategies=strategies,
        boundaries={k: tuple(v) for k, v in boundaries.items()},
        collectives={kind: Collectives(**data) for kind, data in collectives(folded, sharding).items()},
        predicted=_predicted(source, task, staged, answer),
        notes=notes,
    )


def _common_policy(staged: Staged) -> str:
    """What most recomputed segments run again."""
    counts = Counter(policy for stage in staged.solution.policies for policy in stage.values())
    return min(counts, key=lambda policy: (-counts[policy], policy), default="full")


def _stage(folded: Folded, run: tuple[int, int], policies: Mapping[int, str], common: str, device: str) -> Stage:
    first, last = run
    again = tuple(sorted(policies))
    mixed = tuple(policies[i] for i in again) if set(policies.values()) - {common} else ()
    return Stage(
        first=first,
        last=last,
        modules=modules(folded, first, last),
        recompute=again,
        device=device,
        policies=mixed,  # type: ignore[arg-type]
    )


def _predicted(source: TracedModel, task: Task, staged: Staged, answer: Answer) -> Predicted:
    candidate, m = staged.candidate, staged.candidate.microbatches
    ranks = [staged.route.of(staged.stages, rank) for rank in range(candidate.pp)]
    slowest = max(range(candidate.pp), key=lambda rank: sum(s.forward_s + s.backward_s for s in ranks[rank]))
    chunks, end = ranks[slowest], staged.ends[slowest]
    again = sum(s.recompute_s for s in chunks)
    tp = sum(s.forward_tp_s + s.backward_tp_s for s in chunks)
    sharding = sum(s.sharding_s for s in chunks)
    work = sum(s.forward_s + s.backward_s for s in chunks)
    parts = {
        "compute": m * max(0.0, work - tp - again - sharding),
        "recompute": m * again,
        "tp_communication": m * tp,
        "dp_communication": m * sharding + end.reduce_s + end.gather_s,
        "optimizer": end.step_s,
    } | ({"loss_sums": staged.ahead_s} if staged.ahead_s else {})
    idle = staged.seconds - sum(parts.values())
    parts["pipeline_bubble"] = idle if idle > 1e-9 * staged.seconds else 0.0  # or the rounding of the sum
    flop = source.known.flops(tuple(task.sizes.items())) * task.batch
    tokens = task.batch * float(task.sizes.get(SEQUENCE, 1))
    ranks_of = zip(task.cluster.pools, task.cluster.pool_ranks(task.world), strict=True)
    peak = sum(ranks * pool.device.matmul_flops_per_s.of(task.precision) for pool, ranks in ranks_of)
    return Predicted(
        step_time_s=staged.seconds,
        tokens_per_s=tokens / staged.seconds,
        mfu=flop / (staged.seconds * peak),
        memory_bytes=int(max(m.total for m in staged.memory)),
        time_s=parts,
        memory=tuple({k: int(v) for k, v in m.to_data().items()} for m in staged.memory),
        model_flops_per_step=flop,
        times=times_to_data(rank_times(staged), staged.route.shape),
    )


# ---- from a plan to a program ----


def read_sharding(source: TracedModel, plan: Plan) -> Sharding:
    """The plan's tensor-level decisions on this graph. Raises PlanFileError."""
    plan.check_graph(source.graph_hash)
    _check_loss(source, plan.mesh.dp, plan.schedule.microbatches)
    check_sizes(plan, source.folded)
    by_name = {str(s): s for s in source.folded.traced.sizes}
    values = {by_name[n]: v for n, v in plan.sizes.items() if n in by_name}
    if plan.mesh.cp > 1 and SEQUENCE in values:  # tp splits what a rank has
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
    """The emitted program of a plan. Raises PlanError where the model's tokens cannot be cut over cp ranks."""
    specs = [StageSpec(s.first, s.last, plan.policies(s)) for s in plan.stages]
    folded = source.folded
    if plan.mesh.cp > 1:
        folded, sharding = cut_tokens(folded, token_splits(source, plan), sharding)
    program = emit_program(
        folded,
        sharding,
        specs,
        plan.model,
        loss_in_place=plan.method.loss == "in_place",
        gathers_again=plan.method.gathers == "again" and plan.mesh.tp > 1,
    )
    return replace(program, files={**program.files, "plan.json": plan.to_json()})


def token_splits(source: TracedModel, plan: Plan) -> TokenSplits:
    """What each op does with the tokens that a cp rank has. Raises PlanError."""
    tokens, mesh = plan.sizes.get(str(SEQUENCE), 1), plan.mesh
    return split_tokens(source.folded, mesh.cp, tokens, plan.method.context, mesh.tp)


def _cut_inputs(source: TracedModel, plan: Plan) -> tuple[bool, dict[tuple[str, int], int]]:
    """(whether in zigzag, dims of inputs that must be multiples of a number)."""
    if plan.mesh.cp == 1:
        return False, {}
    splits = token_splits(source, plan)
    return splits.zigzag, {source.folded.traced.sizes[SEQUENCE]: splits.chunks}


def _input_specs(source: TracedModel, plan: Plan) -> dict[str, InputSpec]:
    """What a batch must look like, by the model's inputs."""
    traced = source.folded.traced
    values = {symbol: plan.sizes[str(symbol)] for symbol in traced.sizes}
    found = {}
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder" and node.name in traced.inputs:
            x = infos(node)[0]
            symbols = tuple(str(n) if isinstance(n, sympy.Expr) and n.free_symbols else "" for n in x.shape[1:])
            sizes = tuple(int(sympy.sympify(n).subs(values)) for n in x.shape[1:])
            found[traced.inputs[node.name]] = InputSpec(x.dtype, sizes, symbols)
    return {name: found[name] for name in traced.inputs.values()}


def make_layout(source: TracedModel, plan: Plan) -> Layout:
    """What the runtime needs to know of the plan."""
    folded, traced = source.folded, source.folded.traced
    shapes = {n: tuple(p.shape) for n, p in source.model.named_parameters(remove_duplicate=False)}
    dtypes = parameter_dtypes(folded)
    held: dict[str, list[int]] = {}
    buffers: dict[str, TensorSpec] = {}
    for index, stage in enumerate(plan.stages):
        segments = folded.segments[stage.first : stage.last + 1]
        names = [traced.parameters[p.name] for s in segments for p in s.parameters]
        if index == 0:
            names += [traced.parameters[n.name] for n in folded.unused_parameters]
        for name in dict.fromkeys(names):
            held.setdefault(name, []).append(index)
        for node in held_tensors(folded, stage.first, stage.last):
            name = traced.buffers.get(node.name, node.name)
            tensor = infos(node)[0]
            stages = (*(buffers[name].stages if name in buffers else ()), index)
            buffers[name] = TensorSpec(
                parse_placement("B"), tuple(map(int, tensor.shape)), stages, trainable=False, dtype=tensor.dtype
            )
    again = {i for s in plan.stages for i, policy in plan.policies(s).items() if policy != "selective"}
    recomputed = {traced.parameters[p.name] for i in again for p in folded.segments[i].parameters}
    order = list(dict.fromkeys(traced.parameters[p.name] for s in folded.segments for p in s.parameters))
    order += [n for n in held if n not in set(order)]
    owned, unused = lay_out(folded).owned, {traced.parameters[n.name] for n in folded.unused_parameters}
    parameters = {
        name: TensorSpec(
            parse_placement(plan.splits.parameters[name]),
            shapes[name],
            tuple(held[name]),
            name not in traced.frozen,
            dtype=None if dtypes[name] == PRECISIONS[plan.precision] else dtypes[name],  # integers, frozen
            recomputed=name in recomputed,
            block=name.removesuffix(owned.get(name, name)).rstrip("."),
            idle=name in unused,
        )
        for name in order
    }
    zigzag, multiples = _cut_inputs(source, plan)
    narrow = plan.method.gradients == "compute"
    return Layout(
        mesh=RankMesh(plan.mesh.dp, plan.mesh.tp, plan.mesh.pp, plan.schedule.virtual, plan.route.shape, plan.mesh.cp),
        micro=plan.micro,
        microbatches=plan.schedule.microbatches,
        inputs=tuple(traced.inputs.values()),
        parameters=parameters,
        buffers=buffers,
        zero=plan.zero,
        shards=min(plan.method.shards, plan.mesh.dp) if plan.zero else 0,
        precision=plan.precision,
        schedule=plan.schedule.kind,
        gather_later="dp" in plan.method.overlap,
        sums_ahead=plan.method.sums == "ahead",
        one_microbatch=bool(folded.loss_form.refused),
        zigzag=zigzag,
        multiples=multiples,
        specs=_input_specs(source, plan),
        slices=plan.method.sends == "slices",
        modules=tuple(stage.modules for stage in plan.stages),
        gradients="compute" if narrow else "main",
        bucket_elements=elements_of(
            plan.method.bucket_bytes, (COMPUTE_BYTES if narrow else MAIN_BYTES)[plan.precision]
        ),
    )


def named_values(source: TracedModel) -> dict[str, Any]:
    """Constants that the graph closes over, by the names under which stages hold them."""
    traced = source.folded.traced
    return {name: value for name, value in traced.constants.items() if name not in traced.buffers}
