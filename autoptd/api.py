"""What a person calls: `trace`, `plan`, `parallelize`, and the `Parallel` that runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.arguments import (
    check_as_planned,
    check_clip,
    check_limit,
    check_nothing_to_search,
    check_sizes,
    optimizer_name,
    planned_optimizer,
)
from autoptd.boundary import public
from autoptd.compile.make_plan import make_plan
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.traced import TracedModel, read_model
from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.local_cluster import default_cluster
from autoptd.errors import ClusterError, InputsError, PlanError
from autoptd.parallel import Optimizer, Parallel
from autoptd.passes.gc_pause import without_collector
from autoptd.passes.trace.loss import Targets
from autoptd.plans.certificate import recheck
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent
from autoptd.runtime.faults.heartbeat import Timeouts
from autoptd.runtime.lazy_tensor import Stored
from autoptd.runtime.loss_scaling import Finite
from autoptd.runtime.optimizer import read_groups
from autoptd.runtime.torch_compile import DEFAULT
from autoptd.search.constraints.options import read_constraints


@public
@without_collector()
def trace(
    model: nn.Module,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    loss: Callable[..., Tensor] | None = None,
    targets: Targets | None = None,
    loss_averaging: str | None = None,
    seq: int | None = None,
    precision: str = "bf16",
    progress: Progress | None = None,
) -> TracedModel:
    """Trace a model once, for many calls of `plan` and `parallelize`, which take the result in place of the module.

    Keywords are those of `plan`. Raises InputsError, TraceError, UnsupportedOp, PlanError for an unknown precision.
    """
    return read_model(
        model,
        inputs=inputs,
        loss=loss,
        targets=targets,
        seq=seq,
        precision=precision,
        progress=progress or Silent(),
        loss_averaging=loss_averaging or "global",
    )


@public
@without_collector()
def plan(
    model: nn.Module | TracedModel,
    *,
    world: int,
    inputs: Mapping[str, Tensor] | None = None,
    loss: Callable[..., Tensor] | None = None,
    targets: Targets | None = None,
    loss_averaging: str | None = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    optimizer: Optimizer = "adamw",
    clip_norm: float | None = None,
    fix: Mapping[str, Any] | None = None,
    assume: Mapping[str, Any] | None = None,
    include: Iterable[str] = (),
    exact: bool = False,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Search for the fastest way to train `model` on `world` devices that fits.

    inputs: example keyword tensors of `forward`, dim 0 counting samples (may be meta); made from the configuration
    for Hugging Face models and for modules with `example_inputs(batch, seq)`. loss: where `forward` gives no scalar,
    `.loss` or `["loss"]`: a function of the outputs, of (outputs, inputs), or of outputs and targets, such as
    nn.CrossEntropyLoss(). targets: example tensors that the loss takes and `forward` never sees: one, which a batch
    calls "targets", or a mapping by the loss's own keywords.

    cluster: a shipped name, a TOML path, a `Cluster`; left out, this machine's GPUs, or dgx-h100. batch: samples per
    step, all ranks together; left out, 8 × world. seq: left out, the model's own maximum up to 4,096. fix: choices made
    by hand, `options.KNOWN`. assume: how a step is carried out that nothing here runs (`assumed.ASSUMABLE`), such as
    {"kernels": "fused"}: the plan is then a prediction only (`Plan.not_runnable`).

    include: dimensions to search beyond the usual, of `options.INCLUDABLE`, or "all". exact: go on until
    nothing better can be left, which small models allow; otherwise the plan's notes tell how much better one might
    be. time_limit_s: of the search once it has a plan; the plan then depends on the machine's speed.

    precision: "bf16", "fp16" (with dynamic loss scaling), "fp32" or "fp64"; left out, bf16. A model from
    `trace` brings inputs, loss, seq and precision.

    Raises InputsError, TraceError, UnsupportedOp, PlanError, ClusterError, and DoesNotFit saying what is missing.
    """
    progress = progress or Silent()
    check_sizes(world, batch)
    constraints, chosen, where = read_constraints(fix, include, assume), optimizer_name(optimizer), _cluster(cluster)
    check_clip(clip_norm)
    check_limit(time_limit_s)
    source = _traced(model, inputs, loss, targets, seq, precision, progress, loss_averaging)
    return make_plan(
        source,
        exact=exact,
        time_limit_s=time_limit_s,
        world=world,
        cluster=where,
        batch=batch,
        precision=source.precision,
        optimizer=chosen,
        constraints=constraints,
        progress=progress,
    )


@public
@without_collector()
def parallelize(
    model: nn.Module | TracedModel | str | os.PathLike[str],
    *,
    world: int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    loss: Callable[..., Tensor] | None = None,
    targets: Targets | None = None,
    loss_averaging: str | None = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    optimizer: Optimizer | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    parameter_groups: Sequence[Mapping[str, Any]] = (),
    clip_norm: float | None = None,
    fix: Mapping[str, Any] | None = None,
    include: Iterable[str] = (),
    exact: bool = False,
    time_limit_s: float | None = None,
    seed: int = 0,
    weights: str | os.PathLike[str] | None = None,
    non_finite: str = "raise",
    compile: bool | str = False,
    watch: Mapping[str, float] | bool = True,
    signed_by: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Parallel:
    """Plan (or take `plan`), emit the stage modules, and under torchrun set up this rank's running part.

    Keywords are those of `plan`. Under a launcher rank 0 searches, and the other ranks take its plan. With a plan, its
    cluster, sizes, precision and optimizer hold: they need not be given, and nothing is searched, so that fix, include,
    exact and time_limit_s are refused.
    optimizer_options: keywords of the optimizer, such as lr. parameter_groups: parameters with others, by patterns of
    their names: [{"names": ["*.bias", "*norm*"], "weight_decay": 0.0}]; the first that fits counts.
    seed: of the parameters of a meta model, and of dropout. non_finite: what all ranks do with a step whose loss or
    gradient norm is not finite, "raise" RuntimeFault (nothing has changed then) or "skip" it; with fp16, overflows are
    skipped anyway and halve the loss scale. compile: run each class of block through torch.compile, by inductor (True)
    or the backend that is named; a plan with compiled kernels is run so anyway.
    model: may be a name or a folder as the command line takes them; it is then made on meta. weights: a folder of
    safetensors by the model's names, of which each rank reads its own slices; left out, a folder given as model, if it
    has any.
    watch: how ranks look after each other, in seconds: {"silent_s": 8, "slow_s": 30, "stuck_s": 600}; a rank that is
    killed or stopped ends the job everywhere with the cause, a slow one is reported. False: they do not.
    signed_by: the file of a public key; the plan must have a certificate signed with its private key.

    Raises what `plan` raises, and PlanFileError for a plan of another model, one that was changed after it was
    verified or whose program is not the one that was verified, PlanError for one that was made for something else than
    is asked for, SigningError for a key that cannot be read.
    """
    progress = progress or Silent()
    running = _running_world()
    model, weights = _opened(model, weights)
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if world is None:
        world = plan.world if plan is not None else running
        if world is None:
            raise PlanError("world was not given", where="world", fix="pass world=, or start under torchrun")
    check_sizes(world, batch)
    check_limit(time_limit_s)
    include = [include] if isinstance(include, str) else list(include)
    where = None if cluster is None and plan is not None else _cluster(cluster)
    if plan is not None:
        plan.check_world(world)
        check_nothing_to_search(fix=fix, include=include, exact=exact, time_limit_s=time_limit_s)
        check_as_planned(plan, cluster=where, batch=batch, seq=seq, precision=precision, optimizer=optimizer)
    if running is not None and running != world:
        raise PlanError(
            f"{running} processes are running, but the plan is for a world of {world}",
            where="world",
            fix=f"torchrun --nproc-per-node … with {world} processes in all, or world={running}",
        )
    check_clip(clip_norm)
    Finite(non_finite, None)  # or it is refused
    limits = None if watch is False else Timeouts.of({} if watch is True else watch)
    if optimizer is None:
        optimizer = "adamw" if plan is None else planned_optimizer(plan)
    chosen = optimizer_name(optimizer, optimizer_options)
    if plan is None:
        assert where is not None
        constraints = read_constraints({"kernels": "compiled", **(fix or {})} if compile else fix, include)
        source = _traced(model, inputs, loss, targets, seq, precision, progress, loss_averaging)
        make = partial(
            make_plan,
            source,
            exact=exact,
            time_limit_s=time_limit_s,
            world=world,
            cluster=where,
            batch=batch,
            precision=source.precision,
            optimizer=chosen,
            constraints=constraints,
            progress=progress,
        )
        plan = make() if running in (None, 1) else _planned_by_rank_0(make, progress)
        plan.check_runnable()
    else:
        length = seq if seq is not None else plan.sizes.get("s")
        plan.check_runnable()
        averaging = loss_averaging or plan.loss_averaging
        source = _traced(model, inputs, loss, targets, length, plan.precision, progress, averaging)
    stored = None if weights is None else _stored(weights, source)
    groups = read_groups(parameter_groups, [n for n, p in source.model.named_parameters() if p.requires_grad])
    optimizer_name(optimizer, optimizer_options, groups)
    with progress.stage("emit the program"):
        program = make_program(source, plan, read_sharding(source, plan))
    recheck(plan, program, None if signed_by is None else Path(signed_by))
    options = dict(optimizer_options or {})
    backend = compile if isinstance(compile, str) else DEFAULT * (compile or plan.method.kernels == "compiled")
    parallel = Parallel(plan, source, program, optimizer, options, clip_norm, seed, groups, non_finite, backend, stored)
    if running is not None:
        from autoptd.runtime.comm.processes import connect_processes

        parallel.start(connect_processes(parallel.layout.mesh, limits=limits))
    return parallel


def _traced(
    model: nn.Module | TracedModel,
    inputs: Mapping[str, Tensor] | None,
    loss: Callable[..., Tensor] | None,
    targets: Targets | None,
    seq: int | None,
    precision: str | None,
    progress: Progress,
    loss_averaging: str | None = None,
) -> TracedModel:
    """The model traced, now or before. Raises InputsError where a traced model is asked to be another."""
    if not isinstance(model, TracedModel):
        return read_model(
            model,
            inputs=inputs,
            loss=loss,
            targets=targets,
            seq=seq,
            precision="bf16" if precision is None else precision,
            progress=progress,
            loss_averaging=loss_averaging or "global",
        )
    traced_as = {"seq": model.seq, "precision": model.precision, "loss_averaging": model.loss_averaging}
    asked = {
        "inputs": inputs,
        "loss": loss,
        "targets": targets,
        "seq": seq,
        "precision": precision,
        "loss_averaging": loss_averaging,
    }
    others = [n for n, value in asked.items() if value is not None and (n not in traced_as or value != traced_as[n])]
    if others:
        given = ", ".join(f"{name} {asked[name]!r}" if name in traced_as else name for name in others)
        raise InputsError(
            f"the model was traced before, with seq {model.seq} and {model.precision}; it is now given {given}",
            where=", ".join(others),
            fix="leave these out, or give them to autoptd.trace",
        )
    return model


def _opened(
    model: nn.Module | TracedModel | str | os.PathLike[str], weights: str | os.PathLike[str] | None
) -> tuple[nn.Module | TracedModel, str | os.PathLike[str] | None]:
    """The model of a name or a folder, on meta, and where its weights lie."""
    if not isinstance(model, (str, os.PathLike)):
        return model, weights
    from autoptd.checkpoint.huggingface import has_weights
    from autoptd.models.load import load_model

    name = os.fspath(model)
    if weights is None and has_weights(Path(name)):
        weights = name
    return load_model(name)[0], weights


def _stored(weights: str | os.PathLike[str], source: TracedModel) -> Mapping[str, Stored]:
    from autoptd.checkpoint.huggingface import Weights

    found = Weights(Path(weights), source.model)
    found.check(name for name, _ in source.model.named_parameters() if not source.objective.owns(name))
    return found


def _running_world() -> int | None:
    """How many processes a launcher started, or None outside one: a process that is a world by itself may plan."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            return size
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() and "RANK" in os.environ else None


def _planned_by_rank_0(make: Callable[[], Plan], progress: Progress) -> Plan:
    from autoptd.runtime.comm.processes import start_processes
    from autoptd.runtime.comm.shared_plan import shared_plan

    start_processes()
    return shared_plan(make, progress)


def _cluster(cluster: str | os.PathLike[str] | Cluster | None) -> Cluster:
    if cluster is None:
        return default_cluster()
    if not isinstance(cluster, (str, os.PathLike, Cluster)):
        raise ClusterError(
            f"cluster is of type {type(cluster).__name__}",
            where="cluster",
            fix="give a shipped name (autoptd clusters), the path of a .toml file, or a Cluster",
        )
    return cluster if isinstance(cluster, Cluster) else Cluster.load(os.fspath(cluster))
