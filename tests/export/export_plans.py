"""Hand-made plans for models with known parameter names, as the search would write them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoptd.plans.data import MeshSizes, Predicted, Schedule, Splits, StagePlan
from autoptd.plans.model import Plan
from tests.export.sample_clusters import CLUSTER

HASH = "sha256:" + "0123456789abcdef" * 4


def plan_of(
    parameters: dict[str, str],
    segments: tuple[str, ...],
    cuts: tuple[int, ...] = (),
    *,
    mesh: MeshSizes,
    sequence: bool = False,
    **changes: Any,
) -> Plan:
    """Return a plan with stages that begin at segments 0 and `cuts`; `recompute` is by segment, `changes` replace
    fields."""
    again = changes.pop("recompute", ())
    virtual = (len(cuts) + 1) // mesh.pp
    bounds = (0, *cuts, len(segments))
    stages = tuple(
        StagePlan(
            first=first,
            last=end - 1,
            modules=segments[first],
            recompute=tuple(i for i in again if first <= i < end),
        )
        for first, end in pairwise(bounds)
    )
    micro, count = changes.pop("micro", 1), changes.pop("microbatches", 4)
    kinds = {s if not any(c.isdigit() for c in s) else _starred(s) for s in segments}
    given = "S1" if sequence else "B"
    batch, sizes = changes.get("batch", mesh.dp * micro * count), changes.get("sizes", {"b": micro, "s": 16})
    fields: dict[str, Any] = {
        "model": "by-hand",
        "graph_hash": HASH,
        "world": mesh.ranks,
        "cluster": CLUSTER,
        "batch": batch,
        "sizes": sizes,
        "precision": "bf16",
        "optimizer": "adamw",
        "mesh": mesh,
        "schedule": Schedule(kind="1f1b" if virtual == 1 else "interleaved", microbatches=count, virtual=virtual),
        "zero": 1,
        "stages": stages,
        "segments": segments,
        "splits": Splits(parameters=parameters, activations={}),
        "strategies": {},
        "boundaries": dict.fromkeys(sorted(kinds), (given,)) | {segments[0]: ()},
        "predicted": Predicted(
            step_time_s=1.0,
            tokens_per_s=float(batch * sizes.get("s", 1)),
            mfu=0.5,
            memory_bytes=1,
            time_s={},
            memory=({"parameters": 1},) * mesh.pp,
            model_flops_per_step=1.0,
        ),
    }
    return Plan(**(fields | changes))


def _starred(segment: str) -> str:
    return "".join("*" if c.isdigit() else c for c in segment).replace("**", "*")


# --- a Llama in plain PyTorch -------------------------------------------------------------------------------------

VOCAB, WIDTH, HEADS, KV_HEADS, FFN = 32, 16, 4, 2, 24


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; infers its number of heads from its input."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, HEADS * size, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * size, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * size, bias=True)
        self.o_proj = nn.Linear(HEADS * size, WIDTH, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        size = WIDTH // HEADS
        q, k, v = (f(x).view(b, s, -1, size).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        angle = torch.arange(s, dtype=q.dtype)[:, None] / 10 ** torch.arange(0, size, 2, dtype=q.dtype)
        q, k = _rotate(q, angle), _rotate(k, angle)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, FFN, bias=False)
        self.up_proj = nn.Linear(WIDTH, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.post_norm, self.mlp = nn.RMSNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """Llama from tokens [b, s] to logits [b, s, vocab]."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


LLAMA_SPLITS = {
    "attention.q_proj.weight": "S0",
    "attention.k_proj.weight": "S0",
    "attention.v_proj.weight": "S0",
    "attention.v_proj.bias": "S0",
    "attention.o_proj.weight": "S1",
    "attention.o_proj.bias": "B",
    "mlp.gate_proj.weight": "S0",
    "mlp.up_proj.weight": "S0",
    "mlp.down_proj.weight": "S1",
    "input_norm.weight": "B",
    "post_norm.weight": "B",
}


def llama_segments(layers: int = 4) -> tuple[str, ...]:
    halves = (f"layers.{i}.{{{part}}}" for i in range(layers) for part in ("input_norm,attention", "post_norm,mlp"))
    return ("embed", *halves, "norm", "head")


def llama_plan(
    cuts: tuple[int, ...] = (),
    *,
    mesh: MeshSizes,
    layers: int = 4,
    sequence: bool = False,
    splits: dict[str, str] | None = None,
    ends: dict[str, str] | None = None,
    tied: bool = False,
    **changes: Any,
) -> Plan:
    """Return a plan of `Llama(layers, tied)`; with `sequence`, norms are sequence-parallel."""
    norm = "Bp" if sequence else "B"
    rows = {name: norm if "norm" in name else text for name, text in LLAMA_SPLITS.items()} | (splits or {})
    if mesh.tp == 1:
        rows = dict.fromkeys(rows, "B")
    outer = {"embed.weight": "S0", "norm.weight": norm} | ({} if tied else {"head.weight": "S0"}) | (ends or {})
    parameters = {name: "B" if mesh.tp == 1 else text for name, text in outer.items()}
    parameters |= {f"layers.{i}.{name}": text for i in range(layers) for name, text in rows.items()}
    return plan_of(parameters, llama_segments(layers), cuts, mesh=mesh, sequence=sequence, **changes)


# --- the names of GPT-3 in transformers ---------------------------------------------------------------------------

GPT_SPLITS = {
    "attn.c_attn.bias": "S0/3",
    "attn.c_attn.weight": "S1/3",
    "attn.c_proj.bias": "S0",
    "attn.c_proj.weight": "S0",
    "ln_1.bias": "Bp",
    "ln_1.weight": "Bp",
    "ln_2.bias": "Bp",
    "ln_2.weight": "Bp",
    "mlp.c_fc.bias": "S0",
    "mlp.c_fc.weight": "S1",
    "mlp.c_proj.bias": "S0",
    "mlp.c_proj.weight": "S0",
}


def gpt3_plan(cuts: tuple[int, ...], *, mesh: MeshSizes, layers: int = 96, **changes: Any) -> Plan:
    """Return a plan of gpt3-175b. Segments 0 and 1 are the embeddings, 2 + 2i and 3 + 2i the halves of layer i."""
    halves = (f"transformer.h.{i}.{{{part}}}" for i in range(layers) for part in ("ln_1,attn", "ln_2,mlp"))
    segments = ("transformer.wte", "transformer.{wpe,drop}", *halves, "transformer.ln_f", "lm_head")
    parameters = {"transformer.wte.weight": "S0", "transformer.wpe.weight": "B"}
    parameters |= {"transformer.ln_f.weight": "Bp", "transformer.ln_f.bias": "Bp"}
    parameters |= {f"transformer.h.{i}.{name}": text for i in range(layers) for name, text in GPT_SPLITS.items()}
    fields = {"model": "gpt3-175b", "sizes": {"b": 2, "s": 2048}, "micro": 2, "microbatches": 64}
    return plan_of(parameters, segments, cuts, mesh=mesh, sequence=True, **(fields | changes))
