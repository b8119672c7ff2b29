"""A plan with its program, and on a running rank the part of it that trains."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoptd.boundary import public_methods
from autoptd.codegen.emit import Program, load_stage
from autoptd.compile.layout import make_layout, named_values
from autoptd.compile.traced import TracedModel
from autoptd.errors import PlanError, RuntimeFault
from autoptd.layout.layout import Layout
from autoptd.ops.cp_axis import tokens_axis
from autoptd.ops.dropout import DropoutKey
from autoptd.ops.stage import Stage
from autoptd.ops.tp_axis import Axis
from autoptd.out_of_memory import explained, resident_bytes
from autoptd.passes.custom_grad.ops import described
from autoptd.plans.model import Plan
from autoptd.printable import printable
from autoptd.runtime.comm.interfaces import Communicators, Watcher
from autoptd.runtime.faults.rank_status import PendingComm
from autoptd.runtime.initialise import values_for
from autoptd.runtime.lazy_tensor import Stored
from autoptd.runtime.loss_scaling import LossScale
from autoptd.runtime.optimizer import ParameterGroup
from autoptd.runtime.report import StepReport
from autoptd.runtime.sampler import ShareSampler
from autoptd.runtime.torch_compile import check_backend, compile_blocks
from autoptd.runtime.trainer import Trainer
from autoptd.schedule import training_step

if TYPE_CHECKING:
    from autoptd.checkpoint.session import Session, Stateful

from autoptd.runtime.report import meter_of

Optimizer = str | Callable[..., torch.optim.Optimizer]


@public_methods
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
        non_finite: str = "raise",
        backend: str = "",
        weights: Mapping[str, Stored] | None = None,
    ) -> None:
        """`backend`: of torch.compile, for the blocks; empty: they run as they are. Raises PlanError."""
        self.plan = plan
        self._weights = weights
        self.program = program
        self._source = source
        self._optimizer = optimizer
        self._optimizer_options = optimizer_options
        self._groups = groups
        self._clip_norm = clip_norm
        self._seed = seed
        self._non_finite = non_finite
        self._backend = backend
        if backend:
            _check_compilable(plan, backend)
        self._trainer: Trainer | None = None
        self._loss: Tensor | None = None  # of the last step
        self._meter = meter_of(plan)
        self._communicators: Communicators | None = None

    def emit(self, directory: str | os.PathLike[str]) -> Path:
        """Write the stage modules and the plan. Raises PlanFileError where that cannot be done.

        Raises PlanError where the program calls a function of the user's own that no other process could import.
        """
        if self.program.objects:
            raise PlanError(
                "the program calls functions of yours that cannot be imported by a name",
                where="\n".join(described(what) for what in self.program.objects.values()),
                fix="define them at the top level of a module other than the script that is run",
            )
        return self.program.write(Path(directory))

    def stage_module(self, rank: int, chunk: int = 0) -> Stage:
        """The stage that a rank runs, on meta, for looking at; of its several chunks, one."""
        if not 0 <= rank < self.plan.world:
            raise PlanError(f"rank {rank} is not in a world of {self.plan.world}", fix=f"0 to {self.plan.world - 1}")
        mesh = self.layout.mesh
        held = mesh.stages_of(mesh.coordinates(rank)[0])
        if not 0 <= chunk < len(held):
            raise PlanError(f"chunk {chunk} is not on a rank of {len(held)}", fix=f"0 to {len(held) - 1}")
        with torch.device("meta"):
            alone = Axis(_Rank(rank % mesh.tp, mesh.tp))  # type: ignore[arg-type]  # never talks
            cut = tokens_axis(self.layout, _Rank(mesh.cp_of(rank), mesh.cp))  # type: ignore[arg-type]
            stage = load_stage(self.program, held[chunk])(alone, **cut)
        assert isinstance(stage, Stage)
        return stage

    @cached_property
    def layout(self) -> Layout:
        """Mesh, microbatches, and where each tensor lies: what the runtime reads of the plan."""
        return make_layout(self._source, self.plan)

    def initial_values(self, stages: Collection[int] | None = None) -> dict[str, Tensor | Stored]:
        """Whole parameters and buffers, of some stages or of all: the model's own, or made from the seed on meta.

        Of weights in a folder only where they lie: each rank reads its part.
        """
        tensors = {**self.layout.parameters, **self.layout.buffers}
        wanted = [n for n, spec in tensors.items() if stages is None or not set(stages).isdisjoint(spec.stages)]
        stored = {n: self._weights[n] for n in wanted if self._weights is not None and n in self._weights}
        others = [n for n in wanted if n not in stored]
        return {**values_for(self._source.model, others, self._seed, named_values(self._source)), **stored}

    def start(self, communicators: Communicators, values: Mapping[str, Tensor | Stored] | None = None) -> None:
        """Become the running part of the rank that these communicators belong to. A collective.

        values: of this rank's tensors at least; left out, the initial ones.
        """
        self._check_agreement(communicators)
        layout = self.layout
        held = layout.mesh.stages_of(communicators.stage)
        key = DropoutKey(self._seed)
        with torch.device("meta"):
            cut = tokens_axis(layout, communicators.cp)
            stages = [load_stage(self.program, index)(Axis(communicators.tp), key, **cut) for index in held]
        for stage in stages if self._backend else ():
            compile_blocks(stage, self._backend)
        self._communicators = communicators
        self._resident = resident_bytes()
        self._trainer = Trainer(
            stages,
            layout,
            communicators,
            self._optimizer,
            clip_norm=self._clip_norm,
            groups=self._groups,
            non_finite=self._non_finite,
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
            from autoptd.runtime.comm.processes import connect_processes

            self.start(connect_processes(self.layout.mesh))
        assert self._trainer is not None
        return self._trainer

    def train_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One optimizer step. `batch`: this dp rank's share, keyword tensors, the same on its tp and pp ranks.

        Returns the mean loss over the whole global batch. On all ranks, raises InputsError where one of them was given
        a wrong batch (None: its data ran dry), and RuntimeFault where loss or gradient norm is not finite
        (non_finite="raise"): no parameter has changed then.
        """
        trainer = self._running
        if self._meter.step == 0:
            self._meter.restart()
        with self._watch, explained(trainer, self.plan, self._source, self._resident):
            self._loss = trainer.train_step(batch)
        self._meter.count()
        return self._loss

    @property
    def _watch(self) -> Watcher:
        self._running  # noqa: B018  starts a world of one
        assert self._communicators is not None
        return self._communicators.watch

    @property
    def step(self) -> int:
        """Steps done."""
        return self._meter.step

    def report(self) -> StepReport:
        """How training goes since the last report; its text is a line. Any rank may ask; it waits for this rank only.

        Raises RuntimeFault before the first step.
        """
        if self._loss is None or self.grad_norm is None:
            raise RuntimeFault("there is nothing to report before the first step", fix="call train_step first")
        return self._meter.report(self._loss, self.grad_norm, self.optimizer.param_groups[0]["lr"])

    def sampler(self, samples: int, *, shuffle: bool = True, seed: int = 0) -> ShareSampler:
        """This rank's share of each global batch of a data set: `DataLoader(data, batch_sampler=…)`.

        The same batches under every plan; `start_at(step)` resumes. Raises InputsError where they are too few samples.
        """
        return ShareSampler(samples, self.plan.batch, self.dp_rank, self.dp_size, shuffle=shuffle, seed=seed)

    def eval_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean loss over the whole global batch, without gradient or update."""
        trainer = self._running
        with self._watch:
            return trainer.eval_step(batch)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's optimizer, for learning-rate schedulers."""
        return self._running.optimizer

    @property
    def grad_norm(self) -> Tensor | None:
        """The global gradient norm of the last step, before clipping."""
        return self._running.grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the last step was left out, on all ranks, because it was not finite."""
        return self._running.finite.skipped

    @property
    def loss_scale(self) -> LossScale | None:
        """The dynamic loss scale of fp16, with `state_dict` and `load_state_dict`; None in other precisions."""
        return self._running.finite.scaling

    @property
    def rank(self) -> int:
        """This process's place among all."""
        self._running  # noqa: B018  starts a world of one
        assert self._communicators is not None
        return self._communicators.rank

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
        """This rank's part of each parameter and buffer that its stages hold, by original name. A collective."""
        return self._running.local_tensors()

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients, full, by original name, on every rank. A collective."""
        return self._running.gradients()

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        others: Mapping[str, Stateful] | None = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> None:
        """Write a checkpoint `step-…` into a folder that all ranks share, and let `latest` name it. A collective.

        Holds parameters, optimizer state, random state, step and plan, bound to no plan: `load` takes it under any.
        others: what has `state_dict` and `load_state_dict` besides, by name, such as learning-rate schedulers.
        keep: how many checkpoints there are then at most, the oldest are removed; None keeps all.
        wait: until it is durable, else it is written while training goes on, from a copy of this rank's share, and what
        goes wrong is raised by the next `save`, or by `finish_saving`. Raises CheckpointError on every rank.
        """
        session = self._session
        with self._with_all(f"saving step {self.step}"):
            session.save(Path(directory), self.step, others or {}, keep)
            if wait:
                session.wait()

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is durable. Raises CheckpointError if it cannot be written."""
        session = self._session
        with self._with_all("saving"):
            session.wait()

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        others: Mapping[str, Stateful] | None = None,
        optimizer: bool = True,
    ) -> int:
        """Go on from a checkpoint, whatever plan wrote it; returns its step. A collective.

        path: a folder that `save` wrote to, of which `latest` is taken, or one of its `step-…`. optimizer: False takes
        the parameters alone. Files are checked against their digests first. Raises CheckpointError on every rank.
        """
        session = self._session
        with self._with_all("loading"):
            self._meter.step = session.load(Path(path), others or {}, optimizer=optimizer)
        return self.step

    def resume(self, directory: str | os.PathLike[str], *, others: Mapping[str, Stateful] | None = None) -> int:
        """Go on from the newest whole checkpoint in a folder; returns its step, 0 where there is none yet.

        What a script calls before its loop, so that a launcher may start it again as often as it likes. A collective.
        Damaged checkpoints are named in a warning and left out. Raises CheckpointError on every rank: where all of
        them are damaged, for the checkpoint of another model, where ranks do not see the same folder, and where one
        could not save to it; `load` is for folders that are only read.
        """
        session = self._session
        with self._with_all("resuming"):
            step, damaged = session.resume(Path(directory), others or {})
        if damaged and self.rank == 0:
            left_out = printable("; ".join(damaged), keep="")
            warnings.warn(f"left out: {left_out}; going on from step {step}", stacklevel=2)
        self._meter.step = step
        return step

    @contextmanager
    def _with_all(self, doing: str) -> Iterator[None]:
        """Around what all ranks do together outside of steps, for as long as it takes."""
        watch = self._watch
        watch.status.leave(doing)
        try:
            with watch, PendingComm(watch.status, "with", ()):
                yield
        finally:
            watch.status.leave()

    @cached_property
    def _session(self) -> Session:
        from autoptd.checkpoint.session import Session

        model, layout = self._source.model, self.layout
        names = model.state_dict(keep_vars=True)
        trained = {name for name, spec in layout.parameters.items() if spec.trainable}
        still = frozenset(n for n in {**layout.parameters, **layout.buffers} if n in names and n not in trained)
        config = getattr(model, "config", None)
        described = {
            "model": self.plan.model,
            "graph_hash": self.plan.graph_hash,
            "tensors": {n: list(s.shape) for n, s in {**layout.parameters, **layout.buffers}.items() if n in names},
            "buffers": [name for name in layout.buffers if name in names],
            "aliases": dict(self._source.folded.traced.aliases),
            "config": config.to_dict() if config is not None and hasattr(config, "to_dict") else None,
        }
        return Session(self._running, self.plan, still, described)

    def state_dict(self) -> dict[str, Tensor]:
        """Full tensors under the original names, tied ones under each of theirs, on every rank. A collective."""
        found = self._running.state_dict()
        found |= {alias: found[name] for alias, name in self._source.folded.traced.aliases.items() if name in found}
        model = self._source.model
        others = values_for(model, [n for n in model.state_dict(keep_vars=True) if n not in found], self._seed)
        return {name: found[name] if name in found else others[name] for name in model.state_dict(keep_vars=True)}


class _Rank:
    """A place on an axis without anybody to talk to."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def _check_compilable(plan: Plan, backend: str) -> None:
    check_backend(backend)
    how = plan.schedule
    if any(action.kind == "W" for action in training_step(how.kind, plan.mesh.pp, how.microbatches, how.virtual)[0]):
        raise PlanError(
            f"the {how.kind} schedule runs backward passes in two halves, and a compiled block's is one piece",
            where="compile",
            fix="plan with another schedule, or leave out compile=",
        )
