"""Owners of whole parameters: the ranks on which an optimizer that is not elementwise updates them.

Ranks that hold one copy of the training state (tp × the ranks that ZeRO shards over; for experts also ep) bring the
gradient and the value of a parameter together at one of them, and get their elements of the new value back:

    rank 0   [g0 g1 | .. .. ]  ──►  owner of w: g0 g1 g2 g3, update  ──►  rank 0: w0 w1
    rank 1   [.. .. | g2 g3 ]  ──►                                   ──►  rank 1: w2 w3

Owners are chosen among these ranks by elements, largest parameter first. A rank that holds all elements of a parameter
by itself updates it without communication. Other copies (ZeRO 0, HSDP), and stages that hold tied parameters, do the
same with the same values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.packing import Bucket, Slot, overlap, pack
from autoptd.layout.placements import Split


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
    """A parameter that is updated as a whole by one copy of the state: its parts there, and the owner's rank.

    `sources`: one of the ranks that hold the same elements, for each such set.
    """

    name: str
    owner: int
    parts: tuple[OwnedPart, ...]  # by rank
    sources: tuple[OwnedPart, ...]


@dataclass(frozen=True)
class Owners:
    """The distribution of whole parameters `names` over the ranks of one stage. The same on each of these ranks."""

    layout: Layout
    pipeline_rank: int
    names: Collection[str]

    @property
    def ranks(self) -> range:
        """The ranks of the stage, among which everything is exchanged."""
        width = self.layout.mesh.copies * self.layout.mesh.tp
        return range(self.pipeline_rank * width, (self.pipeline_rank + 1) * width)

    @cached_property
    def held(self) -> dict[str, TensorSpec]:
        """The whole parameters of this stage, in the model's order."""
        mesh, found = self.layout.mesh, self.layout.parameters.items()
        mine = {n: s for n, s in found if s.trainable and self.pipeline_rank in mesh.holders(s.stages)}
        return {n: s for n, s in mine.items() if n in set(self.names)}

    @cached_property
    def _slots(self) -> dict[str, tuple[Bucket, Slot]]:
        """The place of each trainable parameter of this stage in its buffer, packed as the runtime packs them."""
        mesh, buffers = self.layout.mesh, dict[tuple[object, ...], dict[str, TensorSpec]]()
        for name, spec in self.layout.parameters.items():
            ranks = mesh.holders(spec.stages)
            if spec.trainable and self.pipeline_rank in ranks:
                kind = "split" if isinstance(spec.placement, Split) else str(spec.placement)
                buffers.setdefault((spec.dtype, kind, ranks, spec.ep > 1), {})[name] = spec
        found: dict[str, tuple[Bucket, Slot]] = {}
        for specs in buffers.values():
            sizes = [(name, math.prod(specs[name].local_shape(mesh.tp))) for name in reversed(list(specs))]
            blocks = {name: spec.unit for name, spec in specs.items()} if self.layout.zero >= 2 else None
            copies = self.layout.copies(next(iter(specs.values())))
            for bucket in pack(sizes, copies, self.layout.bucket_elements, blocks):
                found |= {slot.name: (bucket, slot) for slot in bucket.slots}
        return found

    @cached_property
    def _indices(self) -> dict[str, dict[int, int]]:
        """The index of each rank among the ranks that hold the same part of a parameter, or of an expert's."""
        mesh, axes = self.layout.mesh, ("data", "edp")
        found: dict[str, dict[int, int]] = {axis: {} for axis in axes}
        for axis in axes:
            for rank in self.ranks:
                if rank not in found[axis]:
                    found[axis] |= {other: i for i, other in enumerate(mesh.group_of(rank, axis))}  # type: ignore[arg-type]
            found[axis] = {rank: found[axis][rank] for rank in self.ranks}
        return found

    def _copies(self, name: str) -> list[dict[int, OwnedPart | None]]:
        """Return the ranks of each copy of the state, and each rank's elements of a parameter."""
        spec = self.held[name]
        (bucket, slot), width = self._slots[name], self.layout.sharing_of(spec)
        copies: dict[int, dict[int, OwnedPart | None]] = {}
        for rank, index in self._indices["edp" if spec.ep > 1 else "data"].items():
            copy, shard = divmod(index, width)
            mine = overlap(slot, bucket.shard(shard, width))
            part = None if mine is None else OwnedPart(rank, mine.start - slot.start, mine.stop - slot.start)
            copies.setdefault(copy, {})[rank] = part
        return [copies[i] for i in sorted(copies)]

    @cached_property
    def wholes(self) -> tuple[WholeParameter, ...]:
        """Every whole parameter in each copy of the state. One that several ranks hold by themselves is on each."""
        load = dict.fromkeys(self.ranks, 0)
        found: dict[str, list[WholeParameter]] = {name: [] for name in self.held}
        left: list[tuple[int, str, dict[int, OwnedPart | None]]] = []
        for name, spec in self.held.items():
            numel = math.prod(spec.shape)
            for copy in self._copies(name):
                alone = [part for part in copy.values() if part is not None and part.numel == numel]
                found[name] += [WholeParameter(name, part.rank, (part,), (part,)) for part in alone]
                for part in alone:
                    load[part.rank] += numel
                left += [] if alone else [(numel, name, copy)]
        for numel, name, copy in sorted(left, key=lambda each: -each[0]):  # stable: ties in the model's order
            owner = min(copy, key=lambda rank: (load[rank], rank))
            parts = tuple(part for part in copy.values() if part is not None)
            found[name].append(WholeParameter(name, owner, parts, self._sources(name, owner, parts)))
            load[owner] += numel
        return tuple(whole for each in found.values() for whole in each)

    def _sources(self, name: str, owner: int, parts: tuple[OwnedPart, ...]) -> tuple[OwnedPart, ...]:
        """Return one of the ranks with each element: the owner itself if it is among them."""
        spec, mesh = self.held[name], self.layout.mesh
        chosen: dict[object, OwnedPart] = {}
        for part in parts:
            key = spec.part(mesh, part.rank), part.start
            if key not in chosen or part.rank == owner:
                chosen[key] = part
        return tuple(chosen.values())

    def of(self, rank: int) -> tuple[WholeParameter, ...]:
        """Return the parameters that a rank updates."""
        return tuple(whole for whole in self.wholes if whole.owner == rank)

    def moved(self, dtypes: Mapping[str, torch.dtype], most: int) -> list[tuple[WholeParameter, ...]]:
        """Return the parameters that are brought together, in rounds of one type and of `most` elements per rank."""
        rounds: list[list[WholeParameter]] = []
        size, before = 0, None
        for whole in self.wholes:
            if len(whole.parts) == 1 and whole.parts[0].rank == whole.owner:
                continue
            numel = math.prod(self.held[whole.name].shape)
            if not rounds or dtypes[whole.name] != before or size + numel > most * len(self.ranks):
                rounds.append([])
                size = 0
            rounds[-1].append(whole)
            size, before = size + numel, dtypes[whole.name]
        return [tuple(each) for each in rounds]
