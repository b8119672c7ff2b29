"""Flat buffers: every element has one place, shards partition buckets, padding is only at the end of a bucket."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoptd.layout.packing import ALIGN, overlap, pack


def test_layout_by_hand() -> None:
    # two ranks: 64-element units; the bucket closes when it holds 50
    buckets = pack([("c", 30), ("b", 30), ("a", 10)], ranks=2, bucket_elements=50)
    assert [(b.start, b.stop, [(s.name, s.start, s.stop) for s in b.slots]) for b in buckets] == [
        (0, 64, [("c", 0, 30), ("b", 30, 60)]),
        (64, 128, [("a", 64, 74)]),
    ]
    assert buckets[0].shard(1, 2) == slice(32, 64)
    assert overlap(buckets[0].slots[0], slice(32, 64)) is None
    assert overlap(buckets[0].slots[1], slice(32, 64)) == slice(32, 60)


@given(st.lists(st.integers(0, 500), max_size=20), st.integers(1, 9), st.integers(1, 400))
def test_every_element_has_one_place(sizes: list[int], ranks: int, bucket_elements: int) -> None:
    buckets = pack([(str(i), n) for i, n in enumerate(sizes)], ranks, bucket_elements)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert [(s.name, s.stop - s.start) for s in slots] == [(str(i), n) for i, n in enumerate(sizes)]
    end, unit = 0, ranks * ALIGN if ranks > 1 else 1  # a single rank has no shards to align
    for bucket in buckets:
        assert bucket.start == end and (bucket.stop - bucket.start) % unit == 0
        assert bucket.slots[0].start == bucket.start
        assert all(a.stop == b.start for a, b in zip(bucket.slots, bucket.slots[1:], strict=False))
        padding = bucket.stop - bucket.slots[-1].stop
        assert 0 <= padding < unit or (padding == unit and bucket.slots[-1].stop == bucket.start), "only if it is empty"
        shards = [bucket.shard(r, ranks) for r in range(ranks)]
        assert [i for shard in shards for i in range(shard.start, shard.stop)] == list(range(bucket.start, bucket.stop))
        for slot in bucket.slots:
            parts = [p for shard in shards if (p := overlap(slot, shard)) is not None]
            assert [i for p in parts for i in range(p.start, p.stop)] == list(range(slot.start, slot.stop))
        end = bucket.stop
