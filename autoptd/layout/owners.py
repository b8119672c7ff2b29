"""Owners of whole parameters: the ranks on which an optimizer that is not elementwise updates them.

Ranks that hold one copy of the training state (tp × the ranks that ZeRO shards over; for experts also ep) bring the
gradient and the value of a parameter together at one of them, and get their elements of the new value back:

    rank 0   [g0 g1 | .. .. ]  ──►  owner of w: g0 g1 g2 g3, update  ──►  rank 0: w0 w1
    rank 1   [.. .. | g2 g3 ]  ──►                                   ──►  rank 1: w2 w3

Owners are chosen among these ranks by elements, largest parameter first. A rank that holds all elements of a parameter
by itself updates it without communication. Other copies (ZeRO 0, HSDP), and stages that hold tied parameters, do the
same with the same values.

A rank computes what concerns its own copies, in time proportional to the parameters: parts of a parameter are listed at
its owner alone, and copies that are still alike share their choices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.loads import Loads
from autoptd.layout.packing import Bucket, Slot, overlap, pack
from autoptd.layout.placements import kind as kind_of


@dataclass(frozen=True)
class OwnedPart:
    """Elements [start, stop) of a rank's local parameter, which that rank updates under ZeRO."""

    rank: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class WholeParameter:
    """A parameter that is updated as a whole by one copy of the state, `ranks`, at its owner.

    `alone`: the owner holds all of it by itself, and so may others.
    """

    name: str
    owner: int
    ranks: range
    alone: bool


@dataclass(frozen=True)
class Owners:
    """The distribution of whole parameters `names` over the ranks of one stage. The same on each of these ranks."""

    layout: Layout
    pipeline_rank: int
    names: Collection[str]

    @property
    def ranks(self) -> range:
        """The ranks of the stage, among which everything is exchanged."""
        return self.layout.mesh.stage_ranks(self.pipeline_rank)

    @cached_property
    def held(self) -> dict[str, TensorSpec]:
        """The whole parameters of this stage, in the model's order."""
        mesh, found, names = self.layout.mesh, self.layout.parameters.items(), set(self.names)
        mine = {n: s for n, s in found if n in names and s.trainable}
        return {n: s for n, s in mine.items() if self.pipeline_rank in mesh.holders(s.stages)}

    @cached_property
    def _slots(self) -> dict[str, tuple[Bucket, Slot]]:
        """The place of each trainable parameter of this stage in its buffer, packed as the runtime packs them."""
        mesh, buffers = self.layout.mesh, dict[tuple[object, ...], dict[str, TensorSpec]]()
        for name, spec in self.layout.parameters.items():
            ranks = mesh.holders(spec.stages)
            if spec.trainable and self.pipeline_rank in ranks:
                key = spec.dtype, kind_of(spec.placement), ranks, spec.ep > 1
                buffers.setdefault(key, {})[name] = spec
        found: dict[str, tuple[Bucket, Slot]] = {}
        for specs in buffers.values():
            sizes = [(name, math.prod(specs[name].local_shape(mesh.tp))) for name in reversed(list(specs))]
            blocks = {name: spec.unit for name, spec in specs.items()} if self.layout.zero >= 2 else None
            copies = self.layout.copies(next(iter(specs.values())))
            for bucket in pack(sizes, copies, self.layout.bucket_elements, blocks):
                found |= {slot.name: (bucket, slot) for slot in bucket.slots}
        return found

    # ---- one parameter ----

    def _alike(self, name: str) -> int:
        """Return how many ranks, one after the other, have the same shard of their parts of a parameter."""
        mesh = self.layout.mesh
        return mesh.tp if self.held[name].ep == 1 else mesh.ep * mesh.sharers

    def _width(self, name: str) -> int:
        """Return how many ranks, one after the other, are one copy of the state of a parameter."""
        return self.layout.sharing_of(self.held[name]) * self._alike(name)

    def _copy(self, name: str, rank: int) -> range:
        """Return the ranks of the copy that a rank belongs to."""
        width = self._width(name)
        index = (rank - self.ranks.start) // width
        return self.ranks[index * width : (index + 1) * width]

    def _shards(self, name: str) -> list[tuple[int, slice]]:
        """Return the shards with elements of a parameter, and the elements that each of their ranks has."""
        (bucket, slot), sharing = self._slots[name], self.layout.sharing_of(self.held[name])
        if slot.start == slot.stop:
            return []
        size = (bucket.stop - bucket.start) // sharing
        found = []
        for shard in range((slot.start - bucket.start) // size, (slot.stop - 1 - bucket.start) // size + 1):
            mine = overlap(slot, bucket.shard(shard, sharing))
            assert mine is not None, (name, shard)
            found.append((shard, slice(mine.start - slot.start, mine.stop - slot.start)))
        return found

    def part_of(self, whole: WholeParameter, rank: int) -> OwnedPart | None:
        """Return the elements of a parameter that a rank of its copy holds, None for none."""
        (bucket, slot), sharing = self._slots[whole.name], self.layout.sharing_of(self.held[whole.name])
        shard = (rank - whole.ranks.start) // self._alike(whole.name)
        mine = overlap(slot, bucket.shard(shard, sharing))
        return None if mine is None else OwnedPart(rank, mine.start - slot.start, mine.stop - slot.start)

    def parts(self, whole: WholeParameter) -> tuple[OwnedPart, ...]:
        """Return the parts of all ranks of the copy, by rank."""
        alike = self._alike(whole.name)
        return tuple(
            OwnedPart(rank, part.start, part.stop)
            for shard, part in self._shards(whole.name)
            for rank in whole.ranks[shard * alike : (shard + 1) * alike]
        )

    def sources(self, whole: WholeParameter) -> tuple[OwnedPart, ...]:
        """Return the part of one of the ranks with the same elements, for each such set."""
        return tuple(part for part in self.parts(whole) if self.is_source(whole, part.rank))

    def is_source(self, whole: WholeParameter, rank: int) -> bool:
        """Return whether a rank sends its part: of those with the same elements, the owner or the first does."""
        mesh, spec = self.layout.mesh, self.held[whole.name]
        near = mesh.tp if spec.ep == 1 else mesh.sharers  # ranks of another expert are further away
        first = rank - (rank - self.ranks.start) % near
        equal = [other for other in range(first, first + near) if spec.part(mesh, other) == spec.part(mesh, rank)]
        return rank == (whole.owner if whole.owner in equal else equal[0])

    def counts(self, whole: WholeParameter) -> bool:
        """Return whether a parameter is this stage's first copy, which counts instead of the others."""
        if whole.ranks.start != self.ranks.start:
            return False
        return not whole.alone or whole.owner == whole.ranks[self._alone[whole.name]]

    # ---- choice of owners ----

    @cached_property
    def _alone(self) -> dict[str, int]:
        """The parameters that some rank of each copy holds all of, and the index of the first such rank."""
        found, tp = {}, self.layout.mesh.tp
        for name, spec in self.held.items():
            numel, shards = math.prod(spec.shape), self._shards(name)
            if len(shards) == 1 and math.prod(spec.local_shape(tp)) == numel:
                found[name] = shards[0][0] * self._alike(name)
        return found

    def around(self, rank: int, with_alone: bool = True) -> tuple[WholeParameter, ...]:
        """Return the parameters of the copies that a rank belongs to; of alone ones, those that it holds all of."""
        chosen, found = self._chosen_around(rank), []
        for name in self.held:
            ranks = self._copy(name, rank)
            if name not in self._alone:
                found.append(WholeParameter(name, chosen[name], ranks, alone=False))
            elif with_alone and 0 <= rank - ranks[self._alone[name]] < self._alike(name):
                found.append(WholeParameter(name, rank, ranks, alone=True))
        return tuple(found)

    def of(self, rank: int) -> tuple[WholeParameter, ...]:
        """Return the parameters that a rank updates."""
        return tuple(whole for whole in self.around(rank) if whole.owner == rank)

    def _chosen_around(self, rank: int) -> dict[str, int]:
        """Return the owner of each parameter that is brought together, in the copies that a rank belongs to.

        The stage is cut into units that no small copy crosses. A large copy is many units, of which a choice changes
        one; all others are still alike, and count as one.
        """
        widths = {name: self._width(name) for name in self.held}
        small, large = min(widths.values(), default=1), max(widths.values(), default=1)
        size = small if large % small == 0 else math.lcm(small, large)
        units, place = max(1, large // size), rank - self.ranks.start
        first, here = place - place % (units * size), place % (units * size) // size
        numels = {name: math.prod(self.held[name].shape) for name in self.held}
        order = sorted((name for name in self.held if name not in self._alone), key=lambda name: -numels[name])
        plain, changed, found = _Unit(Loads(size)), dict[int, _Unit](), dict[str, int]()
        for name, shift in self._alone.items():
            for start in range(shift, size, widths[name]):
                for place_alone in range(start, start + self._alike(name)):
                    plain.loads.add(place_alone, numels[name])

        def advance(unit: _Unit, stop: int) -> None:
            for name in order[unit.done : stop]:
                for start in range(0, size, widths[name]) if widths[name] <= size else ():
                    owner = unit.loads.least(start, start + widths[name])[1]
                    unit.loads.add(owner, numels[name])
                    unit.owners[name, start] = owner
            unit.done = stop

        for index, name in enumerate(order):
            if widths[name] <= size:
                continue
            candidates = dict(changed)
            if (alike := next((at for at in range(units) if at not in changed), None)) is not None:
                candidates[alike] = plain
            for unit in candidates.values():
                advance(unit, index)
            least = {at: unit.loads.least(0, size) for at, unit in candidates.items()}
            at = min(least, key=lambda at: (least[at][0], at))
            if at not in changed:
                changed[at] = plain.copy()
            owner = least[at][1]
            changed[at].loads.add(owner, numels[name])
            found[name] = at * size + owner
        mine = changed.get(here, plain)
        advance(mine, len(order))
        for name in order:
            if widths[name] <= size:
                start = place % size // widths[name] * widths[name]
                found[name] = here * size + mine.owners[name, start]
        return {name: self.ranks.start + first + owner for name, owner in found.items()}

    # ---- rounds ----

    def rounds(
        self, rank: int, dtypes: Mapping[str, torch.dtype], most: int
    ) -> list[tuple[torch.dtype, tuple[WholeParameter, ...]]]:
        """Return the parameters that are brought together, in rounds of one type and of `most` elements per rank.

        Equally many rounds on all ranks of the stage, with the parameters of the copies that `rank` belongs to.
        """
        found: list[tuple[torch.dtype, list[WholeParameter]]] = []
        room, capacity = 0, most * len(self.ranks)
        for whole in self.around(rank, with_alone=False):
            dtype, numel, width = dtypes[whole.name], math.prod(self.held[whole.name].shape), len(whole.ranks)
            copies, mine, done = len(self.ranks) // width, (whole.ranks.start - self.ranks.start) // width, 0
            while done < copies:
                if not found or found[-1][0] != dtype or numel > room:
                    found.append((dtype, []))
                    room = capacity
                taken = min(copies - done, max(1, room // numel if numel else copies))
                if done <= mine < done + taken:
                    found[-1][1].append(whole)
                done, room = done + taken, room - taken * numel
        return [(dtype, tuple(each)) for dtype, each in found]


@dataclass
class _Unit:
    """Loads of some ranks, after the first `done` parameters: the owner of each, by name and start of its copy."""

    loads: Loads
    done: int = 0
    owners: dict[tuple[str, int], int] = field(default_factory=dict)

    def copy(self) -> _Unit:
        return _Unit(self.loads.copy(), self.done, dict(self.owners))
