"""Tiny models of transformers whose configurations, submodules and forward passes are mutated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from benchmarks.coverage.alone import first_that_trains
from benchmarks.coverage.batches import proposals
from benchmarks.coverage.huggingface import set_padding
from benchmarks.coverage.mutated.channels import NORMS
from benchmarks.coverage.mutated.draw import Draw
from benchmarks.coverage.mutated.ops import KEEPING, MIXING, PYTHON
from benchmarks.coverage.tiny import tiny_config

Fields = Mapping[str, tuple[Any, ...]]  # field of a configuration -> the values that it is drawn from
FLAG = (False, True)
SIZES: Fields = {
    "hidden_size": (32, 24, 40, 20),
    "num_hidden_layers": (1, 2, 3),
    "intermediate_size": (64, 37, 1),
    "vocab_size": (99, 61, 101),
}
GROUPS: Fields = {"num_attention_heads": (4, 2, 6), "num_key_value_heads": (2, 1), "head_dim": (8, 6, 10)}
HEADS: Fields = {"num_attention_heads": (4, 2, 1)}
DECODER: Fields = {**SIZES, **GROUPS}
MODELS: Mapping[str, tuple[str, Fields]] = {  # class -> its task, and its fields
    "LlamaForCausalLM": ("causal", {**DECODER, "tie_word_embeddings": FLAG, "attention_bias": FLAG}),
    "MixtralForCausalLM": ("causal", {**DECODER, "num_local_experts": (4, 3, 2), "output_router_logits": FLAG}),
    "Qwen3MoeForCausalLM": ("causal", {**DECODER, "num_experts": (4, 3), "norm_topk_prob": FLAG}),
    "GPT2LMHeadModel": ("causal", {"n_embd": (32, 24, 20), "n_layer": (1, 2, 3), "n_head": (4, 2, 1)}),
    "Gemma3ForCausalLM": ("causal", {**DECODER, "sliding_window": (3, 8), "final_logit_softcapping": (None, 5.0)}),
    "MambaForCausalLM": ("causal", {"hidden_size": (32, 24), "num_hidden_layers": (1, 2), "state_size": (4, 5)}),
    "BertForMaskedLM": ("masked", {**SIZES, **HEADS, "hidden_act": ("gelu", "relu", "silu")}),
    "BertForSequenceClassification": ("classes", {**SIZES, **HEADS, "num_labels": (2, 3, 7)}),
    "T5ForConditionalGeneration": (
        "seq2seq",
        {"d_model": (32, 24, 17), "d_kv": (8, 5), "num_heads": (4, 3, 1), "feed_forward_proj": ("relu", "gated-gelu")},
    ),
    "ViTForImageClassification": ("image", {**SIZES, **HEADS, "patch_size": (8, 16, 4), "qkv_bias": FLAG}),
    "ConvNextForImageClassification": ("image", {"layer_scale_init_value": (1e-6, 0.0, 0.5), "patch_size": (4, 2)}),
    "Qwen2VLForConditionalGeneration": ("multimodal", {}),
    "WhisperForConditionalGeneration": (
        "speech",
        {"d_model": (32, 24), "encoder_attention_heads": (4, 2), "scale_embedding": FLAG},
    ),
}


def hooked(model: nn.Module, draw: Draw) -> None:
    """Apply an op to what some submodules return."""
    kind = draw.random.random()
    op = draw.named(KEEPING if kind < 0.85 else PYTHON if kind < 0.93 else MIXING, "hook ")
    leaves = [
        m
        for m in model.modules()
        if isinstance(m, nn.Linear) or "Norm" in type(m).__name__ or "MLP" in type(m).__name__
    ]
    for module in draw.some(leaves, 3) or leaves[:1]:
        module.register_forward_hook(lambda m, given, y: op(y) if isinstance(y, Tensor) and y.ndim == 3 else y)


def other_norms(model: nn.Module, draw: Draw) -> None:
    """Replace norms over features by others."""
    make = draw.named(NORMS, "norm ")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (
                "Norm" in type(child).__name__
                and isinstance(w := getattr(child, "weight", None), Tensor)
                and w.ndim == 1
            ):
                setattr(parent, name, make(len(w)))


def layers_of(model: nn.Module) -> list[nn.ModuleList]:
    return [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]


def shared(model: nn.Module, draw: Draw) -> None:
    """Use the first layer twice; with a cache of keys, the second one reads those of both."""
    model.config.get_text_config().use_cache = draw.chance(0.3)  # type: ignore[union-attr,operator]
    for layers in layers_of(model):
        layers[1] = layers[0]


def reversed_layers(model: nn.Module, draw: Draw) -> None:
    for layers in layers_of(model)[:1]:
        for i, layer in enumerate(list(layers)[::-1]):
            layers[i] = layer


def frozen(model: nn.Module, draw: Draw) -> None:
    for module in draw.some([m for m in model.modules() if any(True for _ in m.parameters(recurse=False))], 6):
        module.requires_grad_(False)


def more_dropout(model: nn.Module, draw: Draw) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2


def recomputed(model: nn.Module, draw: Draw) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": draw.chance(0.3)})  # type: ignore[operator]


def skipping(model: nn.Module, draw: Draw) -> None:
    """Add the input of the first layer to what the last one of its list returns."""
    kept: list[Tensor] = []

    def keep(layer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> Any:
        kept[:] = given[:1]
        return given, named

    def add(layer: nn.Module, given: Any, y: Any) -> Any:
        return y + kept[0] if isinstance(y, Tensor) else (y[0] + kept[0], *y[1:])

    for layers in layers_of(model)[:1]:
        layers[0].register_forward_pre_hook(keep, with_kwargs=True)
        layers[-1].register_forward_hook(add)


def evaluated(model: nn.Module, draw: Draw) -> None:
    for layers in layers_of(model)[:1]:
        layers[0].eval()


CHANGES: Mapping[str, Callable[[nn.Module, Draw], None]] = {
    "hooked": hooked,
    "other norms": other_norms,
    "shared": shared,
    "reversed": reversed_layers,
    "frozen": frozen,
    "more dropout": more_dropout,
    "recomputed": recomputed,
    "skipping": skipping,
    "evaluated": evaluated,
}
LOSSES: Mapping[str, Callable[[Any], Tensor] | None] = {
    "own": None,
    "with z-loss": lambda out: out.loss + 1e-3 * out.logits.logsumexp(-1).square().mean(),
    "with norm": lambda out: out.loss * 2 + out["logits"].square().mean().sqrt(),
    "with largest": lambda out: out.loss + 0.01 * out.logits.amax((1, -1)).mean(),
}


def library_model(draw: Draw, name: str) -> tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor] | None]:
    """Return a mutated model of transformers in float64, its batch and its loss."""
    import transformers
    from transformers.integrations import moe

    moe._can_use_grouped_mm = lambda *_: False  # torch's grouped product has no float64
    task, fields = MODELS[name]
    cls = getattr(transformers, name)
    chosen = {field: draw.one(*values) for field, values in fields.items() if draw.chance(0.5)}
    draw.notes.append(str(chosen))
    config = tiny_config(cls.config_class, chosen)
    if task == "classes":
        set_padding(config)
    model = cls(config).double().train()
    for change in draw.some(list(CHANGES), 3):
        draw.notes.append(change)
        CHANGES[change](model, draw)
    model = model.double()
    tried = copy.deepcopy(model)
    loss = LOSSES["own"] if draw.chance(0.6) or task == "speech" else draw.named(LOSSES, "loss ")
    return model, first_that_trains(tried, proposals(tried, task)), loss
