"""Attention that drops by torch's kernel: recomputation replays its masks, and each rank's are what they have to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.errors import CannotVerify, PlanError
from autoptd.layout.mesh import Mesh
from autoptd.ops import library as ops
from autoptd.ops.cp_axis import TokenChunks
from autoptd.ops.dropout import FIRST_DIM, DropoutKey
from autoptd.search.constraints.options import read_constraints
from autoptd.testing.parity import Trained, differences, train_in_lockstep
from autoptd.verification.verdict import verify_plan
from tests.parity.parity_check import Variant, batches, case, parallel, planned

NAME, CUBE = "nanogpt_dropout", Mesh(dp=2, tp=2, pp=2)
FAST = Variant(dropout="fast")
P, TOKENS = 0.3, 64


def kept(key: str = "0.1", parts: Any = (), samples: Any = FIRST_DIM, **where: int) -> Tensor:
    """Return which scores the kernel keeps: queries of zeros weigh all keys alike, and values are unit vectors."""
    rng = DropoutKey(3, **where)
    q, k = torch.zeros(1, 2, TOKENS, 8), torch.ones(1, 2, TOKENS, 8)
    v = torch.eye(TOKENS).expand(1, 2, -1, -1)
    out = ops.attention(q, k, v, dropout_p=P, key=key, rng=rng, samples=samples, parts=parts, fast=True)
    assert ((out == 0) | (out * TOKENS * (1 - P) - 1).abs().lt(1e-5)).all()
    return out != 0


def alike(a: Tensor, b: Tensor) -> float:
    return (a == b).float().mean().item()


OTHERS = {
    "op": {"key": "0.2"},
    "step": {"step": 1},
    "microbatch": {"sample": 2},
    "dp rank": {"rank": 1},
    "tp rank": {"parts": [TokenChunks(1, 2, (1,))]},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_masks_of_other_places_are_independent(other: dict[str, Any]) -> None:
    """A share of 1 - p of 8,192 scores is kept, and two masks agree in (1 - p)² + p² of them, within 4 deviations."""
    first, second = kept(parts=[TokenChunks(1, 2, (0,))]), kept(**{"parts": [TokenChunks(1, 2, (0,))], **other})
    assert first.float().mean().item() == pytest.approx(1 - P, abs=4 * (P * (1 - P) / 8192) ** 0.5)
    agree = (1 - P) ** 2 + P**2
    assert alike(first, second) == pytest.approx(agree, abs=4 * (agree * (1 - agree) / 8192) ** 0.5)


def test_one_place_has_one_mask_whatever_was_drawn_before() -> None:
    first = kept()
    before = torch.get_rng_state()
    torch.rand(100)
    state = torch.get_rng_state()
    assert torch.equal(first, kept()) and not torch.equal(before, state)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_draw_for_all_samples_is_one_of_all_ranks_and_microbatches() -> None:
    assert torch.equal(kept(samples=None), kept(samples=None, rank=1, sample=4))


# ---- programs ----


def trained(mesh: Mesh, variant: Variant = FAST) -> Trained:
    return train_in_lockstep(parallel(NAME, planned(NAME, mesh, variant), "sgd"), batches(NAME)[:1])


def apart(one: Trained, other: Trained) -> float:
    return max((differences(one.state, other.state) | differences(one.gradients, other.gradients)).values())


@contextmanager
def unseeded(*args: Any) -> Iterator[None]:
    yield


def test_recomputation_replays_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, again = Mesh(tp=2), replace(FAST, recompute="full")
    once = trained(mesh)
    for variant in (again, replace(FAST, recompute="selective")):
        assert apart(once, trained(mesh, variant)) < 1e-12
    assert apart(once, trained(mesh, Variant())) > 1e-4  # other masks than exact ones
    monkeypatch.setattr(DropoutKey, "seeded", unseeded)
    torch.manual_seed(0)
    once = trained(mesh)
    torch.manual_seed(0)
    assert apart(once, trained(mesh, again)) > 1e-4


def test_the_cut_into_stages_and_its_schedule_play_no_part() -> None:
    whole = trained(Mesh(dp=2, tp=2))
    assert apart(whole, trained(CUBE)) < 1e-12
    assert apart(whole, trained(CUBE, replace(FAST, schedule="zero-bubble", recompute="full"))) < 1e-12


@pytest.mark.parametrize("context", ["", "ulysses"])
def test_every_part_of_a_step_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch, context: str) -> None:
    """Seeds are those of layers, dp ranks, microbatches, and tp or cp ranks; recomputation takes each again."""
    seen: Counter[str] = Counter()
    word = DropoutKey.word

    def counting(self: DropoutKey, key: str) -> int:
        if "[" in key:
            seen[f"{self.step}/{key}"] += 1
        return word(self, key)

    monkeypatch.setattr(DropoutKey, "word", counting)
    mesh = Mesh(dp=2, cp=2, pp=2) if context else CUBE
    variant = replace(FAST, recompute="full", context=context or "ring")
    made = parallel(NAME, planned(NAME, mesh, variant), "sgd")
    train_in_lockstep(made, batches(NAME)[:1])
    layers = len(case(NAME).model.blocks)  # type: ignore[arg-type]
    assert len(seen) == layers * 2 * 2 * (16 // 2 // variant.micro)
    assert set(seen.values()) == {2}


WHOLE = replace(FAST, sequence_parallel=False, splits=(("*.attention.*", "B"),))


def test_ranks_that_hold_the_same_scores_drop_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parallel(NAME, planned(NAME, Mesh(tp=2), WHOLE), "sgd")
    assert "fast=True, key" in "".join(made.program.files.values())
    assert not train_in_lockstep(made, batches(NAME)).diverged
    monkeypatch.setattr(DropoutKey, "seeded", unseeded)
    assert train_in_lockstep(made, batches(NAME)).diverged


def test_plans_say_it_and_verify_refuses_it() -> None:
    plan = planned(NAME, Mesh(tp=2), FAST)
    assert any("they depend on the plan" in note for note in plan.notes)
    assert not any("without a fused kernel" in note for note in plan.notes)
    with pytest.raises(CannotVerify, match="draws its own dropout masks"):
        verify_plan(plan, case(NAME).model)
    ring = planned(NAME, Mesh(cp=2), FAST)
    assert any("dropout fast has no effect: tiles of ring attention" in note for note in ring.notes)
    assert "fast=True" not in "".join(parallel(NAME, ring, "sgd").program.files.values())
    assert any("no attention drops" in n for n in planned("nanogpt", Mesh(tp=2), FAST).notes)
    with pytest.raises(PlanError, match="no fused kernel for a CPU"):
        read_constraints({"dropout": "fast"}).on("cpu")
