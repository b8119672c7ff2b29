"""One rank's evaluation of metrics: values of each sample, by a program on the parameters of the training program.

    data-parallel rank   0          1          0      1
    samples              0 1 2 3    4 5 6 7    8 9    (ended)
    rows                 [samples of the batch, width], float64: one all-reduce over the world per batch, in which each
                         row is written by the ranks that computed it, once, and is 0 elsewhere

A rank writes the rows of the microbatches that it counts: on its last stage, as tp rank 0, which holds what all tp
ranks hold. A cp rank's rows are partial values, of its tokens. Ranks whose data has ended take part until all have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.errors import InputsError, PlanError
from autoptd.layout.layout import Layout
from autoptd.ops.group import on_device
from autoptd.ops.stage import Stage
from autoptd.runtime.batch import sample_count
from autoptd.runtime.batch_check import Agreement
from autoptd.runtime.batch_counts import LossTotal, start_counts
from autoptd.runtime.executor import Executor
from autoptd.runtime.trainer import Trainer
from autoptd.schedule import forward_only, with_communication


class Evaluator:
    """The evaluation program of one rank, whose stages take over parameters and buffers of a trainer."""

    def __init__(
        self,
        stages: Sequence[Stage],
        layout: Layout,
        trainer: Trainer,
        width: int,
        buffers: Callable[[Sequence[str]], Mapping[str, Tensor]],
        shared: frozenset[str],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`stages`: on meta. `width`: numbers in the row of a sample. `shared`: buffers of the model, which are the
        trainer's where it has them. `buffers`: values of the others. Raises PlanError if the trainer has no such
        parameter, or not the value that steps have given a buffer."""
        self._stages, self._layout, self._trainer, self._width = tuple(stages), layout, trainer, width
        self._comm = trainer.communicators
        self._inputs, self._check = Agreement(layout, self._comm), check
        self._adopt(buffers, shared)
        self._executor = Executor(self._stages, self._comm, trainer.dropout, (), layout.slices, layout.modules)

    def _adopt(self, buffers: Callable[[Sequence[str]], Mapping[str, Tensor]], shared: frozenset[str]) -> None:
        tensors, device = self._trainer.tensors, self._comm.device
        for stage in self._stages:
            wrong = [
                name
                for name, declared in stage.named_parameters()
                if name not in tensors or tensors[name].shape != declared.shape or tensors[name].dtype != declared.dtype
            ]
            held = {name for name, _ in stage.named_buffers() if name in shared and name in tensors}
            others = [name for name, _ in stage.named_buffers() if name not in held]
            wrong += [name for name in others if name in self._layout.buffers and self._layout.buffers[name].updated]
            if wrong:
                raise PlanError("this rank's stages do not hold what the metrics need", where="\n".join(wrong))
            values = buffers(others)
            for name, module, leaf in _slots(stage):
                if leaf in module._parameters:
                    module._parameters[leaf] = tensors[name]  # type: ignore[assignment]
                else:
                    declared = module._buffers[leaf]
                    assert declared is not None
                    given = tensors[name] if name in held else values[name].to(device, declared.dtype)
                    module._buffers[leaf] = given
        self._trainer.attach(self._stages)

    @torch.no_grad()
    def rows(self, batch: Mapping[str, Any] | None) -> Tensor | None:
        """Return the rows of a global batch's samples, [samples, width] float64 on the host. A collective.

        batch: this dp rank's share, with any number of samples; None: its data has ended. Returns None on all ranks
        once all data has ended. Raises InputsError on all ranks for a wrong batch of one.
        """
        trainer, comm, mesh = self._trainer, self._comm, self._layout.mesh
        trainer.settle()
        microbatches = self._inputs.nothing() if batch is None else self._inputs.take(batch, None, self._check)
        own = 0 if batch is None else len(microbatches)
        first, samples = self._places(0 if batch is None else sum(map(sample_count, microbatches)))
        if samples == 0:
            return None
        for stage in self._stages:
            stage.shared_inputs = {name: microbatches[0][name] for name in self._layout.shared}
        trainer.evaluate_with(self._stages, self._layout, drops=True)  # what the model drops in eval mode too
        counts = start_counts(self._stages, microbatches, comm.dp, comm.device)
        steps = trainer.most_microbatches(own)
        microbatches = microbatches[:own] + microbatches[-1:] * (steps - own)
        values = torch.zeros(samples * self._width, dtype=torch.float64, device=comm.device)
        total = LossTotal(values, 0, self._width, first)
        if microbatches:
            lists = with_communication(forward_only(mesh.pp, len(microbatches), mesh.virtual), mesh.route)
            self._executor.run(lists[comm.stage], microbatches, counts, total, {}, counted=own)
        if comm.tp.rank != 0:
            values.zero_()
        summed = comm.world.all_reduce(torch.cat((values, self._inputs.row())))
        found, agreed = summed.split((len(values), len(summed) - len(values)))
        if not self._inputs.holds(numbers := agreed.tolist()):
            self._inputs.refuse(numbers)
        return found.view(samples, self._width).cpu()

    def _places(self, own: int) -> tuple[int, int]:
        """Return this rank's first sample in the batch of all, and the samples of the batch; `own`: its samples.

        Raises InputsError on all ranks if ranks of one dp share have different numbers of samples.
        """
        mesh = self._layout.mesh
        each = self._comm.world.all_gather(on_device([own], torch.int64, self._comm.device)).flatten().tolist()
        shares: dict[int, dict[int, int]] = {}
        for rank, samples in enumerate(each):
            shares.setdefault(mesh.coordinates(rank)[1], {})[rank] = samples
        for dp, ranks in shares.items():
            if len(set(ranks.values())) > 1:
                raise InputsError(
                    "ranks that take the same share of the batch were given different numbers of samples",
                    where=f"data-parallel share {dp}: "
                    + ", ".join(f"rank {rank} has {samples}" for rank, samples in ranks.items()),
                    fix="give the ranks of a share the same samples: use parallel.eval_sampler(…) or parallel.dp_rank",
                )
        sizes = [next(iter(shares[dp].values())) for dp in range(mesh.dp)]
        return sum(sizes[: self._comm.dp.rank]), sum(sizes)


def _slots(stage: Stage) -> list[tuple[str, nn.Module, str]]:
    """Return name, owner and attribute of every parameter and buffer of a stage."""
    found = []
    for path, module in stage.named_modules(remove_duplicate=False):
        for leaf, held in [*module._parameters.items(), *module._buffers.items()]:
            if held is not None:
                found.append((f"{path}.{leaf}".lstrip("."), module, leaf))
    return found
