"""Plans to corrupt: one for each way to run, of tiny models, traced once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

import autoptd
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan

SEQ = 16


def nanogpt() -> nn.Module:
    return NanoGPT(GPTSizes(vocab=64, max_seq=SEQ, width=32, layers=4, heads=4))


def tied() -> nn.Module:
    """Make a model whose embedding is also its head: the first and the last stage share a parameter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": SEQ}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


def experts() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2))


MODELS: dict[str, Callable[[], nn.Module]] = {"nanogpt": nanogpt, "tied": tied, "experts": experts}


@dataclass(frozen=True)
class Base:
    """A model and the constraints of its plan."""

    model: str
    fix: Mapping[str, Any]
    world: int = 4


BASES = {
    "dense": Base("nanogpt", {"tp": 2, "pp": 2, "micro": 2}),
    "interleaved": Base("tied", {"pp": 2, "dp": 2, "schedule": "interleaved", "virtual": 2, "micro": 1}),
    "vee": Base("nanogpt", {"pp": 2, "dp": 1, "tp": 2, "schedule": "zero-bubble-v", "virtual": 2, "micro": 2}),
    "sharded": Base("tied", {"dp": 4, "zero": 3, "shards": 2, "recompute": "full", "micro": 2}),
    "tokens": Base("nanogpt", {"cp": 2, "dp": 2, "micro": 2}),
    "experts": Base("experts", {"tp": 2, "dp": 2, "recompute": "selective", "micro": 2}),
}


@cache
def traced(model: str) -> autoptd.TracedModel:
    with torch.device("meta"):
        made = MODELS[model]()
    return autoptd.trace(made, seq=SEQ, precision="fp32")


@cache
def planned(name: str) -> Plan:
    base = BASES[name]
    plan = autoptd.plan(traced(base.model), world=base.world, cluster="dgx-h100", batch=16, fix=dict(base.fix))
    plan.check_runnable()
    return plan
