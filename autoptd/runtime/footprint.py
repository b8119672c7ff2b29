"""What the runtime allocates for parameters, gradients and optimizer, to the byte, from the layout alone.

`buffers.py` lays trainable parameters of one (gradient class over tp, stages) into buckets, each padded so that all dp
ranks have equal, aligned shards. Moments belong to the elements of parameters, padding has none; frozen parameters stay
as they are. Here the same `pack` runs over sizes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass

from autoptd.cost_models.memory import Memory, model_state
from autoptd.passes.placements import Placement, Split
from autoptd.runtime.flat import Bucket, Slot, overlap, pack
from autoptd.runtime.layout import Layout

BUCKET_ELEMENTS = Layout.bucket_elements


def buffer_class(placement: Placement) -> str:
    """What parameters of one buffer have in common over tp: how their gradients lie."""
    return "split" if isinstance(placement, Split) else str(placement)


@dataclass(frozen=True)
class Packed:
    """Elements of every bucket with its padding, and those that the optimizer of each dp rank updates, without."""

    dp: int
    zero: int
    laid_out: tuple[Bucket, ...]
    idle: frozenset[str] = frozenset()  # names of slots that no gradient reaches: they have no moments

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(b.stop - b.start for b in self.laid_out)

    @property
    def stepped(self) -> tuple[int, ...]:
        return tuple(self.stepped_by(rank) for rank in range(self.dp))

    @property
    def most_stepped(self) -> int:
        return max(self.stepped) if self.idle else self.stepped_by(0)

    def stepped_by(self, rank: int) -> int:
        """Of one dp rank; the first has most, since buckets are filled from their start, where none is idle."""
        slots = ((bucket, slot) for bucket in self.laid_out for slot in bucket.slots if slot.name not in self.idle)
        parts = (_own(bucket, slot, rank, self.dp, self.zero) for bucket, slot in slots)
        return sum(part.stop - part.start for part in parts if part is not None)


def packed(
    parameters: Iterable[tuple[Hashable, int]],
    dp: int,
    zero: int,
    bucket_elements: int = BUCKET_ELEMENTS,
    idle: Container[int] = (),
) -> Packed:
    """What (buffer, local elements) of trainable parameters, in forward order, become.

    Parameters of one buffer agree in dtype, `buffer_class` and the stages that hold them. `idle`: positions of those
    that no gradient reaches.
    """
    buffers: dict[Hashable, list[tuple[str, int]]] = {}
    resting = set()
    for i, (buffer, elements) in enumerate(parameters):
        buffers.setdefault(buffer, []).insert(0, (str(i), elements))
        if i in idle:
            resting.add(str(i))
    laid_out = tuple(b for sizes in buffers.values() for b in pack(sizes, dp, bucket_elements))
    return Packed(dp, zero, laid_out, frozenset(resting))


def _own(bucket: Bucket, slot: Slot, rank: int, dp: int, zero: int) -> slice | None:
    return overlap(slot, bucket.shard(rank, dp) if zero else slice(bucket.start, bucket.stop))


def state_bytes(layout: Layout, stage: int, optimizer: str, dp_rank: int = 0) -> Memory:
    """Parameters, gradients and optimizer state on a rank of a stage. Optimizers' step counts are left out."""
    tp, dp = layout.mesh.tp, layout.mesh.dp
    frozen, trained = 0, []
    for spec in layout.parameters.values():
        if stage in spec.stages:
            elements = math.prod(spec.local_shape(tp))
            if spec.trainable:
                trained.append(((spec.dtype, buffer_class(spec.placement), spec.stages), elements))
            else:
                frozen += elements * (spec.dtype or layout.dtype).itemsize
    found = packed(trained, dp, layout.zero, layout.bucket_elements)
    state = model_state(
        found.buckets,
        precision=layout.precision,
        optimizer=optimizer,
        zero=layout.zero,
        dp=dp,
        stepped=found.stepped_by(dp_rank),
    )
    return state + Memory(parameters=frozen)
