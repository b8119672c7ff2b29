"""Parameters and gradients in contiguous buffers, and the data-parallel reduction (ZeRO-1: Rajbhandari et al. 2020).

A buffer holds the trainable parameters of one (dtype, gradient class over tp, pipeline ranks), in forward order
reversed. The model's parameters are views of its `data`; autograd's gradients are added to `grad` (float32 at least) by
a hook and freed. Per step and bucket, with d dp ranks:

    last gradient of the last microbatch ready → reduce-scatter over dp (all-reduce with zero 0), started at once
    REDUCE: the rest is started; wait; `Bp` parameters: shard summed over tp; tied: shard summed over the tied stages
    STEP:   the optimizer updates pieces, one per (parameter, this rank's shard): views of `data`, or of `main` when
            parameters are narrower than float32
    GATHER: all-gather over dp; with `layout.gather_later`, each bucket is waited for by the first module of the next
            step's forward passes that reads it

All factors are in the loss, so everything here is a sum. Buckets start in one fixed order on all dp ranks, whichever
parameters took part, so a parameter without gradient delays its bucket to REDUCE and can hang nobody. Tied copies have
buffers of equal layout on every stage: same shards, same sums, same update, the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autoptd.passes.placements import BP, Split
from autoptd.runtime.comm import Alone, Done, Group, Handle
from autoptd.runtime.flat import Bucket, Slot, overlap, pack
from autoptd.runtime.layout import Layout, TensorSpec


@dataclass
class Piece:
    """What the optimizer updates: this rank's elements of one parameter, 1-D, and their gradient."""

    name: str
    param: nn.Parameter
    grad: Tensor
    counts: bool  # towards the global norm: one rank per logical element
    start: int = 0  # where it begins in the rank's local parameter, in elements


@dataclass
class _Live:
    """A bucket during a step."""

    bucket: Bucket
    buffer: Buffer
    priority: int  # index in the model of its earliest parameter: the last whose gradient comes
    pending: set[tuple[str, int]] = field(default_factory=set)  # parameter, chunk
    handle: Handle | None = None
    launched: bool = False


class Buffer:
    """Flat storage of the parameters of one class."""

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        shapes: Mapping[str, torch.Size],
        layout: Layout,
        group: Group,
        tied: Group,
    ) -> None:
        first = next(iter(specs.values()))
        self.group, self.tied = group, tied
        self.partial_over_tp = first.placement == BP
        self.split = isinstance(first.placement, Split)
        self.first_rank = layout.mesh.holder(first.stages[0])
        self.shapes = dict(shapes)
        self.sharded = layout.zero == 1
        sizes = [(name, shapes[name].numel()) for name in reversed(list(specs))]
        self.buckets = pack(sizes, group.size, layout.bucket_elements)
        self.slots: dict[str, Slot] = {slot.name: slot for bucket in self.buckets for slot in bucket.slots}

    def allocate(self, dtype: torch.dtype, main_dtype: torch.dtype, device: torch.device) -> None:
        total = self.buckets[-1].stop
        self.data = torch.zeros(total, dtype=dtype, device=device)
        self.grad = torch.zeros(total, dtype=main_dtype, device=device)
        self.main = None if dtype == main_dtype else torch.zeros(sum(map(self._width, self.buckets)), dtype=main_dtype)
        if self.main is not None:
            self.main = self.main.to(device)
        self._main_of = {bucket.start: shard for bucket, shard in self.main_shards()}

    def _width(self, bucket: Bucket) -> int:
        own = self.own(bucket)
        return own.stop - own.start

    def own(self, bucket: Bucket) -> slice:
        """The elements of a bucket that this rank updates."""
        return bucket.shard(self.group.rank, self.group.size) if self.sharded else slice(bucket.start, bucket.stop)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A parameter's elements in its own shape."""
        slot = self.slots[name]
        return flat[slot.start : slot.stop].view(self.shapes[name])

    def main_shards(self) -> list[tuple[Bucket, Tensor]]:
        """Per bucket, this rank's elements at full precision: of `main`, or of `data` itself."""
        result, at = [], 0
        for bucket in self.buckets:
            own, width = self.own(bucket), self._width(bucket)
            result.append((bucket, self.data[own] if self.main is None else self.main[at : at + width]))
            at += width
        return result

    def pieces(self, counts: bool) -> list[Piece]:
        """The optimizer's views, in buffer order."""
        result = []
        for bucket, shard in self.main_shards():
            own = self.own(bucket)
            for slot in bucket.slots:
                part = overlap(slot, own)
                if part is not None:
                    param = nn.Parameter(shard[part.start - own.start : part.stop - own.start])
                    result.append(Piece(slot.name, param, self.grad[part], counts, part.start - slot.start))
        return result

    def read_parameters(self) -> None:
        """After the parameters were written: take them over at full precision."""
        if self.main is not None:
            for bucket, shard in self.main_shards():
                shard.copy_(self.data[self.own(bucket)])

    def start_reduction(self, bucket: Bucket) -> Handle:
        whole = self.grad[bucket.start : bucket.stop]
        if self.sharded:
            return self.group.reduce_scatter_later(self.grad[self.own(bucket)], whole)
        return self.group.all_reduce_later(whole)

    def start_gather(self, bucket: Bucket) -> Handle:
        """Write an updated shard to the model's parameters, and collect those of the other dp ranks."""
        if self.main is not None:
            self.data[self.own(bucket)].copy_(self._main_of[bucket.start])
        if not self.sharded:
            return Done()
        return self.group.all_gather_later(self.data[bucket.start : bucket.stop], self.data[self.own(bucket)])


class Buffers:
    """All trainable parameters of a stage. Replaces the module's parameters by views of its buffers."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        device: torch.device,
        tp: Group,
        dp: Group,
        tied: Mapping[tuple[int, ...], Group],
        holders: Sequence[Collection[str]] = (),
    ) -> None:
        """`holders`: names of the parameters of each chunk; left out, there is one. `tied`: by pipeline ranks."""
        self._tp = tp
        self._holders = tuple(holders) or (set(parameters),)
        self._overlap, self._gather_later = layout.overlap, layout.gather_later
        self._gathering: dict[tuple[Slot, ...], Handle] = {}  # by bucket
        self._buffers = _build(parameters, layout, device, dp, tied)
        self._buffer_of = {name: buffer for buffer in self._buffers for name in buffer.slots}
        order = {name: i for i, name in enumerate(layout.parameters)}
        self._live = [
            _Live(bucket, buffer, min(order[slot.name] for slot in bucket.slots))
            for buffer in self._buffers
            for bucket in buffer.buckets
        ]
        self._live.sort(key=lambda live: -live.priority)
        self._live_of = {slot.name: live for live in self._live for slot in live.bucket.slots}
        self._fresh: set[str] = set(self._buffer_of)  # no gradient yet in this step
        self._next = 0
        self._last_chunk: int | None = None  # whose last gradients are coming
        # `.data`: a count of writes of its own, or collecting one bucket would spoil what autograd kept of another
        self.parameters = {name: nn.Parameter(b.view(b.data, name).data) for name, b in self._buffer_of.items()}
        for name, parameter in self.parameters.items():
            self._listen(name, parameter)

    def pieces(self, pipeline_rank: int, dp_rank: int) -> list[Piece]:
        """What this rank's optimizer updates."""
        result = []
        for buffer in self._buffers:
            counts = (buffer.split or self._tp.rank == 0) and buffer.first_rank == pipeline_rank
            result += buffer.pieces(counts and (buffer.sharded or dp_rank == 0))
        return result

    def _listen(self, name: str, parameter: nn.Parameter) -> None:
        buffer = self._buffer_of[name]
        total, live = buffer.view(buffer.grad, name), self._live_of[name]

        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            assert not live.launched, f"gradient of {name} after its bucket was reduced"
            if name in self._fresh:
                total.copy_(parameter.grad)
                self._fresh.discard(name)
            else:
                total.add_(parameter.grad)
            parameter.grad = None
            if self._last_chunk is not None:
                live.pending.discard((name, self._last_chunk))
                self._launch_ready()

        parameter.register_post_accumulate_grad_hook(take)

    def start_step(self) -> None:
        """Forget the last step's gradients (the first addend overwrites)."""
        self._fresh = set(self._buffer_of)
        self._last_chunk = None
        self._next = 0
        for live in self._live:
            names = [slot.name for slot in live.bucket.slots]
            live.pending = {(n, chunk) for chunk, held in enumerate(self._holders) for n in names if n in held}
            live.handle, live.launched = None, False

    def expect_gradients(self, chunk: int, last: bool) -> None:
        """Of a chunk; the step's last of it: reduce each bucket as it becomes complete."""
        self._last_chunk = chunk if last and self._overlap else None

    def _launch_ready(self) -> None:
        while self._next < len(self._live) and not self._live[self._next].pending:
            self._launch()

    def _launch(self) -> None:
        live = self._live[self._next]
        live.launched = True
        live.handle = live.buffer.start_reduction(live.bucket)
        self._next += 1

    def finish_reduction(self) -> None:
        """Start what is left, wait for all, and sum over tp and tied stages what is partial there."""
        for name in self._fresh:
            buffer = self._buffer_of[name]
            buffer.view(buffer.grad, name).zero_()
        while self._next < len(self._live):
            self._launch()
        for live in self._live:
            assert live.handle is not None
            live.handle.wait()
        for live in self._live:
            own = live.buffer.grad[live.buffer.own(live.bucket)]
            if live.buffer.partial_over_tp:
                self._tp.all_reduce(own)
            live.buffer.tied.all_reduce(own)

    def used(self) -> set[str]:
        """Parameters that got a gradient on this rank in this step."""
        return set(self._buffer_of) - self._fresh

    def scale_gradients(self, factor: Tensor) -> None:
        for live in self._live:
            live.buffer.grad[live.buffer.own(live.bucket)].mul_(factor)

    def gather_parameters(self) -> None:
        """Of every bucket, first what the model reads first; waited for now, or by who reads it."""
        for live in reversed(self._live):
            self._gathering[live.bucket.slots] = live.buffer.start_gather(live.bucket)
        if not self._gather_later:
            self.finish_gathers()

    def finish_gathers(self, names: Iterable[str] | None = None) -> None:
        """Wait until these parameters are whole again; all of them if none are named."""
        if not self._gathering:
            return
        wanted = self._live if names is None else [self._live_of[name] for name in names if name in self._live_of]
        for live in wanted:
            handle = self._gathering.pop(live.bucket.slots, None)
            if handle is not None:
                handle.wait()

    def gather_before(self, module: nn.Module, names: Sequence[str]) -> None:
        """Let a module's forward passes wait for the parameters that they read."""
        if self._gather_later:
            module.register_forward_pre_hook(lambda *_: self.finish_gathers(names))

    def read_parameters(self) -> None:
        for buffer in self._buffers:
            buffer.read_parameters()

    def gradients(self) -> dict[str, Tensor]:
        """The step's reduced gradients of this stage's local parameters, whole over dp. A collective over dp."""
        result: dict[str, Tensor] = {}
        for buffer in self._buffers:
            whole = buffer.grad.clone()
            for bucket in buffer.buckets:
                if buffer.sharded:
                    target = whole[bucket.start : bucket.stop]
                    buffer.group.all_gather_later(target, buffer.grad[buffer.own(bucket)].clone()).wait()
            result |= {name: buffer.view(whole, name) for name in buffer.slots}
        return result


def _build(
    parameters: Mapping[str, nn.Parameter],
    layout: Layout,
    device: torch.device,
    dp: Group,
    tied: Mapping[tuple[int, ...], Group],
) -> list[Buffer]:
    """One per (dtype, gradient class over tp, pipeline ranks), in the model's order: the same on all that share it."""
    classes: dict[tuple[torch.dtype, str, tuple[int, ...]], dict[str, TensorSpec]] = {}
    for name, spec in layout.parameters.items():
        if name in parameters and spec.trainable:
            kind = "split" if isinstance(spec.placement, Split) else str(spec.placement)
            ranks = layout.mesh.holders(spec.stages)
            classes.setdefault((parameters[name].dtype, kind, ranks), {})[name] = spec
    buffers = []
    for (dtype, _, ranks), specs in classes.items():
        shapes = {name: parameters[name].shape for name in specs}
        buffer = Buffer(specs, shapes, layout, dp, tied[ranks] if len(ranks) > 1 else Alone())
        buffer.allocate(dtype, torch.promote_types(dtype, torch.float32), device)
        buffers.append(buffer)
    return buffers


def squared_norm(pieces: Sequence[Piece]) -> Tensor:
    """Σ g² over the pieces that count here, 0-dim float64."""
    grads = [piece.grad for piece in pieces if piece.counts]
    return nn.utils.get_total_norm(grads).to(torch.float64) ** 2
