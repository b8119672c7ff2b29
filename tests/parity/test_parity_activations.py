"""Blocks whose activations are in host memory compute what they compute without, bit by bit.

On a CPU the host is the device; hooks, copies and views are those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.errors import PlanFileError
from autoptd.layout.mesh import Mesh
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.ops import offload as module
from autoptd.parallel import Parallel
from autoptd.plans.model import Plan
from autoptd.testing.parity import Trained, differences, train_in_lockstep
from tests.parity.parity_check import Variant, alone, batches, check, complaints, parallel, planned
from tests.parity.test_parity_dropout import is_alone
from tests.parity.test_parity_dropout import trained as trained_with_dropout

CUBE, OFFLOAD = Mesh(2, 2, 2), Variant(recompute="offload", micro=1)
WAYS: tuple[tuple[str, Mesh, Variant], ...] = (
    ("gpt2", CUBE, OFFLOAD),
    ("llama", Mesh(4, 2, 1), replace(OFFLOAD, zero=3)),
    ("bert", Mesh(4, 1, 2), replace(OFFLOAD, zero=2, sequence_parallel=False)),
    ("nanogpt", CUBE, replace(OFFLOAD, schedule="zero-bubble")),
    ("nanogpt", CUBE, replace(OFFLOAD, schedule="interleaved", virtual=2)),
    ("nanogpt", Mesh(2, 1, 2), replace(OFFLOAD, schedule="gpipe", offload=0.5)),
    ("llama", CUBE, replace(OFFLOAD, gathers="again")),
    ("oddities", Mesh(2, 2, 2), OFFLOAD),
    ("mixtral", Mesh(4, 1, 1, ep=2), OFFLOAD),
    ("vit", Mesh(1, 2, 2), replace(OFFLOAD, loss="in_place")),
)
SIZES = GPTSizes(vocab=66, max_seq=8, width=24, layers=4, heads=4)


@pytest.mark.parametrize(("name", "mesh", "variant"), WAYS, ids=str)
def test_activations_on_the_host_train_like_one_process(name: str, mesh: Mesh, variant: Variant) -> None:
    assert "offload" in planned(name, mesh, variant).partial
    assert not check(name, mesh, variant, "sgd")


@pytest.mark.parametrize(
    ("name", "mesh", "variant"),
    [
        ("bert_dropout", CUBE, OFFLOAD),
        ("nanogpt_dropout", CUBE, replace(OFFLOAD, schedule="zero-bubble")),
        ("nanogpt_dropout", Mesh(tp=2, pp=2, cp=2), replace(OFFLOAD, micro=2)),
    ],
)
def test_masks_of_dropout_come_back(name: str, mesh: Mesh, variant: Variant) -> None:
    assert is_alone(name, trained_with_dropout(name, mesh, variant))


def mixed(name: str) -> Plan:
    """Return a plan whose layers take the policies in turn, so that tensors are shared by blocks of several."""
    plan = planned(name, Mesh(2, 2, 1), OFFLOAD)
    (stage,) = plan.stages
    pairs = [stage.recompute[i : i + 2] for i in range(0, len(stage.recompute), 2)]
    chosen = {i: ("offload", "full", "offload", "ops")[at % 4] for at, pair in enumerate(pairs) for i in pair}
    changed = {"recompute": tuple(chosen), "policies": tuple(chosen.values())}
    return plan.model_copy(update={"stages": (stage.model_copy(update=changed),)})


def test_layers_may_have_policies_of_their_own() -> None:
    made = parallel("nanogpt", mixed("nanogpt"), "sgd")
    text = "".join(made.program.files.values())
    assert "offload(block, " in text and "recompute(block, " in text
    assert not complaints("nanogpt", train_in_lockstep(made, batches("nanogpt")), alone("nanogpt", "sgd"))
    assert Plan.from_json(made.plan.to_json()).stages == made.plan.stages
    wrong = made.plan.to_json().replace('"ops"', '"host"')
    with pytest.raises(PlanFileError, match="policies"):
        Plan.from_json(wrong)


# ---- bit by bit ----


def ids(steps: int = 2) -> list[dict[str, Tensor]]:
    tokens = torch.randint(SIZES.vocab, (8, 9), generator=torch.Generator().manual_seed(1))
    return [{"idx": t[:, :-1], "targets": t[:, 1:]} for t in (tokens.roll(step, 0) for step in range(steps))]


@cache
def source(precision: str) -> autoptd.TracedModel:
    torch.manual_seed(0)
    return autoptd.trace(NanoGPT(SIZES), seq=8, precision=precision)


def made(precision: str, recompute: str, **fix: Any) -> Parallel:
    mesh = {"dp": 2, "tp": 1, "pp": 2, "zero": 1, "schedule": "1f1b", "micro": 1, "offload": 0} | fix
    return autoptd.parallelize(
        source(precision),
        world=4,
        batch=8,
        cluster="dgx-h100",
        optimizer_options={"lr": 1e-2},
        fix={**mesh, "recompute": recompute},
    )


def trained(precision: str, recompute: str, **fix: Any) -> Trained:
    return train_in_lockstep(made(precision, recompute, **fix), ids())


@pytest.mark.parametrize(
    ("precision", "fix"),
    [
        ("fp32", {}),
        ("bf16", {}),
        ("bf16", {"zero": 3, "dp": 4, "pp": 1}),
        ("fp32", {"zero": 2, "tp": 2, "pp": 1}),
        ("bf16", {"schedule": "interleaved", "virtual": 2}),
        ("bf16", {"cp": 2, "dp": 1, "context": "ulysses"}),
    ],
    ids=str,
)
def test_the_host_changes_no_bit(precision: str, fix: dict[str, Any]) -> None:
    with_it, without = trained(precision, "offload", **fix), trained(precision, "none", **fix)
    assert with_it.losses == without.losses and with_it.norms == without.norms
    assert max(differences(with_it.state, without.state).values()) == 0


def test_the_plan_says_what_is_on_the_host() -> None:
    plan = made("bf16", "offload").plan
    assert "recompute offload" in plan.explain() and "offloaded" in plan.explain()
    assert any("activations of some blocks are in host memory" in note for note in plan.notes)
    assert plan.predicted.time_s["activation_copies"] > 0 == plan.predicted.time_s["recompute"]


# ---- planted ----


def unwritten(patch: pytest.MonkeyPatch) -> None:
    """Copies begin before the kernels have written."""
    patch.setattr(module, "_to_host", torch.zeros_like)


def shared_addresses(patch: pytest.MonkeyPatch) -> None:
    """Storages of equal size are taken for one another."""
    pack = module._OffloadedCall.pack

    def by_size(self: Any, x: Tensor) -> Any:
        if x.untyped_storage()._cdata not in self.stay:
            for copy in self.copies.values():
                if len(copy.host) == x.untyped_storage().nbytes():
                    return copy.view(x)
        return pack(self, x)

    patch.setattr(module._OffloadedCall, "pack", by_size)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(unwritten, marks=pytest.mark.fault("unwritten activations")),
        pytest.param(shared_addresses, marks=pytest.mark.fault("mixed activations")),
    ],
)
def test_a_bug_on_the_way_to_the_host_is_caught(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    without = trained("fp32", "none")
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        found = trained("fp32", "offload")
    assert max(differences(found.state, without.state).values()) > 0
