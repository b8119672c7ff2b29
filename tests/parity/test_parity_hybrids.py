"""Parity of hybrids: layers with a delta rule over several chunks and layers with attention, in turn."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.passes.known import delta_rule, known
from autoptd.verification.smaller.smaller import Subject
from autoptd.verification.trial import trial_on
from autoptd.verification.verdict import Verdict, judge
from tests.parity.parity_check import bulk

TOKENS = 150  # three chunks of 64
FIX = {"tp": 2, "pp": 2, "dp": 1}


def hybrid() -> nn.Module:
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    torch.manual_seed(0)
    config = OlmoHybridConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        pad_token_id=0,
        eos_token_id=1,
    )
    return OlmoHybridForCausalLM(config).double().train()


def verdict(**fix: Any) -> Verdict:
    model, rng = hybrid(), torch.Generator().manual_seed(1)
    ids = [torch.randint(2, 64, (4, TOKENS), generator=rng) for _ in range(2)]
    batches: list[dict[str, Tensor]] = [{"input_ids": x, "labels": x.clone()} for x in ids]
    source = autoptd.trace(model, inputs={n: x[:2] for n, x in batches[0].items()}, precision="fp64")
    cluster = bulk(Cluster.load("dgx-h100"))
    plan = autoptd.plan(source, world=4, cluster=cluster, batch=4, optimizer="sgd", fix={**FIX, **fix})
    places = plan.splits.parameters
    assert places["model.layers.0.linear_attn.q_proj.weight"] == "S0"
    return judge(trial_on(Subject(source, plan, source), batches), plan)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_hybrid_trains_as_one_process(recompute: str) -> None:
    found = verdict(recompute=recompute)
    assert found.agrees and found.difference < 1e-9, found.faults


def test_a_wrong_gate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(delta_rule.gated_delta_rule)
    def forgets_nothing(query: Tensor, key: Tensor, value: Tensor, g: Tensor, *rest: Any, **options: Any) -> Any:
        return delta_rule.gated_delta_rule(query, key, value, g * 0, *rest, **options)

    monkeypatch.setattr(known, "DELTA_RULES", {"torch_chunk_gated_delta_rule": forgets_nothing})
    assert not verdict().agrees
