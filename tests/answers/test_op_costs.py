"""Time by module and kernel: the rows add up to the plan's prediction, and name what is slow and why."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.answers.op_costs import COMMUNICATION, GRADIENTS, WAITING, WRITTEN, OpCosts, op_costs
from autoptd.answers.op_costs_text import op_costs_data, op_costs_text
from autoptd.answers.parameter_totals import parameter_totals
from autoptd.answers.query import PlanQuery
from autoptd.answers.quicker_kernels import quicker_kernels
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster, Pool
from autoptd.cost_models.op_time import op_s
from autoptd.explain.timeline import chunk_times
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan
from tests.answers.small import nodes_of_four

CASES: dict[str, dict[str, Any]] = {
    "whole": {"tp": 1, "pp": 1, "recompute": "none"},
    "full": {"tp": 2, "pp": 1, "recompute": "full", "micro": 2},
    "selective": {"tp": 4, "pp": 2, "recompute": "selective", "kernels": "eager"},
    "ops": {"tp": 1, "pp": 2, "recompute": "ops", "schedule": "interleaved", "virtual": 2},
    "zero": {"tp": 2, "pp": 1, "zero": 3, "recompute": "full"},
    "bubble": {"tp": 1, "pp": 4, "schedule": "zero-bubble", "kernels": "eager"},
    "context": {"cp": 2, "tp": 2, "pp": 1, "recompute": "full"},
    "again": {"tp": 4, "pp": 1, "gathers": "again", "recompute": "none"},
    "host": {"tp": 1, "pp": 1, "recompute": "offload", "zero": 1},
}
PLAIN = {"zero": 1, "schedule": "1f1b", "offload": 0.0}


def adds_up(plan: Plan, costs: OpCosts) -> None:
    """Check that the rows of the rank with most work are its compute, recomputation and communication."""
    ranks = [sum(row.by_rank[rank] for row in costs.rows) for rank in range(plan.mesh.pp)]
    if plan.zero < 2 and "activation_copies" not in plan.predicted.time_s:
        _, times, _ = chunk_times(plan)
        names = ("forward_s", "backward_s", "forward_tp_s", "backward_tp_s")
        works = [sum(getattr(chunk, name) for chunk in rank.chunks for name in names) for rank in times]
        assert ranks == pytest.approx([plan.schedule.microbatches * work for work in works], rel=1e-9)
    parts = ("compute", "recompute", "tp_communication")
    assert max(ranks) == pytest.approx(sum(plan.predicted.time_s.get(part, 0.0) for part in parts), rel=1e-9)
    assert sum(row.seconds for row in costs.rows) == pytest.approx(sum(ranks) / plan.mesh.pp, rel=1e-9)
    assert costs.rest_s == pytest.approx(plan.predicted.step_time_s - sum(ranks) / plan.mesh.pp)
    assert costs.ideal_s / costs.step_s == pytest.approx(plan.predicted.mfu)


@pytest.mark.parametrize("name", CASES)
def test_rows_add_up_to_the_prediction(asked: PlanQuery, traced: TracedModel, name: str):
    plan = replace(asked, fix={**PLAIN, **CASES[name]}).plan()
    costs = op_costs(plan, traced)
    adds_up(plan, costs)
    if plan.mesh.pp > 1:
        return
    time_s = plan.predicted.time_s
    assert sum(row.recompute_s for row in costs.rows) == pytest.approx(time_s["recompute"])
    sent_s = sum(row.forward_s + row.backward_s for row in costs.rows if row.kernel == COMMUNICATION)
    assert sent_s == pytest.approx(time_s["tp_communication"])


def test_experts_on_other_ranks_add_up():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    traced = autoptd.trace(model, seq=256)
    fix = {**PLAIN, "ep": 2, "tp": 2, "pp": 1, "recompute": "full"}
    plan = autoptd.plan(traced, world=4, cluster=nodes_of_four(), batch=16, fix=fix)
    costs = op_costs(plan, traced)
    adds_up(plan, costs)
    assert any("grouped" in row.kernel for row in costs.rows)
    spread = [row for row in parameter_totals(plan, traced) if row.spread]
    assert [row.spread for row in spread] == [1.0] and "experts" in spread[0].module


def test_types_of_device_have_their_own_times(asked: PlanQuery, traced: TracedModel):
    slow = asked.cluster.device.model_copy(update={"name": "slow", "memory_bytes_per_s": 1e12})
    cluster = Cluster.from_data(asked.cluster.model_copy(update={"others": (Pool(device=slow, ranks=4),)}).to_data())
    plan = replace(asked, cluster=cluster, fix={**PLAIN, "pp": 2, "tp": 1, "recompute": "none"}).plan()
    assert {stage.device for stage in plan.stages} == {"H100-SXM5-80GB", "slow"}
    adds_up(plan, op_costs(plan, traced))


def test_a_row_is_what_its_kernels_take(asked: PlanQuery, traced: TracedModel):
    """Repeats the sums of one row from the kernels of the plan, each priced by itself."""
    plan = replace(asked, fix={**PLAIN, "tp": 2, "pp": 1, "recompute": "full", "micro": 2}).plan()
    costs = op_costs(plan, traced)
    row = next(r for r in costs.rows if "GEMM" in r.kernel and "*" in r.module)
    runs = [run for run in costs.runs if (run.module, run.kernel) == (row.module, row.kernel)]
    assert {run.step_pass for run in runs} == {"forward", "backward", "recompute"} and row.passes == "FBR"
    assert row.seconds == pytest.approx(sum(run.times * op_s(run.device, run.work) for run in runs))
    # four layers, microbatches of 2 samples of 256 tokens; two products in backward, and one again
    layers, m, device = 4, plan.schedule.microbatches, plan.cluster.device
    (shape,) = {(w.m, w.n, w.k) for run in runs if run.step_pass == "forward" for w in [run.work]}
    assert shape[0] == 2 * 256 and None not in shape
    flops = 2.0 * shape[0] * shape[1] * shape[2] * layers * m
    assert row.kernels == {"forward": layers * m, "backward": 2 * layers * m, "recompute": layers * m}
    assert row.flops == pytest.approx(4 * flops)
    assert row.of_peak == pytest.approx(4 * flops / device.matmul_flops_per_s.bf16 / row.seconds)
    assert row.of_bandwidth == pytest.approx(row.nbytes / device.memory_bytes_per_s / row.seconds)


def test_rates_are_below_the_peaks(asked: PlanQuery, traced: TracedModel):
    costs = op_costs(replace(asked, fix={**PLAIN, "tp": 1, "pp": 1, "kernels": "eager"}).plan(), traced)
    assert any(row.of_peak for row in costs.rows) and any(row.of_bandwidth for row in costs.rows)
    assert all(row.of_peak <= 1 and row.of_bandwidth <= 1 for row in costs.rows)
    assert list(costs.rows) == sorted(costs.rows, key=lambda row: -row.seconds)


def test_waiting_for_the_host_is_a_row_and_what_a_graph_of_kernels_would_save(asked: PlanQuery, traced: TracedModel):
    plan = replace(asked, fix={**PLAIN, "tp": 1, "pp": 1, "recompute": "none", "micro": 1}).plan()
    costs = op_costs(plan, traced)
    waiting_s = sum(row.seconds for row in costs.rows if row.kernel == WAITING)
    assert waiting_s > 0
    (found,) = (q for q in quicker_kernels(costs) if q.kernel == WAITING)
    assert (found.now_s, found.then_s) == (pytest.approx(waiting_s), 0.0) and "57.6 µs for each of" in found.cause
    device = plan.cluster.device.model_copy(update={"dispatch_s": 0.0})
    idle = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"device": device})})
    without = op_costs(idle, traced)
    assert not any(row.kernel == WAITING for row in without.rows)
    busy_s = sum(row.seconds for row in costs.rows) - waiting_s
    assert sum(row.seconds for row in without.rows) == pytest.approx(busy_s), "only the waiting goes"


# --- attention ----------------------------------------------------------------------------------------------------


class Sinks(nn.Module):
    """Causal attention with a learned sink beside the scores of each head, written as ops; 2 layers."""

    def __init__(self, width: int = 512, heads: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, width)
        self.layers = nn.ModuleList(SinkAttention(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 1024, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


class SinkAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (w // self.heads) ** 0.5
        mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, s, 1)
        p = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return self.out((p @ v).transpose(1, 2).reshape(b, s, w))


@pytest.fixture(scope="module")
def sinks() -> tuple[Plan, TracedModel]:
    with torch.device("meta"):
        model = Sinks()
    traced = autoptd.trace(model, inputs={"ids": torch.zeros(2, 2048, dtype=torch.long, device="meta")}, seq=2048)
    fix = {**PLAIN, "tp": 1, "pp": 1, "recompute": "none", "kernels": "eager"}
    return autoptd.plan(traced, world=1, cluster="dgx-h100", batch=8, seq=None, fix=fix), traced


def test_attention_written_for_its_sinks_is_the_first_row(sinks: tuple[Plan, TracedModel]):
    plan, traced = sinks
    costs = op_costs(plan, traced)
    adds_up(plan, costs)
    first = costs.rows[0]
    assert (first.module, first.kernel) == ("layers.*", WRITTEN)
    (found,) = (q for q in quicker_kernels(costs) if q.kernel == WRITTEN)
    assert "softmax" in found.cause and "cat" in found.cause and found.cause.endswith("reads sinks there")
    assert found.now_s == pytest.approx(first.seconds)
    lines = op_costs_text(plan, costs, parameter_totals(plan, traced), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "largest part: attention, unfused in layers.*" in " ".join(lines[:8])


def test_the_fused_kernel_takes_what_it_takes_in_a_model_that_has_it(sinks: tuple[Plan, TracedModel]):
    """Compares with equal heads and tokens in `scaled_dot_product_attention`, with all scores computed."""

    class Fused(SinkAttention):
        def forward(self, x: Tensor) -> Tensor:
            b, s, w = x.shape
            q, k, v = self.qkv(x).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).reshape(b, s, w))

    with torch.device("meta"):
        model = Sinks()
        model.layers = nn.ModuleList(Fused(512, 8) for _ in range(2))
    traced = autoptd.trace(model, inputs={"ids": torch.zeros(2, 2048, dtype=torch.long, device="meta")}, seq=2048)
    fix = {**PLAIN, "tp": 1, "pp": 1, "recompute": "none", "kernels": "eager", "micro": sinks[0].micro}
    costs = op_costs(autoptd.plan(traced, world=1, cluster="dgx-h100", batch=8, fix=fix), traced)
    (flash,) = (row for row in costs.rows if row.kernel == "flash attention")
    (found,) = (q for q in quicker_kernels(op_costs(*sinks)) if q.kernel == WRITTEN)
    launches_s = 2 * 2 * sinks[0].schedule.microbatches * 4.8e-6
    assert found.then_s == pytest.approx(flash.seconds, abs=launches_s, rel=0.02)


@cache
def nanogpt(dropout: float) -> TracedModel:
    with torch.device("meta"):
        model = NanoGPT(GPTSizes(vocab=1024, max_seq=1024, layers=2, heads=8, width=512, dropout=dropout))
    return autoptd.trace(model, seq=1024)


@pytest.mark.parametrize("more", [{}, {"pp": 2, "micro": 2, "recompute": "full"}], ids=["one", "pipeline"])
def test_dropout_in_attention_is_named(more: dict[str, Any]):
    traced = nanogpt(0.1)
    fix = {**PLAIN, "tp": 1, "pp": 1, "recompute": "none", "micro": 4, **more}
    asks = {"world": fix["pp"], "cluster": "dgx-h100", "batch": 8, "fix": fix}
    costs = op_costs(autoptd.plan(traced, **asks), traced)
    (found,) = (q for q in quicker_kernels(costs) if q.kernel == WRITTEN)
    assert "remove dropout in attention" in found.cause and found.instead == "the flash kernel"
    plain = nanogpt(0.0)
    without = op_costs(autoptd.plan(plain, **asks), plain)
    (flash,) = (row for row in without.rows if row.kernel == "flash attention")
    assert found.then_s == pytest.approx(flash.seconds, rel=0.01), "as the model without dropout has it"


def test_a_learned_bias_beside_dropout_is_named_too():
    class Biased(SinkAttention):
        """Attention with a bias per head and key, and dropout."""

        def forward(self, x: Tensor) -> Tensor:
            b, s, w = x.shape
            q, k, v = self.qkv(x).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
            places = torch.arange(s, device=x.device)
            bias = self.sinks.view(1, -1, 1, 1) * (places[None] - places[:, None]).to(x.dtype)
            y = nn.functional.scaled_dot_product_attention(q, k, v, bias, dropout_p=0.1)
            return self.out(y.transpose(1, 2).reshape(b, s, w))

    with torch.device("meta"):
        model = Sinks()
        model.layers = nn.ModuleList(Biased(512, 8) for _ in range(2))
    traced = autoptd.trace(model, inputs={"ids": torch.zeros(2, 1024, dtype=torch.long, device="meta")}, seq=1024)
    fix = {**PLAIN, "tp": 1, "pp": 1, "recompute": "none"}
    costs = op_costs(autoptd.plan(traced, world=1, cluster="dgx-h100", batch=8, fix=fix), traced)
    (found,) = (q for q in quicker_kernels(costs) if q.kernel == WRITTEN)
    assert "remove dropout" in found.cause and "it has a mask" in found.cause
    mine = [run for run in costs.runs if run.kernel == WRITTEN]
    attention_s = sum(run.seconds for run in mine if run.work.attends)
    assert found.now_s == pytest.approx(attention_s) and attention_s < sum(run.seconds for run in mine)


def test_products_of_odd_rows_and_small_shares_are_named():
    with torch.device("meta"):
        model = NanoGPT(GPTSizes(vocab=10007, max_seq=256, layers=2, heads=8, width=512))
    traced = autoptd.trace(model, seq=256)
    fix = {**PLAIN, "tp": 1, "pp": 1, "recompute": "none", "kernels": "eager", "micro": 32}
    costs = op_costs(autoptd.plan(traced, world=1, cluster="dgx-h100", batch=32, fix=fix), traced)
    found = next(q for q in quicker_kernels(costs) if q.cause.startswith("rows of an odd length"))
    assert "10007" in found.cause and found.then_s < found.now_s
    split = autoptd.plan(traced, world=8, cluster="dgx-h100", batch=32, fix={**fix, "tp": 8, "splits": "megatron"})
    slow = [q for q in quicker_kernels(op_costs(split, traced)) if "split over tp 8" in q.cause]
    assert slow and all("GEMM" in q.kernel for q in slow)


# --- parameters and texts -----------------------------------------------------------------------------------------


def test_parameters_by_module(asked: PlanQuery, traced: TracedModel):
    plan = replace(asked, fix={**PLAIN, "tp": 4, "pp": 1, "splits": "megatron"}).plan()
    rows = parameter_totals(plan, traced)
    named = dict(traced.model.named_parameters())
    assert sum(row.numel for row in rows) == sum(p.numel() for p in named.values())
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert all(row.nbytes == 2 * row.numel for row in rows), "bf16"
    fc = next(row for row in rows if row.split == 1.0 and "*" in row.module)
    mine = [p for n, p in named.items() if n.rpartition(".")[0].endswith(fc.module.partition("*")[2])]
    assert len(mine) == 4 and fc.numel == sum(p.numel() for p in mine) and fc.spread == fc.frozen == 0.0


def test_data_and_text_have_the_same_rows(asked: PlanQuery, traced: TracedModel):
    plan = replace(asked, fix={**PLAIN, "tp": 2, "pp": 2}).plan()
    costs, parameters = op_costs(plan, traced), parameter_totals(plan, traced)
    data = op_costs_data(plan, costs, parameters)
    assert sum(row["share"] for row in data["rows"]) + data["rest_s"] / data["step_time_s"] == pytest.approx(1.0)
    assert all(row["seconds"] == pytest.approx(sum(row["by_rank_s"]) / 2) for row in data["rows"])
    for width in (80, 100, 140):
        text = op_costs_text(plan, costs, parameters, width, all=True)
        assert max(map(len, text.splitlines())) <= width
        assert GRADIENTS in text and "Parameters by module" in text and "rest: dp, optimizer, idle" in text
