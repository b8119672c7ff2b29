"""Experts on ranks of their own train as on one process, whatever mesh they are folded over and however rows fall."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd import trace
from autoptd.errors import AutoptdError, PlanError, RuntimeFault
from autoptd.layout.layout import TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.ops import expert_axis
from autoptd.ops.expert_axis import Experts
from autoptd.ops.group import SingleRankGroup
from autoptd.runtime import trainer
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.zero import param_buffers
from autoptd.testing.parity import train_in_lockstep
from autoptd.verification.verdict import verify_plan
from tests.pairwise import pairwise
from tests.parity.mixture_models import FAMILIES, WIRINGS, Capacity, Plain
from tests.parity.parity_check import TOLERANCE, Variant, batches, case, check, parallel, planned, source, step_off_by
from tests.parity.parity_models import WIDTH

BULK = Variant(bulk=True, micro=4)
FOUR = Mesh(dp=4, ep=2)
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


# The families besides those above, each once: (mesh, variant) by turns.
TURNS = [
    (Mesh(dp=4, ep=4), replace(BULK, zero=3)),
    (Mesh(dp=2, tp=2, pp=2, ep=2), replace(BULK, zero=2)),
    (Mesh(dp=2, cp=2, pp=2, ep=4), BULK),
    (Mesh(dp=4, pp=2, ep=2), replace(BULK, schedule="zero-bubble", recompute="full")),
]
ONE_EACH = [(name, *TURNS[i % len(TURNS)]) for i, name in enumerate(FAMILIES)]
ONE_EACH = [  # the scan of Jamba needs all tokens
    (name, replace(mesh, dp=mesh.dp * mesh.cp, cp=1) if name == "jamba" else mesh, variant)
    for name, mesh, variant in ONE_EACH
]


@pytest.mark.parametrize(("name", "mesh", "variant"), ONE_EACH, ids=[name for name, *_ in ONE_EACH])
def test_families_train_like_one_process(name: str, mesh: Mesh, variant: Variant) -> None:
    assert not check(name, mesh, variant, "adamw")


MESHES = [
    Mesh(dp=2),
    Mesh(dp=2, ep=2),
    Mesh(dp=4, ep=4),
    Mesh(dp=8, ep=8),
    Mesh(dp=8, ep=2),
    Mesh(dp=4, tp=2, ep=2),
    Mesh(dp=4, tp=2, ep=4),
    Mesh(dp=2, tp=2, pp=2, ep=2),
    Mesh(dp=2, cp=2, pp=2, ep=4),
    Mesh(dp=4, pp=2, ep=4),
]
SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]


def drawn() -> list[tuple[str, Mesh, int, tuple[str, int], str]]:
    """Return cases in which any two values occur together."""
    every = product(WIRINGS, MESHES, range(4), SCHEDULES, ("none", "full", "ops"))
    chosen = [
        c
        for i, c in enumerate(every)
        if i % 3 == 0 and (c[1].pp > 1 or c[3][0] == "1f1b") and not (c[0] == "capacity" and c[1].cp > 1)
    ]
    return pairwise(chosen)


@pytest.mark.parametrize(("name", "mesh", "zero", "schedule", "recompute"), drawn())
def test_wirings_train_like_one_process(
    name: str, mesh: Mesh, zero: int, schedule: tuple[str, int], recompute: str
) -> None:
    kind, virtual = schedule
    micro = 16 // mesh.dp // (4 if mesh.pp > 1 else 1) or 1
    variant = Variant(bulk=True, micro=micro, zero=zero, schedule=kind, virtual=virtual, recompute=recompute)
    assert not check(name, mesh, variant, "adamw" if zero % 2 else "sgd")


@pytest.mark.parametrize(
    ("name", "mesh", "variant", "optimizer"), WAYS, ids=[f"{n}-{m}-{i}" for i, (n, m, *_) in enumerate(WAYS)]
)
def test_experts_train_like_one_process(name: str, mesh: Mesh, variant: Variant, optimizer: str) -> None:
    assert not check(name, mesh, variant, optimizer)


@pytest.mark.fault("experts without tokens")
@pytest.mark.parametrize("mesh", [Mesh(dp=4, ep=4), Mesh(dp=2, tp=2, pp=2, ep=2)], ids=str)
@pytest.mark.parametrize("name", ["mixtral_ties", "grouped_one"])
def test_few_experts_take_all_rows(name: str, mesh: Mesh) -> None:
    """Ties are decided alike on all ranks; two experts or one take all rows, and whole ranks of experts get none."""
    assert not check(name, mesh, BULK, "adamw")


def test_numbers_of_experts_that_differ_by_layer() -> None:
    assert not check("four_and_six", FOUR, BULK, "adamw")


def test_tp_splits_widths_where_a_rank_has_one_expert() -> None:
    """The cheapest splits are of experts, where each rank of ep has two."""
    both = Mesh(dp=2, tp=2, ep=2), Mesh(dp=4, tp=2, ep=4)
    placed = [planned("four", mesh, BULK).splits.parameters["mixtures.0.up"] for mesh in both]
    assert placed == ["S0", "S2"]
    assert not check("four", both[1], BULK, "sgd")
    with pytest.raises(PlanError, match="cannot be placed as S0 on tp 2"):
        planned("four", both[1], replace(BULK, splits=(("*.up", "S0"),)))


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
    patch.setattr(Experts, "combine", lambda self, y, route, **dims: known(self, y, route, **dims).flip(0))


def _other_scores(patch: pytest.MonkeyPatch) -> None:
    known = Experts.dispatch
    patch.setattr(Experts, "dispatch", lambda self, x, route: known(self, x.flip(0) if x.shape[-1] == 1 else x, route))


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
    "scores of other rows": _other_scores,
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
    "scores of other rows",
    "the same experts everywhere",
)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    assert faulty()


def test_without_a_fault_nothing_is_seen() -> None:
    assert not faulty()


def _one_rank_alone(patch: pytest.MonkeyPatch) -> None:
    known = Tensor.expand

    def expand(x: Tensor, *sizes: int) -> Tensor:
        """Copy rows for each rank, with the gradient of one of them."""
        found = known(x, *sizes)
        return torch.cat((found[:1], found[1:].detach())) if len(sizes) == x.ndim + 1 else found

    patch.setattr(expert_axis.Tensor, "expand", expand)


def _swapped(patch: pytest.MonkeyPatch) -> None:
    known = Experts._batch
    flipped = lambda self, x, route, rows, experts, back: known(  # noqa: E731
        self, x.flip(experts) if back else x, route, rows, experts, back
    )
    patch.setattr(Experts, "_batch", flipped)


IN_BATCHES = {"gradients of one rank's experts": _one_rank_alone, "batches of other experts": _swapped}


@pytest.mark.fault("gradients of one rank's experts", "batches of other experts")
@pytest.mark.parametrize("name", IN_BATCHES)
def test_a_fault_planted_in_batches_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not check("einsum", FOUR, replace(BULK, zero=0), "sgd")
    IN_BATCHES[name](monkeypatch)
    assert check("einsum", FOUR, replace(BULK, zero=0), "sgd")


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
        (Mesh(dp=2, ep=2), "nanogpt", "ep 2: no experts are found in the model"),
        (Mesh(dp=2, ep=2), "modules", "ep 2: no experts are found in the model"),
        (Mesh(dp=8, ep=8), "mixtral", "4 experts are not divisible by ep 8"),
        (
            Mesh(dp=4, ep=4),
            "four_and_six",
            r"6 experts are not divisible by ep 4\n +where +mixtures.1 .*\n.*divisor of 2",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(mesh: Mesh, name: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        planned(name, mesh, replace(BULK, micro=2))


def test_experts_that_are_whole_beside_cp_are_refused() -> None:
    """Slots are counted from all tokens of a sample: every rank of cp has them all."""
    with pytest.raises(PlanError, match=r"mixtures.{0..1}.up are not split over ep 2 where cp 2 splits the tokens"):
        parallel("capacity", planned("capacity", Mesh(cp=2, ep=2), replace(BULK, micro=2)), "adamw")


class Attending(Plain):
    """A layer of attention, beside which cp is searched, before a mixture with slots per sample."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + F.scaled_dot_product_attention(*(x.unflatten(2, (2, -1)).transpose(1, 2),) * 3).transpose(1, 2).flatten(
            2
        )
        return F.cross_entropy(self.head(x + self.mixtures[0](x)).flatten(0, 1), labels.flatten())


def test_no_experts_are_offered_that_would_be_whole_beside_cp() -> None:
    """Tokens are split over cp ranks or experts over ep ranks, as no more than one of them is named."""
    ids, labels = (torch.zeros(2, 8192, dtype=torch.long, device="meta") for _ in range(2))
    model = trace(Attending(Capacity()), inputs={"ids": ids, "labels": labels})
    few = {"world": 4, "batch": 2}
    mesh = autoptd.plan(model, **few, fix={"cp": 2, "tp": 1, "pp": 1}).mesh
    assert (mesh.cp, mesh.ep) == (2, 1)
    with pytest.raises(PlanError, match=r"mixtures.0.up are not split over ep 2 where cp 2 splits the tokens"):
        autoptd.plan(model, **few, fix={"ep": 2, "tp": 1, "pp": 1})


def test_an_ep_that_fits_no_mesh_is_named() -> None:
    """The batch allows no more than two data-parallel ranks, and without attention there is no cp."""
    with pytest.raises(PlanError, match=r"ep 4 fits no mesh: .* dp is at most the batch of 2"):
        autoptd.plan(source("capacity"), world=4, batch=2, fix={"ep": 4})
    with pytest.raises(PlanError, match="world 4 is not divisible by tp 3"):
        autoptd.plan(source("capacity"), world=4, batch=4, fix={"ep": 4, "tp": 3})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("capacity_of_batch", "cumsum works across samples", marks=pytest.mark.fault("capacity of a rank")),
        ("old_mixtral", "a loop depends on data"),
    ],
)
def test_what_depends_on_the_rows_of_a_rank_is_refused(name: str, says: str) -> None:
    with pytest.raises(AutoptdError, match=says) as caught:
        source(name)
    assert "mixtures.0" in caught.value.where and caught.value.fix


def test_sequences_of_different_lengths_are_refused() -> None:
    """Rows in batches must have one shape on all ranks; sorted rows need not."""
    for name in ("einsum", "grouped"):
        made = parallel(name, planned(name, FOUR, BULK), "sgd")
        data, values = case(name).batch, made.initial_values()

        def body(communicators: Communicators, made: Any = made, data: Any = data, values: Any = values) -> float:
            mine, rank = copy.copy(made), communicators.dp.rank
            mine.start(communicators, values)
            return float(mine.eval_step({n: x[4 * rank : 4 * rank + 4, : 8 - rank % 2] for n, x in data.items()}))

        if name == "grouped":
            run_lockstep(made.layout.mesh, body)
        else:
            with pytest.raises(RuntimeFault, match=r"tensors of different sizes: \[\[4, 8, 32\], \[4, 7, 32\]\]"):
                run_lockstep(made.layout.mesh, body)


@pytest.mark.fault("a rank without rows")
def test_a_rank_that_leaves_out_an_exchange_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parallel("grouped_one", planned("grouped_one", Mesh(dp=4, ep=4), BULK), "sgd")
    known = expert_axis._move
    monkeypatch.setattr(expert_axis, "_move", lambda x, *others: known(x, *others) if x.shape[0] else x)
    with pytest.raises(RuntimeFault):
        train_in_lockstep(made, batches("grouped_one", 1), timeout_s=1)


@pytest.mark.parametrize("name", ["mixtral", "einsum"])
def test_evaluation_with_unequal_shares(name: str) -> None:
    """A rank with fewer microbatches takes part in the exchanges of the others."""
    made = parallel(name, planned(name, FOUR, BULK), "sgd")
    data, values = case(name).batch, made.initial_values()
    shares = [slice(0, 1), slice(1, 9), slice(9, 11), slice(11, 16)]

    def body(communicators: Communicators) -> float:
        mine = copy.copy(made)
        mine.start(communicators, values)
        return float(mine.eval_step({n: x[shares[communicators.dp.rank]] for n, x in data.items()}))

    found = run_lockstep(made.layout.mesh, body)
    given = case(name).model(**data)
    loss = given if isinstance(given, Tensor) else given.loss
    assert found == pytest.approx([loss.item()] * 4, rel=1e-12)


def test_verify_sees_what_training_would(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model = planned("mixtral", Mesh(dp=2, ep=2), BULK), case("mixtral").model
    inputs = {n: x[:2] for n, x in case("mixtral").batch.items()}
    assert verify_plan(plan, model, inputs=inputs).agrees
    _wrong_places(monkeypatch)
    assert not verify_plan(plan, model, inputs=inputs).agrees


class OnItsDevice(nn.Module):
    """Layers that make the tensor of their sums on the device of their input, as DBRX does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=True):
            total = torch.zeros_like(x, dtype=x.dtype, device=x.device)
            weights, experts = gate(x).softmax(-1).topk(2, -1)
            for expert in range(4):
                rows, place = torch.where(experts == expert)
                total.index_add_(0, rows, layer(x[rows]) * weights[rows, place, None])
            x = x + total
        return x.square().mean()


def test_tensors_that_are_made_on_the_device_of_another() -> None:
    torch.manual_seed(0)
    assert step_off_by(OnItsDevice().double(), {"x": torch.randn(6, WIDTH).double()}, dp=2, tp=2, micro=1) < TOLERANCE
