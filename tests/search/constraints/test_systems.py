"""Plans as other systems would run them: their exports, conflicts, and the cost of their limits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import PlanError
from autoptd.explain.plan import headline
from autoptd.export.megatron import megatron
from autoptd.plans.model import Plan
from autoptd.search.constraints.assumed import SYSTEM_NAMES
from autoptd.search.constraints.systems import SYSTEMS, read_system

SIZES = {"vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 2048}
CONFIGS = {
    "llama": transformers.LlamaConfig(
        **SIZES, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=8192, n_embd=1024, n_head=16, n_layer=4, n_positions=2048, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "mixtral": transformers.MixtralConfig(
        **SIZES, intermediate_size=2048, num_attention_heads=16, num_key_value_heads=8, num_local_experts=8
    ),
}  # fmt: skip


_H100 = Cluster.load("dgx-h100")
# without launch overhead, which the splits ILP does not see where whole segments are launch-bound
CLUSTER = _H100.model_copy(update={"device": _H100.device.model_copy(update={"dispatch_s": 0.0})})


@cache
def traced(name: str) -> autoptd.TracedModel:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    return autoptd.trace(model, seq=2048)


def plan(name: str, as_: str = "megatron", **fix: Any) -> Plan:
    few = {"cp": 1, "micro": 1, "zero": 3 if as_ == "torchtitan" and fix["pp"] == 1 else 1}
    return autoptd.plan(traced(name), world=16, cluster=CLUSTER, batch=64, as_=as_, fix=few | fix)


def differences(name: str, found: Plan) -> tuple[str, ...]:
    return megatron(found, traced(name).model, traced(name).folded).differs


MESHES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tp": 4}),
    ("llama", {"tp": 4, "pp": 2}),
    ("llama", {"tp": 2, "pp": 4, "recompute": "full"}),
    ("llama", {"tp": 8, "sequence_parallel": False, "recompute": "selective"}),
    ("gpt2", {"tp": 2, "pp": 2}),
    ("gpt2", {"tp": 8, "cp": 2, "zero": 0}),
    ("mixtral", {"tp": 2, "pp": 2, "etp": 2}),
    ("mixtral", {"tp": 2, "ep": 8, "etp": 1}),
]


@pytest.mark.parametrize(("name", "fix"), MESHES)
def test_an_exported_plan_as_megatron_is_the_planned_one(name: str, fix: dict[str, Any]):
    found = plan(name, **fix)
    assert differences(name, found) == ()
    assert headline(found).endswith(", as megatron")
    assert Plan.from_json(found.to_json()) == found


def test_nemo_overlaps_tp():
    found = plan("llama", "nemo", tp=4, pp=2, micro=4)  # messages that a second collective's latency does not outweigh
    assert set(found.method.overlap) >= {"dp", "tp"}
    assert differences("llama", found) == ()
    assert found.predicted.step_time_s <= plan("llama", tp=4, pp=2, micro=4).predicted.step_time_s


def test_torchtitan_shards_parameters_unless_there_are_stages():
    found = plan("llama", "torchtitan", tp=2, pp=1)
    assert found.zero == 3 and found.splits.parameters["model.layers.0.self_attn.o_proj.weight"] == "S1"
    assert plan("llama", "torchtitan", tp=2, pp=2).zero == 1


@pytest.mark.parametrize(
    ("as_", "fix", "what"),
    [
        ("megatron", {"schedule": "zero-bubble"}, "cannot express schedule 'zero-bubble'"),
        ("megatron", {"zero": 3}, "cannot express zero 3"),
        ("megatron", {"recompute": "ops"}, "cannot express recompute 'ops'"),
        ("megatron", {"splits": {"*.q_proj.weight": "S1"}}, "cannot express splits"),
        ("torchtitan", {"offload": 0.5}, "cannot express offload 0.5"),
        ("torchtitan", {"pp": 2, "zero": 3}, "cannot express"),
        ("megatrn", {}, "no system is called 'megatrn'"),
    ],
)
def test_conflicts_are_refused(as_: str, fix: dict[str, Any], what: str):
    with pytest.raises(PlanError, match=what) as error:
        read_system(as_, fix)
    assert error.value.where and error.value.fix


def test_a_tp_that_heads_do_not_divide_by_is_refused():
    with pytest.raises(PlanError, match="has 8 parts along the dim that Megatron-LM splits, which tp 16 does not"):
        autoptd.plan(traced("llama"), world=16, cluster="dgx-h100", fix={"splits": "megatron", "tp": 16})


def normed() -> torch.nn.Module:
    """Return layers whose products' results are needed whole."""
    return torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))))


def two_stacks() -> torch.nn.Module:
    both = {name: torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))) for name in ("encoder", "decoder")}
    return torch.nn.Sequential(OrderedDict(both))


@pytest.mark.parametrize(
    ("made", "fix", "own"),
    [
        (normed, {}, False),
        (normed, {"splits": "megatron"}, True),
        (two_stacks, {}, False),
        (two_stacks, {"stages": "layers"}, True),
    ],
)
def test_the_way_out_is_not_to_leave_out_what_was_not_given(
    made: Callable[[], torch.nn.Module], fix: dict[str, Any], own: bool
):
    asked = {"inputs": {"input": torch.ones(4, 4)}, "loss": lambda out, _: out.mean(), "world": 2, "batch": 4}
    with pytest.raises(PlanError) as error:
        autoptd.plan(made(), as_="megatron", fix=fix, **asked)
    assert ("leave as_ out" in error.value.fix) == (not own)
    assert all(name in error.value.fix for name in fix)


def test_layers_are_not_cut():
    with pytest.raises(PlanError, match="cuts a layer"):
        plan("llama", cuts=["model.layers.2.post_attention_layernorm"], pp=2)


@pytest.mark.parametrize("way", range(len(SYSTEMS["megatron"])))
def test_no_plan_of_a_system_is_faster_than_any(way: int):
    """Assume the same kernels and overlaps of both."""
    limits = SYSTEMS["megatron"][way]
    assumed = {"kernels": "fused", "attention": "cudnn", "overlap": next(iter(limits["overlap"]))}
    fix = {"schedule": limits["schedule"][0], "headroom": 0, "tp": 2, "pp": 2, "cp": 1, "micro": 1, "recompute": "none"}
    task: dict[str, Any] = {"world": 16, "cluster": CLUSTER, "batch": 64}
    limited = autoptd.plan(traced("llama"), **task, as_="megatron", fix=fix, assume=assumed)
    free = autoptd.plan(traced("llama"), **task, fix={**fix, "loss": "in_place", "shards": 0}, assume=assumed)
    assert limited.predicted.step_time_s >= free.predicted.step_time_s * (1 - 1e-9)


def test_every_system_is_on_the_command_line():
    assert tuple(SYSTEMS) == SYSTEM_NAMES
