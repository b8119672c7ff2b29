"""A model's sizes as Megatron-LM's arguments, read from the Hugging Face configuration of a decoder.

Names of arguments: megatron/training/arguments.py of Megatron-LM (Megatron-Core 0.15), `_add_network_size_args`,
`_add_regularization_args`, `_add_training_args`, `_add_tokenizer_args`, `_add_moe_args`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from autoptd.text import fold_names

Argument = tuple[str, str]  # name and value; "" for a flag

_LLAMA_LIKE = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_MOE = ("mixtral", "qwen3_moe")
# constants of megatron/core/models/common/embeddings/rotary_pos_embedding.py (`_apply_scaling`)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
KNOWN = ("gpt2", *_LLAMA_LIKE)


def shape_arguments(model: nn.Module) -> tuple[list[Argument], list[str]]:
    """Return the arguments and the differences; for a model of an unknown type, only a difference."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind == "gpt2":
        return list(_gpt2(config)), list(_gpt2_differs(config))
    if kind in _LLAMA_LIKE:
        return list(_llama(config, model)), list(_llama_differs(config, model))
    what = f"a {kind}" if kind else f"a {type(model).__name__}, which has no configuration"
    return [], [f"the model's sizes are left to you: it is {what}; they are known for {', '.join(KNOWN)}"]


def _gpt2(config: Any) -> Iterator[Argument]:
    yield from _sizes(config.n_layer, config.n_embd, config.n_head, config.n_inner or 4 * config.n_embd)
    yield from _positions(config.n_positions)
    yield "--position-embedding-type", "learned_absolute"
    yield from _vocabulary(config)
    yield "--normalization", "LayerNorm"
    yield "--norm-epsilon", f"{config.layer_norm_epsilon:g}"
    yield from _dropouts(config.attn_pdrop, config.resid_pdrop)
    if config.activation_function == "gelu":
        yield "--no-bias-gelu-fusion", ""  # its fused gelu is the tanh form
    if not config.tie_word_embeddings:
        yield "--untie-embeddings-and-output-weights", ""


def _gpt2_differs(config: Any) -> Iterator[str]:
    if config.activation_function not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        yield f"the activation is {config.activation_function}: Megatron-LM uses gelu here"
    if config.embd_pdrop != config.resid_pdrop:
        hidden = f"--hidden-dropout {config.resid_pdrop:g}"
        yield f"dropout of embeddings is {config.embd_pdrop:g}: {hidden} applies to them too"
    if not getattr(config, "scale_attn_weights", True) or getattr(config, "scale_attn_by_inverse_layer_idx", False):
        yield "attention is not scaled by the root of a head's width alone: Megatron-LM's is"


def _llama(config: Any, model: nn.Module) -> Iterator[Argument]:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    yield from _sizes(config.num_hidden_layers, config.hidden_size, heads, config.intermediate_size)
    if groups != heads:
        yield "--group-query-attention", ""
        yield "--num-query-groups", str(groups)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim * heads != config.hidden_size:
        yield "--kv-channels", str(head_dim)
    yield from _positions(config.max_position_embeddings)
    yield from _rotary(config)
    yield from _vocabulary(config)
    yield "--normalization", "RMSNorm"
    yield "--norm-epsilon", f"{config.rms_norm_eps:g}"
    yield "--swiglu", ""
    yield "--disable-bias-linear", ""
    names = [name for name, _ in model.named_parameters()]
    if any(name.endswith("q_proj.bias") for name in names):
        yield "--add-qkv-bias", ""
    if any(".q_norm." in name for name in names):
        yield "--qk-layernorm", ""
    yield from _dropouts(getattr(config, "attention_dropout", 0.0), 0.0)
    if not config.tie_word_embeddings:
        yield "--untie-embeddings-and-output-weights", ""
    if config.model_type in _MOE:
        yield from _experts(config)


def _llama_differs(config: Any, model: nn.Module) -> Iterator[str]:
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        yield f"the activation is {config.hidden_act}: --swiglu takes silu"
    biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
    if others := [name for name in biases if not name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))]:
        yield f"biases are left out: {', '.join(fold_names(others))}"
    yield from _rotary_differs(config)
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        yield f"attention has a sliding window of {window} tokens: set --window-size for the layers that have it"
    if config.model_type == "qwen2_moe":
        yield "experts of qwen2_moe, one of which is shared, are left to you"
    if noise := getattr(config, "router_jitter_noise", 0.0):
        yield f"what experts read is multiplied with noise of {noise:g}: Megatron-LM has it for the router alone"
    if config.model_type in _MOE and config.num_experts_per_tok == 1 and getattr(config, "norm_topk_prob", True):
        yield "the only expert of a token has the weight 1: Megatron-LM weighs it by its probability"
    if config.model_type in _MOE and getattr(config, "output_router_logits", False):
        yield "the balance loss is one of all layers: Megatron-LM adds one per layer, divided by --moe-router-topk"


def _sizes(layers: int, width: int, heads: int, ffn: int) -> Iterator[Argument]:
    yield "--num-layers", str(layers)
    yield "--hidden-size", str(width)
    yield "--ffn-hidden-size", str(ffn)
    yield "--num-attention-heads", str(heads)


def _positions(limit: int) -> Iterator[Argument]:
    yield "--max-position-embeddings", str(limit)


def _vocabulary(config: Any) -> Iterator[Argument]:
    yield "--vocab-size", str(config.vocab_size)


def _dropouts(attention: float, hidden: float) -> Iterator[Argument]:
    yield "--attention-dropout", f"{attention:g}"
    yield "--hidden-dropout", f"{hidden:g}"


def _rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})


def _rotary(config: Any) -> Iterator[Argument]:
    rope = _rope(config)
    yield "--position-embedding-type", "rope"
    yield "--rotary-base", str(int(rope.get("rope_theta", getattr(config, "rope_theta", 10000))))
    if rope.get("rope_type") == "llama3":
        yield "--use-rope-scaling", ""
        yield "--rope-scaling-factor", f"{rope['factor']:g}"


def _rotary_differs(config: Any) -> Iterator[str]:
    rope = _rope(config)
    kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta", getattr(config, "rope_theta", 10000))
    if kind not in ("default", "llama3"):
        yield f"rotary embeddings are of type {kind}: the arguments here are those of the default type"
    if theta != int(theta):
        yield f"the base of rotary embeddings is {theta:g}: --rotary-base is an integer"
    fixed = {name: rope[name] for name in _LLAMA3 if kind == "llama3" and rope.get(name) != _LLAMA3[name]}
    for name, value in fixed.items():
        yield f"{name} of rotary embeddings is {value:g}: Megatron-LM has {_LLAMA3[name]:g} with --use-rope-scaling"


def _experts(config: Any) -> Iterator[Argument]:
    sparse = [int(_has_experts(config, layer)) for layer in range(config.num_hidden_layers)]
    if not all(sparse):
        yield "--moe-layer-freq", str(sparse).replace(" ", "")
    count = getattr(config, "num_local_experts", None) or config.num_experts
    yield "--num-experts", str(count)
    yield "--moe-router-topk", str(config.num_experts_per_tok)
    yield "--moe-router-dtype", "fp32"  # transformers' routers take the softmax in float32
    # weights that are not normalised: softmax before the choice; for one expert, Megatron-LM takes nothing else
    if not getattr(config, "norm_topk_prob", True) or config.num_experts_per_tok == 1:
        yield "--moe-router-pre-softmax", ""
    if getattr(config, "output_router_logits", False):
        yield "--moe-router-load-balancing-type", "aux_loss"
        yield "--moe-aux-loss-coeff", f"{config.router_aux_loss_coef:g}"
    else:  # the model's loss has no such term
        yield "--moe-router-load-balancing-type", "none"
    if width := getattr(config, "moe_intermediate_size", None):
        yield "--moe-ffn-hidden-size", str(width)


def _has_experts(config: Any, layer: int) -> bool:
    """Return whether a layer has experts, by the rule of Qwen's mixtures; in Mixtral all layers have."""
    dense = getattr(config, "mlp_only_layers", None) or ()
    return layer not in dense and (layer + 1) % getattr(config, "decoder_sparse_step", 1) == 0
