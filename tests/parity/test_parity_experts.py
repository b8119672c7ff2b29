"""Experts on ranks of their own train as on one process, whatever mesh they are folded over and however rows fall."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.errors import PlanError, RuntimeFault
from autoptd.layout.layout import TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.ops import expert_axis
from autoptd.ops.expert_axis import Experts
from autoptd.ops.group import SingleRankGroup
from autoptd.runtime import trainer
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.zero import param_buffers
from autoptd.verification.verdict import verify_plan
from tests.parity.parity_check import Variant, case, check, parallel, planned

BULK = Variant(bulk=True, micro=4)
WAYS = [
    ("mixtral", Mesh(dp=2, ep=2), BULK, "adamw"),
    ("mixtral", Mesh(dp=8, ep=4), replace(BULK, zero=0, micro=2), "sgd"),
    ("mixtral", Mesh(dp=4, tp=2, ep=2), BULK, "adamw"),
    ("mixtral", Mesh(dp=2, tp=2, pp=2, ep=2), replace(BULK, zero=2), "adamw"),
    ("mixtral", Mesh(dp=4, pp=2, ep=2), replace(BULK, zero=3), "adamw"),
    ("mixtral", Mesh(dp=2, cp=2, tp=2, ep=4), BULK, "adamw"),
    ("mixtral", Mesh(cp=4, pp=2, ep=2), replace(BULK, zero=3, recompute="full"), "adamw"),
    (
        "mixtral",
        Mesh(dp=4, pp=2, ep=4),
        replace(BULK, schedule="interleaved", virtual=2, recompute="ops", micro=2),
        "sgd",
    ),
    ("mixtral", Mesh(dp=4, pp=2, ep=4), replace(BULK, schedule="zero-bubble"), "adamw"),
    ("mixtral", Mesh(dp=2, tp=2, pp=2, ep=2), replace(BULK, recompute="selective", clip_norm=0.05), "adamw"),
    ("mixtral", Mesh(dp=4, tp=2, ep=4), replace(BULK, sequence_parallel=False, overlap=("dp", "p2p")), "adamw"),
    ("mixtral", Mesh(dp=4, pp=2, ep=2), replace(BULK, schedule="zero-bubble-v", virtual=2, zero=2), "sgd"),
    ("deepseek", Mesh(dp=2, cp=2, pp=2, ep=4), BULK, "adamw"),
    ("deepseek", Mesh(dp=4, pp=2, ep=4), replace(BULK, zero=3, micro=2, schedule="zero-bubble"), "adamw"),
    ("gpt_oss", Mesh(dp=2, tp=2, pp=2, ep=2), replace(BULK, recompute="full"), "adamw"),
    ("gpt_oss", Mesh(dp=4, cp=2, ep=4), replace(BULK, zero=2), "sgd"),
]


@pytest.mark.parametrize(
    ("name", "mesh", "variant", "optimizer"), WAYS, ids=[f"{n}-{m}-{i}" for i, (n, m, *_) in enumerate(WAYS)]
)
def test_experts_train_like_one_process(name: str, mesh: Mesh, variant: Variant, optimizer: str) -> None:
    assert not check(name, mesh, variant, optimizer)


@pytest.mark.fault("experts without tokens")
@pytest.mark.parametrize("mesh", [Mesh(dp=4, ep=4), Mesh(dp=2, tp=2, pp=2, ep=2)], ids=str)
def test_all_rows_to_two_experts(mesh: Mesh) -> None:
    """Ties are decided alike on all ranks; two experts, and with ep 4 two ranks, get no rows."""
    assert not check("mixtral_ties", mesh, BULK, "adamw")


FOUR = Mesh(dp=4, ep=2)


def faulty() -> list[str]:
    return check("mixtral", FOUR, replace(BULK, zero=0, clip_norm=0.05), "sgd")


def _summed_with_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Communicators, "within_edp", lambda self, sharded: (SingleRankGroup(), self.data))


def _scaled(patch: pytest.MonkeyPatch) -> None:
    known = expert_axis._Moved.backward
    patch.setattr(expert_axis._Moved, "backward", staticmethod(lambda ctx, grad: known(ctx, grad * 2)))


def _counts(change: Callable[[Any, bool], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault in which pieces count in the norm as `change` of their buffers says."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        whole = trainer.squared_norm

        def counted(pieces: Any) -> Tensor:
            mine = [piece for piece in pieces if "experts" in piece.name]
            assert mine
            for piece in mine:
                piece.counts = change(piece, piece.counts)
            return whole(pieces)

        patch.setattr(trainer, "squared_norm", counted)

    return plant


def _first_rank_alone(patch: pytest.MonkeyPatch) -> None:
    known = param_buffers.Buffers.pieces

    def pieces(self: Any, pipeline_rank: int) -> list[Any]:
        found = known(self, pipeline_rank)
        here = {b.sharing.replica_group.rank for b in self._buffers}
        for piece in found:
            piece.counts = piece.counts and ("experts" not in piece.name or len(here) == 1)
        return found

    patch.setattr(param_buffers.Buffers, "pieces", pieces)


def _without_gradient(patch: pytest.MonkeyPatch) -> None:
    known = Experts.dispatch
    patch.setattr(Experts, "dispatch", lambda self, x, route: known(self, x.detach() if x.shape[-1] == 1 else x, route))


def _wrong_experts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(expert_axis, "_by_expert", lambda counts: torch.arange(int(counts.sum())))


def _wrong_places(patch: pytest.MonkeyPatch) -> None:
    known = Experts.combine
    patch.setattr(Experts, "combine", lambda self, y, route: known(self, y, route).flip(0))


def _same_everywhere(patch: pytest.MonkeyPatch) -> None:
    known = TensorSpec.part
    patch.setattr(TensorSpec, "part", lambda self, mesh, rank: (0, known(self, mesh, rank)[1]))


PLANTED = {
    "experts summed with others": _summed_with_others,
    "experts scaled by ep": _scaled,
    "experts of others out of the norm": _first_rank_alone,
    "copies of experts in the norm": _counts(lambda piece, counts: True),
    "a router without gradient": _without_gradient,
    "rows of the wrong experts": _wrong_experts,
    "rows in the wrong places": _wrong_places,
    "the same experts everywhere": _same_everywhere,
}


@pytest.mark.fault(
    "experts summed with others",
    "experts scaled by ep",
    "experts of others out of the norm",
    "copies of experts in the norm",
    "a router without gradient",
    "rows of the wrong experts",
    "rows in the wrong places",
    "the same experts everywhere",
)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    assert faulty()


def test_without_a_fault_nothing_is_seen() -> None:
    assert not faulty()


@pytest.mark.fault("rows of no expert")
def test_rows_of_no_expert_are_refused() -> None:
    axis = Experts(SingleRankGroup())
    route = axis.route(torch.tensor([1, 1, 3], dtype=torch.int32))
    assert axis.dispatch(torch.ones(3, 2), route).shape == (3, 2)
    with pytest.raises(RuntimeFault, match="4 rows are sorted by expert, but the experts take 3 of them"):
        axis.dispatch(torch.ones(4, 2), route)


@pytest.mark.parametrize(
    ("mesh", "name", "says"),
    [
        (Mesh(dp=2, ep=2), "nanogpt", "ep 2: the model has no grouped products of experts"),
        (Mesh(dp=8, ep=8), "mixtral", "4 experts are not divisible by ep 8"),
    ],
)
def test_what_cannot_be_split_is_refused(mesh: Mesh, name: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        planned(name, mesh, replace(BULK, micro=2))


def test_evaluation_with_unequal_shares() -> None:
    """A rank with fewer microbatches takes part in the exchanges of the others."""
    made = parallel("mixtral", planned("mixtral", FOUR, BULK), "sgd")
    data, values = case("mixtral").batch, made.initial_values()
    shares = [slice(0, 1), slice(1, 9), slice(9, 11), slice(11, 16)]

    def body(communicators: Communicators) -> float:
        mine = copy.copy(made)
        mine.start(communicators, values)
        return float(mine.eval_step({n: x[shares[communicators.dp.rank]] for n, x in data.items()}))

    found = run_lockstep(made.layout.mesh, body)
    model, loss = case("mixtral").model, case("mixtral").loss
    assert loss is None
    assert found == pytest.approx([float(model(**data).loss)] * 4, rel=1e-12)


def test_verify_sees_what_training_would(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model = planned("mixtral", Mesh(dp=2, ep=2), BULK), case("mixtral").model
    inputs = {n: x[:2] for n, x in case("mixtral").batch.items()}
    assert verify_plan(plan, model, inputs=inputs).agrees
    _wrong_places(monkeypatch)
    assert not verify_plan(plan, model, inputs=inputs).agrees
