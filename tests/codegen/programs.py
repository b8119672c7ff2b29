"""Small models, planned for one node, and the programs written for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from autoptd.codegen.emit import Program, StageSpec, emit_program
from autoptd.cost_models.cluster import Cluster
from autoptd.passes.fold import Folded, fold
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.search.sharding.tensors import Tensors

LENGTH = 32


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "vocab_size": 512,
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 8,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=64,
        )
    )


def tokens() -> dict[str, Tensor]:
    shape = (4, LENGTH)
    return {n: torch.empty(shape, dtype=torch.long, device="meta") for n in ("input_ids", "labels")}


def folded_of(model: nn.Module, inputs: dict[str, Tensor] | None = None) -> Folded:
    return fold(normalise(trace(model, inputs or tokens(), precision="bf16")))


def program_of(
    folded: Folded,
    title: str,
    *,
    tp: int,
    pp: int,
    recompute: Sequence[int] = (),
    policy: str = "full",
    length: int = LENGTH,
) -> Program:
    """Emit a program with segments spread evenly over `pp` stages; those in `recompute` are recomputed by `policy`."""
    symbols = {s: n for s, n in {BATCH: 1, SEQUENCE: length}.items() if s in folded.traced.sizes}
    sharding = Tensors(folded, Cluster.load("dgx-h100"), tp, symbols, microbatches=8).solve().sharding
    count = len(folded.segments)
    cuts = [round(i * count / pp) for i in range(pp + 1)]
    stages = [StageSpec(a, b - 1, {i: policy for i in recompute if a <= i < b}) for a, b in pairwise(cuts)]
    return emit_program(folded, sharding, stages, title)


def text_of(program: Program) -> str:
    """Return all files as one text."""
    return "".join(f"{'=' * 20} {name}\n{source}" for name, source in program.files.items())


def meta(build: object) -> nn.Module:
    with torch.device("meta"):
        return build()  # type: ignore[operator,no-any-return]
