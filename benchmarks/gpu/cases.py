"""Models that are trained on one GPU, and random batches for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A Hugging Face model class, fields of its configuration, and the batch of a step (one microbatch)."""

    name: str
    model: str
    config: Mapping[str, Any]
    batch: int
    seq: int | None


def _gpt2(name: str, width: int, layers: int, heads: int, batch: int, seq: int = 1024, **more: Any) -> Case:
    """Return a GPT-2 (shapes: Radford et al. 2019, table 2) without dropout, as it is trained today."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": seq, **none, **more}
    return Case(name, "GPT2LMHeadModel", config, batch, seq)


def _llama(name: str, width: int, layers: int, heads: int, kv_heads: int, inner: int, batch: int, **more: Any) -> Case:
    config = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        **more,
    }
    return Case(name, "LlamaForCausalLM", config, batch, min(4096, config["max_position_embeddings"]))


def _mixture(name: str, width: int, layers: int, inner: int, batch: int, seq: int, **more: Any) -> Case:
    config = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": inner,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": seq,
        **more,
    }
    return Case(name, "MixtralForCausalLM", config, batch, seq)


def _encoder(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {**sizes, "intermediate_size": 4 * width, **none}


CASES = {
    "cuda": (
        _gpt2("gpt2-124m", 768, 12, 12, 16),
        _gpt2("gpt2-350m", 1024, 24, 16, 16),
        _gpt2("gpt2-774m", 1280, 36, 20, 8),
        _gpt2("gpt2-1.5b", 1600, 48, 25, 8),
        # Llama 3.2 1B and 3B, shapes of Meta's released configurations (quoted from memory)
        _llama("llama-1b", 2048, 16, 32, 8, 8192, 2),
        _llama("llama-3b", 3072, 28, 24, 8, 8192, 2),
        _mixture("mixture-0.7b", 1024, 12, 2048, 8, 2048),
        # Devlin et al. 2019, section 3; Dosovitskiy et al. 2021, table 1
        Case("bert-large", "BertForMaskedLM", _encoder(1024, 24, 16), 32, 512),
        Case("vit-large", "ViTForImageClassification", {**_encoder(1024, 24, 16), "num_labels": 1000}, 64, None),
    ),
    "cpu": (
        _gpt2("gpt2-tiny", 64, 2, 4, 2, seq=32, vocab_size=512),
        _llama("llama-tiny", 64, 2, 4, 2, 128, 2, vocab_size=512, max_position_embeddings=32),
        _mixture("mixture-tiny", 64, 2, 96, 2, 32, vocab_size=512),
        Case("bert-tiny", "BertForMaskedLM", {**_encoder(64, 2, 4), "vocab_size": 512}, 2, 32),
        Case(
            "vit-tiny", "ViTForImageClassification", {**_encoder(64, 2, 4), "image_size": 32, "num_labels": 10}, 2, None
        ),
    ),
}


def make_model(case: Case) -> Any:
    """Return the model on meta, in training mode."""
    import torch
    import transformers

    model_class = getattr(transformers, case.model)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**case.config)).train()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # the default of transformers, which warns about it
    return model


def random_batch(model: Any, case: Case, device: str) -> dict[str, Any]:
    """Return random tokens, labels or pixels in the shapes of the model's example inputs; nothing is masked."""
    import torch

    from autoptd.models.inputs import example_inputs

    torch.manual_seed(0)
    config = model.config
    batch = {}
    for name, like in example_inputs(model, case.batch, case.seq).items():
        if like.is_floating_point():
            batch[name] = torch.randn(like.shape, dtype=like.dtype, device=device)
        elif "mask" in name:
            batch[name] = torch.ones(like.shape, dtype=like.dtype, device=device)
        else:
            values = getattr(config, "vocab_size", None) or config.num_labels
            batch[name] = torch.randint(values, like.shape, dtype=like.dtype, device=device)
    return batch
