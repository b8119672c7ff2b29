"""Tiny mixtures of experts for parity: families of transformers, and mixtures as people write them by hand.

By hand, each `mix(x, weights of the experts per token)` is one wiring of eight experts:

    grouped    rows sorted by expert, torch's grouped product
    einsum     every expert on all tokens, in one einsum per product
    inner      as `einsum`, with the experts' dim after the tokens'
    expanded   rows expanded to [experts, rows, h], torch.bmm with biases
    repeated   rows repeated and weighted before the products, as in Llama 4
    matmul     [samples, experts, tokens, h] by broadcasting; gated, clamped, with a norm
    merged     weights of all experts in one matrix [experts · f, h], as in DBRX
    capacity   GShard: slots per expert and sample, filled by masks; what finds no slot is dropped
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.parity_models import TOKENS, VOCAB, WIDTH, Case, mixture, randomised, tokens

EXPERTS, CHOSEN, INNER = 8, 2, 24


def parameter(*sizes: int) -> nn.Parameter:
    return nn.Parameter(0.2 * torch.randn(*sizes))


class Mixture(nn.Module):
    """A router and experts, two matrices each."""

    count, chosen = EXPERTS, CHOSEN

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, self.count)
        self.up, self.down = parameter(self.count, WIDTH, INNER), parameter(self.count, INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, experts = scores.topk(self.chosen, -1)
        return self.mix(x, torch.zeros_like(scores).scatter(-1, experts, best))

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError


class Grouped(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        import transformers.integrations.moe  # noqa: F401  torch's own product has no float64

        product = torch.ops.transformers.grouped_mm_fallback
        rows = x.flatten(0, 1)
        best, experts = self.gate(rows).softmax(-1).topk(self.chosen, -1)
        keys, order = experts.flatten().sort(stable=True)
        ends = F.one_hot(keys, self.count).sum(0).cumsum(0).to(torch.int32)
        y = product(F.gelu(product(rows[order // self.chosen], self.up, ends)), self.down, ends)
        y = y * best.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // self.chosen, y).view_as(x)


class One(Grouped):
    """Each token has one expert: see `all_to_one`."""

    chosen = 1


class Einsum(Mixture):
    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        y = torch.einsum("ebtf,efh->ebth", F.gelu(torch.einsum("bth,ehf->ebtf", x, self.up)), self.down)
        return torch.einsum("ebth,bte->bth", y, weights)


class Four(Einsum):
    count = 4


class Six(Grouped):
    count = 6


class Inner(Mixture):
    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        y = torch.einsum("btef,efh->bteh", F.silu(torch.einsum("bth,ehf->btef", x, self.up)), self.down)
        return (y * weights.unsqueeze(-1)).sum(2)


class Expanded(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.bias = parameter(self.count, INNER)

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        rows = x.reshape(1, -1, WIDTH).expand(self.count, -1, -1)
        y = torch.bmm(F.gelu(torch.bmm(rows, self.up) + self.bias[:, None]), self.down)
        return (y * weights.flatten(0, 1).t().unsqueeze(-1)).sum(0).view_as(x)


class Repeated(Mixture):
    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH).repeat(self.count, 1) * weights.flatten(0, 1).t().reshape(-1, 1)
        y = torch.bmm(torch.tanh(torch.bmm(rows.view(self.count, -1, WIDTH), self.up)), self.down)
        return y.view(-1, WIDTH).reshape(self.count, -1, WIDTH).sum(0).view_as(x)


class Matmul(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = parameter(self.count, WIDTH, 2 * INNER), nn.LayerNorm(INNER)

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, y = torch.matmul(x.unsqueeze(1), self.up).chunk(2, -1)
        y = torch.matmul(self.norm(F.silu(gate.clamp(max=2.0)) * (y + 1)), self.down)
        return (y * weights.transpose(1, 2).unsqueeze(-1)).sum(1)


class Merged(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = parameter(self.count * INNER, WIDTH), parameter(self.count * INNER, WIDTH)

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        up, down = (w.view(self.count, INNER, WIDTH) for w in (self.up, self.down))
        y = torch.einsum("ebtf,efh->ebth", F.gelu(torch.einsum("bth,efh->ebtf", x, up)), down)
        return torch.einsum("ebth,bte->bth", y, weights)


class Capacity(Mixture):
    slots = 3  # of each expert, for the tokens of one sample

    def forward(self, x: Tensor) -> Tensor:
        left = scores = self.gate(x).softmax(-1)
        combine, taken = x.new_zeros(()), x.new_zeros((), dtype=torch.long)
        for _ in range(self.chosen):
            mask = F.one_hot(left.argmax(-1), self.count)
            place = mask.cumsum(1) - mask + taken
            taken = taken + mask.sum(1, keepdim=True)
            left = left * (1 - mask)
            mask = mask * (place < self.slots)
            slot = F.one_hot((place * mask).sum(-1), self.slots) * mask.sum(-1, keepdim=True)
            combine = combine + torch.einsum("gs,gse,gsc->gsec", (scores * mask).sum(-1), mask.to(x), slot.to(x))
        rows = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x), x)
        y = torch.einsum("egcf,efm->egcm", F.relu(torch.einsum("egcm,emf->egcf", rows, self.up)), self.down)
        return torch.einsum("gsec,egcm->gsm", combine, y)


class CapacityOfBatch(Capacity):
    """Slots for the tokens of all samples of a rank, so what is dropped depends on the mesh."""

    slots = 6

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(1, -1, WIDTH)).view_as(x)


class Modules(Mixture):
    """Experts as modules of their own, each on all tokens or, `sparse`, on those that chose it."""

    sparse = ""

    def __init__(self) -> None:
        super().__init__()
        del self.up, self.down
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(self.count)
        )

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        rows, weights = x.flatten(0, 1), weights.flatten(0, 1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            match self.sparse:
                case "where":
                    (mine,) = torch.where(weights[:, i] > 0)
                    out = out.index_add(0, mine, expert(rows[mine]) * weights[mine, i, None])
                case "mask":
                    mine = weights[:, i] > 0
                    out[mine] += expert(rows[mine]) * weights[mine, i, None]
                case "":
                    out = out + expert(rows) * weights[:, i, None]
        return out.view_as(x)


class Where(Modules):
    sparse = "where"


class Mask(Modules):
    sparse = "mask"


class OldMixtral(Modules):
    """A loop over the experts that some token chose, as in Mixtral of older releases."""

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        rows, weights = x.flatten(0, 1), weights.flatten(0, 1)
        out = torch.zeros_like(rows)
        for i in (weights > 0).any(0).nonzero():
            (mine,) = torch.where(weights[:, i[0]] > 0)
            out.index_add_(0, mine, self.experts[i](rows[mine]) * weights[mine, i])
        return out.view_as(x)


class Plain(nn.Module):
    """An embedding, residual layers of one mixture each, and a head."""

    def __init__(self, *mixtures: Mixture) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in mixtures)
        self.mixtures = nn.ModuleList(mixtures)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for norm, layer in zip(self.norms, self.mixtures, strict=True):
            x = x + layer(norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def by_hand(*mixtures: type[Mixture]) -> Case:
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(Plain(*(kind() for kind in mixtures))), {"ids": ids, "labels": labels})


def all_to_one() -> Case:
    """Return a model whose routers send every token to the sixth expert."""
    case = by_hand(One, One)
    with torch.no_grad():
        for name, p in case.model.named_parameters():
            if name.endswith("gate.bias"):
                p[5] = 50.0
    return case


WIRINGS: Mapping[str, type[Mixture]] = {
    "grouped": Grouped,
    "einsum": Einsum,
    "inner": Inner,
    "expanded": Expanded,
    "repeated": Repeated,
    "matmul": Matmul,
    "merged": Merged,
    "capacity": Capacity,
}
OTHERS: Mapping[str, type[Mixture]] = {
    "capacity_of_batch": CapacityOfBatch,
    "modules": Modules,
    "where": Where,
    "mask": Mask,
    "old_mixtral": OldMixtral,
}

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 2 * TOKENS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
_LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
# name -> folder, class, and what its configuration has besides `_SIZES`
FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        "DeepseekV2",
        {**_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
        | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "glm4_moe": (
        "glm4_moe",
        "Glm4Moe",
        {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "granitemoe": ("granitemoe", "GraniteMoe", {"num_local_experts": 4}),
    "jamba": (
        "jamba",
        "Jamba",
        {"num_experts": 4, "expert_layer_period": 1, "expert_layer_offset": 0, "use_mamba_kernels": False}
        | {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_state": 4, "mamba_dt_rank": 4},
    ),
    "llama4": (
        "llama4",
        "Llama4",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": 4}
        | {"interleave_moe_layer_step": 1},
    ),
    "olmoe": ("olmoe", "Olmoe", {"num_experts": 8}),
    "phimoe": ("phimoe", "Phimoe", {"num_local_experts": 4}),
    "qwen2_moe": (
        "qwen2_moe",
        "Qwen2Moe",
        {"num_experts": 4, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
    ),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe", {"num_experts": 8, "norm_topk_prob": True}),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3Next",
        {"num_experts": 4, "shared_expert_intermediate_size": 40, "layer_types": ["full_attention"] * 2},
    ),
}


def family(name: str) -> Case:
    """Return a family of transformers, with what it computes in float32 in float64."""
    folder, model, given = FAMILIES[name]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    source = inspect.getsource(module).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    names = dict(vars(module))
    exec(compile(source, module.__file__ or "", "exec"), names)
    text = "Text" if name == "llama4" else ""
    config = getattr(importlib.import_module("transformers"), f"{model}{text}Config")(**{**_SIZES, **given})
    case = mixture(names[f"{model}ForCausalLM"], config)
    if name == "phimoe":  # in training its router draws, which only a process with the same keys repeats
        for layer in case.model.model.layers:  # type: ignore[union-attr]
            layer.mlp.router.eval()
    return case


MIXTURES: dict[str, Callable[[], Case]] = {
    "grouped_one": all_to_one,
    "four": lambda: by_hand(Four, Four),
    "four_and_six": lambda: by_hand(Four, Six),
    **{name: lambda kind=kind: by_hand(kind, kind) for name, kind in {**WIRINGS, **OTHERS}.items()},  # type: ignore[misc]
    **{name: lambda name=name: family(name) for name in FAMILIES},  # type: ignore[misc]
}
