"""A model's sizes as Megatron-LM's arguments: what of its configuration they cannot say is a difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from autoptd.export.megatron_model import shape_arguments

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {**SIZES, "num_experts": 4, "moe_intermediate_size": 32}
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def found(family: str, options: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Return the arguments of a model of transformers, and the differences as lines."""
    config = getattr(transformers, f"{family}Config")(**options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    arguments, differs = shape_arguments(model)
    return dict(arguments), "\n".join(differs)


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("Llama", {**SIZES, "hidden_act": "gelu"}, "the activation is gelu"),
        ("Llama", {**SIZES, "attention_bias": True}, r"biases are left out: model.layers.{0..3}.self_attn.o_proj.bias"),
        ("Llama", {**SIZES, "mlp_bias": True}, "model.layers.{0..3}.mlp.up_proj.bias"),
        ("Llama", {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 500.5}}, "base of rotary"),
        (
            "Llama",
            {**SIZES, "rope_parameters": {**ROPE, "original_max_position_embeddings": 4096}},
            "original_max_position_embeddings of rotary embeddings is 4096",
        ),
        ("Mixtral", {**SIZES, "router_jitter_noise": 0.1}, "noise of 0.1"),
        ("Mixtral", {**SIZES, "output_router_logits": True}, "the balance loss is one of all layers"),
        ("Mixtral", {**SIZES, "num_experts_per_tok": 1}, "the only expert of a token has the weight 1"),
        ("GPT2", {"n_layer": 2, "scale_attn_by_inverse_layer_idx": True}, "attention is not scaled"),
        ("GPT2", {"n_layer": 2, "scale_attn_weights": False}, "attention is not scaled"),
    ],
)
def test_what_no_argument_says_differs(family: str, options: dict[str, Any], said: str) -> None:
    assert said in found(family, options)[1]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {**SIZES, "rope_parameters": {**ROPE, "original_max_position_embeddings": 8192}}),
        ("Qwen2", SIZES),
        ("Qwen3Moe", EXPERTS),
        ("Mixtral", SIZES),
        ("GPT2", {"n_layer": 2}),
    ],
)
def test_models_that_the_arguments_say_differ_in_nothing(family: str, options: dict[str, Any]) -> None:
    assert not found(family, options)[1]


@pytest.mark.parametrize(
    ("options", "layers"),
    [({}, None), ({"decoder_sparse_step": 2}, "[0,1,0,1]"), ({"mlp_only_layers": [0]}, "[0,1,1,1]")],
)
def test_layers_without_experts_are_listed(options: dict[str, Any], layers: str | None) -> None:
    assert found("Qwen3Moe", {**EXPERTS, **options})[0].get("--moe-layer-freq") == layers


@pytest.mark.parametrize(
    ("family", "options", "before"),
    [
        ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}, False),
        ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False}, True),
        ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False, "num_experts_per_tok": 1}, True),
        ("Mixtral", {**SIZES, "num_experts_per_tok": 1}, True),
    ],
)
def test_the_softmax_of_a_router(family: str, options: dict[str, Any], before: bool) -> None:
    """Megatron-LM takes no softmax of one chosen logit."""
    assert ("--moe-router-pre-softmax" in found(family, options)[0]) == before


@pytest.mark.parametrize(("activation", "fused"), [("gelu", False), ("gelu_new", True), ("gelu_pytorch_tanh", True)])
def test_the_exact_gelu_is_not_fused_with_its_bias(activation: str, fused: bool) -> None:
    """Megatron-LM's kernel for bias and gelu has the tanh form, and is the default."""
    arguments, differs = found("GPT2", {"n_layer": 2, "activation_function": activation})
    assert ("--no-bias-gelu-fusion" not in arguments) == fused
    assert not differs
