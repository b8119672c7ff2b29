"""Flat buffers divided into buckets: the elements of each parameter, bucket and dp rank.

    bucket 0                          bucket 1
    | w3 | w2 ......| pad |           | w1 | w0 .........| pad |
    | rank 0  | rank 1  |             | rank 0  | rank 1  |       shards of two dp ranks

Parameters are in the order in which their gradients are computed, the reverse of forward. Buckets are padded so that
every rank's shard is equal and aligned; a shard boundary may cut a parameter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

ALIGN = 32  # elements; 128 bytes of float32


@dataclass(frozen=True)
class Slot:
    """The elements of one parameter in a buffer."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """A range of a buffer that is reduced and gathered by one collective."""

    start: int
    stop: int
    slots: tuple[Slot, ...]

    def shard(self, rank: int, ranks: int) -> slice:
        """Return the elements of one of `ranks` equal shards."""
        width = (self.stop - self.start) // ranks
        return slice(self.start + rank * width, self.start + (rank + 1) * width)


def pack(
    sizes: Iterable[tuple[str, int]], ranks: int, bucket_elements: int, blocks: Mapping[str, Hashable] | None = None
) -> list[Bucket]:
    """Pack (name, elements) in order. A bucket closes once it holds `bucket_elements`, or the parameters end.

    `blocks`: the block of each parameter, by name; a bucket then also closes at the end of a block. One of parameters
    without elements has padding.
    """
    buckets: list[Bucket] = []
    start = end = 0
    slots: list[Slot] = []

    def close() -> None:
        nonlocal start, end, slots
        if slots:
            unit = ranks * ALIGN if ranks > 1 else 1
            stop = start + max(1, -(-(end - start) // unit)) * unit  # no two buckets start at one place
            buckets.append(Bucket(start, stop, tuple(slots)))
            start = end = stop
            slots = []

    for name, elements in sizes:
        if blocks is not None and slots and blocks[name] != blocks[slots[-1].name]:
            close()
        slots.append(Slot(name, end, end + elements))
        end += elements
        if end - start >= bucket_elements:
            close()
    close()
    return buckets


def offloaded(buckets: Sequence[Bucket], share: float) -> int:
    """Return how many buckets, from the first on, have at least this share of the elements: those whose optimizer state
    is in host memory. Their gradients are complete before those of the others."""
    wanted, count = share * sum(bucket.stop - bucket.start for bucket in buckets), 0
    while wanted > 0 and count < len(buckets):
        wanted -= buckets[count].stop - buckets[count].start
        count += 1
    return count


def overlap(slot: Slot, shard: slice) -> slice | None:
    """Return the elements of a parameter within a shard; None if there are none."""
    low, high = max(slot.start, shard.start), min(slot.stop, shard.stop)
    return slice(low, high) if low < high else None
