"""Blocks of a model, which become classes of the program and recompute together; and the parameters that each owns.

A block is a repetition of a unit. If the layers of a repetition are of several sorts (three with linear attention, one
with full attention), each layer is a block: the segments whose parameters' names agree up to the first word that the
next repetition does not share.

A block owns the parameters that only it reads and whose names differ between equal blocks by a prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autoptd.passes.fold import Folded, RepeatedUnit, Segment, wired


@dataclass(frozen=True)
class LayerBlock:
    """`length` segments from `first` on, of a unit. `like`: where the first equal block of the unit starts."""

    first: int
    length: int
    like: int
    unit: RepeatedUnit

    def inside(self, first: int, last: int) -> tuple[int, ...]:
        """Return the block's segments within a stage."""
        return tuple(range(max(first, self.first), min(last, self.first + self.length - 1) + 1))

    def segments(self, folded: Folded) -> tuple[Segment, ...]:
        return folded.segments[self.first : self.first + self.length]

    def model(self, folded: Folded) -> tuple[Segment, ...]:
        """Return the segments of the first equal block."""
        return folded.segments[self.like : self.like + self.length]


def find_blocks(folded: Folded) -> Iterator[LayerBlock]:
    """Yield the blocks of all units, in order."""
    texts, names = wired(folded.segments), _Names(folded)
    for unit in folded.units:
        lengths, first = names.lengths(unit), unit.first
        alike: dict[tuple[object, ...], int] = {}
        for _ in range(unit.count):
            for length in lengths:
                several = (*texts[first : first + length], names.relative(first, length))
                text = several if len(lengths) > 1 else ()
                read = _repeated_reads(folded.segments[first : first + length])
                yield LayerBlock(first, length, alike.setdefault((*text, read), first), unit)
                first += length


def layer_segments(folded: Folded) -> frozenset[int]:
    """Return the segments of a model's layers: all that repeat, and those that own modules inside a numbered one, as
    the dense layers before a mixture do (`layers.0.mlp.gate_proj.weight`). All segments, if none repeats."""
    repeated = [u for u in folded.units if u.count > 1]
    if not repeated:
        return frozenset(range(len(folded.segments)))
    named = {i for i, names in enumerate(_Names(folded).of) if any(_is_numbered(name) for name in names)}
    return frozenset(named.union(*(range(u.first, u.last + 1) for u in repeated)))


def _is_numbered(name: list[str]) -> bool:
    """Return whether a parameter belongs to a module inside a numbered one."""
    return any(word.isdecimal() for word in name[:-2])


def _repeated_reads(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Number the parameters and tensors of the prelude that segments read, each by its first occurrence.

    Blocks of equal segments whose numbers differ take other arguments: one reads w twice, another one v and w.
    """
    numbers: dict[fx.Node, int] = {}
    return tuple(numbers.setdefault(n, len(numbers)) for s in segments for n in (*s.parameters, *s.prelude))


class _Names:
    """The names of the parameters of each segment, as lists of words."""

    def __init__(self, folded: Folded) -> None:
        called = folded.traced.parameters
        self.of = [[called[p.name].split(".") for p in s.parameters] for s in folded.segments]

    def lengths(self, unit: RepeatedUnit) -> list[int]:
        """Return the lengths of the blocks of a unit, which all of its repetitions agree on; else its own length."""
        found = [self._layers(unit, k) for k in range(unit.count)]
        names = [name for layers in found for name, _ in layers]
        lengths = [[length for _, length in layers] for layers in found]
        agreed = all(x == lengths[0] for x in lengths) and len(set(names)) == len(names)
        return lengths[0] if agreed and unit.count > 1 else [unit.length]

    def _layers(self, unit: RepeatedUnit, k: int) -> list[tuple[str, int]]:
        """Return the names and lengths of the layers of a repetition."""
        start, other = (unit.first + i % unit.count * unit.length for i in (k, k + 1))
        found: list[tuple[str, int]] = []
        for i in range(unit.length):
            name = _shared_name(self.of[start + i], self.of[other + i])
            if found and (not name or name == found[-1][0] or not found[-1][0]):
                found[-1] = found[-1][0] or name, found[-1][1] + 1
            else:
                found.append((name, 1))
        return found

    def relative(self, first: int, length: int) -> tuple[tuple[str, ...], ...]:
        """Return the names of some segments' parameters without what they have in common."""
        names = [name for of in self.of[first : first + length] for name in of]
        shared = 0
        while names and all(x[: shared + 1] == names[0][: shared + 1] and len(x) > shared + 1 for x in names):
            shared += 1
        return tuple(tuple(x[shared:]) for x in names)


def _shared_name(mine: list[list[str]], others: list[list[str]]) -> str:
    """Return the start of the names in `mine`, up to the first word that differs in `others`; "" if there is no one."""
    found = set()
    for name, other in zip(mine, others, strict=True):
        differ = next((i for i, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), None)
        if differ is not None:
            found.add(".".join(name[: differ + 1]))
    return found.pop() if len(found) == 1 else ""


def owned_by_blocks(folded: Folded) -> tuple[dict[str, str], dict[int, str]]:
    """Return (original name of an owned parameter -> its name in the block, first segment of a block -> path)."""
    readers = Counter(folded.traced.parameters[p.name] for s in folded.segments for p in s.parameters)
    owned: dict[str, str] = {}
    prefixes: dict[int, str] = {}
    equal: dict[int, list[LayerBlock]] = {}
    for block in find_blocks(folded):
        equal.setdefault(block.like, []).append(block)
    for blocks in equal.values():
        named = [_relative(folded, block.segments(folded), readers) for block in blocks]
        # each place by its owned name, since one layer may own its first product and another one its second
        places = {
            tuple(relative.get(name) for name in _parameter_names(folded, block.segments(folded)))
            for block, (_, relative) in zip(blocks, named, strict=True)
        }
        agree = len(places) == 1 and len(blocks) > 1
        for block, (prefix, relative) in zip(blocks, named, strict=True):
            prefixes[block.first] = prefix if agree else ""
            owned |= relative if agree else {}
    return owned, prefixes


def _parameter_names(folded: Folded, segments: Sequence[Segment]) -> list[str]:
    return [folded.traced.parameters[p.name] for s in segments for p in s.parameters]


def _relative(folded: Folded, segments: tuple[Segment, ...], readers: Counter[str]) -> tuple[str, dict[str, str]]:
    """Return (prefix, original name -> name without it) for the parameters that no other segment reads."""
    own = [n for n in dict.fromkeys(_parameter_names(folded, segments)) if readers[n] == 1]
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
