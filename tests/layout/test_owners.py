"""Owners of whole parameters: each has one per copy of the state, loads are even, and bytes are as predicted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.owners import Owners
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
    for whole in owners.wholes:
        spec = SPECS[whole.name]
        counted = torch.zeros(spec.shape)
        for part in whole.sources:
            for region in regions_of(spec, mesh, part.rank, part.start, part.stop):
                counted[tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))] += 1
        assert (counted == 1).all(), whole
    for rank in range(mesh.world):
        held = {n: sum(p.numel for w in owners.wholes if w.name == n for p in w.parts if p.rank == rank) for n in SPECS}
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
    rounds = owners.moved(dict.fromkeys(SPECS, torch.float32), 512)
    sizes = [[math.prod(SPECS[w.name].shape) for w in each] for each in rounds]
    assert len(rounds) > 3 and all(len(each) == 1 or sum(each) <= 512 * 8 for each in sizes)


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
