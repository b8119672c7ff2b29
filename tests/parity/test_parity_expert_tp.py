"""Experts that no tp ranks share (etp 1): each tp rank computes and sends the rows of its own tokens."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import autoptd
from autoptd.errors import PlanError, RuntimeFault
from autoptd.layout.layout import Layout
from autoptd.layout.mesh import Mesh
from autoptd.ops.expert_axis import Experts
from autoptd.passes.sharding import expert_parallel_graph
from autoptd.runtime.zero import flat_buffer
from autoptd.testing.parity import train_in_lockstep
from autoptd.verification.verdict import verify_plan
from tests.parity.mixture_models import Grouped
from tests.parity.parity_check import Variant, batches, case, check, parallel, planned, source
from tests.parity.parity_models import TOKENS, WIDTH

BULK = Variant(bulk=True, micro=4)
WAYS = [
    ("mixtral", Mesh(tp=2, dp=2, pp=2, ep=4, etp=1), BULK, "adamw"),
    ("mixtral", Mesh(tp=2, cp=2, dp=2, ep=4, etp=1), replace(BULK, zero=3), "adamw"),
    ("mixtral", Mesh(tp=4, dp=2, ep=2, etp=1), replace(BULK, zero=2, micro=2, clip_norm=0.05), "sgd"),
    (
        "mixtral",
        Mesh(tp=2, dp=2, pp=2, ep=4, etp=1),
        replace(BULK, zero=0, recompute="ops", schedule="interleaved", virtual=2, micro=2),
        "sgd",
    ),
    ("mixtral", Mesh(tp=2, dp=2, pp=2, ep=2, etp=1), replace(BULK, schedule="zero-bubble", zero=3), "adamw"),
    ("mixtral_ties", Mesh(tp=2, dp=2, pp=2, ep=4, etp=1), replace(BULK, recompute="selective"), "adamw"),
    ("deepseek", Mesh(tp=2, cp=2, pp=2, ep=2, etp=1), replace(BULK, zero=3), "sgd"),
    ("gpt_oss", Mesh(tp=2, dp=4, ep=4, etp=1), replace(BULK, zero=2, recompute="full"), "adamw"),
    ("gpt_oss", Mesh(tp=2, dp=2, pp=2, ep=1, etp=1), BULK, "adamw"),
    ("qwen2_moe", Mesh(tp=2, cp=2, dp=2, ep=4, etp=1), replace(BULK, zero=2), "adamw"),
    ("qwen3_moe", Mesh(tp=2, dp=2, pp=2, ep=2, etp=1), replace(BULK, schedule="zero-bubble", recompute="full"), "sgd"),
    ("glm4_moe", Mesh(tp=2, dp=4, ep=8, etp=1), replace(BULK, zero=3, micro=2), "adamw"),
    ("llama4", Mesh(tp=2, dp=2, pp=2, ep=4, etp=1), replace(BULK, zero=3), "sgd"),
    ("grouped", Mesh(tp=2, dp=4, ep=8, etp=1), replace(BULK, zero=0, micro=2), "sgd"),
    ("expanded", Mesh(tp=2, dp=2, pp=2, ep=2, etp=1), replace(BULK, recompute="full"), "adamw"),
]


@pytest.mark.parametrize(
    ("name", "mesh", "variant", "optimizer"), WAYS, ids=[f"{n}-{m}-{i}" for i, (n, m, *_) in enumerate(WAYS)]
)
def test_experts_train_like_one_process(name: str, mesh: Mesh, variant: Variant, optimizer: str) -> None:
    assert not check(name, mesh, variant, optimizer)


class Float32Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x.dtype)


class InFloat32(Grouped):
    """A mixture whose router computes in float32, as those of DeepSeek-V3 and its descendants do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.first = Float32Linear(WIDTH, self.count), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return (x + super().forward(x.tanh())).square().mean()


def test_a_router_in_float32_keeps_fp64_plans_off_etp_1() -> None:
    """Nothing asks for etp 1, so the plan takes another; a user who does gets the reason."""
    model, inputs = InFloat32().double(), {"x": torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)}
    traced = autoptd.trace(model, inputs=inputs, precision="fp64")
    ask = {"world": 4, "cluster": "dgx-h100", "batch": 4}
    assert autoptd.plan(traced, fix={"tp": 2, "dp": 2}, **ask).mesh.etp == 0
    with pytest.raises(PlanError, match="linear would round partial values"):
        autoptd.plan(traced, fix={"tp": 2, "dp": 2, "etp": 1}, **ask)


def test_a_model_without_experts_has_no_etp() -> None:
    model, inputs = nn.Linear(WIDTH, WIDTH), {"input": torch.randn(4, WIDTH)}
    with pytest.raises(PlanError, match=r"etp 1: .* no experts are found in the model"):
        autoptd.plan(model, inputs=inputs, loss=lambda y, _: y.mean(), world=2, cluster="dgx-h100", fix={"etp": 1})


def test_rows_that_the_loss_reads_keep_plans_off_etp_1() -> None:
    """The logits of routers leave their layers for a loss that balances them, with tokens merged with samples."""
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    traced = autoptd.trace(model, seq=TOKENS)
    ask = {"world": 4, "cluster": "dgx-h100", "batch": 4}
    assert autoptd.plan(traced, fix={"tp": 2, "dp": 2, "ep": 2}, **ask).mesh.etp == 0
    with pytest.raises(PlanError, match="linear gives rows of each tp rank's own tokens") as error:
        autoptd.plan(traced, fix={"tp": 2, "dp": 2, "ep": 2, "etp": 1}, **ask)
    assert "gate" in error.value.where


FOUR = Mesh(dp=2, tp=2, ep=2, etp=1)
CLIPPED = replace(BULK, zero=0, clip_norm=0.05)


def _summed_twice(patch: pytest.MonkeyPatch) -> None:
    made = flat_buffer.Buffer.__init__

    def partial(self: Any, specs: Any, *rest: Any) -> None:
        made(self, specs, *rest)
        self.partial_over_tp |= next(iter(specs.values())).over_tp

    patch.setattr(flat_buffer.Buffer, "__init__", partial)


def _first_tp_rank_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Layout, "counts", lambda self, spec, tp_rank: tp_rank == 0)


PLANTED = {
    "an expert over tp summed twice": _summed_twice,
    "experts over tp out of the norm": _first_tp_rank_alone,
}


@pytest.mark.fault("an expert over tp summed twice", "experts over tp out of the norm")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    assert check("mixtral", FOUR, CLIPPED, "sgd")


@pytest.mark.fault("rows sent once per tp rank")
def test_rows_sent_by_every_tp_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planned("mixtral", Mesh(dp=2, tp=2, ep=2), replace(CLIPPED, splits=(("*experts*", "B"),)))
    claimed = whole.model_copy(update={"mesh": whole.mesh.model_copy(update={"etp": 1})})
    with pytest.raises(PlanError, match="with etp 1 each tp rank sends own rows"):
        parallel("mixtral", claimed, "sgd")
    made = expert_parallel_graph._Splitter.__init__
    monkeypatch.setattr(
        expert_parallel_graph._Splitter,
        "__init__",
        lambda self, *args, own_rows: made(self, *args, own_rows=False),
    )
    with pytest.raises(RuntimeFault, match="disagree"):  # each has the others' rows
        train_in_lockstep(parallel("mixtral", claimed, "sgd", 0.05), batches("mixtral"))


def test_each_row_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token's rows are dispatched by one rank: tokens × experts chosen × layers × microbatches in all."""
    sent: list[int] = []
    known = Experts.route

    def counted(self: Experts, ends: torch.Tensor) -> torch.Tensor:
        found = known(self, ends)
        sent.append(int(found[0].sum()))
        return found

    monkeypatch.setattr(Experts, "route", counted)
    assert not check("mixtral", FOUR, BULK, "sgd")
    tokens = case("mixtral").batch["input_ids"].numel()
    config = case("mixtral").model.config
    assert sum(sent) == 2 * tokens * config.num_experts_per_tok * config.num_hidden_layers  # two steps


@pytest.mark.parametrize(
    ("mesh", "variant", "says"),
    [
        (Mesh(dp=2, tp=2, ep=2, etp=1), replace(BULK, sequence_parallel=False), "sequence_parallel is off"),
        (Mesh(dp=4, tp=2, ep=1, etp=1), replace(BULK, micro=2), "no experts are found in the model"),
    ],
)
def test_what_etp_cannot_do_is_refused(mesh: Mesh, variant: Variant, says: str) -> None:
    name = "mixtral" if mesh.ep > 1 else "nanogpt"
    with pytest.raises(PlanError, match=says):
        planned(name, mesh, variant)


def test_verify_runs_such_a_plan() -> None:
    inputs = {n: x[:2] for n, x in case("mixtral").batch.items()}
    found = verify_plan(planned("mixtral", FOUR, BULK), copy.deepcopy(source("mixtral").model), inputs=inputs)
    assert found.agrees
