"""One-dimensional buffers cut into buckets: which element belongs to which parameter, bucket and dp rank.

    bucket 0                          bucket 1
    | w3 | w2 ......| pad |           | w1 | w0 .........| pad |
    | rank 0  | rank 1  |             | rank 0  | rank 1  |       shards of two dp ranks

Parameters stand in the order in which their gradients come (the reverse of forward). Buckets are padded so that every
rank's shard is equal and aligned; a shard boundary may cut a parameter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

ALIGN = 32  # elements; 128 bytes of float32


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """A range that is reduced and gathered as one."""

    start: int
    stop: int
    slots: tuple[Slot, ...]

    def shard(self, rank: int, ranks: int) -> slice:
        """The elements of one of `ranks` equal shards."""
        width = (self.stop - self.start) // ranks
        return slice(self.start + rank * width, self.start + (rank + 1) * width)


def pack(
    sizes: Iterable[tuple[str, int]], ranks: int, bucket_elements: int, blocks: Mapping[str, Hashable] | None = None
) -> list[Bucket]:
    """Lay (name, elements) out in order. A bucket closes once it holds `bucket_elements` or the parameters end.

    `blocks`: by name, the block that it is a part of; a bucket then closes where another begins.
    """
    buckets: list[Bucket] = []
    start = end = 0
    slots: list[Slot] = []

    def close() -> None:
        nonlocal start, end, slots
        if slots:
            unit = ranks * ALIGN if ranks > 1 else 1
            stop = start + -(-(end - start) // unit) * unit
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


def overlap(slot: Slot, shard: slice) -> slice | None:
    """The elements of a parameter that lie in a shard."""
    low, high = max(slot.start, shard.start), min(slot.stop, shard.stop)
    return slice(low, high) if low < high else None
