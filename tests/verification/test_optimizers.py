"""Plans whose optimizer updates whole tensors: verified step by step, and a fault in the exchange is found."""

from __future__ import annotations

from functools import cache

import pytest

import autoptd
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan
from autoptd.runtime.optimizers.whole_tensors import WholeTensors
from autoptd.verification.verdict import verify_plan

SIZES = GPTSizes(vocab=64, max_seq=8, width=32, layers=4, heads=4)
FIX = {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "micro": 2}


@cache
def planned(optimizer: str) -> Plan:
    return autoptd.plan(NanoGPT(SIZES), world=8, seq=8, batch=8, cluster="dgx-h100", optimizer=optimizer, fix=FIX)


@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "lion"])
def test_a_plan_is_verified(optimizer: str) -> None:
    plan = planned(optimizer)
    assert bool(plan.whole) == (optimizer != "lion")
    assert Plan.from_json(plan.to_json()) == plan
    found = verify_plan(plan, NanoGPT(SIZES))
    assert found.certificate is not None


@pytest.mark.fault("new values stay at the owner")
def test_a_fault_of_the_exchange_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeTensors, "_send_back", lambda *_: None)
    assert verify_plan(planned("muon"), NanoGPT(SIZES)).certificate is None
