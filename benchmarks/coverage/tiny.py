"""Tiny configurations of Hugging Face models: every size of the default configuration replaced by a small one.

A field is recognised by its name (`SIZES`, the first pattern that matches); a list of numbers keeps its length unless
it has one entry per layer. Models whose fields depend on one another in other ways have a row in `BY_MODEL`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from benchmarks.coverage.by_model import BY_MODEL, HEADS, PARTS, PATCH, PIXELS, WIDTH, WORDS

LAYERS = 2

# pattern of a field's name -> its tiny value; a value of the default configuration that is smaller stays
SIZES: tuple[tuple[str, int], ...] = (
    (r"(char|input|output|codec|bucket|unpadded)?_?vocab_size(_per_layer_input)?", WORDS),
    (r"vocab_offset|codebook_size|num_words", WORDS),
    (r"(\w+_)?(num_|n_)?(key_value|kv)_(heads|groups)", 2),
    (r"linear_num_key_heads", 2),
    (r"(\w+_)?(num_|n_)?(attention_|query_|value_|index_|mamba_)?n?_?heads?|n_head|multi_query_group_num", HEADS),
    (r"(\w+_)?(head_dim|dim_head|d_kv|head_size|kv_channels|qk_nope_head_dim|qk_rope_head_dim|v_head_dim)", 8),
    (r"linear_(key|value)_head_dim|mamba_d_head", 8),
    (r"qk_head_dim|d_head", 16),
    (r"query_pre_attn_scalar", 8),
    (r"(q|kv|o)_lora_rank|time_step_rank|mamba_dt_rank|\w*lora_rank\w*", 8),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_d_ssm", 16),
    (r"(mamba_)?chunk_size|mamba_chunk_size", 8),
    (r"(num_|n_)?(routed_experts|local_experts|experts)|moe_num_experts", 4),
    (r"(num_)?experts_per_tok(en)?|moe_topk|num_experts_per_tok|moe_k|top_k_experts", 2),
    (r"n_group|topk_group", 1),
    (r"n_shared_experts|num_shared_experts|shared_experts", 1),
    (r"(num_hidden|num|n|encoder|decoder|num_encoder|num_decoder|e|d)_layers?|depth|n_layer|layers|\w*_layers", LAYERS),
    (r"\w*(intermediate|ffn|ff|mlp|feed_forward|feedforward|inner)_(size|dim|hidden_dim|hidden_size)|d_ff|d_inner", 64),
    (r"dim_feedforward|moe_intermediate_size|ffn_hidden_size|n_inner|shared_intermediate_size", 64),
    (r"(max_|n_)(position_embeddings|positions|source_positions|target_positions|seq_len|2d_position_embeddings)", 64),
    (r"(max_sequence_length|model_max_length|context_length|max_seq_length|block_size|seq_length)", 64),
    (r"original_max_position_embeddings", 32),
    (r"sliding_window|attention_chunk_size|local_attention|attention_window\w*|sliding_window_size", 8),
    (r"(pretrain_)?image_size|img_size|input_size|resolution", PIXELS),
    (r"num_frames", 4),
    (r"patch_size", PATCH),
    (r"num_mel_bins|feature_size|input_feat_per_channel|mel_dim", 16),
    (r"conv_depthwise_kernel_size|conv_kernel_size", 3),
    (r"num_conv_pos_embeddings", 4),
    (r"num_conv_pos_embedding_groups", 2),
    (r"num_codevectors_per_group|codevector_dim|proj_codevector_dim|classifier_proj_size", 16),
    (r"num_queries|num_query_tokens|resampler_n_latents|num_latents", 8),
    (r"num_classes|num_labels|num_embeddings", 10),
    (
        r"\w*(hidden_size|hidden_dim|embed_dim|embedding_size|emb_dim|d_model|n_embd|embedding_dim|projection_dim)\w*",
        WIDTH,
    ),
    (r"\w*_(size|dim|width|channels)|dim|width|feature_dim|conv_channels", WIDTH),
)
KEPT = re.compile(  # sizes of the data or of an algorithm, not of the model
    r"(num_channels|in_channels|out_channels|in_chans|window_size|kernel_size|type_vocab_size|mlp_ratio|stride|rope_theta"
    r"|spatial_merge_size|temporal_patch_size|tubelet_size|chunk_size_\w+|pixel_shuffle_factor|conv_kernel|d_conv"
    r"|mamba_d_conv|conv_dim|first_k_dense_replace|max_num_\w+|\w+_kernel_size|merge_size|hc_mult|\w+_id"
    r"|\w+_token_index|\w+_ids|\w+_ratio|\w+_stride|downsample\w*|upsample\w*|neck_\w+|num_feat_extract_layers)$"
)
FIXED_TOKENS = {
    **{
        f"{what}_token_{kind}": WORDS - 1 - i
        for i, what in enumerate(("image", "video", "audio"))
        for kind in ("id", "index")
    },
    **{
        f"{what}_{end}_token_id": WORDS - 4 - i
        for i, (what, end) in enumerate((w, e) for w in ("vision", "image") for e in ("start", "end"))
    },
}
_TOKENS = re.compile(r"\w+_(token_(id|index)|id|token_ids)$")

_HEADS = r"(\w+_)?(num_|n_)?(attention_)?heads?|n_head"
_KEY_HEADS = r"(\w+_)?(num_|n_)?(key_value|kv)_(heads|groups)"
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_SORTS = 4


def tiny_config(config_class: type, fields: Mapping[str, Any] | None = None) -> Any:
    """Return a tiny configuration of this class. `fields`: values that replace the ones found by name."""
    default = config_class()
    rows = merged(BY_MODEL.get(config_class.model_type, {}), fields or {})
    return config_class(**merged(tiny_fields(default), rows))


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of both, those of the second where both have one; parts that both have are merged as well."""
    found = dict(first)
    for name, value in second.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if both else value
    return found


def tiny_fields(default: Any) -> dict[str, Any]:
    """Return the keyword arguments of a configuration class that make it tiny."""
    found: dict[str, Any] = {}
    known = set(inspect.signature(type(default).__init__).parameters) | set(default.to_dict())
    parts = getattr(default, "sub_configs", None) or {}
    values = {name: _value(default, name) for name in sorted(known - {"self", "kwargs"} - set(parts))}
    plain = type(default)()  # a part may differ from its class, and its fields are given to the class
    queries = [n for n in values if re.fullmatch(_HEADS, n) and not re.fullmatch(_KEY_HEADS, n)]
    heads = {values[n] for n in queries if isinstance(values[n], int)}
    for name, value in values.items():
        small = _small(name, value)
        if re.fullmatch(_KEY_HEADS, name) and value in heads:
            small = HEADS
        if small is not None and (small != value or value != _value(plain, name)):
            found[name] = small
    found |= _tiny_layers(values)
    for name in parts:
        part = _value(default, name)
        if part is None and name in PARTS.get(default.model_type, ()):
            part = parts[name]()
        if part is not None and hasattr(part, "to_dict"):
            inner = merged(tiny_fields(part), BY_MODEL.get(part.model_type, {}))
            found[name] = inner | ({"model_type": part.model_type} if part.model_type else {})
    return found


def _value(config: Any, name: str) -> Any:
    """Return a field's value, of all layers where it differs from layer to layer; None if there is no such field."""
    own = vars(config)
    try:
        return own[name] if name in own else getattr(config, name, None)
    except AttributeError:
        return None


def _tiny_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with an entry per layer, cut to one layer of every sort, at least LAYERS in all."""
    deep = next((v for n, v in values.items() if n in _DEPTHS and isinstance(v, int) and v > LAYERS), None)
    lists = {n: list(v) for n, v in values.items() if isinstance(v, (list, tuple)) and deep and len(v) == deep}
    if not lists:
        return {}
    sorts = list(zip(*lists.values(), strict=True))
    first = sorted({sorts.index(x) for x in sorts})[:_MOST_SORTS]
    chosen = (first * LAYERS)[: max(LAYERS, len(first))]
    depths = {n: len(chosen) for n in _DEPTHS if values.get(n) == deep}
    return depths | {n: [v[i] for i in chosen] for n, v in lists.items()}


def _small(name: str, value: Any) -> Any:
    if isinstance(value, bool) or (KEPT.match(name) and not _TOKENS.match(name)):
        return None
    if isinstance(value, int) and (name in FIXED_TOKENS or (_TOKENS.match(name) and value >= WORDS)):
        return FIXED_TOKENS.get(name, WORDS - 10 - sum(map(ord, name)) % 31)
    if isinstance(value, int):
        return next((min(size, value) for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
    if isinstance(value, (list, tuple)) and value and all(isinstance(x, int) and x > 0 for x in value):
        return _small_list(name, list(value))
    return None


def _small_list(name: str, value: list[int]) -> list[int] | None:
    """Return small entries for the stages of a vision backbone: depths, widths, heads."""
    if re.search(r"depths|num_blocks|layers_per", name):
        return [1] * len(value)
    if re.search(r"hidden_sizes|embed_dims?|dims|widths", name):
        return [16 * 2 ** min(i, 2) for i in range(len(value))]
    if re.search(r"num_attention_heads|num_heads", name):
        return [2] * len(value)
    if name == "image_size" or name == "img_size":
        return [PIXELS] * len(value)
    return None
