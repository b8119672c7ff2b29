"""What a person calls: `trace`, `plan`, `parallelize`, and the `Parallel` that runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.codegen.emit import Program, load_stage
from autoptd.compile import TracedModel, make_layout, make_plan, make_program, named_values, read_model, read_sharding
from autoptd.cost_models.cluster import Cluster, default_cluster
from autoptd.errors import AutoptdError, ClusterError, InputsError, PlanError, RuntimeFault, nearest
from autoptd.passes.collector import without_collector
from autoptd.plans import Plan
from autoptd.progress import Progress, Silent
from autoptd.runtime.axis import Axis
from autoptd.runtime.comm import Communicators
from autoptd.runtime.initialise import values_for
from autoptd.runtime.layout import Layout
from autoptd.runtime.optimizer import ParameterGroup, grouped, make_optimizer, read_groups
from autoptd.runtime.randomness import DropoutKey
from autoptd.runtime.stage import Stage
from autoptd.runtime.trainer import Trainer
from autoptd.search.wishes import read_wishes, require_count

OPTIMIZERS = ("adamw", "sgd")
Optimizer = str | Callable[..., torch.optim.Optimizer]


@without_collector()
def trace(
    model: nn.Module,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    loss: Callable[..., Tensor] | None = None,
    seq: int | None = None,
    precision: str = "bf16",
    progress: Progress | None = None,
) -> TracedModel:
    """Trace a model once, for many calls of `plan` and `parallelize`, which take the result in place of the module.

    Keywords are those of `plan`. Raises InputsError, TraceError, UnsupportedOp, PlanError for an unknown precision.
    """
    return read_model(model, inputs=inputs, loss=loss, seq=seq, precision=precision, progress=progress or Silent())


@without_collector()
def plan(
    model: nn.Module | TracedModel,
    *,
    world: int,
    inputs: Mapping[str, Tensor] | None = None,
    loss: Callable[..., Tensor] | None = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    optimizer: Optimizer = "adamw",
    clip_norm: float | None = None,
    fix: Mapping[str, Any] | None = None,
    include: Iterable[str] = (),
    exact: bool = False,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Search for the fastest way to train `model` on `world` devices that fits.

    inputs: example keyword tensors of `forward`, dim 0 counting samples (may be meta); made from the configuration
    for Hugging Face models and for modules with `example_inputs(batch, seq)`. loss: a function of the outputs (and the
    inputs, if it takes two), where `forward` gives no scalar, `.loss` or `["loss"]`. cluster: a shipped name, a TOML
    path, a `Cluster`; left out, this machine's GPUs, or dgx-h100. batch: samples per step, all ranks together; left
    out, 8 × world. seq: left out, the model's own maximum up to 4,096. fix: choices made by hand, `wishes.KNOWN`; with
    some of them a plan can be predicted, but not run (`Plan.not_runnable`).

    include: dimensions to search beyond the usual, of `wishes.INCLUDABLE`, or "all". exact: go on until
    nothing better can be left, which small models allow; otherwise the plan's notes tell how much better one might
    be. time_limit_s: of the search once it has a plan; the plan then depends on the machine's speed.

    precision: "bf16", "fp32" or "fp64"; left out, bf16. A model from `trace` brings inputs, loss, seq and precision.

    Raises InputsError, TraceError, UnsupportedOp, PlanError, ClusterError, and DoesNotFit saying what is missing.
    """
    progress = progress or Silent()
    _check_sizes(world, batch)
    wishes, chosen, where = read_wishes(fix, include), _optimizer_name(optimizer), _cluster(cluster)
    _check_clip(clip_norm)
    _check_limit(time_limit_s)
    source = _traced(model, inputs, loss, seq, precision, progress)
    return make_plan(
        source,
        exact=exact,
        time_limit_s=time_limit_s,
        world=world,
        cluster=where,
        batch=batch,
        precision=source.precision,
        optimizer=chosen,
        wishes=wishes,
        progress=progress,
    )


@without_collector()
def parallelize(
    model: nn.Module | TracedModel,
    *,
    world: int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    loss: Callable[..., Tensor] | None = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    optimizer: Optimizer = "adamw",
    optimizer_options: Mapping[str, Any] | None = None,
    parameter_groups: Sequence[Mapping[str, Any]] = (),
    clip_norm: float | None = None,
    fix: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Parallel:
    """Plan (or take `plan`), emit the stage modules, and under torchrun set up this rank's running part.

    Keywords are those of `plan`; with a plan, its sizes, precision and optimizer hold and nothing is searched.
    optimizer_options: keywords of the optimizer, such as lr. parameter_groups: parameters with others, by patterns of
    their names: [{"names": ["*.bias", "*norm*"], "weight_decay": 0.0}]; the first that fits counts.
    seed: of the parameters of a meta model, and of dropout.

    Raises what `plan` raises, and PlanFileError for a plan of another model, PlanError for one of another world.
    """
    progress = progress or Silent()
    running = _running_world()
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if world is None:
        world = plan.world if plan is not None else running
        if world is None:
            raise PlanError("world was not given", where="world", fix="pass world=, or start under torchrun")
    _check_sizes(world, batch)
    if plan is not None:
        plan.check_world(world)
    if running is not None and running != world:
        raise PlanError(
            f"{running} processes are running, but the plan is for a world of {world}",
            where="world",
            fix=f"torchrun --nproc-per-node … with {world} processes in all, or world={running}",
        )
    _check_clip(clip_norm)
    if plan is not None and not callable(optimizer):
        optimizer = _planned_optimizer(plan)
    chosen = _optimizer_name(optimizer, optimizer_options)
    if plan is None:
        wishes, where = read_wishes(fix), _cluster(cluster)
        source = _traced(model, inputs, loss, seq, precision, progress)
        plan = make_plan(
            source,
            world=world,
            cluster=where,
            batch=batch,
            precision=source.precision,
            optimizer=chosen,
            wishes=wishes,
            progress=progress,
        )
        plan.check_runnable()
    else:
        length = seq if seq is not None else plan.sizes.get("s")
        plan.check_runnable()
        source = _traced(model, inputs, loss, length, plan.precision, progress)
    groups = read_groups(parameter_groups, [n for n, p in source.model.named_parameters() if p.requires_grad])
    _optimizer_name(optimizer, optimizer_options, groups)
    with progress.stage("emit the program"):
        program = make_program(source, plan, read_sharding(source, plan))
    parallel = Parallel(plan, source, program, optimizer, dict(optimizer_options or {}), clip_norm, seed, groups)
    if running is not None:
        from autoptd.runtime.processes import connect_processes

        parallel.start(connect_processes(parallel.layout.mesh))
    return parallel


class Parallel:
    """A plan with its program. Under torchrun (or for a world of one) it trains; anywhere it emits."""

    def __init__(
        self,
        plan: Plan,
        source: TracedModel,
        program: Program,
        optimizer: Optimizer,
        optimizer_options: dict[str, Any],
        clip_norm: float | None,
        seed: int,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        self.plan = plan
        self.program = program
        self._source = source
        self._optimizer = optimizer
        self._optimizer_options = optimizer_options
        self._groups = groups
        self._clip_norm = clip_norm
        self._seed = seed
        self._trainer: Trainer | None = None
        self._communicators: Communicators | None = None

    def emit(self, directory: str | os.PathLike[str]) -> Path:
        """Write the stage modules and the plan. Raises PlanFileError where that cannot be done."""
        return self.program.write(Path(directory))

    def stage_module(self, rank: int, chunk: int = 0) -> Stage:
        """The stage that a rank runs, on meta, for looking at; of its several chunks, one."""
        if not 0 <= rank < self.plan.world:
            raise PlanError(f"rank {rank} is not in a world of {self.plan.world}", fix=f"0 to {self.plan.world - 1}")
        held = self.layout.mesh.stages_of(rank // (self.plan.mesh.dp * self.plan.mesh.tp))
        if not 0 <= chunk < len(held):
            raise PlanError(f"chunk {chunk} is not on a rank of {len(held)}", fix=f"0 to {len(held) - 1}")
        with torch.device("meta"):
            alone = Axis(_Rank(rank % self.plan.mesh.tp, self.plan.mesh.tp))  # type: ignore[arg-type]  # never talks
            stage = load_stage(self.program, held[chunk])(alone)
        assert isinstance(stage, Stage)
        return stage

    @cached_property
    def layout(self) -> Layout:
        """Mesh, microbatches, and where each tensor lies: what the runtime reads of the plan."""
        return make_layout(self._source, self.plan)

    def initial_values(self, stages: Collection[int] | None = None) -> dict[str, Tensor]:
        """Whole parameters and buffers, of some stages or of all: the model's own, or made from the seed on meta."""
        tensors = {**self.layout.parameters, **self.layout.buffers}
        wanted = [n for n, spec in tensors.items() if stages is None or not set(stages).isdisjoint(spec.stages)]
        return values_for(self._source.model, wanted, self._seed, named_values(self._source))

    def start(self, communicators: Communicators, values: Mapping[str, Tensor] | None = None) -> None:
        """Become the running part of the rank that these communicators belong to. A collective.

        values: of this rank's tensors at least; left out, the initial ones.
        """
        self._check_agreement(communicators)
        layout = self.layout
        held = layout.mesh.stages_of(communicators.stage)
        key = DropoutKey(self._seed, communicators.dp.rank)
        with torch.device("meta"):
            stages = [load_stage(self.program, index)(Axis(communicators.tp), key) for index in held]
        self._communicators = communicators
        self._trainer = Trainer(
            stages,
            layout,
            communicators,
            self._optimizer,
            clip_norm=self._clip_norm,
            groups=self._groups,
            **self._optimizer_options,
        )
        self._trainer.load_parameters(self.initial_values(held) if values is None else values)

    def _check_agreement(self, communicators: Communicators) -> None:
        """Every rank plans for itself, and gets the same; other versions or models on some would hang or lie."""
        text = "\0".join(self.program.files.values())
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        agreed = torch.tensor([digest, -digest], dtype=torch.int64, device=communicators.device)
        highest, lowest = communicators.world.all_reduce(agreed, "max").tolist()
        if (highest, -lowest) != (digest, digest):
            raise PlanError(
                "the ranks made different plans or programs",
                where=f"rank {communicators.world.rank}",
                fix="run the same model, torch and autoptd everywhere, or pass one plan file: plan='plan.json'",
            )

    @property
    def _running(self) -> Trainer:
        if self._trainer is None:
            if self.plan.world != 1:
                raise RuntimeFault(
                    f"this process is not one of the plan's {self.plan.world} ranks",
                    fix=f"start the script with torchrun --nproc-per-node … ({self.plan.world} processes in all)",
                )
            from autoptd.runtime.processes import connect_processes

            self.start(connect_processes(self.layout.mesh))
        assert self._trainer is not None
        return self._trainer

    def train_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One optimizer step. `batch`: this dp rank's share, keyword tensors, the same on its tp and pp ranks.

        Returns the mean loss over the whole global batch. Raises InputsError before anything is sent.
        """
        return self._running.train_step(batch)

    def eval_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean loss over the whole global batch, without gradient or update."""
        return self._running.eval_step(batch)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's optimizer, for learning-rate schedulers."""
        return self._running.optimizer

    @property
    def grad_norm(self) -> Tensor | None:
        """The global gradient norm of the last step, before clipping."""
        return self._running.grad_norm

    @property
    def dp_rank(self) -> int:
        """Which share of the global batch this rank takes."""
        self._running  # noqa: B018  starts a world of one
        assert self._communicators is not None
        return self._communicators.dp.rank

    @property
    def dp_size(self) -> int:
        """Into how many shares the global batch is cut."""
        return self.plan.mesh.dp

    def local_tensors(self) -> dict[str, Tensor]:
        """This rank's part of each parameter and buffer that its stages hold, by original name."""
        self._running.settle()
        stages = self._running.stages
        parameters = {name: held for stage in stages for name, held in stage.named_parameters()}
        return parameters | {name: held for stage in stages for name, held in stage.named_buffers()}

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients, full, by original name, on every rank. A collective."""
        return self._running.gradients()

    def state_dict(self) -> dict[str, Tensor]:
        """Full tensors under the original names, tied ones under each of theirs, on every rank. A collective."""
        found = self._running.state_dict()
        found |= {alias: found[name] for alias, name in self._source.folded.traced.aliases.items() if name in found}
        model = self._source.model
        others = values_for(model, [n for n in model.state_dict(keep_vars=True) if n not in found], self._seed)
        return {name: found[name] if name in found else others[name] for name in model.state_dict(keep_vars=True)}


def _traced(
    model: nn.Module | TracedModel,
    inputs: Mapping[str, Tensor] | None,
    loss: Callable[..., Tensor] | None,
    seq: int | None,
    precision: str | None,
    progress: Progress,
) -> TracedModel:
    """The model traced, now or before. Raises InputsError where a traced model is asked to be another."""
    if not isinstance(model, TracedModel):
        return read_model(
            model,
            inputs=inputs,
            loss=loss,
            seq=seq,
            precision="bf16" if precision is None else precision,
            progress=progress,
        )
    traced_as = {"seq": model.seq, "precision": model.precision}
    asked = {"inputs": inputs, "loss": loss, "seq": seq, "precision": precision}
    others = [
        n for n, value in asked.items() if value is not None and (n in ("inputs", "loss") or value != traced_as[n])
    ]
    if others:
        given = ", ".join(name if name in ("inputs", "loss") else f"{name} {asked[name]!r}" for name in others)
        raise InputsError(
            f"the model was traced before, with seq {model.seq} and {model.precision}; it is now given {given}",
            where=", ".join(others),
            fix="leave these out, or give them to autoptd.trace",
        )
    return model


class _Rank:
    """A place on an axis without anybody to talk to."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def _running_world() -> int | None:
    """How many processes a launcher started, or None outside one: a process that is a world by itself may plan."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            return size
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() and "RANK" in os.environ else None


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


def _optimizer_name(
    optimizer: Optimizer, options: Mapping[str, Any] | None = None, groups: Sequence[ParameterGroup] = ()
) -> str:
    """`adamw`, `sgd` or `custom`. One is made on nothing, so that a wrong one is refused before any process starts."""
    known = "give 'adamw', 'sgd', or a callable that makes one of parameters, such as torch.optim.Adam"
    if isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            f"optimizer is a {type(optimizer).__name__} of parameters already", where="optimizer", fix=known
        )
    if not callable(optimizer) and optimizer not in OPTIMIZERS:
        fix = nearest(optimizer, OPTIMIZERS) + "; or a callable" if isinstance(optimizer, str) else known
        raise PlanError(f"unknown optimizer {optimizer!r}", where="optimizer", fix=fix)
    try:
        make_optimizer(optimizer, grouped([], groups), **(options or {}))
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, AutoptdError):
            raise
        raise PlanError(
            f"the optimizer cannot be made: {error}", where="optimizer", fix="correct optimizer= or optimizer_options="
        ) from error
    return "custom" if callable(optimizer) else optimizer


def _planned_optimizer(plan: Plan) -> str:
    """The plan's optimizer, where it has a name."""
    if plan.optimizer == "custom":
        raise PlanError(
            "the plan was made for an optimizer of your own, which a file cannot hold",
            where="optimizer",
            fix="pass the same optimizer= again",
        )
    return plan.optimizer


def _check_sizes(world: object, batch: object) -> None:
    require_count(world, "world", of="the devices, all nodes together")
    if batch is not None:
        require_count(batch, "batch", of="the samples of a step, all ranks together")


def _check_limit(time_limit_s: object) -> None:
    number = isinstance(time_limit_s, (int, float)) and not isinstance(time_limit_s, bool)
    if time_limit_s is not None and not (number and time_limit_s > 0):  # type: ignore[operator]
        raise PlanError(
            f"time_limit_s is {time_limit_s!r}", where="time_limit_s", fix="give a positive number, or none"
        )


def _check_clip(clip_norm: object) -> None:
    number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (number and 0 < clip_norm < float("inf")):  # type: ignore[operator]
        raise PlanError(f"clip_norm is {clip_norm!r}", where="clip_norm", fix="give a positive number, or leave it out")
