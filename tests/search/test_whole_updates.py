"""Predicted costs of whole-tensor updates: by hand, and as bounds of what chosen owners hold."""

from __future__ import annotations

from functools import cache

import pytest

import autoptd
from autoptd.cost_models.memory import UPDATE_COSTS
from autoptd.layout.state_bytes import state_bytes
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.search.step_end.whole_updates import WholeLoad, WholeUpdates

SHAPES = {"a": (8, 4), "b": (4, 4), "c": (4, 4), "norm": (4,)}


def test_loads_by_hand() -> None:
    muon = WholeUpdates(UPDATE_COSTS["muon"], {n: s for n, s in SHAPES.items() if n != "norm"})
    held = [("a", 16), ("b", 16), ("c", 8), ("norm", 4)]  # over tp 2: a and c are split, b is not
    # two ranks: b is on each; of a and c, 48 elements, the fuller rank has 32
    flops = {n: muon.cost.flops(SHAPES[n]) for n in "abc"}
    assert muon.load(held, 2, 1) == WholeLoad(16 + 48, 48, 48, 16 + 32, flops["b"] + flops["a"])
    # four ranks, which share shards of all three: 64 elements, 16 on average, 32 at the owner of a
    assert muon.load(held, 4, 2) == WholeLoad(16 + 32, 64, 48, 32, flops["a"])
    assert muon.load([("norm", 4)], 2, 1) == WholeLoad()
    # values and gradients at the owner; a round's buffers of two tensors, sent and received
    assert WholeLoad(moved=64, owned=32).temporary_bytes(4, 4) == 4 * (2 * 32 + 4 * 16)


FIXED = [
    {"dp": 4, "tp": 2, "pp": 1, "zero": 1},
    {"dp": 2, "tp": 2, "pp": 2, "zero": 0},
    {"dp": 4, "tp": 1, "pp": 2, "zero": 2},
    {"dp": 8, "tp": 1, "pp": 1, "zero": 3},
]


@cache
def traced() -> autoptd.TracedModel:
    return autoptd.trace(NanoGPT(GPTSizes(vocab=128, max_seq=16, width=64, layers=4, heads=4)), seq=16)


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
@pytest.mark.parametrize("fix", FIXED, ids=str)
def test_state_is_bounded(fix: dict[str, int], optimizer: str) -> None:
    """No rank has more state than predicted, and Muon's is less than AdamW's."""
    asked = {"world": 8, "cluster": "dgx-h100", "batch": 16, "fix": {**fix, "micro": 1}}
    par = autoptd.parallelize(traced(), optimizer=optimizer, **asked)  # type: ignore[arg-type]
    mesh, predicted = par.layout.mesh, par.plan.predicted
    for stage in range(mesh.pp):
        held = [
            state_bytes(par.layout, stage, optimizer, dp, tp_rank=tp).optimizer
            for dp in range(mesh.copies)
            for tp in range(mesh.tp)
        ]
        assert max(held) <= predicted.memory[stage]["optimizer"] <= 2 * max(held)
    other = autoptd.plan(traced(), **asked).predicted  # type: ignore[arg-type]
    assert predicted.time_s["optimizer"] > other.time_s["optimizer"]
    if fix["zero"]:
        assert sum(m["optimizer"] for m in predicted.memory) < sum(m["optimizer"] for m in other.memory)
    assert any("whole tensors" in note for note in par.plan.notes)
