"""Model of a published run: the shape that the row states, and the plain PyTorch module of that shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from benchmarks.published.mixture import Experts, Latent
from benchmarks.published.rows import Row, Unsupported
from benchmarks.published.transformer import Transformer

# Shoeybi et al. 2019, section 4.1 (and Megatron-LM's --hidden-dropout, --attention-dropout): 0.1 with unfused
# attention; the fused recipes of later years train without.
MEGATRON_DROPOUT = 0.1
_VOCABULARY_MULTIPLE = 128  # of each tp rank's rows: Megatron-LM, --make-vocab-size-divisible-by
_ALIKE = 0.02  # of the parameters that a stated total has beyond the stated shape: how far from those of an expert


@dataclass(frozen=True)
class Shape:
    """Sizes and options that define the module; equal shapes share one module and one trace.

    `positions`: rows of learned position embeddings, 0 for rotary ones. `joined`: one matmul computes queries, keys and
    values, and one computes gate and up.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    norm: str  # "layer" | "rms"
    activation: str  # "gelu" | "gelu_tanh" | "swiglu" | "squared_relu"
    bias: bool
    tied: bool
    joined: bool
    unfused: bool  # attention materialises its score matrix
    dropout: float
    experts: Experts | None = None
    latent: Latent | None = None
    ahead: bool = False  # one layer more predicts the token after the next
    head_norm: bool = False  # queries and keys are normed per head


def shape_of(row: Row) -> Shape:
    """Return the shape of a run's model. Raises Unsupported for an unmodelled architecture or a missing key."""
    row.need("arch", "n_layers", "hidden_size", "ffn_hidden_size", "n_heads", "vocab_size", "seq_len_tokens")
    family = _family(row)
    assert row.n_heads and row.hidden_size and row.n_layers and row.ffn_hidden_size and row.seq_len_tokens
    if row.head_dim is None and row.hidden_size % row.n_heads:
        raise Unsupported(f"{row.n_heads} heads do not divide width {row.hidden_size}, and no head_dim is stated")
    unfused = row.attention_impl.startswith("unfused")
    learned = family in ("gpt", "mpt")
    shape = Shape(
        layers=row.n_layers,
        width=row.hidden_size,
        ffn=row.ffn_hidden_size,
        heads=row.n_heads,
        kv_heads=row.n_kv_heads or row.n_heads,
        head_dim=row.head_dim or row.hidden_size // row.n_heads,
        vocab=padded_vocabulary(row),
        positions=row.seq_len_tokens if learned else 0,
        norm="rms" if family == "llama" else "layer",
        activation={"gpt": "gelu_tanh", "mpt": "gelu", "llama": "swiglu", "nemotron": "squared_relu"}[family],
        bias=learned,
        tied=row.tied_embeddings if row.tied_embeddings is not None else learned,
        joined=learned or row.is_megatron or "nanotron" in row.framework,
        unfused=unfused,
        dropout=MEGATRON_DROPOUT if unfused and row.is_megatron else 0.0,
        experts=_experts(row),
        latent=_latent(row),
        ahead=row.mtp_num_layers > 0,
        head_norm="qwen3" in row.model_name.lower(),  # Yang et al. 2025, Qwen3, section 2: QK-Norm
    )
    return _with_missing_expert(shape, row.n_params_billion)


def _with_missing_expert(shape: Shape, stated_billion: float | None) -> Shape:
    """Return the shape with a shared expert if it lacks exactly the parameters of one in each mixture.

    Some tables of mixtures print no shared experts, but a total that includes them.
    """
    if shape.experts is None or shape.experts.shared or stated_billion is None:
        return shape
    shared = replace(shape, experts=replace(shape.experts, shared=shape.experts.ffn))
    plain, more = (sum(p.numel() for p in build(s).parameters()) for s in (shape, shared))
    return shared if abs(stated_billion * 1e9 - more) <= _ALIKE * (more - plain) else shape


def _family(row: Row) -> str:
    """Return `gpt`, `mpt`, `llama` or `nemotron`. Raises Unsupported for every architecture that is not modelled."""
    arch = row.arch or ""
    if arch in ("moe", "moe(MLA)"):
        return "llama" if row.gated_mlp is not False else "nemotron"
    if arch.startswith("gpt("):
        inside = arch.removeprefix("gpt(").lower()
        if "squared-relu" in inside and "rope" in inside:
            return "nemotron"
        if inside.startswith("mpt"):
            return "mpt"
    if arch in ("gpt", "llama"):
        return arch
    raise Unsupported(f"architecture {arch!r} is not modelled")


def _experts(row: Row) -> Experts | None:
    """Return the experts of a mixture, None for a dense model. Raises Unsupported."""
    if not (row.arch or "").startswith("moe"):
        return None
    row.need("n_experts", "moe_top_k", "n_layers")
    assert row.n_experts and row.moe_top_k and row.n_layers
    ffn = row.moe_ffn_hidden_size or row.ffn_hidden_size
    assert ffn
    if "every second" in row.moe_layer_pattern:  # Llama 4: the even layers are dense
        layers = "".join("dm"[i % 2] for i in range(row.n_layers))
    elif row.moe_layer_pattern:
        raise Unsupported(f"a pattern of layers that is not modelled: {row.moe_layer_pattern}")
    else:
        layers = "d" * row.n_dense_layers + "m" * (row.n_layers - row.n_dense_layers)
    shared = row.moe_shared_ffn_hidden_size or row.n_shared_experts * ffn
    return Experts(row.n_experts, row.moe_top_k, ffn, shared, layers)


def _latent(row: Row) -> Latent | None:
    """Return the sizes of multi-head latent attention; None for another attention. Raises Unsupported."""
    if row.arch != "moe(MLA)":
        return None
    row.need("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    assert row.kv_lora_rank and row.qk_nope_head_dim and row.qk_rope_head_dim and row.v_head_dim
    return Latent(row.q_lora_rank or 0, row.kv_lora_rank, row.qk_nope_head_dim, row.qk_rope_head_dim, row.v_head_dim)


def padded_vocabulary(row: Row) -> int:
    """Return the rows of the embedding table: rounded up to a multiple of 128 tp in Megatron, else as stated."""
    assert row.vocab_size is not None
    if not row.is_megatron:
        return row.vocab_size
    multiple = _VOCABULARY_MULTIPLE * row.tp
    return -(-row.vocab_size // multiple) * multiple


@cache
def build(shape: Shape, device: str = "meta") -> Transformer:
    """Return the module in training mode, with parameters on `device`; cached per shape."""
    with torch.device(device):
        return Transformer(shape).train()
