"""One rank's training program: its stages of the model, its shards of their parameters, and the training step.

The loss does not depend on the plan: Σ_i c_i S_i / N_i with counts N_i over the global batch, known before the first
microbatch's loss. Each microbatch computes its share of the loss, so gradients are summed over microbatches and dp
ranks and divided by neither. A loss that is a function of sums is differentiated at the sums of the global batch
(`batch_counts.py`). As in torch, a mean over no valid label is NaN; `non_finite` decides what the step does then.

One all-reduce over the world at the end of a step carries the loss, the squared gradient norm and, per parameter,
whether any rank has a gradient for it. Parameters without a gradient are not stepped, as in torch with `.grad is None`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoptd.errors import PlanError, RuntimeFault
from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.placements import Split
from autoptd.layout.size_conditions import Conditions
from autoptd.layout.step_actions import step_actions
from autoptd.ops.axis.slices import from_slices
from autoptd.ops.dropout import DropoutKey
from autoptd.ops.group import on_device
from autoptd.ops.random import dropout_mask
from autoptd.ops.stage import Stage
from autoptd.runtime.batch import Microbatch, sample_count
from autoptd.runtime.batch_check import NUMBERS, Agreement, check_evaluates
from autoptd.runtime.batch_counts import BatchSums, LossOfSums, LossTotal, start_counts, write
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.executor import Executor
from autoptd.runtime.faults.nonfinite_origin import origin
from autoptd.runtime.lazy_tensor import Stored, own_part
from autoptd.runtime.loss_scaling import Finite, LossScale
from autoptd.runtime.optimizers.groups import ParameterGroup
from autoptd.runtime.optimizers.named import Factory
from autoptd.runtime.optimizers.step import OptimizerStep
from autoptd.runtime.zero.materialise import check_names, materialise, tied_groups
from autoptd.runtime.zero.param_buffers import ParameterShard, TrainedNames, squared_norm
from autoptd.schedule import forward_only, with_communication


class Trainer:
    """The training program of one rank, with one stage per chunk. Construction is a collective.

    Stages with values keep them; those on meta need `load_parameters` before the first step. `optimizer`: a
    name (keyword arguments go to its class), or a factory over parameters (`optimizers/`). `clip_norm` bounds the
    global gradient norm. `non_finite`: "raise" or "skip", on all ranks, if loss or norm is not finite (see
    `finite`). Raises PlanError if stages and layout do not match.
    """

    def __init__(
        self,
        stages: Stage | Sequence[Stage],
        layout: Layout,
        communicators: Communicators,
        optimizer: str | Factory = "adamw",
        *,
        clip_norm: float | None = None,
        groups: Sequence[ParameterGroup] = (),
        non_finite: str = "raise",
        check: Callable[[], None] = lambda: None,
        order: Callable[[], str] = str,
        **optimizer_kwargs: Any,
    ) -> None:
        self.finite = Finite(non_finite, LossScale() if layout.dtype == torch.float16 else None)
        self.stages = (stages,) if isinstance(stages, Stage) else tuple(stages)
        self.layout, self.communicators, self.clip_norm = layout, communicators, clip_norm
        self.changing = False  # whether a step has begun to change parameters or buffers, and has not been counted
        self.grad_norm: Tensor | None = None  # of the last step, before clipping; 0-dim float64 on the host
        self._dropout = self.stages[0].dropout or DropoutKey()
        self._dropout.device, self._dropout.rank = communicators.device, communicators.dp.rank
        check_names(self.stages, layout, communicators)
        tied = tied_groups(layout, communicators)
        self._loaded = not any(p.is_meta for stage in self.stages for p in stage.parameters())
        self._buffers, self._tensors = materialise(self.stages, layout, communicators, tied)
        self._pieces = self._buffers.pieces(communicators.stage)
        self._frozen_pieces = self._buffers.frozen_pieces(communicators.stage)
        self.update = OptimizerStep(
            optimizer, optimizer_kwargs, groups, layout, communicators, self._pieces, self._tensors
        )
        self.optimizer = self.update.optimizer
        recomputed = {name for name, spec in layout.parameters.items() if spec.recomputed}
        self._executor = Executor(self.stages, communicators, self._dropout, recomputed, layout.slices, layout.modules)
        self._actions = step_actions(layout)[communicators.stage]
        self._trainable = TrainedNames(layout, communicators.device)
        self._inputs, self._check = Agreement(layout, communicators, order), check
        self._agreed: list[float] = []  # sums of `_inputs.row()` over all ranks in the last step
        self._used, self._attached = set[str](), len(self.stages)  # attached: with those of evaluations

    @property
    def stage(self) -> Stage:
        """The first of this rank's stages."""
        return self.stages[0]

    @property
    def pieces(self) -> Sequence[ParameterShard]:
        """This rank's elements of the trainable parameters, as the optimizer updates them."""
        return self._pieces

    @property
    def frozen_pieces(self) -> Sequence[ParameterShard]:
        """This rank's elements of the sharded frozen parameters: with ZeRO 3 of all, otherwise none."""
        return self._frozen_pieces

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's part of each parameter and buffer of its stages, by name. ZeRO 3 parameters have no storage."""
        return self._tensors

    # Steps

    def train_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Run one optimizer step over the global batch; `batch`: this dp rank's share of it (keyword tensors).

        Returns the loss over the global batch, 0-dim on the host, the same on all ranks. If any rank has a wrong batch,
        all ranks raise InputsError and no parameter changes.
        """
        self._check_loaded()
        microbatches = self._microbatches(batch, self.layout.microbatches, self._check)
        self._dropout.active = True
        _use_running(self.stages, self.layout, False)
        self._dropout.share = self._share_starts(sum(map(sample_count, microbatches)))
        self._buffers.start_step()
        counts = self._global_counts(microbatches)
        outcome: list[Tensor] = []
        total = LossTotal.of(self.stages[-1], self.communicators, microbatches)
        loss_of_sums = self._loss_of_sums(counts)
        sums = BatchSums(self.stages, self.layout.sums, counts, self.communicators.device)
        if self.layout.sums_ahead:
            ahead = self._forward(microbatches, counts, total.anew())
            if loss_of_sums is not None:
                loss_of_sums.take(ahead)
        origins: list[str] = []

        def finish() -> None:
            loss = total.values if loss_of_sums is None else loss_of_sums.share()
            outcome.append(self._finish(loss, sums))
            if self.finite.fatal:  # before GATHER, which overwrites each rank's own copy of the parameters
                again = partial(self._forward, microbatches, counts, total.anew())
                origins.append(origin(self.stages, self.communicators, again))

        end = {
            "REDUCE": self._buffers.finish_reduction,
            "STEP": finish,
            "GATHER": self._buffers.gather_parameters,
        }
        scale = self.finite.scale
        self._executor.run(
            self._actions, microbatches, counts, total, end, self._buffers, None, scale, loss_of_sums, sums
        )
        if not self._inputs.holds(self._agreed):
            self._inputs.refuse(self._agreed)
        if self.finite.fatal:
            here = [piece.name for piece in self._pieces if not piece.grad.isfinite().all()]
            self._dropout.step += 1
            self.finite.fail(self._dropout.step - 1, list(dict.fromkeys(here)), origins[0])
        self._dropout.step += 1
        return outcome[0]

    def _microbatches(
        self, batch: Mapping[str, Any], count: int | None, check: Callable[[], None], further: Conditions = ()
    ) -> list[Microbatch]:
        """Return the microbatches of a step; the stages get the inputs that all samples share."""
        found = self._inputs.take(batch, count, check, further)
        for stage in self.stages:
            stage.shared_inputs = {name: found[0][name] for name in self.layout.shared}
        return found

    def _loss_of_sums(self, counts: Callable[[], tuple[Tensor, ...]]) -> LossOfSums | None:
        last = self.stages[-1]
        reads = last.is_last and (last.partial_sums or last.row_width)
        return LossOfSums(last, self.communicators, counts) if reads else None

    @torch.no_grad()
    def _forward(
        self,
        microbatches: list[Microbatch],
        counts: Callable[[], tuple[Tensor, ...]],
        loss: LossTotal,
        counted: int | None = None,
    ) -> Tensor:
        """Run forward passes only; add the last stage's results over the first `counted` microbatches to `loss`."""
        mesh = self.layout.mesh
        lists = with_communication(forward_only(mesh.pp, len(microbatches), mesh.virtual), mesh.route)
        self._executor.run(lists[self.communicators.stage], microbatches, counts, loss, {}, counted=counted)
        return loss.values

    @torch.no_grad()
    def eval_step(self, batch: Mapping[str, Any], conditions: Conditions = ()) -> Tensor:
        """Return the loss over the global batch, 0-dim on the host, without dropout or gradients.

        Any number of samples per dp rank. conditions: on the batch, beside those of training."""
        whole = self.layout.one_microbatch or self.layout.statistics == "batch"
        check_evaluates(self.layout)
        microbatches = self._microbatches(batch, 1 if whole else None, lambda: None, conditions)
        self.evaluate_with(self.stages, self.layout)
        own = len(microbatches)
        counts = self._global_counts(microbatches)
        microbatches = microbatches + microbatches[-1:] * (self.most_microbatches(own) - own)  # counts read the others
        total = LossTotal.of(self.stages[-1], self.communicators, microbatches[:own])
        loss = self._forward(microbatches, counts, total, own)
        if (loss_of_sums := self._loss_of_sums(counts)) is not None:
            loss_of_sums.take(loss)
            loss = loss_of_sums.share()
        if self.communicators.tp.rank != 0:
            loss.zero_()
        summed = self.communicators.world.all_reduce(torch.cat((loss.view(1), self._inputs.row())))
        whole, *agreed = summed.tolist()
        if not self._inputs.holds(agreed):
            self._inputs.refuse(agreed)
        return torch.tensor(whole, dtype=self.layout.main_dtype)

    def evaluate_with(self, stages: Sequence[Stage], layout: Layout, *, drops: bool = False) -> None:
        """Bring stages on this rank's tensors into evaluation mode: statistics are running ones, dropout as `drops`."""
        self._check_loaded()
        self._dropout.active = drops
        _use_running(stages, layout, True)

    def attach(self, stages: Sequence[Stage]) -> None:
        """Let further stages on this rank's parameters gather them, or wait for them, in their forward passes."""
        for stage in stages:
            self._buffers.attach(stage, self._attached)
            self._attached += 1

    def most_microbatches(self, own: int) -> int:
        """Return the maximum of `own` over dp ranks if forward passes communicate over them; else `own`."""
        if self.layout.zero < 3 and self.layout.mesh.ep == 1 and not self.layout.sums_over_dp:
            return own
        return int(self.communicators.dp.all_reduce(on_device([own], torch.int64, self.communicators.device), "max"))

    def _share_starts(self, samples: int) -> int | Tensor:
        """Return the global index of this dp rank's first sample; 0 if no stage of this rank draws random numbers."""
        dp = self.communicators.dp
        if dp.size == 1 or not any(stage.draws for stage in self.stages):
            return 0
        shares = dp.all_gather(on_device([samples], torch.int64, self.communicators.device))
        return shares[: dp.rank].sum()

    def _global_counts(self, microbatches: list[Microbatch]) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function that gives counts over all microbatches and dp ranks; () if no stage reads any."""
        self.communicators.watch.status.enter("counts", self.communicators.stage, None, "")
        return start_counts(self.stages, microbatches, self.communicators.dp, self.communicators.device)

    @torch.no_grad()
    def _finish(self, share: Tensor, sums: BatchSums) -> Tensor:
        """Reduce loss, norm, used parameters and sums for buffers over the world; clip and step unless not finite.

        Buffers are updated in steps that are skipped too, since the forward pass has run. Returns the loss. The host
        reads the device once, when all that can be computed before is queued.
        """
        if self.finite.scale != 1:
            self._buffers.scale_gradients(1 / self.finite.scale)
        device, own_used = self.communicators.device, self._buffers.used()
        loss = share if self.communicators.tp.rank == 0 else torch.zeros_like(share)
        flags = self._trainable.flags(own_used, device)
        norm = on_device(squared_norm(self._pieces), torch.float64, device)
        checks = self._inputs.row(self.update.options, self.finite.options)
        parts = (loss.view(1), norm.view(1), checks, flags, sums.own)
        agreed = self.communicators.world.all_reduce(torch.cat(parts))
        agreed, summed = agreed.split((len(agreed) - len(sums.own), len(sums.own)))
        whole, square, *rest = torch.cat((agreed, self._trainable.counts(summed))).tolist()
        self._agreed, users = rest[:NUMBERS], rest[NUMBERS:]
        result = torch.tensor(whole, dtype=self.layout.main_dtype)
        if not self._inputs.holds(self._agreed):  # `train_step` raises
            return result
        self._used = {name for name in self._trainable.used(users) if not self._skipped(name)}
        self.grad_norm = torch.tensor(square, dtype=torch.float64).sqrt()
        steps = self.finite.steps(whole, float(self.grad_norm))
        if not self.finite.fatal:
            buffers = sums.new_buffers(summed)
            self.changing = True
            write(buffers)
        if not steps:
            return result
        if self.clip_norm is not None and (factor := self.clip_norm / (self.grad_norm + 1e-6)) < 1:
            self._buffers.scale_gradients(float(factor))
        self.update.run(self._used)
        self._buffers.end_step()
        self._buffers.owed = True
        return result

    def _skipped(self, name: str) -> bool:
        """Return whether all layers that read a parameter are skipped in this step, so that it has no gradient."""
        masks = self.layout.parameters[name].skipped
        key = replace(self._dropout, device=None) if masks else None
        return bool(masks) and not any(dropout_mask((), p, torch.float32, k, key, None).any() for k, p in masks)

    # Full tensors

    def settle(self) -> None:
        """All-gather the last step's parameters, or wait for it if that has begun. A collective over dp."""
        self._buffers.finish_gathers()

    @torch.no_grad()
    def take_pieces(self) -> None:
        """Update the model's parameters from pieces that the caller has written. A collective over dp."""
        self._buffers.owed = True
        self.settle()
        self._loaded = True

    @property
    def dropout(self) -> DropoutKey:
        """The random state of dropout."""
        return self._dropout

    @torch.no_grad()
    def load_parameters(self, full: Mapping[str, Tensor | Stored]) -> None:
        """Load this rank's part of full tensors, by original names; tensors of other stages are ignored.

        Raises PlanError naming every missing tensor and wrong shape, before anything is written.
        """
        specs = {**self.layout.parameters, **self.layout.buffers}
        wrong = [f"{name}: missing" for name in self._tensors if name not in full]
        wrong += [
            f"{name}: {list(full[name].shape)} instead of {list(specs[name].shape)}"
            for name in self._tensors
            if name in full and tuple(full[name].shape) != tuple(specs[name].shape)
        ]
        wrong += [
            f"{name}: on the meta device, without values"
            for name in self._tensors
            if name in full and isinstance(x := full[name], Tensor) and x.is_meta
        ]
        if wrong:
            raise PlanError(
                "tensors that do not fit the plan", where="\n".join(wrong), fix="give the planned model's tensors"
            )
        self.settle()
        for name, local in self._tensors.items():
            part = own_part(full[name], specs[name], self.layout.mesh, self.communicators.rank)
            if name in self._buffers.parameters:
                self._buffers.write(name, part)
            else:
                local.copy_(part)
        self._loaded = True

    def state_dict(self, still: Collection[str] = ()) -> dict[str, Tensor]:
        """Return parameters, buffers that steps update, and those of `still`, full, by original name, on every rank."""
        buffers = [name for name, spec in self.layout.buffers.items() if spec.updated or name in still]
        with self.communicators.watch.status.calling("state_dict"):
            return {name: self.whole(name) for name in (*self.layout.parameters, *buffers)}

    def whole(self, name: str) -> Tensor:
        """Return one parameter or buffer, full, on every rank. A collective."""
        parameter = self.layout.parameters.get(name)
        spec = parameter or self.layout.buffers[name]
        with self._buffers.whole([name]) if parameter else nullcontext():
            return self._collect(self._tensors.get(name), spec, spec.dtype or self.layout.dtype)

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter and buffer of its stages, by name. A collective over dp."""
        self.settle()
        if self.layout.zero < 3:
            return dict(self._tensors)
        with self._buffers.whole(self._buffers.parameters):
            return {name: x.detach().clone() for name, x in self._tensors.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's gradients after clipping, full, of the parameters that had one. A collective."""
        local = self._buffers.gradients()
        used = {name: self.layout.parameters[name] for name in self._trainable.names if name in self._used}
        main = {
            name: torch.promote_types(spec.dtype or self.layout.dtype, torch.float32) for name, spec in used.items()
        }
        with self.communicators.watch.status.calling("gradients"):
            return {name: self._collect(local.get(name), spec, main[name]) for name, spec in used.items()}

    @torch.no_grad()
    def _collect(self, local: Tensor | None, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
        """All-gather over tp and ep on the tensor's first stage, then broadcast to the other stages."""
        c = self.communicators
        owner = c.mesh.holder(spec.stages[0])
        if c.stage != owner:
            whole = torch.empty(spec.shape, dtype=dtype, device=c.device)
        else:
            assert local is not None
            whole = local.detach().to(dtype).contiguous()
            if isinstance(spec.placement, Split) and c.tp.size > 1:
                whole = from_slices(c.tp.all_gather(whole), spec.placement.dim, spec.placement.groups).contiguous()
            if spec.ep > 1:
                whole = from_slices(c.ep.all_gather(whole), 0, 1).contiguous()
        return c.pp.broadcast(whole.clone(), owner)

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise RuntimeFault("the parameters have no values yet", fix="call load_parameters first")


def _use_running(stages: Sequence[Stage], layout: Layout, evaluating: bool) -> None:
    """Let running statistics stand in for those of the batch, or not."""
    for replicas in (stage.dp for stage in stages if hasattr(stage, "dp")):
        replicas.mode.running = evaluating
        replicas.mode.alone = evaluating and layout.statistics == "running"
