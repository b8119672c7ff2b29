"""The public functions: `trace`, `plan` and `parallelize`, which returns a `Parallel` that trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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
    check_update,
    cluster_for,
    optimizer_name,
    planned_optimizer,
)
from autoptd.boundary import public
from autoptd.caller_modes import without_anomalies
from autoptd.compile.make_plan import make_plan, samples_of
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import InputsError, PlanError
from autoptd.parallel import Optimizer, Parallel
from autoptd.passes.gc_pause import without_collector
from autoptd.passes.hidden_matrices import hidden_matrices
from autoptd.passes.trace.loss import Targets
from autoptd.plans.certificate import recheck
from autoptd.plans.model import Plan
from autoptd.progress import Progress, progress_of
from autoptd.runtime.faults.heartbeat import Timeouts
from autoptd.runtime.lazy_tensor import Stored
from autoptd.runtime.loss_scaling import Finite
from autoptd.runtime.optimizers.groups import read_groups
from autoptd.runtime.torch_compile import DEFAULT
from autoptd.search.constraints.options import read_constraints
from autoptd.search.constraints.systems import read_system


@public
@without_anomalies()
@without_collector()
def trace(
    model: nn.Module | str | os.PathLike[str],
    *,
    inputs: Mapping[str, Any] | None = None,
    loss: Callable[..., Tensor] | None = None,
    targets: Targets | None = None,
    loss_averaging: str | None = None,
    seq: int | None = None,
    precision: str = "bf16",
    progress: Progress | bool | None = None,
) -> TracedModel:
    """Trace `model` once, for any number of calls of `plan` and `parallelize`, which take the result in its place.

    Arguments are those of `plan`. Raises InputsError, TraceError, UnsupportedOp, PlanError for an unknown precision.
    """
    from autoptd.compile.read import read_model  # torch.export, which a trace that was kept does without

    return read_model(
        _built(model),  # type: ignore[arg-type]  # raises InputsError for a traced one
        inputs=inputs,
        loss=loss,
        targets=targets,
        seq=seq,
        precision=precision,
        progress=progress_of(progress),
        loss_averaging=loss_averaging or "global",
    )


@public
@without_anomalies()
@without_collector()
def plan(
    model: nn.Module | TracedModel | str | os.PathLike[str],
    *,
    world: int,
    inputs: Mapping[str, Any] | None = None,
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
    as_: str | None = None,
    exact: bool = False,
    time_limit_s: float | None = None,
    others: bool = False,
    progress: Progress | bool | None = None,
) -> Plan:
    """Return the fastest plan found for training `model` on `world` devices within their memory.

    Needs no GPU and no launcher; parameters may be on meta. A model from `trace` brings its own inputs, loss, targets,
    seq, precision and loss_averaging.

    Args:
        model: a single-device module, the result of `trace`, or a name as on the command line, such as a Hub id.
        world: number of devices, over all nodes.
        inputs: example keyword arguments of `forward`: tensors with samples in dim 0, maybe on meta, and containers of
            them. All samples share tensors without, such as the weight of a term at this step. Flags, numbers, strings
            and None are fixed when planning. Default: made from the configuration of a Hugging Face model, or by the
            module's `example_inputs(batch, seq)`.
        loss: callable that returns the loss, needed unless `forward` returns a scalar, `.loss` or `["loss"]`. Takes
            (outputs), (outputs, inputs), or outputs and targets, such as `nn.CrossEntropyLoss()`.
        targets: example tensors that only the loss takes: one tensor, which a batch then holds as "targets", or a
            mapping by the loss's keywords.
        loss_averaging: "global" (default): the whole batch's loss, as on one device. "per-microbatch": terms of it that
            are no sums, such as a balance loss, are the mean of what the microbatches of each dp rank give.
            "per-microbatch-over-dp": the same with microbatches of all dp ranks together.
        cluster: a shipped name, the path of a TOML file, or a `Cluster`. Default: this machine's GPUs, or "dgx-h100".
        batch: samples per optimizer step over all ranks. Default: 8 × world.
        seq: tokens per sample. Default: the model's maximum, at most 4,096.
        precision: "bf16" (default), "fp16" (with dynamic loss scaling), "fp32" or "fp64".
        optimizer: "adamw", "sgd", "lion", "adafactor", "muon" (AdamW for all but hidden matrices), or a callable such
            as `torch.optim.Adam` whose optimizer updates each parameter by itself.
        clip_norm: limit of the global gradient norm. Default: no clipping.
        fix: choices made by hand, such as `{"tp": 8, "recompute": "full"}`; keys are `options.KNOWN`.
        assume: execution that the runtime cannot do, such as `{"kernels": "fused"}` (`assumed.ASSUMABLE`). Such a plan
            is a prediction only (`Plan.not_runnable`).
        as_: "megatron", "nemo" or "torchtitan": search only plans that this system's arguments can express, as it
            would carry them out; `fix` narrows them further. Most of these plans are predictions.
        exact: search until no better plan can exist; for small models. Else `plan.notes` bounds the possible gain.
        time_limit_s: limit of the search once it has a plan; the result then depends on the machine's speed.
        others: plan the runners-up too (`Plan.others`): other meshes, and other values of each choice.
        progress: True shows the steps on a terminal or in a notebook; a `Progress` receives them. Default: the log.

    Raises InputsError, TraceError, UnsupportedOp, PlanError, ClusterError, or DoesNotFit with the memory that is short.
    """
    progress = progress_of(progress)
    check_sizes(world, batch)
    constraints, chosen, where = read_system(as_, fix, assume), optimizer_name(optimizer), cluster_for(cluster, world)
    check_clip(clip_norm)
    check_limit(time_limit_s)
    source = _traced(_built(model), inputs, loss, targets, seq, precision, progress, loss_averaging)
    source = source.for_batch(samples_of(batch, world))
    return make_plan(
        source,
        exact=exact,
        time_limit_s=time_limit_s,
        others=others,
        world=world,
        cluster=where,
        batch=batch,
        precision=source.precision,
        optimizer=chosen,
        constraints=constraints,
        progress=progress,
    )


@public
@without_anomalies()
@without_collector()
def parallelize(
    model: nn.Module | TracedModel | str | os.PathLike[str],
    *,
    world: int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
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
    exact: bool = False,
    time_limit_s: float | None = None,
    seed: int = 0,
    weights: str | os.PathLike[str] | None = None,
    non_finite: str = "raise",
    compile: bool | str | None = None,
    watch: Mapping[str, float] | bool = True,
    signed_by: str | os.PathLike[str] | None = None,
    progress: Progress | bool | None = None,
) -> Parallel:
    """Plan, or take `plan`, generate the program, and under torchrun set this rank up for training.

    Other keywords are those of `plan`. Under a launcher only rank 0 searches; the other ranks receive its plan. With
    `plan=` its cluster, sizes, precision and optimizer apply, and fix, exact and time_limit_s are refused.

    Args:
        model: a module or the result of `trace`; or a model name or folder as on the command line, to build on meta.
        world: number of ranks. Default: the plan's, or the number of processes that the launcher started.
        plan: a `Plan` or the path of a plan file.
        optimizer_options: keywords of the optimizer, such as `{"lr": 3e-4}`; those of muon's AdamW under "adamw", as in
            `{"lr": 0.02, "adamw": {"lr": 3e-4}}`.
        parameter_groups: parameters with other options, by patterns of their names, such as
            `[{"names": ["*.bias", "*norm*"], "weight_decay": 0.0}]`. The first group that matches applies. A group may
            name an optimizer of its own: `{"names": ["*head*"], "optimizer": "adamw", "lr": 3e-4}`.
        seed: seeds dropout and the parameters of a model on meta.
        weights: folder of safetensors; each rank reads only its slices. Default: `model`, if that is a folder with any.
        non_finite: what all ranks do if the loss or gradient norm of a step is not finite: "raise" RuntimeFault with
            nothing changed, or "skip" the step. With fp16, an overflow is always skipped and halves the loss scale.
        compile: run blocks through torch.compile, by inductor (True) or a named backend, or not (False). Default: where
            the plan has compiled kernels and the ranks' devices, GPUs or CPUs, are of the planned type.
        watch: time limits in seconds for other ranks, such as `{"silent_s": 8, "slow_s": 30, "stuck_s": 600}`. A rank
            that dies or stops ends the job on all ranks with the cause; a slow one is reported. False: no watching.
        signed_by: file of a public key; the plan must hold a certificate signed with the matching private key.

    Raises what `plan` raises; PlanFileError for a plan of another model, or one that no longer matches its certificate;
    PlanError if a keyword contradicts the plan; SigningError for an unreadable key; RuntimeFault if another rank fails.
    """
    from autoptd.runtime.comm.shared_plan import on_all_ranks, shared_plan

    progress, running = progress_of(progress), _running_world()
    alone = running in (None, 1)
    model, weights = _opened(model, weights)
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if world is None:
        world = plan.world if plan is not None else running
        if world is None:
            raise PlanError("world was not given", where="world", fix="pass world=, or start under torchrun")
    check_sizes(world, batch)
    check_limit(time_limit_s)
    where = None if cluster is None and plan is not None else cluster_for(cluster, world)
    if plan is not None:
        plan.check_world(world)
        check_nothing_to_search(fix=fix, exact=exact, time_limit_s=time_limit_s)
        check_as_planned(plan, cluster=where, batch=batch, seq=seq, precision=precision, optimizer=optimizer)
    if running is not None and running != world:
        raise PlanError(
            f"{running} processes are running, but the plan is for a world of {world}",
            where="world",
            fix=f"start {world} processes in total (torchrun --nproc-per-node …), or pass world={running}",
        )
    if optimizer is None:
        optimizer = "adamw" if plan is None else planned_optimizer(plan)
    fixed = {**({} if compile is None else {"kernels": "compiled" if compile else "eager"}), **(fix or {})}
    together = nullcontext if alone else on_all_ranks
    with together():
        check_clip(clip_norm)
        Finite(non_finite, None)  # raises PlanError for an unknown value
        limits = None if watch is False else Timeouts.of({} if watch is True else watch)
        chosen, constraints = optimizer_name(optimizer, optimizer_options), read_constraints(fixed)
        if plan is None:
            source = _traced(model, inputs, loss, targets, seq, precision, progress, loss_averaging)
            source = source.for_batch(samples_of(batch, world))
        else:
            plan.check_runnable()
            length, averaging = seq if seq is not None else plan.sizes.get("s"), loss_averaging or plan.loss_averaging
            source = _traced(model, inputs, loss, targets, length, plan.precision, progress, averaging)
            source = source.for_batch(plan.batch)
    if plan is None:
        assert where is not None
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
        asked = {"batch": samples_of(batch, world), "precision": source.precision, "fix": fixed}
        plan = make() if alone else shared_plan(make, source.graph_hash, asked, progress)
        plan.check_runnable()
    with together():
        stored = None if weights is None else _stored(weights, source)
        shapes = {n: tuple(p.shape) for n, p in source.model.named_parameters() if p.requires_grad}
        groups = read_groups(parameter_groups, shapes)
        check_update(optimizer, optimizer_options, groups, shapes, hidden_matrices(source.folded))
        with progress.stage("emit the program"):
            program = make_program(source, plan, read_sharding(source, plan))
        recheck(plan, program, None if signed_by is None else Path(signed_by))
        options = dict(optimizer_options or {})
        backend = compile if isinstance(compile, str) or compile is None else DEFAULT * compile
        parallel = Parallel(
            plan, source, program, optimizer, options, clip_norm, seed, groups, non_finite, backend, stored
        )
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
    """Return `model` traced. Raises InputsError for keywords that contradict a model traced before."""
    if not isinstance(model, TracedModel):
        from autoptd.compile.read import read_model

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
            f"the model was traced with seq {model.seq} and {model.precision}, but this call passes {given}",
            where=", ".join(others),
            fix="leave these out, or pass them to autoptd.trace",
        )
    return model


def _opened(
    model: nn.Module | TracedModel | str | os.PathLike[str], weights: str | os.PathLike[str] | None
) -> tuple[nn.Module | TracedModel, str | os.PathLike[str] | None]:
    """Build a model given by name or folder on meta; return it with the folder of its weights, if there is one.

    A model of the Hub has its weights: they are never those of an initialiser.
    """
    if not isinstance(model, (str, os.PathLike)):
        return model, weights
    from autoptd.checkpoint.huggingface import ONE, has_weights
    from autoptd.models.hub import cached_folder, is_hub_id

    name = os.fspath(model)
    if weights is None:
        folder = cached_folder(name) if is_hub_id(name) else Path(name)
        weights = folder if has_weights(folder) or is_hub_id(name) else None
        if weights is not None and not has_weights(folder):
            cached_folder(name, ONE)  # raises ModelError
    return _built(name), weights


def _built(model: nn.Module | TracedModel | str | os.PathLike[str]) -> nn.Module | TracedModel:
    """Return a model; one that is given by name, built on meta."""
    if not isinstance(model, (str, os.PathLike)):
        return model
    from autoptd.models.load import load_model

    return load_model(os.fspath(model))[0]


def _stored(weights: str | os.PathLike[str], source: TracedModel) -> Mapping[str, Stored]:
    from autoptd.checkpoint.huggingface import Weights

    found = Weights(Path(weights), source.model)
    found.check(name for name, _ in source.model.named_parameters() if not source.objective.owns(name))
    return found


def _running_world() -> int | None:
    """Number of processes started by the launcher; None outside one, where a single process may plan for any world."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            return size
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() and "RANK" in os.environ else None
