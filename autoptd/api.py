"""What a person calls: `plan`, `parallelize`, and the `Parallel` that runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.codegen.emit import Program, load_stage
from autoptd.compile import Source, make_layout, make_plan, make_program, named_values, read_model, read_sharding
from autoptd.cost_models.cluster import Cluster, default_cluster
from autoptd.errors import PlanError, RuntimeFault, nearest
from autoptd.plans import Plan
from autoptd.progress import Progress, Silent
from autoptd.runtime.axis import Axis
from autoptd.runtime.comm import Communicators
from autoptd.runtime.initialise import values_for
from autoptd.runtime.randomness import DropoutKey
from autoptd.runtime.stage import Stage
from autoptd.runtime.trainer import Trainer
from autoptd.search.wishes import read_wishes

OPTIMIZERS = ("adamw", "sgd")
Optimizer = str | Callable[..., torch.optim.Optimizer]


def plan(
    model: nn.Module,
    *,
    world: int,
    inputs: Mapping[str, Tensor] | None = None,
    loss: Callable[..., Tensor] | None = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str = "bf16",
    optimizer: Optimizer = "adamw",
    clip_norm: float | None = None,
    fix: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Search for the fastest way to train `model` on `world` devices that fits.

    inputs: example keyword tensors of `forward`, dim 0 counting samples (may be meta); made from the configuration
    for Hugging Face models and for modules with `example_inputs(batch, seq)`. loss: a function of the outputs (and the
    inputs, if it takes two), where `forward` gives no scalar, `.loss` or `["loss"]`. cluster: a shipped name, a TOML
    path, a `Cluster`; left out, this machine's GPUs, or dgx-h100. batch: samples per step, all ranks together; left
    out, 8 × world. seq: left out, the model's own maximum up to 4,096. fix: any of dp, tp, pp, micro, zero, recompute,
    sequence_parallel, splits.

    Raises InputsError, TraceError, UnsupportedOp, PlanError, ClusterError, and DoesNotFit saying what is missing.
    """
    progress = progress or Silent()
    wishes = read_wishes(fix)
    chosen = _optimizer_name(optimizer)
    where = _cluster(cluster)
    _check_clip(clip_norm)
    source = read_model(model, inputs=inputs, loss=loss, seq=seq, precision=precision, progress=progress)
    return make_plan(
        source,
        world=world,
        cluster=where,
        batch=batch,
        precision=precision,
        optimizer=chosen,
        wishes=wishes,
        progress=progress,
    )


def parallelize(
    model: nn.Module,
    *,
    world: int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    loss: Callable[..., Tensor] | None = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str = "bf16",
    optimizer: Optimizer = "adamw",
    optimizer_options: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    fix: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Parallel:
    """Plan (or take `plan`), emit the stage modules, and under torchrun set up this rank's running part.

    Keywords are those of `plan`; with a plan, its sizes, precision and optimizer hold and nothing is searched.
    optimizer_options: keywords of the optimizer, such as lr. seed: of the parameters of a meta model, and of dropout.

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
    if plan is not None:
        plan.check_world(world)
    if running is not None and running != world:
        raise PlanError(
            f"{running} processes are running, but the plan is for a world of {world}",
            where="world",
            fix=f"torchrun --nproc-per-node … with {world} processes in all, or world={running}",
        )
    _check_clip(clip_norm)
    if plan is None:
        wishes, chosen, where = read_wishes(fix), _optimizer_name(optimizer), _cluster(cluster)
        source = read_model(model, inputs=inputs, loss=loss, seq=seq, precision=precision, progress=progress)
        plan = make_plan(
            source,
            world=world,
            cluster=where,
            batch=batch,
            precision=precision,
            optimizer=chosen,
            wishes=wishes,
            progress=progress,
        )
    else:
        length = seq if seq is not None else plan.sizes.get("s")
        source = read_model(model, inputs=inputs, loss=loss, seq=length, precision=plan.precision, progress=progress)
    if plan.optimizer != "custom" and not callable(optimizer):
        optimizer = plan.optimizer
    with progress.stage("emit the program"):
        program = make_program(source, plan, read_sharding(source, plan))
    parallel = Parallel(plan, source, program, optimizer, dict(optimizer_options or {}), clip_norm, seed)
    if running is not None:
        from autoptd.runtime.processes import connect_processes

        parallel.start(connect_processes(make_layout(source, plan).mesh))
    return parallel


class Parallel:
    """A plan with its program. Under torchrun (or for a world of one) it trains; anywhere it emits."""

    def __init__(
        self,
        plan: Plan,
        source: Source,
        program: Program,
        optimizer: Optimizer,
        optimizer_options: dict[str, Any],
        clip_norm: float | None,
        seed: int,
    ) -> None:
        self.plan = plan
        self.program = program
        self._source = source
        self._optimizer = optimizer
        self._optimizer_options = optimizer_options
        self._clip_norm = clip_norm
        self._seed = seed
        self._trainer: Trainer | None = None
        self._communicators: Communicators | None = None

    def emit(self, directory: str | os.PathLike[str]) -> Path:
        """Write the stage modules and the plan. Raises PlanFileError where that cannot be done."""
        return self.program.write(Path(directory))

    def stage_module(self, rank: int) -> Stage:
        """The stage that a rank runs, on meta, for looking at."""
        if not 0 <= rank < self.plan.world:
            raise PlanError(f"rank {rank} is not in a world of {self.plan.world}", fix=f"0 to {self.plan.world - 1}")
        index = rank // (self.plan.mesh.dp * self.plan.mesh.tp)
        with torch.device("meta"):
            stage = load_stage(self.program, index)(Axis(_Rank(rank % self.plan.mesh.tp, self.plan.mesh.tp)))
        assert isinstance(stage, Stage)
        return stage

    def start(self, communicators: Communicators) -> None:
        """Become the running part of the rank that these communicators belong to. A collective."""
        layout = make_layout(self._source, self.plan)
        index = communicators.stage
        key = DropoutKey(self._seed, communicators.dp.rank)
        with torch.device("meta"):
            stage = load_stage(self.program, index)(Axis(communicators.tp), key)
        self._communicators = communicators
        self._trainer = Trainer(
            stage, layout, communicators, self._optimizer, clip_norm=self._clip_norm, **self._optimizer_options
        )
        wanted = [n for n, s in {**layout.parameters, **layout.buffers}.items() if index in s.stages]
        values = values_for(self._source.model, wanted, self._seed, named_values(self._source))
        self._trainer.load_parameters(values)

    @property
    def _running(self) -> Trainer:
        if self._trainer is None:
            if self.plan.world != 1:
                raise RuntimeFault(
                    f"this process is not one of the plan's {self.plan.world} ranks",
                    fix=f"start the script with torchrun --nproc-per-node … ({self.plan.world} processes in all)",
                )
            from autoptd.runtime.processes import connect_processes

            self.start(connect_processes(make_layout(self._source, self.plan).mesh))
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

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients, full, by original name, on every rank. A collective."""
        return self._running.gradients()

    def state_dict(self) -> dict[str, Tensor]:
        """Full tensors under the original names, tied ones under each of theirs, on every rank. A collective."""
        found = self._running.state_dict()
        found |= {alias: found[name] for alias, name in self._source.folded.traced.aliases.items() if name in found}
        buffers = self._source.model.state_dict()
        return {name: found.get(name, value) for name, value in buffers.items()} | found


class _Rank:
    """A place on an axis without anybody to talk to."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def _running_world() -> int | None:
    """How many processes a launcher started, or None outside one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() and "RANK" in os.environ else None


def _cluster(cluster: str | os.PathLike[str] | Cluster | None) -> Cluster:
    if cluster is None:
        return default_cluster()
    return cluster if isinstance(cluster, Cluster) else Cluster.load(os.fspath(cluster))


def _optimizer_name(optimizer: Optimizer) -> str:
    if callable(optimizer):
        return "custom"
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"unknown optimizer {optimizer!r}", where="optimizer", fix=nearest(str(optimizer), OPTIMIZERS))
    return optimizer


def _check_clip(clip_norm: float | None) -> None:
    if clip_norm is not None and not clip_norm > 0:
        raise PlanError(f"clip_norm is {clip_norm!r}", where="clip_norm", fix="give a positive number, or leave it out")
