"""Ownership of parameters by blocks, the instances of a repeated unit.

A block owns the parameters that only it reads and whose names differ between its instances by a prefix.
"""

from __future__ import annotations

from collections import Counter

from autoptd.passes.fold import Folded, RepeatedUnit, Segment


def owned_by_blocks(folded: Folded) -> tuple[dict[str, str], dict[int, str]]:
    """Return (original name of an owned parameter -> its name in the block, first segment of an instance -> path)."""
    readers = Counter(folded.traced.parameters[p.name] for s in folded.segments for p in s.parameters)
    owned: dict[str, str] = {}
    prefixes: dict[int, str] = {}
    for unit in folded.units:
        instances = [instance(folded, unit, k) for k in range(unit.count)]
        named = [_relative(folded, segments, readers) for segments in instances]
        agree = len({tuple(relative.values()) for _, relative in named}) == 1 and unit.count > 1
        for segments, (prefix, relative) in zip(instances, named, strict=True):
            prefixes[segments[0].index] = prefix if agree else ""
            owned |= relative if agree else {}
    return owned, prefixes


def instance(folded: Folded, unit: RepeatedUnit, k: int) -> tuple[Segment, ...]:
    """Return the segments of the k-th repetition of a unit."""
    start = unit.first + k * unit.length
    return folded.segments[start : start + unit.length]


def _relative(folded: Folded, segments: tuple[Segment, ...], readers: Counter[str]) -> tuple[str, dict[str, str]]:
    """Return (prefix, original name -> name without it) for the parameters that no other segment reads."""
    names = [folded.traced.parameters[p.name] for s in segments for p in s.parameters]
    own = [n for n in dict.fromkeys(names) if readers[n] == 1]
    if not own:
        return "", {}
    paths = [n.split(".") for n in own]
    low, high = min(paths), max(paths)
    length = 0
    while length < min(len(low), len(high)) - 1 and low[length] == high[length]:
        length += 1
    if length == 0:
        return "", {}
    return ".".join(low[:length]), {n: ".".join(p[length:]) for n, p in zip(own, paths, strict=True)}
