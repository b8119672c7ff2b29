"""A small hand-made plan for tests, like that of the search for a 4-layer GPT on 8 devices."""

from __future__ import annotations

from typing import Any

from autoptd.cost_models.cluster import Cluster
from autoptd.plans.data import MeshSizes, Predicted, Schedule, Splits, StagePlan
from autoptd.plans.model import Plan

LAYERS = 4
CLUSTER = Cluster.from_data(
    {
        "name": "test-cluster",
        "device": {
            "name": "test-device",
            "memory_bytes": 80 * 2**30,
            "memory_bytes_per_s": 3e12,
            "matmul_flops_per_s": {"fp64": 6e13, "fp32": 5e14, "bf16": 1e15, "fp16": 1e15},
        },
        "levels": [{"name": "fast", "ranks": 8, "bytes_per_s": 4.5e11, "latency_s": 2e-6}],
    }
)
PLACEMENTS = {
    "attn.c_attn.weight": "S1/3",
    "attn.c_proj.weight": "S0",
    "ln_1.weight": "Bp",
    "mlp.c_fc.weight": "S1",
    "mlp.c_proj.weight": "S0",
}


def sample_plan(**changes: Any) -> Plan:
    """Return a plan for batch 16 in microbatches of 2 on dp 2 × tp 2 × pp 2; `changes` replace whole fields."""
    parameters = {"transformer.wte.weight": "S0", "transformer.wpe.weight": "B"}
    parameters |= {f"transformer.h.{i}.{name}": text for i in range(LAYERS) for name, text in PLACEMENTS.items()}
    fields: dict[str, Any] = {
        "model": "gpt2-small",
        "graph_hash": "sha256:" + "0123456789abcdef" * 4,
        "world": 8,
        "cluster": CLUSTER,
        "batch": 16,
        "sizes": {"b": 2, "s": 128},
        "precision": "bf16",
        "optimizer": "adamw",
        "mesh": MeshSizes(dp=2, tp=2, pp=2),
        "schedule": Schedule(kind="1f1b", microbatches=4),
        "zero": 1,
        "stages": (
            StagePlan(first=0, last=2, modules="transformer.wte … transformer.h.1", recompute=(1,)),
            StagePlan(first=3, last=5, modules="transformer.h.2 … lm_head"),
        ),
        "segments": ("embed", "h.0", "h.1", "h.2", "h.3", "head"),
        "splits": Splits(parameters=parameters, activations={"embed.hidden": "S1", "h.ids": "B"}),
        "strategies": {"head": {"linear": "Bp, S0 -> S2"}, "block": {"c_proj": "S2, S0 -> P", "c_fc": "Bp, S1 -> S2"}},
        "boundaries": {"block": ("S1",), "head": ()},
        "predicted": Predicted(
            step_time_s=0.25,
            tokens_per_s=8192.0,
            mfu=0.4321,
            memory_bytes=5 * 2**30,
            time_s={"compute": 0.15, "tp_communication": 0.04, "bubble": 0.05, "dp_communication": 0.01},
            memory=(
                {"parameters": 2**30, "optimizer": 2 * 2**30, "activations": 2 * 2**30},
                {"parameters": 2**30, "optimizer": 2 * 2**30, "activations": 2**30},
            ),
            model_flops_per_step=1.5e15,
        ),
        "notes": ("batch was not given: 2 × world",),
    }
    return Plan(**_agreeing(fields | changes))


def _agreeing(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with a rate, a total and terms that follow from the others of the prediction."""
    found, units = fields["predicted"], fields["batch"] * fields["sizes"].get("s", 1)
    lacking = found.step_time_s - sum(found.time_s.values())
    filled = {"compute": found.time_s.get("compute", 0.0) + lacking} if found.time_s and lacking > 1e-9 else {}
    changes = {
        "tokens_per_s": units / found.step_time_s,
        "memory_bytes": max((sum(row.values()) for row in found.memory), default=0),
        "time_s": found.time_s | filled,
    }
    return fields | {"predicted": found.model_copy(update=changes)}
