"""One rank's training program: its stages of the model, its share of their parameters, and the step.

The loss is plan-invariant: Σ_i c_i S_i / N_i with counts N_i over the whole global batch, known before the first
loss. Each microbatch's loss is its share of the whole, so gradients are summed over microbatches and dp ranks, and
nothing is divided by either. A loss that is a function of sums takes its derivatives at those of the whole batch
(`loss_of_sums.py`). As in torch, a mean over no valid label at all is no number, and the step is one that
`non_finite` is about.

At the end of a step one all-reduce over the world carries the loss, the squared gradient norm and, per parameter,
whether anyone had a gradient for it; what nobody used is not stepped, as in torch with `.grad is None`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoptd.errors import PlanError, RuntimeFault
from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.placements import Split
from autoptd.ops.dropout import DropoutKey
from autoptd.ops.stage import Stage
from autoptd.ops.tp_axis import from_slices, own_slice
from autoptd.runtime.batch import Microbatch, sample_count
from autoptd.runtime.batch_check import NUMBERS, Agreement
from autoptd.runtime.batch_counts import LossOfSums, counts_under_way
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.executor import Executor
from autoptd.runtime.faults.nonfinite_origin import origin
from autoptd.runtime.lazy_tensor import Stored
from autoptd.runtime.loss_scaling import Finite, LossScale
from autoptd.runtime.optimizer import Factory, ParameterGroup, grouped, make_optimizer
from autoptd.runtime.zero.materialise import check_names, materialise, tied_groups
from autoptd.runtime.zero.param_buffers import ParameterShard, squared_norm
from autoptd.schedule import forward_only, training_step, with_communication


class Trainer:
    """Trains `stages`, by chunk, as this rank's part of a program; all ranks build theirs in the same order.

    Stages may be on meta: call `load_parameters` before the first step. Those with values keep them.
    `optimizer` is "adamw" or "sgd" (keywords go to torch's class), or a factory over parameters; elementwise ones only.
    `clip_norm` bounds the global gradient norm. `non_finite`: what to do where loss or norm is not finite, "raise" or
    "skip"; on all ranks, see `finite`. Raises PlanError if stage and layout do not fit each other.
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
        **optimizer_kwargs: Any,
    ) -> None:
        self.finite = Finite(non_finite, LossScale() if layout.dtype == torch.float16 else None)
        self.stages = (stages,) if isinstance(stages, Stage) else tuple(stages)
        self.layout, self.communicators = layout, communicators
        self.clip_norm = clip_norm
        self.grad_norm: Tensor | None = None  # of the last step, before clipping; 0-dim float64
        self._dropout = self.stages[0].dropout or DropoutKey()
        check_names(self.stages, layout, communicators)
        tied = tied_groups(layout, communicators)
        self._loaded = not any(p.is_meta for stage in self.stages for p in stage.parameters())
        self._buffers, self._tensors = materialise(self.stages, layout, communicators, tied)
        self._pieces = self._buffers.pieces(communicators.stage)
        self._frozen_pieces = self._buffers.frozen_pieces(communicators.stage)
        given = grouped([(piece.name, piece.param) for piece in self._pieces], groups)
        self.optimizer = make_optimizer(optimizer, given, **optimizer_kwargs)
        recomputed = {name for name, spec in layout.parameters.items() if spec.recomputed}
        self._executor = Executor(self.stages, communicators, self._dropout, recomputed, layout.slices, layout.modules)
        mesh = layout.mesh
        lists = training_step(layout.schedule, mesh.pp, layout.microbatches, mesh.virtual)
        self._actions = lists[communicators.stage]
        self._trainable = [name for name, spec in layout.parameters.items() if spec.trainable]
        self._used: set[str] = set()
        self._inputs = Agreement(layout, communicators)
        self._agreed: list[float] = []  # of the last step, what `_inputs` sums up

    @property
    def stage(self) -> Stage:
        """The first of this rank's stages."""
        return self.stages[0]

    @property
    def pieces(self) -> Sequence[ParameterShard]:
        """What this rank's optimizer updates."""
        return self._pieces

    @property
    def frozen_pieces(self) -> Sequence[ParameterShard]:
        """This rank's elements of the frozen parameters that are sharded: with ZeRO 3 all of them."""
        return self._frozen_pieces

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's part of each parameter and buffer of its stages, by name; without values, where it is sharded."""
        return self._tensors

    # Steps

    def train_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One optimizer step over the global batch, of which `batch` is this dp rank's share (keyword tensors).

        Returns the loss over the whole global batch, 0-dim, the same on all ranks. On all ranks, raises InputsError
        where one was given a wrong batch: no parameter has changed then.
        """
        self._check_loaded()
        microbatches = self._inputs.take(batch, self.layout.microbatches)
        self._dropout.active = True
        self._dropout.share = self._share_starts(sum(map(sample_count, microbatches)))
        self._buffers.start_step()
        counts = self._global_counts(microbatches)
        outcome: list[Tensor] = []
        share, of_sums = self._zero_loss(), self._of_sums(counts)
        if self.layout.sums_ahead:
            ahead = self._forward(microbatches, counts)
            if of_sums is not None:
                of_sums.take(ahead)
        first: list[str] = []

        def finish() -> None:
            outcome.append(self._finish(share if of_sums is None else of_sums.share()))
            if self.finite.fatal:  # before parameters are gathered, which are still each rank's own
                first.append(origin(self.stages, self.communicators, lambda: self._forward(microbatches, counts)))

        end = {
            "REDUCE": self._buffers.finish_reduction,
            "STEP": finish,
            "GATHER": self._buffers.gather_parameters,
        }
        scale = self.finite.scale
        self._executor.run(self._actions, microbatches, counts, share, end, self._buffers, None, scale, of_sums)
        if not self._inputs.holds(self._agreed):
            self._inputs.refuse(self._agreed)
        if self.finite.fatal:
            here = [piece.name for piece in self._pieces if not piece.grad.isfinite().all()]
            self._dropout.step += 1
            self.finite.fail(self._dropout.step - 1, list(dict.fromkeys(here)), first[0])
        self._dropout.step += 1
        return outcome[0]

    def _zero_loss(self) -> Tensor:
        """What the last stage adds its share of the loss to, or its partial values."""
        partial_sums = self.stages[-1].partial_sums
        return torch.zeros(
            (partial_sums,) if partial_sums else (), dtype=torch.float64, device=self.communicators.device
        )

    def _of_sums(self, counts: Callable[[], tuple[Tensor, ...]]) -> LossOfSums | None:
        last = self.stages[-1]
        return LossOfSums(last, self.communicators, counts) if last.is_last and last.partial_sums else None

    @torch.no_grad()
    def _forward(
        self, microbatches: list[Microbatch], counts: Callable[[], tuple[Tensor, ...]], counted: int | None = None
    ) -> Tensor:
        """The forward passes alone; gives what the last stage adds to the loss, over the first `counted` of them."""
        mesh, loss = self.layout.mesh, self._zero_loss()
        lists = with_communication(forward_only(mesh.pp, len(microbatches), mesh.virtual), mesh.route)
        self._executor.run(lists[self.communicators.stage], microbatches, counts, loss, {}, counted=counted)
        return loss

    @torch.no_grad()
    def eval_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss over the global batch, without dropout, gradient or update; any number of samples per dp rank."""
        self._check_loaded()
        microbatches = self._inputs.take(batch, 1 if self.layout.one_microbatch else None)
        self._dropout.active = False
        own = len(microbatches)
        counts = self._global_counts(microbatches)
        microbatches += microbatches[-1:] * (self._most_microbatches(own) - own)
        loss = self._forward(microbatches, counts, counted=own)
        if (of_sums := self._of_sums(counts)) is not None:
            of_sums.take(loss)
            loss = of_sums.share()
        if self.communicators.tp.rank != 0:
            loss.zero_()
        summed = self.communicators.world.all_reduce(torch.cat((loss.view(1), self._inputs.row())))
        if not self._inputs.holds(agreed := summed[1:].tolist()):
            self._inputs.refuse(agreed)
        return summed[0].to(self.layout.main_dtype)

    def _most_microbatches(self, own: int) -> int:
        """Of any dp rank, where all gather parameters together for each; whose share is smaller repeats its last."""
        if self.layout.zero < 3:
            return own
        return int(self.communicators.dp.all_reduce(torch.tensor([own], device=self.communicators.device), "max"))

    def _share_starts(self, samples: int) -> int | Tensor:
        """The first sample of this dp rank's share, of `samples`, in the global batch; 0 where nobody asks."""
        dp = self.communicators.dp
        if dp.size == 1 or not any(stage.draws for stage in self.stages):
            return 0
        shares = dp.all_gather(torch.tensor([samples], device=self.communicators.device))
        return shares[: dp.rank].sum()

    def _global_counts(self, microbatches: list[Microbatch]) -> Callable[[], tuple[Tensor, ...]]:
        """Counts over all microbatches and dp ranks; () where no stage reads any."""
        return counts_under_way(self.stages, microbatches, self.communicators.dp, self.communicators.device)

    @torch.no_grad()
    def _finish(self, share: Tensor) -> Tensor:
        """Agree on loss, norm and used parameters; clip; step, unless something is not finite. Returns the loss."""
        if self.finite.scale != 1:
            self._buffers.scale_gradients(torch.tensor(1 / self.finite.scale))
        device = self.communicators.device
        own_used = self._buffers.used()
        loss = share if self.communicators.tp.rank == 0 else torch.zeros_like(share)
        flags = torch.tensor([name in own_used for name in self._trainable], dtype=torch.float64, device=device)
        norm = squared_norm(self._pieces).to(device)
        parts = (loss.view(1), norm.view(1), self._inputs.row(), flags)
        agreed = self.communicators.world.all_reduce(torch.cat(parts))
        whole, _, *told = agreed.tolist()
        self._agreed, users = told[:NUMBERS], told[NUMBERS:]
        if not self._inputs.holds(self._agreed):  # told when the step is over
            return agreed[0].to(self.layout.main_dtype)
        self._used = {name for name, n in zip(self._trainable, users, strict=True) if n}
        self.grad_norm = agreed[1].sqrt()
        if not self.finite.steps(whole, float(self.grad_norm)):
            return agreed[0].to(self.layout.main_dtype)
        if self.clip_norm is not None:
            self._buffers.scale_gradients((self.clip_norm / (self.grad_norm + 1e-6)).clamp(max=1.0))
        for piece in self._pieces:
            piece.param.grad = piece.grad if piece.name in self._used else None
        self.optimizer.step()
        self._buffers.end_step()
        return agreed[0].to(self.layout.main_dtype)

    # Full tensors

    def settle(self) -> None:
        """Wait until this rank's parameters are those of the last step, where they are still being collected."""
        self._buffers.finish_gathers()

    @torch.no_grad()
    def take_pieces(self) -> None:
        """After pieces were written: make them the model's parameters. A collective over dp."""
        self._buffers.gather_parameters()
        self.settle()
        self._loaded = True

    @property
    def dropout(self) -> DropoutKey:
        """Where the random state stands."""
        return self._dropout

    @torch.no_grad()
    def load_parameters(self, full: Mapping[str, Tensor | Stored]) -> None:
        """Take this rank's part of full tensors by their original names; tensors of other stages are ignored.

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
            part = self._part(full[name], specs[name])
            if name in self._buffers.parameters:
                self._buffers.write(name, part)
            else:
                local.copy_(part)
        self._loaded = True

    def _part(self, full: Tensor | Stored, spec: TensorSpec) -> Tensor:
        tp = self.communicators.tp
        match spec.placement, full:
            case Split(dim, groups), Stored() if tp.size > 1:
                return full.own_slice(dim, groups, tp.size, tp.rank)
            case Split(dim, groups), Tensor() if tp.size > 1:
                return own_slice(full, dim, groups, tp.size, tp.rank)
            case _:
                return full.whole() if isinstance(full, Stored) else full

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters of the model, full, under their original names, on every rank. A collective."""
        result = {}
        for name, spec in self.layout.parameters.items():
            with self._buffers.whole([name]):
                result[name] = self._collect(self._tensors.get(name), spec, spec.dtype or self.layout.dtype)
        return result

    def local_tensors(self) -> dict[str, Tensor]:
        """This rank's part of each parameter and buffer that its stages hold, by name. A collective over dp."""
        self.settle()
        if self.layout.zero < 3:
            return dict(self._tensors)
        with self._buffers.whole(self._buffers.parameters):
            return {name: x.detach().clone() for name, x in self._tensors.items()}

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients (clipped, if so asked), full, of the parameters that had one. A collective."""
        local = self._buffers.gradients()
        used = {name: self.layout.parameters[name] for name in self._trainable if name in self._used}
        main = {
            name: torch.promote_types(spec.dtype or self.layout.dtype, torch.float32) for name, spec in used.items()
        }
        return {name: self._collect(local.get(name), spec, main[name]) for name, spec in used.items()}

    @torch.no_grad()
    def _collect(self, local: Tensor | None, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
        """Gather over tp on the tensor's first stage, then tell the other stages."""
        c = self.communicators
        owner = c.mesh.holder(spec.stages[0])
        if c.stage != owner:
            whole = torch.empty(spec.shape, dtype=dtype, device=c.device)
        else:
            assert local is not None
            whole = local.detach().to(dtype).contiguous()
            if isinstance(spec.placement, Split) and c.tp.size > 1:
                whole = from_slices(c.tp.all_gather(whole), spec.placement.dim, spec.placement.groups).contiguous()
        return c.pp.broadcast(whole.clone(), owner)

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise RuntimeFault("the parameters have no values yet", fix="call load_parameters first")
