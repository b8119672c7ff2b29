"""Explanations of infeasible requests: the conflict is minimal, suggested fixes were planned and fit, time is
bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from autoptd.answers.infeasibility import HARDWARE, SETTING, Conflict, conflict, without
from autoptd.answers.infeasibility_text import conflict_text
from autoptd.answers.query import PlanQuery
from autoptd.compile.traced import TracedModel
from autoptd.errors import DoesNotFit, PlanError
from tests.answers.small import nodes_of_four
from tests.sample_plan import sample_plan


@pytest.fixture(scope="module")
def refused(traced: TracedModel) -> PlanQuery:
    """Requests microbatches of 32 without recomputation: only together too large. The others are irrelevant."""
    fix = {"tp": 1, "kernels": "fused", "micro": 32, "recompute": "none", "offload": 0}
    asked = PlanQuery(traced, 1, nodes_of_four(), 64, fix=fix)
    fat = max(asked.device_bytes(asked.plan()))
    either = [asked.with_changes(recompute="full"), asked.with_changes(micro=8)]
    enough = max(max(query.device_bytes(query.plan())) for query in either)
    assert enough < fat * 0.7
    return asked.with_memory((enough + fat) // 2)


@pytest.fixture(scope="module")
def found(refused: PlanQuery) -> Conflict:
    with pytest.raises(DoesNotFit):
        refused.plan()
    return conflict(refused, ("batch",))


def test_the_set_is_minimal(refused: PlanQuery, found: Conflict):
    assert found.minimal and found.pins
    others = [pin for pin in (*refused.fix, "batch") if pin not in found.pins]
    with pytest.raises(DoesNotFit):
        without(refused, others).plan()
    for pin in found.pins:
        assert without(refused, [*others, pin]).plan()
    assert {"micro", "recompute"} <= set(found.pins) and "kernels" not in found.pins


def test_every_way_out_fits(refused: PlanQuery, found: Conflict):
    whats = {remedy.what: remedy for remedy in found.remedies}
    assert {"leave micro free", "leave recompute free", "--fix micro=1"} <= set(whats)
    room = refused.cluster.device.memory_bytes
    assert all(max(refused.device_bytes(r.plan)) <= room for r in found.remedies if r.kind == SETTING)
    assert whats["leave micro free"].plan == refused.with_changes(micro=None).plan()
    kinds = [remedy.kind for remedy in found.remedies]
    assert kinds == sorted(kinds) and HARDWARE in kinds
    assert found.untried == ()


def test_what_is_missing(refused: PlanQuery, found: Conflict):
    assert found.least_memory is not None
    (least,) = refused.device_bytes(found.least_memory)
    assert found.missing_bytes == [least - refused.cluster.device.memory_bytes]
    assert refused.with_memory(least + 4096).plan()
    with pytest.raises(DoesNotFit):
        refused.with_memory(refused.cluster.device.memory_bytes + found.missing_bytes[0] // 2).plan()


def test_text(found: Conflict):
    for width in (80, 120):
        text = conflict_text(found, width)
        assert max(map(len, text.splitlines())) <= width
        assert text.split("\n")[0].startswith("no plan that fits was found with micro=32, recompute=none together")
        assert "--cluster local" not in text, "CPUs have memory, and no more"
        assert "stage 0 lacks" in text and "leave micro free" in text


class Scripted(PlanQuery):
    """Query that answers by rule instead of planning, and counts the questions."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def plan(self, progress: Any = None) -> Any:
        Scripted.asked.append(dict(self.fix))
        if self.world > 8:
            raise PlanError("another world cannot be")
        if {"tp", "pp"} <= self.fix.keys() or self.options.get("hopeless"):
            raise DoesNotFit("no")
        return sample_plan()


@pytest.fixture
def scripted(asked: PlanQuery) -> Scripted:
    Scripted.asked = []
    fix = {"tp": 1, "zero": 1, "pp": 1, "kernels": "fused"}
    return Scripted(asked.traced, 8, asked.cluster, 64, fix, {}, "small")


def test_pins_that_do_not_matter_are_dropped(scripted: Scripted):
    assert conflict(scripted, ("batch",)).pins == {"tp": "1", "pp": "1"}


def test_no_pin_is_to_blame(scripted: Scripted):
    found = conflict(replace(scripted, options={"hopeless": True}))
    assert (found.pins, found.minimal, found.remedies, found.least_memory) == ({}, True, (), None)
    assert "no constraint is to blame" in conflict_text(found)


def test_the_time_limit_holds(scripted: Scripted):
    ticks = iter(range(1000))
    found = conflict(scripted, time_limit_s=2.5, clock=lambda: float(next(ticks)))
    assert len(Scripted.asked) <= 3
    assert not found.minimal and found.untried
    text = conflict_text(found)
    assert (
        "no plan that fits was found with all of these: tp=1, zero=1, pp=1, kernels=fused" in text
        and "--why tries them" in text
    )


def test_what_cannot_be_is_no_way_out(scripted: Scripted):
    found = conflict(scripted)
    assert [r.what for r in found.remedies if r.kind == SETTING] == [
        "leave tp free",
        "leave pp free",
        "leave tp, pp free",
    ]
    assert not any("--world" in remedy.what for remedy in found.remedies)
