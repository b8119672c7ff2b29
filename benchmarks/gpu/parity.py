"""Every kind of plan on one GPU against one process there: all ranks are threads that share the device.

Figures are the largest difference of a gradient, or of a parameter or buffer after two steps, ‖found − expected‖ /
‖expected‖. In double precision all sums are those of one process up to their order. In bfloat16 the whole gradient's
distance from double precision is compared with that of the plain model in bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.testing.parity import Trained, differences, train_alone, train_in_lockstep
from benchmarks.gpu.rows import Row

EXACT, NEAR = 1e-10, 3.0  # largest difference in double precision; largest ratio of distances in bfloat16
BATCH, SEQ = 16, 32
OPTIONS = {"lr": 3e-3, "weight_decay": 0.1}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
_MORE = {"vocab_size": 259, "max_position_embeddings": SEQ, "attn_implementation": "sdpa"}
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "decoder": ("LlamaForCausalLM", {**_SIZES, **_MORE, "intermediate_size": 96}),
    "mixture": (
        "MixtralForCausalLM",
        {**_SIZES, **_MORE, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


class Small(nn.Module):
    """A decoder that computes in its parameters' precision alone; Llama's norms and loss are in float32 at least."""

    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4, vocabulary: int = 259) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(SEQ, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
                    ),
                }
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            q, k, v = block["qkv"](block["norm"](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + block["out"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + block["mlp"](x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Check:
    """A plan of a model: the constraints that make it."""

    world: int
    fix: Mapping[str, Any]
    precision: str = "fp64"
    model: str = "decoder"
    compiled: bool = False

    def __str__(self) -> str:
        words = " ".join(f"{key} {value}" for key, value in self.fix.items()) or "one rank"
        return f"{self.model}, {words}" + (", compiled" if self.compiled else "")


def _pipeline(schedule: str, **more: Any) -> Check:
    virtual = {"virtual": 2} if schedule in ("interleaved", "zero-bubble-v") else {}
    return Check(4, {"dp": 2, "pp": 2, "schedule": schedule, "micro": 2, **virtual, **more})


CHECKS = (
    Check(1, {}),
    *(Check(2, {"dp": 2, "zero": stage}) for stage in (0, 1, 2, 3)),
    Check(4, {"dp": 4, "zero": 1, "shards": 2}),
    Check(2, {"dp": 2, "zero": 1, "offload": 1.0}),
    Check(2, {"tp": 2}),
    Check(2, {"tp": 2, "sequence_parallel": False}),
    Check(2, {"cp": 2}),
    *map(_pipeline, ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v")),
    Check(8, {"dp": 2, "tp": 2, "pp": 2, "recompute": "full", "micro": 2}),
    Check(8, {"dp": 2, "tp": 2, "pp": 2, "recompute": "selective", "micro": 2, "zero": 2}),
    Check(4, {"dp": 2, "pp": 2, "recompute": "offload", "micro": 2, "zero": 2}),
    Check(2, {"dp": 2}, model="mixture"),
    Check(4, {"dp": 2, "ep": 2, "tp": 2}, model="mixture"),
    Check(4, {"dp": 2, "ep": 2, "pp": 2, "micro": 2}, model="mixture"),
    Check(1, {}, model="small", compiled=True),
    Check(4, {"dp": 2, "tp": 2, "zero": 3}, model="small", compiled=True),
    Check(4, {"pp": 2, "tp": 2, "micro": 2, "recompute": "full"}, model="small", compiled=True),
    Check(1, {"micro": 2, "recompute": "offload"}, model="small", compiled=True),
    Check(1, {}, "bf16", model="small", compiled=True),
    Check(1, {}, "bf16"),
    Check(4, {"dp": 2, "tp": 2, "zero": 3}, "bf16"),
    Check(2, {"cp": 2}, "bf16"),
    Check(4, {"cp": 2, "tp": 2}, "bf16"),
    Check(4, {"pp": 2, "tp": 2, "micro": 2, "recompute": "full"}, "bf16"),
    Check(1, {}, "bf16", model="mixture"),
    Check(4, {"dp": 2, "ep": 2, "tp": 2}, "bf16", model="mixture"),
)


@cache
def made(name: str) -> nn.Module:
    """Return the model in double precision, on the host."""
    torch.manual_seed(0)
    if name == "small":
        return Small().double()
    import transformers
    from transformers.integrations import moe

    moe._can_use_grouped_mm = lambda *_: False  # torch's kernel has no float64; transformers' own loop has
    model_class, config = CONFIGS[name]
    made_class = getattr(transformers, model_class)
    model: nn.Module = made_class(made_class.config_class(**config)).double().train()
    return model


@cache
def batches() -> tuple[Mapping[str, Tensor], ...]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(256, (BATCH, SEQ), generator=generator)
    return tuple({"input_ids": ids.roll(step, 0), "labels": ids.roll(step, 0)} for step in range(2))


@cache
def alone(name: str, device: str) -> Trained:
    return train_alone(made(name), batches(), optimizer_options=OPTIONS, device=torch.device(device))


def measure(check: Check, device: str) -> Row:
    """Train both ways and compare. Raises what planning or training raises."""
    par = autoptd.parallelize(
        made(check.model),
        world=check.world,
        batch=BATCH,
        inputs={name: x[:2] for name, x in batches()[0].items()},
        precision=check.precision,
        cluster="dgx-h100",
        fix=dict(check.fix),
        optimizer_options=OPTIONS,
        compile=check.compiled,
    )
    found, truth = train_in_lockstep(par, batches(), device=torch.device(device)), alone(check.model, device)
    if check.precision == "fp64":
        pairs = (found.gradients, truth.gradients), (found.state, truth.state)
        worst = max(off for mine, theirs in pairs for off in differences(mine, theirs).values())
        passed = worst <= EXACT and not found.diverged
        return Row("parity", str(check), {"ranks": str(check.world), "difference": f"{worst:.1e}"}, passed)
    mine, plain = distance(found.gradients, truth.gradients), distance(of_plain(check.model, device), truth.gradients)
    figures = {"ranks": str(check.world), "difference": f"{mine:.1e}", "of the plain model": f"{plain:.1e}"}
    return Row("parity", f"{check}, bf16", figures, mine <= NEAR * plain)


def of_plain(name: str, device: str) -> dict[str, Tensor]:
    """Return the gradients of the plain model in bfloat16."""
    model = copy.deepcopy(made(name)).to(device, torch.bfloat16)
    result = model(**{key: x.to(device) for key, x in batches()[0].items()})
    (result if isinstance(result, Tensor) else result.loss).backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Return ‖found − truth‖ / ‖truth‖ of all gradients together; infinite if one is missing."""
    if set(found) != set(truth):
        return float("inf")
    off = sum(float((found[name].double() - x.double()).square().sum()) for name, x in truth.items())
    return float((off / sum(float(x.double().square().sum()) for x in truth.values())) ** 0.5)


def run(model: str, device: str) -> Iterator[Row]:
    """Yield a row for each check of a model; a plan that fails is a row with the error."""
    for check in CHECKS:
        if check.model == model:
            try:
                yield measure(check, device)
            except Exception as error:  # noqa: BLE001  the next plan is tried
                yield Row("parity", f"{check}, {check.precision}", passed=False, problem=f"{error}".splitlines()[0])
