"""Flat storage of the parameters of one class, and this rank's shards of it (ZeRO: Rajbhandari et al. 2020).

Bytes for n elements (padding included) on d ranks that share one copy; c, g, m: bytes of an element in the compute,
gradient and main dtype:

    zero    parameters               gradients            main copy
    0, 1    `data`, c n, full        `grad`, g n, full    `main`, m n / d, if m differs from c (d = 1 for zero 0)
    2       `data`, c n, full        `grad`, g n / d      `main`, as above
    3       c per bucket, on demand  `grad`, m n / d      `main`, m n / d, always: the parameters themselves

Main copies of the first buckets (`offloaded`) may be in host memory instead, `host`, m n / d, whatever c is: the
optimizer then updates them, and keeps its state of them, on the host. Their gradients are copied there before
(`host_grad`), and new parameters back by `start_gather`.

ZeRO 3 shards frozen parameters too, in a buffer of their own: c n / d in their own dtype, without gradients or a main
copy. A sharded tensor holds this rank's shards of all buckets, one after the other.

Gradients are accumulated and reduced in the gradient dtype: the main dtype, or the compute dtype if the layout says so.
In the second case they are `narrow`: during the optimizer step there is a copy of this rank's shard in the main dtype,
`wide`, which is scaled, clipped and passed to the optimizer. Gradients of the main dtype that no rank adds anything to
stay the tensors that autograd made, `grads`, g n, and there is no `grad`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.packing import Bucket, Slot, offloaded, overlap, pack
from autoptd.layout.placements import BP
from autoptd.ops.group import Group, Handle


@dataclass
class ParameterShard:
    """This rank's elements of one parameter, 1-D, and their gradient, as the optimizer updates them."""

    name: str
    param: nn.Parameter
    grad: Tensor
    counts: bool  # included in the global norm on this rank: one rank per logical element
    start: int = 0  # its offset in the rank's local parameter, in elements
    host_grad: Tensor | None = None  # its place in host memory, if `param` is there

    def stepped_grad(self) -> Tensor:
        """Return the gradient beside `param`; on the host once the device is done."""
        return self.grad if self.host_grad is None else self.host_grad.copy_(self.grad, non_blocking=True)


class TransientMemory:
    """The memory of a tensor that exists for a while. Views of it are valid again once it is allocated again."""

    def __init__(self, x: Tensor) -> None:
        self._storage, self._bytes = x.untyped_storage(), x.numel() * x.itemsize

    def allocate(self) -> None:
        self._storage.resize_(self._bytes)

    def free(self) -> None:
        self._storage.resize_(0)


@dataclass
class _SumOfShards:
    """A reduce-scatter in progress among the ranks of one copy; the all-reduce over copies follows it."""

    scattered: Handle
    replica_group: Group
    own: Tensor

    def wait(self) -> None:
        self.scattered.wait()
        self.replica_group.all_reduce(self.own)


@dataclass(frozen=True)
class Sharing:
    """The dp ranks that shard one copy, and this rank's counterparts in the other copies.

    Without ZeRO each rank is a group of its own. With several groups of several ranks the shards are replicated (HSDP:
    Zhao et al. 2023, section 3.2.2; MiCS: Zhang et al. 2022).
    """

    shard_group: Group
    replica_group: Group

    def sum_later(self, whole: Tensor, own: Tensor) -> Handle:
        """Sum `whole` [n] over all ranks; this rank's part goes to `own`, which may be a view of `whole`."""
        if self.shard_group.size == 1:
            return self.replica_group.all_reduce_later(whole)
        scattered = self.shard_group.reduce_scatter_later(own, whole)
        return scattered if self.replica_group.size == 1 else _SumOfShards(scattered, self.replica_group, own)


class Buffer:
    """Flat storage of the parameters of one class."""

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        shapes: Mapping[str, torch.Size],
        layout: Layout,
        sharing: Sharing,
        tied: Group,
        offload: float = 0.0,
    ) -> None:
        """`offload`: share of the main copy in host memory. Tied parameters are updated on the device, as elsewhere."""
        first = next(iter(specs.values()))
        self.sharing, self.group, self.tied = sharing, sharing.shard_group, tied
        self.partial_over_tp = first.placement == BP and not first.over_tp
        self.frozen = not first.trainable
        self.counts = partial(layout.counts, first)
        self.first_rank = layout.mesh.holder(first.stages[0])
        self.shapes = dict(shapes)
        self._strides = {name: torch.empty(shape, device="meta").stride() for name, shape in shapes.items()}
        self.zero, self._in_compute = layout.zero, layout.gradients == "compute"
        self._tp = layout.mesh.tp
        sizes = [(name, shapes[name].numel()) for name in reversed(list(specs))]
        blocks = {name: spec.unit for name, spec in specs.items()} if layout.zero >= 2 else None
        self.buckets = pack(sizes, layout.copies(first), layout.bucket_elements, blocks)
        self.slots: dict[str, Slot] = {slot.name: slot for bucket in self.buckets for slot in bucket.slots}
        on_host = 0 if self.frozen or tied.size > 1 else offloaded(self.buckets, offload)
        self._on_host = {bucket.start for bucket in self.buckets[:on_host]}

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate zeros; with ZeRO 3 no bucket is gathered yet."""
        main_dtype = dtype if self.frozen else torch.promote_types(dtype, torch.float32)
        self._summed_in = dtype if self._in_compute else main_dtype
        self.narrow = self._summed_in != main_dtype and self.zero < 3
        total, shard = self.buckets[-1].stop, 0
        self._in_shards: dict[int, slice] = {}
        for bucket in self.buckets:
            own = self.own(bucket)
            self._in_shards[bucket.start] = slice(shard, shard := shard + own.stop - own.start)
        self.data = torch.zeros(0 if self.zero == 3 else total, dtype=dtype, device=device)
        self.in_place = self._summed_in == dtype and self.zero < 2
        groups = (self.sharing.shard_group, self.sharing.replica_group, self.tied)
        summed = any(group.size > 1 for group in groups) or (self.partial_over_tp and self._tp > 1)
        self.alone = self.in_place and not (self.narrow or summed)
        self.grads: dict[str, Tensor] = {}
        held = 0 if self.frozen or self.alone else shard if self.zero >= 2 else total
        self.grad = torch.zeros(held, dtype=dtype if self.narrow else main_dtype, device=device)
        self._main_dtype, self._none = main_dtype, torch.zeros(0, dtype=main_dtype, device=device)
        self.wide: Tensor | None = None
        self._late_pieces: list[tuple[ParameterShard, slice]] = []  # whose gradients exist in the optimizer step only
        has_main = self.zero == 3 or dtype != main_dtype
        self._hosted = sum(self.own(b).stop - self.own(b).start for b in self.buckets if b.start in self._on_host)
        self.main = torch.zeros(shard - self._hosted, dtype=main_dtype, device=device) if has_main else None
        pinned = device.type == "cuda" and self._hosted > 0
        self.host, self._host_grad = (torch.zeros(self._hosted, dtype=main_dtype, pin_memory=pinned) for _ in range(2))
        self._whole: dict[int, Tensor] = {}
        self._own: dict[int, Tensor] = {}  # this rank's part of each
        self._memory: dict[int, TransientMemory] = {}  # with ZeRO 3, of each
        for bucket in self.buckets:
            if self.zero == 3:
                whole = torch.empty(bucket.stop - bucket.start, dtype=dtype, device=device)
            else:
                whole = self.data[bucket.start : bucket.stop]
            self._whole[bucket.start], self._own[bucket.start] = whole, self.own_part(whole, bucket)
            if self.zero == 3:
                self._memory[bucket.start] = TransientMemory(whole)
                self.free(bucket)
        self._shards = {bucket.start: self._shard(bucket) for bucket in self.buckets}

    # ---- views ----

    def own(self, bucket: Bucket) -> slice:
        """Return the range of a bucket that this rank updates, counted from the buffer's start."""
        return bucket.shard(self.group.rank, self.group.size)

    def own_part(self, whole: Tensor, bucket: Bucket) -> Tensor:
        """Return this rank's shard of a tensor that holds one bucket."""
        own = self.own(bucket)
        return whole[own.start - bucket.start : own.stop - bucket.start]

    def whole(self, bucket: Bucket) -> Tensor:
        """Return a bucket's parameters, flat; with ZeRO 3 they have no storage until gathered."""
        return self._whole[bucket.start]

    def view(self, whole: Tensor, bucket: Bucket, name: str) -> Tensor:
        """Return a parameter's view, in its own shape, of a tensor that holds one bucket."""
        start = whole.storage_offset() + self.slots[name].start - bucket.start
        return whole.as_strided(self.shapes[name], self._strides[name], start)  # one op, a slice and a view are two

    def shard(self, bucket: Bucket) -> Tensor:
        """Return this rank's shard in the main dtype: a view of `host`, of `main`, or of `data` without a main copy."""
        return self._shards[bucket.start]

    def _shard(self, bucket: Bucket) -> Tensor:
        if bucket.start in self._on_host:
            return self.host[self._in_shards[bucket.start]]
        if self.main is None:
            return self.data[self.own(bucket)]
        at = self._in_shards[bucket.start]
        return self.main[at.start - self._hosted : at.stop - self._hosted]

    def _has_main(self, bucket: Bucket) -> bool:
        """Return whether `shard` is a copy of the parameters, not a view of them."""
        return self.main is not None or bucket.start in self._on_host

    def grad_shard(self, bucket: Bucket) -> Tensor:
        """Return the gradient of `shard`."""
        return self.grad[self._in_shards[bucket.start] if self.zero >= 2 else self.own(bucket)]

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that the optimizer uses."""
        if self.alone:
            torch._foreach_mul_(list(self.grads.values()), factor)
        elif self.wide is not None:
            self.wide.mul_(factor)
        else:
            for bucket in self.buckets:
                self.grad_shard(bucket).mul_(factor)

    def start_update(self) -> None:
        """Give the pieces their gradients, after they are reduced, where `grad` does not hold them: of narrow ones a
        wide copy."""
        if self.narrow:
            shard = sum(part.stop - part.start for part in self._in_shards.values())
            self.wide = torch.empty(shard, dtype=self._main_dtype, device=self.grad.device)
            for bucket in self.buckets:
                self.wide[self._in_shards[bucket.start]].copy_(self.grad_shard(bucket))
        for piece, at in self._late_pieces:
            piece.grad = self.grads[piece.name].view(-1) if self.wide is None else self.wide[at]

    def end_update(self) -> None:
        """Free the wide copy after the step; the scaled gradients are rounded back into `grad`."""
        if self.wide is None:
            return
        for bucket in self.buckets:
            self.grad_shard(bucket).copy_(self.wide[self._in_shards[bucket.start]])
        self.wide = None
        self._forget()

    def start_step(self) -> None:
        """Free the gradients that autograd made."""
        self.end_update()
        self.grads.clear()
        self._forget()

    def _forget(self) -> None:
        for piece, _ in self._late_pieces:
            piece.param.grad, piece.grad = None, self._none

    def pieces(self, counts: bool) -> list[ParameterShard]:
        """Return views of this rank's elements and of their gradients, in buffer order."""
        result = []
        for bucket in self.buckets:
            own, shard, on_host = self.own(bucket), self.shard(bucket), bucket.start in self._on_host
            grad = self.grad if self.frozen or self.alone else self.grad_shard(bucket)
            for slot in bucket.slots:
                part = overlap(slot, own)
                if part is not None:
                    at = slice(part.start - own.start, part.stop - own.start)
                    param, start = nn.Parameter(shard[at], not self.frozen), part.start - slot.start
                    result.append(ParameterShard(slot.name, param, grad[at], counts, start))
                    first = self._in_shards[bucket.start].start
                    in_shards = slice(first + at.start, first + at.stop)
                    if on_host:
                        result[-1].host_grad = self._host_grad[in_shards]
                    if self.narrow or self.alone:
                        result[-1].grad = self._none
                        self._late_pieces.append((result[-1], in_shards))
        return result

    # ---- values ----

    def write(self, bucket: Bucket, name: str, value: Tensor) -> None:
        """Set a parameter to `value`, of its local shape, rounded to the compute dtype."""
        slot, own, whole = self.slots[name], self.own(bucket), self.whole(bucket)
        if self.zero < 3:
            self.view(whole, bucket, name).copy_(value)
        part = overlap(slot, own)
        if self._has_main(bucket) and part is not None:
            shard, mine = self.shard(bucket), value.reshape(-1)[part.start - slot.start : part.stop - slot.start]
            shard[part.start - own.start : part.stop - own.start] = mine.to(shard.device, whole.dtype)

    def start_gather(self, bucket: Bucket) -> Handle:
        """All-gather the shards to the model's parameters; this rank's own is copied there if it is of another type."""
        at = bucket.start
        whole, own = self._whole[at], self._own[at]
        if self.zero == 3:
            self._memory[at].allocate()
        if at in self._on_host:
            own.copy_(self._rounded(bucket, whole.dtype), non_blocking=True)
        elif self.main is not None:
            own = self._shards[at] if self._main_dtype == whole.dtype else own.copy_(self._shards[at])
        return self.group.all_gather_later(whole, own)

    def _rounded(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        """Return this rank's shard on the host in the compute dtype, in the memory of gradients, which were used."""
        shard = self.shard(bucket)
        if dtype == shard.dtype:
            return shard
        return self._host_grad[self._in_shards[bucket.start]].view(dtype)[: len(shard)].copy_(shard)

    def free(self, bucket: Bucket) -> None:
        """Free the storage of gathered parameters; views of it are valid again after the next gather."""
        self._memory[bucket.start].free()

    def whole_gradient(self, bucket: Bucket) -> Tensor:
        """Return the flat gradients of a bucket: a view of `grad`, or with ZeRO 2 and 3 memory of their own."""
        if self.zero < 2:
            return self.grad[bucket.start : bucket.stop]
        return torch.empty(bucket.stop - bucket.start, dtype=self._summed_in, device=self.grad.device)

    def no_gradient(self, name: str) -> Tensor:
        """Return the gradient of a parameter that took no part in a step."""
        return self.data.new_zeros(self.shapes[name])

    def gradients(self) -> dict[str, Tensor]:
        """Return the step's reduced gradients, gathered over dp. A collective."""
        if self.alone:
            return {name: gradient.clone() for name, gradient in self.grads.items()}
        result: dict[str, Tensor] = {}
        for bucket in self.buckets:
            whole = self.grad.new_empty(bucket.stop - bucket.start)
            self.group.all_gather_later(whole, self.grad_shard(bucket).clone()).wait()
            result |= {slot.name: self.view(whole, bucket, slot.name) for slot in bucket.slots}
        return result
