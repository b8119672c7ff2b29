"""`Parallel`: a plan with its generated program and, on a running rank, training, evaluation and checkpoints."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor

from autoptd.boundary import public_methods
from autoptd.codegen.emit import Program, load_stage
from autoptd.compile.layout import make_layout, named_values
from autoptd.compile.traced import TracedModel
from autoptd.errors import PlanError, RuntimeFault
from autoptd.evaluating import Evaluating, EvaluationPrograms
from autoptd.explain.plan import brief
from autoptd.layout.layout import Layout
from autoptd.ops.dropout import DropoutKey
from autoptd.ops.stage import Stage, stage_axes
from autoptd.ops.tp_axis import Axis
from autoptd.optimizer_parts import warning_of_reads
from autoptd.out_of_memory import explained, resident_bytes
from autoptd.passes.analysis.pictures import pixels_of
from autoptd.passes.custom_grad.ops import described
from autoptd.passes.objectives.metrics import Metrics
from autoptd.passes.objectives.terms import buffers_of
from autoptd.planned_model import PlannedModel
from autoptd.plans.model import Plan
from autoptd.runtime.comm.handshake import check_same_arguments, check_same_program
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.evaluation.evaluator import Evaluator
from autoptd.runtime.initialise import check_same_values, values_for
from autoptd.runtime.lazy_tensor import Stored
from autoptd.runtime.loss_scaling import LossScale
from autoptd.runtime.optimizers.groups import ParameterGroup
from autoptd.runtime.report import StepReport, meter_of
from autoptd.runtime.sampler import ShareSampler
from autoptd.runtime.torch_compile import DEFAULT, check_backend, compile_stage, compiling
from autoptd.runtime.trainer import Trainer
from autoptd.saving import Saving
from autoptd.trackers import RunTracker, Tracker

_Rank = namedtuple("_Rank", "rank size")  # on an axis without communication
Optimizer = str | Callable[..., torch.optim.Optimizer]


@public_methods
class Parallel(Evaluating, Saving):
    """A plan with its generated program, as `parallelize` returns it.

    Under torchrun, or with a world of one, it trains: `train_step`, `eval_step`, `save`, `resume`. Without a launcher
    it still has `plan`, `emit` and `stage_module`. Methods marked *collective* must be called on all ranks.
    """

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
        non_finite: str = "raise",
        backend: str | None = "",
        weights: Mapping[str, Stored] | None = None,
    ) -> None:
        """Raise PlanError if the blocks cannot run under torch.compile's `backend`.

        Empty: they are not compiled; None: on devices of the planned type they have the planned kernels.
        """
        self.plan = plan
        self._weights = weights
        self.program = program
        self._source = source
        traced = source.folded.traced
        self._planned = PlannedModel(source.model, source.objective.loss, traced.outside, traced.left)
        self._optimizer = optimizer
        self._optimizer_options = optimizer_options
        self._groups = groups
        self._clip_norm = clip_norm
        self._seed = seed
        self._non_finite = non_finite
        self._backend = backend
        self._compiled = False  # whether the blocks that this process runs are
        if backend:
            check_backend(backend, plan.schedule.kind)
        self._trainer: Trainer | None = None
        self._has_stepped = False  # since it started
        self._loss: Tensor | None = None  # the last step's
        self._terms: dict[str, Tensor] = {}  # of it, float64
        self._samplers: WeakSet[ShareSampler] = WeakSet()
        self._meter = meter_of(plan, pixels_of(source.folded.traced))
        self._programs = EvaluationPrograms()
        self._evaluators: dict[Hashable, tuple[Metrics, Evaluator]] = {}

    def __repr__(self) -> str:
        rank = "" if self._trainer is None else f", rank {self.rank}, step {self.step}"
        return f"<Parallel {brief(self.plan)}{rank}>"

    def __copy__(self) -> Parallel:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __reduce__(self) -> NoReturn:
        raise RuntimeFault(
            "a Parallel is one rank of a running job, and can be neither copied nor pickled",
            fix="par.state_dict() has the weights of all ranks, and par.save writes what a run goes on from",
        )

    def emit(self, directory: str | os.PathLike[str]) -> Path:
        """Write the stage files and the plan into a folder, and return its path.

        Raises PlanFileError if the folder cannot be written, and PlanError if the program calls a function of the
        user's that another process cannot import.
        """
        if self.program.objects:
            raise PlanError(
                "the program calls functions of yours that cannot be imported by name",
                where="\n".join(described(what) for what in self.program.objects.values()),
                fix="define them at the top level of a module other than the script that is run",
            )
        return self.program.write(Path(directory))

    def stage_module(self, rank: int, chunk: int = 0) -> Stage:
        """Return a chunk of the stage module of a rank, on meta, for inspection. Raises PlanError if there is none."""
        if not 0 <= rank < self.plan.world:
            raise PlanError(f"rank {rank} is not in a world of {self.plan.world}", fix=f"0 to {self.plan.world - 1}")
        mesh = self.layout.mesh
        held = mesh.stages_of(mesh.coordinates(rank)[0])
        if not 0 <= chunk < len(held):
            raise PlanError(f"chunk {chunk} is not on a rank of {len(held)}", fix=f"0 to {len(held) - 1}")
        with torch.device("meta"):
            alone = Axis(_Rank(rank % mesh.tp, mesh.tp))  # type: ignore[arg-type]  # never communicates
            axes = stage_axes(self.layout, *map(_Rank, (mesh.cp_of(rank), 0, 0), (mesh.cp, mesh.ep, mesh.dp)))  # type: ignore[arg-type]
            stage = load_stage(self.program, held[chunk])(alone, **axes)
        assert isinstance(stage, Stage)
        return stage

    @cached_property
    def layout(self) -> Layout:
        """Mesh, microbatches, and the placement of each tensor: the part of the plan that the runtime reads."""
        return make_layout(self._source, self.plan)

    def _backend_on(self, device: torch.device) -> str:
        """Return the torch.compile backend of the stages on a device; empty: they are not compiled."""
        if self._backend is not None:
            return self._backend
        planned = self.plan.method.kernels == "compiled" and device.type == self.plan.cluster.device.kind
        return DEFAULT if planned else ""

    def initial_values(self, stages: Collection[int] | None = None) -> dict[str, Tensor | Stored]:
        """Return full parameters and buffers of some stages, or of all, by original name.

        They are the model's own; for a model on meta, initialised from the seed, or references to weights in a folder.
        """
        tensors = {**self.layout.parameters, **self.layout.buffers}
        wanted = [n for n, spec in tensors.items() if stages is None or not set(stages).isdisjoint(spec.stages)]
        stored = {n: self._weights[n] for n in wanted if self._weights is not None and n in self._weights}
        others = [n for n in wanted if n not in stored]
        return {**values_for(self._source.model, others, self._seed, named_values(self._source)), **stored}

    def start(self, communicators: Communicators, values: Mapping[str, Tensor | Stored] | None = None) -> None:
        """Set up training on the rank of these communicators. Collective.

        values: full tensors by original name, at least those of this rank's stages. Default: `initial_values`.
        Raises PlanError if the ranks do not have the same program, arguments and values.
        """
        check_same_program(self.program.files, communicators)
        check_same_arguments(
            {
                "optimizer": self._optimizer,
                "optimizer_options": self._optimizer_options,
                "parameter_groups": [(g.names, g.options, g.optimizer) for g in self._groups],
                "clip_norm": self._clip_norm,
                "seed": self._seed,
                "non_finite": self._non_finite,
            },
            communicators,
        )
        layout = self.layout
        held = layout.mesh.stages_of(communicators.stage)
        others: dict[str, Tensor] = {}  # of other stages
        if values is None:
            model, values = self._source.model, self.initial_values(held)
            others = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        check_same_values({**others, **values}, layout, communicators)
        key = DropoutKey(self._seed)
        with torch.device("meta"):
            axes = stage_axes(layout, communicators.cp, communicators.ep, communicators.dp)
            stages = [load_stage(self.program, index)(Axis(communicators.tp), key, **axes) for index in held]
        backend = self._backend_on(communicators.device)
        self._compiled = bool(backend)
        if backend:
            check_backend(backend, self.plan.schedule.kind, communicators.device)
            for stage in stages:
                compile_stage(stage, backend)
        self._evaluators, self._has_stepped = {}, False
        self._resident = resident_bytes()
        self._trainer = Trainer(
            stages,
            layout,
            communicators,
            self._optimizer,
            clip_norm=self._clip_norm,
            groups=self._groups,
            non_finite=self._non_finite,
            check=self._check,
            order=self._order,
            **self._optimizer_options,
        )
        self._trainer.load_parameters(values)

    def _check(self) -> None:
        """Raise InputsError if the model has changed, or the optimizer has hooks or further groups."""
        first, self._has_stepped = not self._has_stepped, True
        self._planned.check_step(first=first, step=self.step)
        if self._trainer is not None:
            self._trainer.update.check()

    @property
    def _running(self) -> Trainer:
        if self._trainer is None:
            if self.plan.world != 1:
                raise RuntimeFault(
                    f"this process is not one of the plan's {self.plan.world} ranks",
                    fix=f"start the script with torchrun --nproc-per-node … ({self.plan.world} processes in total)",
                )
            from autoptd.runtime.comm.processes import connect_processes

            self.start(connect_processes(self.layout.mesh))
        assert self._trainer is not None
        return self._trainer

    def train_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Run one optimizer step and return the mean loss over the global batch, a 0-dim tensor. Collective.

        batch: this dp rank's share of the global batch, as keyword arguments like the example inputs and targets, and
        whole what all samples share; identical on the tp, cp and pp ranks of that share. Fixed values, such as flags,
        may be left out.

        Raises on all ranks, before any parameter changes: InputsError if one rank has a wrong batch, or None because
        its data ended; RuntimeFault if the loss or gradient norm is not finite (with non_finite="raise").
        Raises OutOfMemory naming the category that exceeds its prediction.
        """
        trainer = self._unchanging
        if self._meter.step == 0:
            self._meter.restart()
        with (
            self._calling("train_step()"),
            compiling(self._compiled),
            explained(trainer, self.plan, self._source, self._resident),
        ):
            self._loss = trainer.train_step(batch)
            bank, names = self._source.objective.bank, self._source.objective.terms
            self._terms = {name: trainer.whole(f"{bank}.{held}") for name, held in buffers_of(names).items()}
        self._meter.count()
        trainer.changing = False
        return self._loss

    @property
    def losses(self) -> dict[str, Tensor]:
        """The loss of the last step and the terms that the loss function returned beside it, 0-dim on the host.

        They are those of one forward pass over the global batch, on every rank. Raises RuntimeFault before the first
        step.
        """
        if self._loss is None:
            raise RuntimeFault("there is no loss before the first step", fix="call train_step first")
        return {"loss": self._loss, **{name: x.cpu() for name, x in self._terms.items()}}

    def report(self) -> StepReport:
        """Return loss, gradient norm, throughput and MFU since the last report; `str()` of it is one line.

        Any rank may call it; it synchronises with this rank's device only. Raises RuntimeFault before the first step.
        """
        if self._loss is None or self.grad_norm is None:
            raise RuntimeFault("there is nothing to report before the first step", fix="call train_step first")
        learning_rate, device = self.optimizer.param_groups[0]["lr"], self._running.communicators.device
        return self._meter.report(self._loss, self.grad_norm, learning_rate, device)

    def tracker(self, *trackers: Tracker) -> RunTracker:
        """Return trackers, such as those of `autoptd.trackers`, that log on rank 0 alone."""
        return RunTracker(self.rank, *trackers)

    def sampler(self, samples: int, *, shuffle: bool = True, seed: int = 0) -> ShareSampler:
        """Return a sampler of this rank's share of each global batch, for `DataLoader(data, batch_sampler=…)`.

        samples: size of the data set; InputsError if it is less than one batch. The global batches are the same under
        every plan; `start_at(step)` resumes.
        """
        found = ShareSampler(samples, self.plan.batch, self.dp_rank, self.dp_size, shuffle=shuffle, seed=seed)
        self._samplers.add(found)
        return found

    def _order(self) -> str:
        """Return in words the order of the samples, by the sampler that last began an epoch; "" if none has."""
        used = [sampler for sampler in self._samplers if sampler.used]
        return max(used, key=lambda sampler: sampler.used).order() if used else ""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's optimizer, such as for learning-rate schedulers.

        Its parameters are this rank's flat parts, without gradients between steps: whoever reads them is warned."""
        return warning_of_reads(self._running.optimizer)

    @property
    def grad_norm(self) -> Tensor | None:
        """The global gradient norm of the last step, before clipping."""
        return self._running.grad_norm

    @property
    def skipped(self) -> bool:
        """True if the last step was skipped, on all ranks, because its loss or gradient norm was not finite."""
        return self._running.finite.skipped

    @property
    def loss_scale(self) -> LossScale | None:
        """The dynamic loss scale of fp16, with `state_dict` and `load_state_dict`; None in other precisions."""
        return self._running.finite.scaling

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's slices of its stages' parameters and buffers, by original name. Collective."""
        with self._calling("local_tensors()"):
            return self._unchanging.local_tensors()

    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's full gradients by original name, on every rank. Collective."""
        with self._calling("gradients()"):
            return self._running.gradients()

    def state_dict(self) -> dict[str, Tensor]:
        """Return full tensors by original name, tied ones under each of their names, on every rank. Collective."""
        names = self._source.model.state_dict(keep_vars=True)
        with self._calling("state_dict()"):
            found = self._unchanging.state_dict(names)
        found |= {alias: found[name] for alias, name in self._source.folded.traced.aliases.items() if name in found}
        others = self._unheld([name for name, x in names.items() if name not in found and isinstance(x, Tensor)])
        whole = {**names, **others, **found}  # of the model: what is no tensor, from `get_extra_state`
        result = {name: whole[name] for name in names}
        self._planned.gave(result)
        return result
