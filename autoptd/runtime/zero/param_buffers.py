"""Parameters and gradients in contiguous buffers, shared out over the data-parallel ranks (ZeRO 0 to 3).

A buffer (`storage.py`) holds the trainable parameters, or with ZeRO 3 the frozen ones, of one (dtype, gradient class
over tp, pipeline ranks), in forward order reversed. The model's parameters are views of it; autograd's gradients are
added up in float32 at least (or, where a plan says so, in the parameters' type) by a hook and freed. Per step and
bucket, of trainable ones:

    backward  gradients ready → reduce-scatter over dp (all-reduce with zero 0): once a step, or with ZeRO 2 and 3 in
              each backward pass (`reduction.py`)
    REDUCE    the rest is started; wait; `Bp` parameters: shard summed over tp; tied: shard summed over the tied stages
    STEP      the optimizer updates pieces, one per (parameter, this rank's shard): views of `data`, or of `main` when
              parameters are narrower than float32 or sharded themselves
    GATHER    all-gather over dp; with `layout.gather_later`, each bucket is waited for by the first module of the next
              step's forward passes that reads it; with ZeRO 3 every pass gathers for itself (`gathering.py`)

All factors are in the loss, so everything here is a sum. Tied copies have buffers of equal layout on every stage: same
shards, same sums, same update, the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.packing import Slot
from autoptd.layout.placements import Split
from autoptd.ops.group import Group, Handle, SingleRankGroup
from autoptd.ops.stage import Stage
from autoptd.runtime.zero.flat_buffer import Buffer, ParameterShard, Sharing
from autoptd.runtime.zero.grad_reduce import Live, Reduction
from autoptd.runtime.zero.param_gather import Gathering, GatherUnit


class Buffers:
    """The parameters of a pipeline rank: all trainable ones, and with ZeRO 3 the frozen ones.

    Replaces the modules' parameters by views of its buffers.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        device: torch.device,
        tp: Group,
        sharing: Sharing,
        tied: Mapping[tuple[int, ...], Group],
        holders: Sequence[Collection[str]] = (),
    ) -> None:
        """`holders`: names of the parameters of each chunk; left out, there is one. `tied`: by pipeline ranks."""
        self._tp = tp
        self._gather_later = layout.gather_later
        self._gathering: dict[tuple[Slot, ...], Handle] = {}  # by bucket
        self._buffers = _build(parameters, layout, device, sharing, tied)
        self._buffer_of = {name: buffer for buffer in self._buffers for name in buffer.slots}
        order = {name: i for i, name in enumerate(layout.parameters)}
        self._live = [
            Live(bucket, buffer, min(order[slot.name] for slot in bucket.slots))
            for buffer in self._buffers
            for bucket in buffer.buckets
        ]
        self._live.sort(key=lambda live: -live.priority)
        self._live_of = {name: live for live in self._live for name in live.names}
        idle = {name for name, spec in layout.parameters.items() if spec.idle}
        reached = [frozenset(held) - idle for held in holders or (set(parameters),)]
        self._reduction = Reduction(self._summed(), reached, layout.overlap, layout.zero)
        self._wholes = Gathering(ahead=layout.overlap) if layout.zero == 3 else None
        # `.data`: a count of writes of its own, or collecting one bucket would spoil what autograd kept of another
        self.parameters = {
            name: nn.Parameter(self._view(name).data, not buffer.frozen) for name, buffer in self._buffer_of.items()
        }
        self._name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                self._listen(name, parameter)

    def _view(self, name: str) -> Tensor:
        live = self._live_of[name]
        whole = live.buffer.whole(live.bucket)
        if self._wholes is None:
            return live.buffer.view(whole, live.bucket, name)
        whole.untyped_storage().resize_(whole.numel() * whole.itemsize)  # views are only made of what is there
        view = live.buffer.view(whole, live.bucket, name)
        live.buffer.free(live.bucket)
        return view

    def pieces(self, pipeline_rank: int) -> list[ParameterShard]:
        """What this rank's optimizer updates."""
        return self._pieces(pipeline_rank, frozen=False)

    def frozen_pieces(self, pipeline_rank: int) -> list[ParameterShard]:
        """This rank's elements of the frozen parameters that are sharded."""
        return self._pieces(pipeline_rank, frozen=True)

    def _pieces(self, pipeline_rank: int, *, frozen: bool) -> list[ParameterShard]:
        result = []
        for buffer in self._buffers:
            if buffer.frozen == frozen:
                counts = (buffer.split or self._tp.rank == 0) and buffer.first_rank == pipeline_rank
                result += buffer.pieces(counts and buffer.sharing.across.rank == 0)
        return result

    # ---- gradients ----

    def _listen(self, name: str, parameter: nn.Parameter) -> None:
        live = self._live_of[name]

        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad, None
            self._reduction.take(live, name, gradient)

        parameter.register_post_accumulate_grad_hook(take)

    def start_step(self) -> None:
        """Forget the last step's gradients (the first partial value overwrites)."""
        self.end_step()
        self._reduction.start_step()

    def expect_gradients(self, chunk: int, last: bool) -> None:
        """Of a chunk; the step's last of it: reduce each bucket as it becomes complete."""
        self._reduction.expect(chunk, last)

    def finish_reduction(self) -> None:
        """Wait for all sums over dp, and sum over tp and tied stages what is partial there."""
        self._reduction.finish()
        for live in self._summed():
            own = live.buffer.grad_shard(live.bucket)
            if live.buffer.partial_over_tp:
                self._tp.all_reduce(own)
            live.buffer.tied.all_reduce(own)
        for buffer in self._buffers:
            buffer.widen()

    def used(self) -> set[str]:
        """Parameters that got a gradient on this rank in this step."""
        return self._reduction.used

    def _summed(self) -> list[Live]:
        return [live for live in self._live if not live.buffer.frozen]

    def scale_gradients(self, factor: Tensor) -> None:
        for live in self._summed():
            live.buffer.stepped_grad(live.bucket).mul_(factor)

    def end_step(self) -> None:
        """The optimizer has stepped."""
        for buffer in self._buffers:
            buffer.narrow_again()

    def gradients(self) -> dict[str, Tensor]:
        """The step's reduced gradients of this stage's local parameters, whole over dp. A collective over dp."""
        trained = (buffer for buffer in self._buffers if not buffer.frozen)
        return {name: x for buffer in trained for name, x in buffer.gradients().items()}

    # ---- parameters ----

    def gather_parameters(self) -> None:
        """Of every bucket, first what the model reads first; waited for now, or by who reads it."""
        if self._wholes is not None:
            return
        for live in reversed(self._live):
            self._gathering[live.bucket.slots] = live.buffer.start_gather(live.bucket)
        if not self._gather_later:
            self.finish_gathers()

    def finish_gathers(self, names: Iterable[str] | None = None) -> None:
        """Wait until these parameters are whole again; all of them if none are named."""
        if not self._gathering:
            return
        for live in self._live if names is None else self._lives(names):
            handle = self._gathering.pop(live.bucket.slots, None)
            if handle is not None:
                handle.wait()

    def _lives(self, names: Iterable[str]) -> list[Live]:
        """The buckets of those that lie in one."""
        return list(dict.fromkeys(self._live_of[name] for name in names if name in self._live_of))

    def gather_before(self, module: nn.Module, names: Sequence[str]) -> None:
        """Let a module's forward passes wait for the parameters that they read."""
        if self._gather_later and self._wholes is None:
            module.register_forward_pre_hook(lambda *_: self.finish_gathers(names))

    def attach(self, stage: Stage, chunk: int) -> None:
        """Let a stage's passes find its parameters: blocks their own, the stage those that no block holds."""
        inside: set[str] = set()
        for path, module in stage.named_modules():
            nested = any(path.startswith(f"{block}.") for block in inside)
            if module is not stage and type(module) is not nn.Module and not nested:
                inside.add(path)
                names = [f"{path}.{name}" for name, _ in module.named_parameters()]
                self.gather_before(module, names)
                if self._wholes is not None:
                    self._wholes.watch_block(module, self._lives(names))
        every = [name for name, _ in stage.named_parameters()]
        own = [name for name in every if not any(name.startswith(f"{path}.") for path in inside)]
        self.gather_before(stage, own)
        if self._wholes is not None:
            self._wholes.watch_stage(stage, chunk, self._lives(own))

    @contextmanager
    def whole(self, names: Iterable[str]) -> Iterator[None]:
        """Meanwhile these parameters have their values. A collective over dp."""
        self.finish_gathers()
        unit = GatherUnit(tuple(self._lives(names)))
        if self._wholes is not None:
            self._wholes.hold(unit)
        yield
        if self._wholes is not None:
            self._wholes.release(unit)

    def write(self, name: str, value: Tensor) -> None:
        """Give a parameter of a bucket a value of its local shape."""
        live = self._live_of[name]
        live.buffer.write(live.bucket, name, value)

    # ---- passes, as the executor announces them ----

    def before_backward(self, chunk: int, half: str, last: bool) -> None:
        self.expect_gradients(chunk, last)
        if self._wholes is not None:
            self._wholes.begin_backward(chunk, half)

    def before_weights(self, parameters: Sequence[Tensor]) -> None:
        if self._wholes is not None:
            names = [name for p in parameters if (name := self._name_of.get(id(p))) is not None]
            self._wholes.only(self._lives(names))

    def after_backward(self, chunk: int, whole: bool) -> None:
        if self._wholes is not None:
            self._wholes.end()
        if whole:
            self._reduction.end_backward(chunk)


def _build(
    parameters: Mapping[str, nn.Parameter],
    layout: Layout,
    device: torch.device,
    sharing: Sharing,
    tied: Mapping[tuple[int, ...], Group],
) -> list[Buffer]:
    """One per (trainable, dtype, gradient class over tp, pipeline ranks), in the model's order.

    The same on all that share it.
    """
    classes: dict[tuple[bool, torch.dtype, str, tuple[int, ...]], dict[str, TensorSpec]] = {}
    for name, spec in layout.parameters.items():
        if name in parameters and (spec.trainable or layout.zero == 3):
            kind = "split" if isinstance(spec.placement, Split) else str(spec.placement)
            ranks = layout.mesh.holders(spec.stages)
            classes.setdefault((spec.trainable, parameters[name].dtype, kind, ranks), {})[name] = spec
    buffers = []
    for (_, dtype, _, ranks), specs in classes.items():
        shapes = {name: parameters[name].shape for name in specs}
        buffer = Buffer(specs, shapes, layout, sharing, tied[ranks] if len(ranks) > 1 else SingleRankGroup())
        buffer.allocate(dtype, device)
        buffers.append(buffer)
    return buffers


def squared_norm(pieces: Sequence[ParameterShard]) -> Tensor:
    """Σ g² over the pieces that count here, 0-dim float64."""
    grads = [piece.grad for piece in pieces if piece.counts]
    return nn.utils.get_total_norm(grads).to(torch.float64) ** 2
