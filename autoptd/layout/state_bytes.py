"""Exact bytes that the runtime allocates for parameters, gradients and optimizer, computed from the layout alone.

`runtime/zero` packs trainable parameters of equal (gradient class over tp, stages) into buckets, each padded so that
all dp ranks have equal, aligned shards. The optimizer's moments exist for elements of parameters, not for padding.
Under ZeRO 3 frozen parameters have buckets of their own, in their own dtype; otherwise they are not packed. Here the
same `pack` runs over the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from autoptd.cost_models.memory import MAIN_BYTES, UPDATE_COSTS, Memory, model_state
from autoptd.layout.host_memory import host_state_bytes
from autoptd.layout.layout import Layout
from autoptd.layout.owners import Owners
from autoptd.layout.packing import Bucket, offloaded, overlap, pack
from autoptd.layout.placements import kind as kind_of

Unit: TypeAlias = tuple[str, tuple[int, ...]]  # `TensorSpec.unit`: path of a block or "", and the stages that read it
BUCKET_ELEMENTS = Layout.bucket_elements
RANK_ELEMENTS = 2**20  # of a default bucket for each rank, so that a message's bytes cost more than its latency


def elements_of(bucket_bytes: int, gradient_bytes: int, ranks: int) -> int:
    """Return the elements at which a bucket of `bucket_bytes` of gradients closes.

    0 bytes: the default, which grows with the ranks that reduce it, since a ring has as many steps.
    """
    if bucket_bytes:
        return max(1, bucket_bytes // gradient_bytes)
    return max(BUCKET_ELEMENTS, RANK_ELEMENTS * ranks)


@dataclass(frozen=True)
class Packed:
    """Buckets of packed trainable parameters (`buffers`) and of the frozen ones that ZeRO 3 shards (`frozen`)."""

    dp: int
    shards: int  # ranks that share one copy; 1 without ZeRO
    buffers: tuple[tuple[Bucket, ...], ...]
    idle: frozenset[str] = frozenset()  # names of slots that no gradient reaches; they have no moments
    units: tuple[Unit, ...] = ()  # by slot; empty unless gradients are sharded
    frozen: tuple[tuple[Bucket, ...], ...] = ()
    itemsizes: tuple[int, ...] = ()  # by slot, for those in `frozen`; 0 for others
    on_host: tuple[tuple[Bucket, ...], ...] = ()  # of each of `buffers`, those whose optimizer state is in host memory

    @property
    def laid_out(self) -> tuple[Bucket, ...]:
        return tuple(bucket for buckets in self.buffers for bucket in buckets)

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(map(_elements, self.laid_out))

    @property
    def whole(self) -> int:
        """The most gradient elements that ZeRO 2 and 3 hold unsharded: a bucket per buffer, and one being reduced.

        Buffers receive gradients in the same order, so each fills one bucket at a time. The one being reduced
        (`grad_reduce.UNDER_WAY`) is the previous one of its buffer.
        """
        each = [list(map(_elements, buckets)) for buckets in self.buffers]
        filled = sum(map(max, each))
        return max((filled - max(sizes) + max(map(sum, pairwise([0, *sizes]))) for sizes in each), default=0)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of a rank's shards of frozen parameters."""
        return sum(self._bytes(bucket, 0) // self.shards for buckets in self.frozen for bucket in buckets)

    def _bytes(self, bucket: Bucket, itemsize: int) -> int:
        """Return the bytes of a whole bucket. `itemsize`: bytes per element unless the bucket is frozen."""
        slot = int(bucket.slots[0].name)
        return _elements(bucket) * (self.itemsizes[slot] if self.itemsizes and self.itemsizes[slot] else itemsize)

    def gathered_bytes(self, itemsize: int) -> int:
        """Return the most bytes of parameters that ZeRO 3 holds gathered: two blocks, and those a stage reads itself.

        `itemsize`: bytes of the compute dtype, in which trainable parameters are gathered.
        """
        blocks, stages = dict[str, int](), dict[int, int]()
        held = (*self.laid_out, *(bucket for buckets in self.frozen for bucket in buckets))
        for bucket in held if self.units else ():
            block, readers = self.units[int(bucket.slots[0].name)]
            if block:
                blocks[block] = blocks.get(block, 0) + self._bytes(bucket, itemsize)
            for stage in readers if not block else ():
                stages[stage] = stages.get(stage, 0) + self._bytes(bucket, itemsize)
        return sum(sorted(blocks.values())[-2:]) + max(stages.values(), default=0)

    @property
    def host_elements(self) -> int:
        """Elements of a rank's shard whose main copy is in host memory."""
        return sum(self.hosted)

    @property
    def hosted(self) -> tuple[int, ...]:
        """Elements there, by buffer."""
        return tuple(sum(_elements(bucket) // self.shards for bucket in buckets) for buckets in self.on_host)

    @property
    def stepped(self) -> tuple[int, ...]:
        return tuple(self.stepped_by(rank) for rank in range(self.dp))

    @property
    def most_stepped(self) -> int:
        return max(self.stepped) if self.idle else self.stepped_by(0)

    def stepped_by(self, rank: int) -> int:
        """Return the elements that a dp rank updates on its device; rank 0 has the most unless parameters are idle."""
        on_host = {id(bucket) for buckets in self.on_host for bucket in buckets}
        held = [bucket for bucket in self.laid_out if id(bucket) not in on_host]
        shards = ((bucket.shard(rank % self.shards, self.shards), bucket.slots) for bucket in held)
        parts = (overlap(slot, shard) for shard, slots in shards for slot in slots if slot.name not in self.idle)
        return sum(part.stop - part.start for part in parts if part is not None)


def packed(
    parameters: Iterable[tuple[Hashable, int]],
    dp: int,
    shards: int,
    bucket_elements: int = BUCKET_ELEMENTS,
    idle: Container[int] = (),
    units: Sequence[Unit] = (),
    frozen: Mapping[int, int] | None = None,
    offload: float = 0.0,
    tied: Container[int] = (),
) -> Packed:
    """Pack parameters, given as (buffer, local elements) in forward order.

    Parameters of one buffer agree in dtype, `placements.kind` and the stages that hold them. `shards`: dp ranks that
    share one copy. `idle`: positions of parameters that no gradient reaches. `units`: with ZeRO 2 and 3, the unit of
    each; only parameters of one unit share a bucket. `frozen`: bytes per element of frozen parameters, by position.
    `offload`: share of the optimizer state in host memory, of buffers without parameters in `tied`, those that several
    pipeline ranks hold, by position.
    """
    frozen = frozen or {}
    buffers: dict[tuple[int, Hashable], list[tuple[str, int]]] = {}
    count = 0
    for i, (buffer, elements) in enumerate(parameters):
        count += 1
        buffers.setdefault((frozen.get(i, 0), buffer), []).append((str(i), elements))
    named = {str(i): unit for i, unit in enumerate(units)} if units else None
    laid_out = {key: tuple(pack(reversed(sizes), dp, bucket_elements, named)) for key, sizes in buffers.items()}
    trained = tuple(buckets for (still, _), buckets in laid_out.items() if not still)
    alone = (buckets for buckets in trained if offload and int(buckets[0].slots[0].name) not in tied)
    return Packed(
        dp,
        shards,
        trained,
        frozenset(str(i) for i in range(count) if i in idle),
        tuple(units),
        tuple(buckets for (still, _), buckets in laid_out.items() if still),
        tuple(frozen.get(i, 0) for i in range(count)),
        tuple(buckets[: offloaded(buckets, offload)] for buckets in alone),
    )


def _elements(bucket: Bucket) -> int:
    return bucket.stop - bucket.start


def state_bytes(
    layout: Layout, pipeline_rank: int, optimizer: str, dp_rank: int = 0, fullest: bool = False, tp_rank: int = 0
) -> Memory:
    """Return the bytes of parameters, gradients and optimizer state of a rank, without optimizers' step counts.

    `dp_rank` counts dp and cp together. `fullest`: add what ZeRO 2 and 3 hold unsharded at their peak. `tp_rank`
    matters to optimizers that update whole parameters, each at its owner (`owners.py`).
    """
    cost, names = UPDATE_COSTS[optimizer], whole_names(layout, optimizer)
    parts = [
        _state_of(layout, pipeline_rank, optimizer, dp_rank, fullest, ep, names) for ep in sorted({1, layout.mesh.ep})
    ]
    owners = Owners(layout, pipeline_rank, names)
    owned = owners.of(owners.ranks[dp_rank * layout.mesh.tp + tp_rank]) if names else ()
    kept = sum(cost.elements(spec.shape, True) for w in owned if not (spec := owners.held[w.name]).idle)
    return sum(parts[1:], parts[0]) + Memory(optimizer=kept * MAIN_BYTES[layout.precision])


def whole_names(layout: Layout, optimizer: str) -> frozenset[str]:
    """Return the parameters that a named optimizer updates as whole tensors."""
    whole = UPDATE_COSTS[optimizer].whole
    trained = {name: spec for name, spec in layout.parameters.items() if spec.trainable}
    return frozenset(name for name, spec in trained.items() if whole == "all" or (whole == "hidden" and spec.hidden))


def _state_of(
    layout: Layout,
    pipeline_rank: int,
    optimizer: str,
    dp_rank: int,
    fullest: bool,
    ep: int,
    whole: frozenset[str],
) -> Memory:
    """Return the state of parameters that are split over `ep` ranks, without the optimizer's of those in `whole`."""
    tp, dp, sharing = layout.mesh.tp, layout.mesh.copies, 1
    alone, held, units, frozen = 0, list[tuple[Hashable, int]](), list[Unit](), dict[int, int]()
    idle, tied = set[int](), set[int]()
    for name, spec in layout.parameters.items():
        if spec.ep == ep and pipeline_rank in (holders := layout.mesh.holders(spec.stages)):
            dp, sharing = layout.copies(spec), layout.sharing_of(spec)
            elements, itemsize = math.prod(spec.local_shape(tp)), (spec.dtype or layout.dtype).itemsize
            if not spec.trainable and layout.zero < 3:
                alone += elements * itemsize
                continue
            if not spec.trainable:
                frozen[len(held)] = itemsize
            elif spec.idle or name in whole:
                idle.add(len(held))
            if len(holders) > 1:
                tied.add(len(held))
            held.append(((spec.dtype, kind_of(spec.placement), holders), elements))
            units.append(spec.unit)
    given = units if layout.zero >= 2 else ()
    offload = layout.offload[pipeline_rank] if layout.offload else 0.0
    found = packed(held, dp, sharing, layout.bucket_elements, idle, given, frozen, offload, tied)
    state = model_state(
        found.buckets,
        precision=layout.precision,
        optimizer=optimizer,
        zero=layout.zero,
        gradients=layout.gradients,
        dp=dp,
        shards=sharing,
        whole_numel=found.whole if fullest else 0,
        kept=UPDATE_COSTS[optimizer].moments * found.stepped_by(dp_rank * dp // layout.mesh.copies),
        on_host=found.host_elements,
    )
    gathered = found.gathered_bytes(layout.dtype.itemsize) if fullest and layout.zero == 3 else 0
    there = host_state_bytes(found.hosted, precision=layout.precision, optimizer=optimizer)
    return state + Memory(parameters=alone + found.frozen_bytes + gathered, host=there)
