"""Error report on the stages that do not fit."""

from __future__ import annotations

import re

import pytest
import torch

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import DoesNotFit
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.search.infeasible import Shortfall
from autoptd.search.meshes import Candidate

GIB = 2.0**30


def shortfall(*missing_gib: float) -> Shortfall:
    stages = tuple((f"first{k}", f"last{k}") for k in range(len(missing_gib)))
    missing = tuple(GIB * gib for gib in missing_gib)
    return Shortfall(Candidate(1, 1, len(stages), 1, 8, 1, "none"), stages, missing, 52.0 * GIB, recompute_fits=True)


def test_missing_bytes_are_reported_by_stage() -> None:
    error = shortfall(22.0, 0.0).error()
    assert isinstance(error, DoesNotFit)
    text = str(error)
    assert "1 of 2 stages do not fit" in text and "stage 0 (first0 … last0) lacks 22.00 GiB" in text
    assert "recompute" in text and "52.00 GiB per device" in text and "stage 1" not in text


def test_many_stages_are_summed_up() -> None:
    assert str(shortfall(1.0, 2.0, 3.0, 4.0)).count("\n") == 3
    lines = str(shortfall(1.0, 2.0, 3.0, 0.0, 9.0, 4.0)).splitlines()
    assert [line.split(" (")[0] for line in lines[:3]] == ["stage 0", "stage 1", "stage 2"]
    assert lines[3:] == ["and 2 more stages, up to 9.00 GiB"]


def test_devices_of_the_size_that_is_named_are_enough() -> None:
    """Communicators and the context take their memory too, so that less was named than the device has."""
    with torch.device("meta"):
        model = NanoGPT(GPTSizes(vocab=512, max_seq=128, layers=4, heads=8, width=256))
    traced, cluster = autoptd.trace(model, seq=128), Cluster.load("dgx-a100-40gb")

    def planned(gib: float) -> autoptd.Plan:
        device = cluster.device.model_copy(update={"memory_bytes": int(gib * GIB)})
        on = cluster.model_copy(update={"device": device})
        return autoptd.plan(traced, world=4, cluster=on, batch=8, fix={"pp": 1, "zero": 0})

    with pytest.raises(DoesNotFit) as refused:
        planned(2.0)
    named = re.search(r"devices of ([\d.]+) GiB", refused.value.fix)
    assert named is not None and float(named[1]) > 2.0
    assert planned(float(named[1])).world == 4


def refusal(gib: float, headroom: float, world: int = 4) -> DoesNotFit:
    with torch.device("meta"):
        model = NanoGPT(GPTSizes(vocab=512, max_seq=128, layers=4, heads=8, width=1024))
    cluster = Cluster.load("dgx-a100-40gb")
    device = cluster.device.model_copy(update={"memory_bytes": int(cluster.device.context_bytes + gib * GIB)})
    on, fix = cluster.model_copy(update={"device": device}), {"pp": 1, "zero": 0, "headroom": headroom}
    with pytest.raises(DoesNotFit) as refused:
        autoptd.plan(autoptd.trace(model, seq=128), world=world, cluster=on, batch=8, fix=fix)
    return refused.value


def test_less_headroom_than_the_default_is_not_named_as_what_costs_memory() -> None:
    assert "fixing less than pp, zero;" in refusal(0.2, headroom=0.0).fix
    assert "fixing less than headroom, pp, zero;" in refusal(0.2, headroom=0.3).fix


def test_a_world_is_named_for_what_the_headroom_leaves() -> None:
    whole, less = (re.search(r"a world of at least (\d+)", refusal(0.05, part).fix) for part in (0.0, 0.02))
    assert whole is not None and less is not None and int(whole[1]) < int(less[1])
    assert " world" not in refusal(0.2, headroom=0.5).fix  # the context alone takes what is left
