"""Kept traces of shipped models and of families: their plans are those of a fresh trace, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations import moe

import autoptd
from autoptd.compile.traced import TracedModel
from autoptd.errors import DoesNotFit
from autoptd.models.load import load_model, model_names
from autoptd.trace_cache import cached
from autoptd.trace_cache.cached import TraceEntry
from autoptd.trace_cache.folder import TraceFolder

_TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# what families add to a decoder: dropout, an encoder, pictures, experts, scans, statistics of a batch
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 256},
    "T5ForConditionalGeneration": {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 256,
        "decoder_start_token_id": 0,
        "seq": 64,
    },
    "ViTForImageClassification": {**_TEXT, "model_type": "vit", "image_size": 32, "patch_size": 8},
    "MixtralForCausalLM": {**_TEXT, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "MambaForCausalLM": {**_TEXT, "model_type": "mamba", "state_size": 8, "num_hidden_layers": 2},
    "ResNetForImageClassification": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "image_size": 32,
    },
    "BertForMaskedLM": {**_TEXT, "model_type": "bert"},
    "SwinForImageClassification": {
        "model_type": "swin",
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    "DeepseekV3ForCausalLM": {
        **_TEXT,
        **_EXPERTS,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "Mamba2ForCausalLM": {
        **_TEXT,
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
}


@pytest.mark.parametrize("name", [*FAMILIES, *model_names()])
def test_a_kept_trace_gives_the_same_plan(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if name in FAMILIES:
        file = tmp_path / "config.json"
        file.write_text(json.dumps({"architectures": [name], **FAMILIES[name]}))
    # tests of float64 leave transformers' own loop over experts, whose trace has constants that are not kept
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: True)
    model, _ = load_model(name if name not in FAMILIES else str(file))
    fresh = autoptd.trace(model)
    monkeypatch.setattr(cached, "are_settled", lambda stamps, began_ns: True)
    monkeypatch.setattr(cached, "surroundings", lambda: {"names": []})  # other tests write beside modules meanwhile
    folder = tmp_path / "kept"
    assert TraceEntry(TraceFolder(folder), name).keep(fresh)
    kept = TraceEntry(TraceFolder(folder), name).find(no_module, no_batch)
    assert kept is not None
    fix: dict[str, Any] = {"schedule": "1f1b", "recompute": "full", "offload": 0, "micro": 1}
    if name == "ResNetForImageClassification":
        del fix["micro"]  # its statistics are over the whole batch of a replica
    given: dict[str, Any] = {"world": 8, "cluster": "dgx-h100", "fix": fix}
    if name not in FAMILIES:
        given |= {"world": 64, "fix": fix | {"tp": 4, "cp": 1, "zero": 1}}
    assert answer(kept, **given) == answer(fresh, **given)


def answer(traced: TracedModel, **given: Any) -> str:
    try:
        return autoptd.plan(traced, **given).to_json()
    except DoesNotFit as error:  # the largest models, on 64 devices
        return str(error)


def no_module() -> Any:
    raise AssertionError("planning loads the model")


def no_batch(samples: int) -> Any:
    raise AssertionError(f"planning traces the model again for {samples} samples")
