"""Adapters of peft on tiny models of transformers: only the adapter is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.made import SAMPLES, normal, whole

WORDS, TOKENS = 60, 10
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def words(below: int = WORDS, seed: int = 2) -> Tensor:
    return whole(below - 5, TOKENS, seed=seed) + 3


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **SMALL)), {"input_ids": words(), "labels": words(seed=3)}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=WORDS, max_position_embeddings=32, num_labels=3, **SMALL)
    return BertForSequenceClassification(config), {"input_ids": words(), "labels": whole(3)}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), {"input_ids": words(), "labels": words(seed=3)}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=3, **SMALL))
    return model, {"pixel_values": normal(3, 16, 16), "labels": whole(3)}


MODELS: Mapping[str, tuple[Callable[[], tuple[nn.Module, dict[str, Tensor]]], str, list[str], list[str]]] = {
    # name -> model and batch, peft's task, its projections in attention, those after activations
    "Llama": (llama, "CAUSAL_LM", ["q_proj", "v_proj"], ["down_proj"]),
    "BERT": (bert, "SEQ_CLS", ["query", "value"], ["output.dense"]),
    "T5": (t5, "SEQ_2_SEQ_LM", ["q", "v"], ["wo"]),
    "ViT": (vit, "", ["q_proj", "v_proj"], ["fc2"]),
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {  # class of configuration -> its fields
    "LoraConfig": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1},
    "LoraConfig DoRA": {"r": 4, "use_dora": True},
    "LoraConfig rsLoRA": {"r": 4, "use_rslora": True, "modules_to_save": []},
    "IA3Config": {},
    "VeraConfig": {"r": 8, "projection_prng_key": 0},
    "AdaLoraConfig": {"init_r": 4, "target_r": 2, "total_step": 10},
    "LoHaConfig": {"r": 4},
    "LoKrConfig": {"r": 4},
    "OFTConfig": {"oft_block_size": 8},
    "BOFTConfig": {"boft_block_size": 8},
    "HRAConfig": {"r": 4},
    "RandLoraConfig": {"r": 4},
    "FourierFTConfig": {"n_frequency": 20},
    "VBLoRAConfig": {"num_vectors": 16, "vector_length": 8, "topk": 2},
    "MissConfig": {"r": 4},
    "ShiraConfig": {"r": 4},
    "C3AConfig": {"block_size": 8},
    "LNTuningConfig": {},
    "PrefixTuningConfig": {"num_virtual_tokens": 4},
    "PromptTuningConfig": {"num_virtual_tokens": 4},
    "PromptEncoderConfig": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "AdaptionPromptConfig": {"adapter_len": 4, "adapter_layers": 2},
}
PROMPTS = ("PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig", "AdaptionPromptConfig")
EVERYWHERE = ("LoraConfig", "LoraConfig DoRA", "IA3Config", "VeraConfig", "LoHaConfig", "OFTConfig")


@dataclass(frozen=True)
class Adapted:
    """A tiny model with one sort of adapter."""

    adapter: str
    base: str
    family: str = "peft"

    @property
    def name(self) -> str:
        return f"{self.adapter.removesuffix('Config').replace('Config ', ' ')} on {self.base}"

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the model with the adapter, in float64 and training mode, and a batch."""
        import peft

        torch.manual_seed(0)
        make, task, attention, after = MODELS[self.base]
        model, batch = make()
        options = dict(OPTIONS[self.adapter]) | ({"task_type": task} if task else {})
        if self.adapter == "IA3Config":
            options |= {"target_modules": [*attention, *after], "feedforward_modules": after}
        elif self.adapter not in (*PROMPTS, "LNTuningConfig"):
            options["target_modules"] = attention
        config = getattr(peft, self.adapter.split()[0])(**options)
        adapted = peft.get_peft_model(model, config).double().train()
        for parameter in adapted.parameters():  # adapters begin at zero, which passes no gradient on
            if parameter.requires_grad and not parameter.any():
                nn.init.normal_(parameter, std=0.1)
        assert next(iter(batch.values())).shape[0] == SAMPLES
        return adapted, batch


CASES = [
    *(Adapted(name, base) for name in EVERYWHERE for base in MODELS),
    *(Adapted(name, "Llama") for name in OPTIONS if name not in EVERYWHERE),
    *(Adapted(name, "BERT") for name in PROMPTS[:3]),
]
