"""Owners of whole parameters: each has one per copy of the state, loads are even, and bytes are as predicted."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.loads import Loads
from autoptd.layout.mesh import Mesh
from autoptd.layout.owners import OwnedPart, Owners, WholeParameter
from autoptd.layout.packing import overlap
from autoptd.layout.placements import BP, B, Split
from autoptd.layout.regions import regions_of
from autoptd.layout.state_bytes import state_bytes, whole_names
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from tests.layout.test_state_bytes import allocated
from tests.runtime import tiny_model as tiny

SPECS = {
    "big": TensorSpec(Split(1), (64, 96), hidden=True),
    **{f"square.{i}": TensorSpec(Split(0), (32, 32), hidden=True) for i in range(12)},
    "norm": TensorSpec(BP, (32,)),
    "scale": TensorSpec(B, ()),
    "experts": TensorSpec(Split(2), (8, 16, 24), ep=2),
}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", [Mesh(4, 2, ep=2), Mesh(8, 1, ep=2), Mesh(2, 4, cp=2, ep=2)], ids=str)
def test_every_element_comes_once_and_goes_to_all_who_hold_it(mesh: Mesh, zero: int) -> None:
    layout = Layout(mesh, 1, 1, ("x",), SPECS, zero=zero, bucket_elements=1000)
    owners = Owners(layout, 0, SPECS)
    wholes = all_wholes(owners)
    for whole in wholes:
        spec = SPECS[whole.name]
        counted = torch.zeros(spec.shape)
        for part in sources(owners, whole):
            for region in regions_of(spec, mesh, part.rank, part.start, part.stop):
                counted[tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))] += 1
        assert (counted == 1).all(), whole
    for rank in range(mesh.world):
        held = {
            n: sum(p.numel for w in wholes if w.name == n for p in parts(owners, w) if p.rank == rank) for n in SPECS
        }
        local = sum(math.prod(spec.local_shape(mesh.tp)) for spec in SPECS.values())
        assert sum(held.values()) <= local and (zero or sum(held.values()) == local)


def test_owners_are_even() -> None:
    layout = Layout(Mesh(4, 2, ep=2), 1, 1, ("x",), SPECS, zero=1, bucket_elements=1000)
    owners = Owners(layout, 0, SPECS)
    loads = [sum(math.prod(SPECS[w.name].shape) for w in owners.of(rank)) for rank in owners.ranks]
    largest = max(math.prod(spec.shape) for spec in SPECS.values())
    assert max(loads) <= sum(loads) / 8 + largest


def test_rounds_are_bounded() -> None:
    owners = Owners(Layout(Mesh(4, 2, ep=2), 1, 1, ("x",), SPECS, zero=1, bucket_elements=1000), 0, SPECS)
    rounds = owners.rounds(0, dict.fromkeys(SPECS, torch.float32), 512)
    sizes = [[math.prod(SPECS[w.name].shape) for w in each] for _, each in rounds]
    assert len(rounds) > 3 and all(len(each) == 1 or sum(each) <= 512 * 8 for each in sizes)


# ---- all wholes of a stage ----


def all_wholes(owners: Owners) -> list[WholeParameter]:
    """Return the whole parameters of all copies, by name, copy and owner."""
    order = list(owners.held)
    found = {whole for rank in owners.ranks for whole in owners.around(rank)}
    return sorted(found, key=lambda each: (order.index(each.name), each.ranks.start, each.owner))


def parts(owners: Owners, whole: WholeParameter) -> tuple[OwnedPart, ...]:
    """Return the parts in an exchange; a rank that holds all elements has none with others."""
    found = owners.parts(whole)
    return tuple(part for part in found if part.rank == whole.owner) if whole.alone else found


def sources(owners: Owners, whole: WholeParameter) -> tuple[OwnedPart, ...]:
    return parts(owners, whole) if whole.alone else owners.sources(whole)


@dataclass(frozen=True)
class Listed:
    """The definition of owners, for all ranks at once: lists what each rank holds, and chooses from it."""

    owners: Owners

    @cached_property
    def wholes(self) -> list[tuple[str, int, tuple[OwnedPart, ...], tuple[OwnedPart, ...]]]:
        """Name, owner, parts and sources of each."""
        load = dict.fromkeys(self.owners.ranks, 0)
        found: dict[str, list[tuple[str, int, tuple[OwnedPart, ...], tuple[OwnedPart, ...]]]] = {}
        left: list[tuple[int, str, dict[int, OwnedPart | None]]] = []
        for name, spec in self.owners.held.items():
            numel, found[name] = math.prod(spec.shape), []
            for copy in self._copies(name):
                alone = [part for part in copy.values() if part is not None and part.numel == numel]
                found[name] += [(name, part.rank, (part,), (part,)) for part in alone]
                for part in alone:
                    load[part.rank] += numel
                left += [] if alone else [(numel, name, copy)]
        for numel, name, copy in sorted(left, key=lambda each: -each[0]):
            owner = min(copy, key=lambda rank: (load[rank], rank))
            held = tuple(part for part in copy.values() if part is not None)
            found[name].append((name, owner, held, self._sources(name, owner, held)))
            load[owner] += numel
        return [whole for each in found.values() for whole in each]

    def _copies(self, name: str) -> list[dict[int, OwnedPart | None]]:
        spec, mesh, layout = self.owners.held[name], self.owners.layout.mesh, self.owners.layout
        (bucket, slot), width = self.owners._slots[name], layout.sharing_of(spec)
        copies: dict[int, dict[int, OwnedPart | None]] = {}
        for rank in self.owners.ranks:
            index = mesh.group_of(rank, "edp" if spec.ep > 1 else "data").index(rank)
            copy, shard = divmod(index, width)
            mine = overlap(slot, bucket.shard(shard, width))
            part = None if mine is None else OwnedPart(rank, mine.start - slot.start, mine.stop - slot.start)
            copies.setdefault(copy, {})[rank] = part
        return [copies[i] for i in sorted(copies)]

    def _sources(self, name: str, owner: int, held: tuple[OwnedPart, ...]) -> tuple[OwnedPart, ...]:
        spec, mesh = self.owners.held[name], self.owners.layout.mesh
        chosen: dict[object, OwnedPart] = {}
        for part in held:
            key = spec.part(mesh, part.rank), part.start
            if key not in chosen or part.rank == owner:
                chosen[key] = part
        return tuple(chosen.values())

    def rounds(self, dtypes: Mapping[str, torch.dtype], most: int) -> list[list[tuple[str, int]]]:
        """Names and owners of those that are brought together."""
        rounds: list[list[tuple[str, int]]] = []
        size, before = 0, None
        for name, owner, held, _ in self.wholes:
            if len(held) == 1 and held[0].rank == owner:
                continue
            numel = math.prod(self.owners.held[name].shape)
            if not rounds or dtypes[name] != before or size + numel > most * len(self.owners.ranks):
                rounds.append([])
                size = 0
            rounds[-1].append((name, owner))
            size, before = size + numel, dtypes[name]
        return rounds


def a_layout(seed: int) -> Layout:
    """Return a random layout with parameters of many sizes, some of experts, two stages, and buckets that cut them."""
    draw = random.Random(seed)
    tp, ep, cp = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2, 3, 4)), draw.choice((1, 2))
    etp = draw.choice((0, 1))
    mesh = Mesh(dp=draw.choice((1, 2, 4)) * ep, tp=tp, pp=2, cp=cp, ep=ep, etp=etp)
    zero = draw.randrange(4)
    divisors = [n for n in range(1, mesh.copies) if mesh.copies % n == 0]
    shards = draw.choice(divisors) if zero and ep == 1 and divisors and draw.random() < 0.5 else 0
    specs = {}
    for i in range(draw.randrange(1, 25)):
        shape = tuple(draw.choice((12, 24, 36)) for _ in range(draw.randrange(1, 4)))
        placement = draw.choice((BP, B, Split(len(shape) - 1)))
        stages = draw.choice(((0,), (1,), (0, 1)))
        dtype = draw.choice((torch.float32, torch.bfloat16))
        experts = ep > 1 and draw.random() < 0.4
        apart = experts and mesh.sharers < tp
        specs[f"p{i}"] = TensorSpec(
            B if apart else placement, shape, stages, dtype=dtype, ep=ep if experts else 1, over_tp=apart
        )
    specs["scale"], specs["none"] = TensorSpec(B, ()), TensorSpec(BP, (0, 4))
    bucket = draw.choice((100, 2000, 10**6))
    return Layout(mesh, 1, 1, ("x",), specs, zero=zero, shards=shards, bucket_elements=bucket)


@pytest.mark.parametrize("seed", range(150))
def test_each_rank_finds_the_same_owners(seed: int) -> None:
    layout = a_layout(seed)
    for stage in range(2):
        owners = Owners(layout, stage, [name for name in layout.parameters if name != "p0"])
        listed = Listed(owners)
        wholes = all_wholes(owners)
        assert [(w.name, w.owner, parts(owners, w), sources(owners, w)) for w in wholes] == listed.wholes
        writers: dict[str, int] = {}
        for name, owner, *_ in listed.wholes:
            writers.setdefault(name, owner)
        assert {w.name: w.owner for w in wholes if owners.counts(w)} == writers
        dtypes = {name: spec.dtype for name, spec in owners.held.items()}
        expected = listed.rounds(dtypes, 700)
        for rank in owners.ranks:
            for whole in owners.around(rank):
                mine = [part for part in parts(owners, whole) if part.rank == rank]
                assert [owners.part_of(whole, rank)] == (mine or [None])
            rounds = owners.rounds(rank, dtypes, 700)
            near = {(w.name, w.owner) for w in owners.around(rank)}
            assert [[(w.name, w.owner) for w in each] for _, each in rounds] == [
                [each for each in found if each in near] for found in expected
            ]
            assert [dtype for dtype, _ in rounds] == [dtypes[each[0][0]] for each in expected]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("shards", [0, 8])
@pytest.mark.parametrize("mesh", [Mesh(4096, 4), Mesh(16_384), Mesh(1024, 8, cp=2, ep=64, etp=1)], ids=str)
def test_a_rank_of_many_does_work_for_its_parameters(
    mesh: Mesh, zero: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads that are read or changed are as many as parameters, not as ranks."""
    asked = Counter[str]()
    for name in ("add", "least"):
        honest = getattr(Loads, name)
        monkeypatch.setattr(
            Loads, name, lambda *args, name=name, honest=honest: (asked.update([name]), honest(*args))[1]
        )
    monkeypatch.setattr(Mesh, "group_of", lambda *args: asked.update(["group"]) or range(64))
    specs = {f"w{i}": TensorSpec(Split(1), (768, 768 * (1 + i % 4)), hidden=True) for i in range(100)}
    specs |= {f"norm{i}": TensorSpec(B, (768,)) for i in range(50)}
    if mesh.ep > 1:
        specs |= {f"e{i}": TensorSpec(B, (64, 768, 96), ep=mesh.ep, over_tp=True) for i in range(20)}
    layout = Layout(mesh, 1, 1, ("x",), specs, zero=zero, shards=shards if zero and mesh.ep == 1 else 0)
    owners = Owners(layout, 0, list(specs))
    rank = mesh.world - 5
    assert len(owners.around(rank)) <= len(specs)
    owners.rounds(rank, dict.fromkeys(specs, torch.float32), 2**23)
    assert asked.total() <= 60 * len(specs), asked


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(dp=3), Mesh(2, 2, 2), Mesh(1, 2, 2)], ids=str)
@pytest.mark.parametrize(("zero", "optimizer"), [(0, "muon"), (1, "muon"), (2, "adafactor"), (3, "muon")])
def test_bytes_of_state(mesh: Mesh, zero: int, optimizer: str) -> None:
    layout = tiny.layout(mesh, zero=zero)
    parameters = {n: replace(s, hidden=".up." in n or ".down.w" in n) for n, s in layout.parameters.items()}
    parameters["idle"] = replace(parameters["idle"], idle=True)
    layout = replace(layout, parameters=parameters)
    assert whole_names(layout, optimizer) and "gain" not in whole_names(layout, optimizer)

    def body(c: Communicators) -> tuple[int, ...]:
        trainer = Trainer(tiny.make_stage(Axis(c.tp), c.mesh.pp, c.stage), layout, c, optimizer)
        trainer.load_parameters(tiny.weights())
        trainer.train_step({n: x.chunk(mesh.dp)[c.dp.rank] for n, x in tiny.batch(mesh.dp * 6, 0).items()})
        return c.stage, c.dp.rank, c.tp.rank, *allocated(trainer)

    for stage, dp, tp, *found in run_lockstep(mesh, body):
        expected = state_bytes(layout, stage, optimizer, dp, tp_rank=tp)
        assert found == [expected.parameters, expected.gradients, expected.optimizer]
