"""Verify from the command line, the certificate, and models that are reduced in size."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

import autoptd
from autoptd.cli.main import main
from autoptd.errors import CannotVerify, PlanFileError
from autoptd.models.load import load_model
from autoptd.ops import library as ops
from autoptd.plans.model import Plan
from autoptd.verification.report import text
from autoptd.verification.smaller.widths import Ranks, narrow
from autoptd.verification.verdict import replace_text, verify_plan
from tests.verification.verified import cluster, model, plan, told, trial, verdict


@cache
def certified() -> Plan:
    """Return the plan with its certificate."""
    found = verify_plan(plan("tensors"), model())
    assert found.certificate is not None
    return plan("tensors").model_copy(update={"certificate": found.certificate})


def test_a_certificate_is_made_kept_and_looked_at() -> None:
    held = certified()
    again = Plan.from_json(held.to_json())
    assert again == held
    assert again.digest == plan("tensors").digest
    assert "certificate" not in json.loads(plan("tensors").to_json())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autoptd.parallelize(model(), plan=again)


def test_a_plan_that_was_changed_after_it_was_verified_is_refused() -> None:
    data = json.loads(certified().to_json())
    data["zero"] = 0
    with pytest.raises(PlanFileError, match="changed after it was verified"):
        autoptd.parallelize(model(), plan=Plan.from_json(json.dumps(data)))


def test_a_plan_that_averages_its_loss_has_no_answer() -> None:
    averaged = plan("tensors").model_copy(update={"loss_averaging": "per-microbatch"})
    with pytest.raises(CannotVerify, match="which the plain model computes over whole batches"):
        verify_plan(averaged, model())


def test_other_versions_are_a_warning() -> None:
    certificate = certified().certificate
    assert certificate is not None
    other = certificate.model_copy(update={"versions": {"autoptd": "0.0", "torch": "0.0"}})
    held = plan("tensors").model_copy(update={"certificate": other})
    with pytest.warns(UserWarning, match=r"verified with autoptd 0\.0, this is"):
        autoptd.parallelize(model(), plan=held)


def test_the_command_stores_the_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, nanogpt = tmp_path / "plan.json", load_model("nanogpt")[0]
    autoptd.plan(
        nanogpt, world=4, batch=8, seq=32, fix={"tp": 2, "pp": 2, "schedule": "1f1b"}, cluster="dgx-h100"
    ).save(path)
    assert main(["verify", str(path), "--model", "nanogpt", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["agrees"]
    assert told["ranks"] == 4
    assert "12 × blocks.0 → 3" in told["shown"]
    assert Plan.load(path).certificate is not None


def test_the_report_says_what_was_found() -> None:
    shown = text(verdict("tensors"), 100)
    assert "4 ranks in one process, in float64" in shown
    assert "blocks.{0..2}.norm_1.weight" in shown
    assert "verified: the plan computes what the model computes" in shown
    wrong = text(verdict("tensors", replace_text(trial("tensors"), "tp.all_reduce_both(out)", "out")), 100)
    assert "NOT the same as the plain model: stage 0, blocks.0.attention.out: linear" in wrong


def test_locating_a_difference_warns_of_no_model_that_is_trained_again() -> None:
    wrong = replace_text(trial("tensors"), "tp.all_reduce_both(out)", "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not verdict("tensors", wrong).agrees
        wrong.subject.source.model.state_dict()


def test_what_is_carried_over_is_the_plan() -> None:
    small, whole = trial("stages").subject.plan, plan("stages")
    assert small.mesh == whole.mesh
    assert len(small.stages) == len(whole.stages)
    assert small.zero == whole.zero
    assert set(small.splits.parameters.values()) == set(whole.splits.parameters.values())
    assert verdict("stages").steps == 2


@pytest.mark.parametrize(
    ("config", "ranks", "expected"),
    [
        (
            {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
            Ranks(8),
            {"hidden_size": 64, "num_attention_heads": 16, "head_dim": 4},
        ),
        ({"hidden_size": 768, "num_attention_heads": 12}, Ranks(8), {"hidden_size": 16, "num_attention_heads": 4}),
        ({"vocab_size": 50257}, Ranks(8), {"vocab_size": 25}),
        ({"vocab_size": 50304}, Ranks(2, 2), {"vocab_size": 24}),
        (  # parts of a head
            {"hidden_size": 7168, "num_attention_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            Ranks(4),
            {"hidden_size": 16, "num_attention_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
        ),
        (  # several experts in each group, as many groups
            {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
            Ranks(4),
            {"n_routed_experts": 32, "num_experts_per_tok": 2},
        ),
        (  # a group of experts on each rank, as planned
            {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
            Ranks(ep=8),
            {"n_routed_experts": 16, "num_experts_per_tok": 2},
        ),
        # a quarter of a group on each rank
        ({"n_routed_experts": 256, "n_group": 8}, Ranks(ep=32), {"n_routed_experts": 64}),
        ({"num_experts": 128}, Ranks(ep=8), {"num_experts": 16}),  # on each rank several
        ({"num_experts": 128}, Ranks(4), {"num_experts": 8}),
        ({"num_local_experts": 8}, Ranks(2, ep=8), {}),
    ],
)
def test_narrower_sizes_split_as_the_planned_ones(
    config: dict[str, int], ranks: Ranks, expected: dict[str, int]
) -> None:
    assert narrow(config, ranks, 8) == expected


class Tied(nn.Module):
    """Plain model with one table as embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(24, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.up(self.table(ids))).flatten(0, 1), labels.flatten())


def test_a_plain_model_on_meta_whose_ends_are_tied() -> None:
    """The values are made by `verify`, and stay tied."""
    with torch.device("meta"):
        model = Tied()
    inputs = {name: torch.zeros(2, 8, dtype=torch.int64) for name in ("ids", "labels")}
    plan = autoptd.plan(model, world=4, batch=8, inputs=inputs, precision="fp32", fix={"dp": 2, "pp": 2, "micro": 2})
    found = verify_plan(plan, model, inputs=inputs)
    assert found.agrees, told(found)


@pytest.mark.parametrize(("batch", "ranks", "micro"), [(3, 2, 2), (7, 2, 2), (7, 3, 3), (11, 2, 3)])
def test_a_batch_that_does_not_fill_its_microbatches_is_verified(batch: int, ranks: int, micro: int) -> None:
    fix = {"dp": ranks, "tp": 1, "pp": 1, "micro": micro, "schedule": "1f1b"}
    uneven = autoptd.plan(model(), world=ranks, batch=batch, seq=8, precision="fp32", fix=fix, cluster=cluster())
    found = verify_plan(uneven, model())
    assert found.agrees, told(found)


def test_a_mixture_whose_products_are_grouped() -> None:
    """The model calls a kernel in bfloat16 that supports neither float64 nor narrow rows."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=4, vocab_size=128, tie_word_embeddings=False)
    with torch.device("meta"):
        mixture = AutoModelForCausalLM.from_config(config)
    source = autoptd.trace(mixture, seq=32, precision="bf16")
    assert any(node.target is ops.grouped_mm for node in source.folded.traced.graph.graph.nodes)
    made = autoptd.plan(source, world=8, batch=16, cluster="dgx-h100", fix={"dp": 2, "tp": 2, "pp": 2})
    found = verify_plan(made, mixture)
    assert found.agrees and found.compared is not None and any("experts" in name for name in found.compared.gradients)
