"""Flat storage of the parameters of one class, and this rank's shards of it (ZeRO: Rajbhandari et al. 2020).

With n elements (padding included) on d ranks that share one copy, in the compute dtype c and the main dtype m:

    zero    parameters               gradients            main copy
    0, 1    `data`, c n, whole       `grad`, g n, whole   `main`, m n / d, where m is not c (d = 1 for zero 0)
    2       `data`, c n, whole       `grad`, g n / d      the same
    3       c per bucket, on demand  `grad`, m n / d      `main`, m n / d, always: the parameters themselves

Frozen parameters are sharded with ZeRO 3, in a buffer of their own: c n / d of their own dtype, without gradients or a
main copy. What is sharded holds this rank's shard of every bucket, one after the other.

Gradients are added up and summed in g: m, or c where the layout says so. Then they are `narrow`, and while the
optimizer steps there is a copy of this rank's shard in m, `wide`, which is what is scaled, clipped and stepped with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.packing import Bucket, Slot, overlap, pack
from autoptd.layout.placements import BP, Split
from autoptd.ops.group import Group, Handle


@dataclass
class ParameterShard:
    """What the optimizer updates: this rank's elements of one parameter, 1-D, and their gradient."""

    name: str
    param: nn.Parameter
    grad: Tensor
    counts: bool  # towards the global norm: one rank per logical element
    start: int = 0  # where it begins in the rank's local parameter, in elements


@dataclass
class _SumOfShards:
    """A reduce-scatter among the ranks of one copy under way, and the sum over copies still to do."""

    inside: Handle
    across: Group
    own: Tensor

    def wait(self) -> None:
        self.inside.wait()
        self.across.all_reduce(self.own)


@dataclass(frozen=True)
class Sharing:
    """The dp ranks that share one copy of what is sharded, and this rank's counterparts that share the others.

    Without ZeRO each rank has a copy of its own. Between the two ends the shards are replicated (HSDP: Zhao et al.
    2023, section 3.2.2; MiCS: Zhang et al. 2022).
    """

    inside: Group
    across: Group

    def sum_later(self, whole: Tensor, own: Tensor) -> Handle:
        """Of every rank's `whole` [n], this rank's part of the sum into `own`, which may be a part of `whole`."""
        if self.inside.size == 1:
            return self.across.all_reduce_later(whole)
        scattered = self.inside.reduce_scatter_later(own, whole)
        return scattered if self.across.size == 1 else _SumOfShards(scattered, self.across, own)


class Buffer:
    """Flat storage of the parameters of one class."""

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        shapes: Mapping[str, torch.Size],
        layout: Layout,
        sharing: Sharing,
        tied: Group,
    ) -> None:
        first = next(iter(specs.values()))
        self.sharing, self.group, self.tied = sharing, sharing.inside, tied
        self.partial_over_tp = first.placement == BP
        self.frozen = not first.trainable
        self.split = isinstance(first.placement, Split)
        self.first_rank = layout.mesh.holder(first.stages[0])
        self.shapes = dict(shapes)
        self.zero, self._in_compute = layout.zero, layout.gradients == "compute"
        sizes = [(name, shapes[name].numel()) for name in reversed(list(specs))]
        blocks = {name: spec.unit for name, spec in specs.items()} if layout.zero >= 2 else None
        self.buckets = pack(sizes, layout.mesh.copies, layout.bucket_elements, blocks)
        self.slots: dict[str, Slot] = {slot.name: slot for bucket in self.buckets for slot in bucket.slots}

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Zeros everywhere; under ZeRO 3 nothing is whole yet."""
        main_dtype = dtype if self.frozen else torch.promote_types(dtype, torch.float32)
        self._summed_in = dtype if self._in_compute else main_dtype
        self.narrow = self._summed_in != main_dtype and self.zero < 3
        total, shard = self.buckets[-1].stop, 0
        self._in_shards: dict[int, slice] = {}
        for bucket in self.buckets:
            own = self.own(bucket)
            self._in_shards[bucket.start] = slice(shard, shard := shard + own.stop - own.start)
        self.data = torch.zeros(0 if self.zero == 3 else total, dtype=dtype, device=device)
        held = 0 if self.frozen else shard if self.zero >= 2 else total
        self.grad = torch.zeros(held, dtype=dtype if self.narrow else main_dtype, device=device)
        self._main_dtype = main_dtype
        self.wide: Tensor | None = None
        self._narrow_pieces: list[tuple[ParameterShard, slice]] = []
        has_main = self.zero == 3 or dtype != main_dtype
        self.main = torch.zeros(shard, dtype=main_dtype, device=device) if has_main else None
        self._whole: dict[int, Tensor] = {}
        for bucket in self.buckets:
            if self.zero == 3:
                self._whole[bucket.start] = torch.empty(bucket.stop - bucket.start, dtype=dtype, device=device)
                self.free(bucket)
            else:
                self._whole[bucket.start] = self.data[bucket.start : bucket.stop]

    # ---- where things lie ----

    def own(self, bucket: Bucket) -> slice:
        """The elements of a bucket that this rank updates, counted from the buffer's start."""
        return bucket.shard(self.group.rank, self.group.size)

    def own_part(self, whole: Tensor, bucket: Bucket) -> Tensor:
        """The same of a tensor that is one bucket."""
        own = self.own(bucket)
        return whole[own.start - bucket.start : own.stop - bucket.start]

    def whole(self, bucket: Bucket) -> Tensor:
        """The parameters of a bucket, flat; without storage under ZeRO 3 while they are not gathered."""
        return self._whole[bucket.start]

    def view(self, whole: Tensor, bucket: Bucket, name: str) -> Tensor:
        """A parameter's elements in its own shape, of a tensor that is one bucket."""
        slot = self.slots[name]
        return whole[slot.start - bucket.start : slot.stop - bucket.start].view(self.shapes[name])

    def shard(self, bucket: Bucket) -> Tensor:
        """This rank's parameters at full precision: of `main`, or of `data` itself."""
        return self.data[self.own(bucket)] if self.main is None else self.main[self._in_shards[bucket.start]]

    def grad_shard(self, bucket: Bucket) -> Tensor:
        """The gradient of `shard`."""
        return self.grad[self._in_shards[bucket.start] if self.zero >= 2 else self.own(bucket)]

    def stepped_grad(self, bucket: Bucket) -> Tensor:
        """What the optimizer steps with: `grad_shard`, or its wide copy."""
        return self.grad_shard(bucket) if self.wide is None else self.wide[self._in_shards[bucket.start]]

    def widen(self) -> None:
        """Gradients are summed: what is narrow gets its copy."""
        if not self.narrow:
            return
        shard = sum(part.stop - part.start for part in self._in_shards.values())
        self.wide = torch.empty(shard, dtype=self._main_dtype, device=self.grad.device)
        for bucket in self.buckets:
            self.stepped_grad(bucket).copy_(self.grad_shard(bucket))
        for piece, at in self._narrow_pieces:
            piece.grad = self.wide[at]

    def narrow_again(self) -> None:
        """The step is over: the copy goes, what was scaled stays, rounded."""
        if self.wide is None:
            return
        for bucket in self.buckets:
            self.grad_shard(bucket).copy_(self.stepped_grad(bucket))
        for piece, _ in self._narrow_pieces:
            piece.param.grad, piece.grad = None, piece.grad.new_empty(0)
        self.wide = None

    def pieces(self, counts: bool) -> list[ParameterShard]:
        """Views of this rank's elements, and of their gradients, in buffer order."""
        result = []
        for bucket in self.buckets:
            own, shard = self.own(bucket), self.shard(bucket)
            grad = self.grad if self.frozen else self.grad_shard(bucket)
            for slot in bucket.slots:
                part = overlap(slot, own)
                if part is not None:
                    at = slice(part.start - own.start, part.stop - own.start)
                    param, start = nn.Parameter(shard[at], not self.frozen), part.start - slot.start
                    result.append(ParameterShard(slot.name, param, grad[at], counts, start))
                    if self.narrow:
                        result[-1].grad = shard.new_empty(0)
                        first = self._in_shards[bucket.start].start
                        self._narrow_pieces.append((result[-1], slice(first + at.start, first + at.stop)))
        return result

    # ---- values ----

    def write(self, bucket: Bucket, name: str, value: Tensor) -> None:
        """Take over a parameter's value, of its local shape, rounded to the compute dtype."""
        slot, own, whole = self.slots[name], self.own(bucket), self.whole(bucket)
        if self.zero < 3:
            self.view(whole, bucket, name).copy_(value)
        part = overlap(slot, own)
        if self.main is not None and part is not None:
            mine = value.reshape(-1)[part.start - slot.start : part.stop - slot.start]
            self.shard(bucket)[part.start - own.start : part.stop - own.start] = mine.to(self.main.device, whole.dtype)

    def start_gather(self, bucket: Bucket) -> Handle:
        """Write this rank's shard to the model's parameters, and collect those of the others that share it."""
        whole = self.whole(bucket)
        if self.zero == 3:
            whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
        own = self.own_part(whole, bucket)
        if self.main is not None:
            own.copy_(self.shard(bucket))
        return self.group.all_gather_later(whole, own)

    def free(self, bucket: Bucket) -> None:
        """Give back the storage of gathered parameters; views of it may be read again after the next gather."""
        self.whole(bucket).untyped_storage().resize_(0)

    def empty_gradient(self, bucket: Bucket) -> Tensor:
        """Room for the gradients of a bucket, flat."""
        return torch.empty(bucket.stop - bucket.start, dtype=self._summed_in, device=self.grad.device)

    def gradients(self) -> dict[str, Tensor]:
        """The step's reduced gradients, whole over dp. A collective."""
        result: dict[str, Tensor] = {}
        for bucket in self.buckets:
            whole = self.grad.new_empty(bucket.stop - bucket.start)
            self.group.all_gather_later(whole, self.grad_shard(bucket).clone()).wait()
            result |= {slot.name: self.view(whole, bucket, slot.name) for slot in bucket.slots}
        return result
